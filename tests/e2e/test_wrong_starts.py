"""``vllm serve --omni`` on what cannot start: one message, exit code 2, no engine is begun, and nothing is left."""

import os
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import zygote
from tests.server import wait_for
from tests.shared_memory import orphans

pytestmark = [pytest.mark.long, pytest.mark.timeout(300)]

WEIGHTS = "model.safetensors"


@pytest.fixture
def runtime() -> Iterator[Path]:
    """Where servers keep their files."""
    with tempfile.TemporaryDirectory(prefix="omni-", dir="/tmp") as parent:  # the path of a socket must be short
        yield Path(parent)


def start(runtime: Path, model: Path, *flags: str, around: tuple[str, ...] = ()) -> str:
    """Start a server that is to fail; returns what it says, each line that is no log of vLLM's."""
    command = [*around, str(Path(sys.executable).with_name("vllm")), "serve", str(model), "--omni", *flags]
    environ = {**os.environ, "VLLM_OMNI_RUNTIME_DIR": str(runtime), "VLLM_LOGGING_LEVEL": "ERROR"}
    started_at = time.time()
    ended = zygote.run(command, timeout=120, env=environ)
    assert ended.returncode == 2, ended.stderr[-3000:]
    assert list(runtime.iterdir()) == []
    # What other tests' servers use is no orphan, and what these leave, killed, is soon removed.
    wait_for("nothing is left", lambda: not any("vllm-omni" in path.name for path in orphans(started_at)))
    assert ": starting" not in ended.stdout + ended.stderr, "an engine was begun"
    return "".join(line for line in ended.stderr.splitlines(keepends=True) if line.startswith("vllm-omni"))


@pytest.fixture
def broken(tiny_checkpoint: Path, tmp_path: Path) -> Path:
    """A copy of the checkpoint, for a test to break."""
    return Path(shutil.copytree(tiny_checkpoint, tmp_path / "broken"))


def test_weights_that_were_not_copied_to_their_end_are_named(runtime: Path, broken: Path) -> None:
    whole = (broken / WEIGHTS).read_bytes()
    (broken / WEIGHTS).write_bytes(whole[: len(whole) // 2])
    assert start(runtime, broken) == (
        f"vllm-omni: error: {broken}: its weights are not whole: {WEIGHTS} has {len(whole) // 2} bytes, and by its "
        f"header {len(whole)}: download or copy it again\n"
    )


def test_a_configuration_that_is_no_json_is_named_with_its_place(runtime: Path, broken: Path) -> None:
    (broken / "config.json").write_text("{")
    assert start(runtime, broken).startswith(f"vllm-omni: error: {broken}/config.json: not a JSON object: Expecting")


def test_a_wrong_key_of_a_deployment_is_named_with_its_line(
    runtime: Path, tiny_checkpoint: Path, tmp_path: Path
) -> None:
    file = tmp_path / "deployment.yaml"
    file.write_text("stages:\n  thinker: {max_num_seq: 2}\n")
    assert start(runtime, tiny_checkpoint, f"--deploy-config={file}") == (
        f"vllm-omni: error: {file}:2: stages.thinker.max_num_seq: unknown key 'max_num_seq' of stage 'thinker': did "
        "you mean 'max_num_seqs'?\n"
    )


def test_a_port_that_another_program_has_is_named(runtime: Path, tiny_checkpoint: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        said = start(runtime, tiny_checkpoint, "--host=127.0.0.1", f"--port={port}")
    assert said == f"vllm-omni: error: cannot listen at 127.0.0.1:{port}: Address already in use\n"


def test_caches_that_are_larger_than_the_host_are_named(runtime: Path, tiny_checkpoint: Path) -> None:
    said = start(runtime, tiny_checkpoint, f"--stage=thinker.kv_cache_memory_bytes={1 << 50}")
    assert "1048576.0 GiB of them for thinker, and this host has" in said


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a file system")
def test_a_full_disk_is_named_with_what_is_needed(runtime: Path, tiny_checkpoint: Path) -> None:
    mount = f'mount -t tmpfs -o size=64k tmpfs {runtime} && exec "$@"'
    said = start(runtime, tiny_checkpoint, around=("unshare", "-m", "sh", "-c", mount, "sh"))
    assert said.startswith(f"vllm-omni: error: the file system of {runtime} has ") and "make room, or set" in said
