"""A pipeline in a file beside the caller, by every command; its further graph speaks, and its first one does not."""

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests import zygote
from tests.server import NUM_CODES, Server, serve
from vllm_omni.testing import qwen2_5_omni as tiny

pytestmark = [pytest.mark.timeout(400), pytest.mark.long]  # units: tests/config/test_given_pipeline.py

FILE = """
from vllm_omni.flow import Graph
from vllm_omni.model_executor.models.qwen2_5_omni.graph import Thinker
from vllm_omni.model_executor.models.qwen2_5_omni.pipeline import Qwen2_5OmniPipeline

class Speaking(Qwen2_5OmniPipeline):
    deployment = {"stages": {
        "thinker": {"engine_type": "ar"}, "talker": {"engine_type": "ar"}, "token2wav": {"engine_type": "generation"},
    }}

    def __init__(self, *args):
        super().__init__(*args)
        self.graph.name = "spoken"
        self.further_graphs = [self.graph]
        self.graph = Graph("written")
        thinker = self.graph.role(Thinker, "thinker")
        self.graph.output(text=thinker.generate(prompt=self.graph.placeholder("prompt")).text)
"""
FLAGS = ("--pipeline=./speaking.py:Speaking", "--dtype=float32", "--max-model-len=1024", "--enforce-eager")


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A working directory with the file and a checkpoint."""
    path = tmp_path_factory.mktemp("given")
    (path / "speaking.py").write_text(FILE)
    tiny.build(path / "checkpoint", variant="short")
    with contextlib.chdir(path):
        yield path


@pytest.fixture(scope="module")
def server(directory: Path) -> Iterator[Server]:
    with serve(Path("checkpoint"), directory / "log", *FLAGS, PYTHONPATH=_python_path()) as server:
        yield server


def _python_path() -> str:
    root = Path(__file__).resolve().parents[2]
    return os.pathsep.join((str(root), os.environ.get("PYTHONPATH", "")))


def run(command: str, *flags: str) -> str:
    program = [Path(sys.executable).with_name("vllm-omni"), *command.split(), "checkpoint", *FLAGS, *flags]
    environ = os.environ | {"PYTHONPATH": _python_path()}
    ran = zygote.run(program, timeout=200, env=environ)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


def test_config_show_reads_a_file_beside_the_caller(directory: Path) -> None:
    shown = run("config show")
    assert [name for name in ("thinker", "talker", "token2wav") if name in shown] == ["thinker", "talker", "token2wav"]


def test_generate_runs_a_file_beside_the_caller(directory: Path) -> None:
    assert run("generate", "--prompt=Hello.", "--max-tokens=4").strip()


def test_speech_is_that_of_the_graph_that_is_named(server: Server) -> None:
    body: dict[str, Any] = {"input": "Hello, world.", "max_new_tokens": NUM_CODES, "response_format": "pcm"}
    spoken = httpx.post(server.url + "/v1/audio/speech", json={**body, "model": "spoken"}, timeout=60)
    assert spoken.status_code == 200, spoken.text
    assert len(spoken.content) > 0
    events = httpx.post(
        server.url + "/v1/audio/speech", json={**body, "model": "spoken", "stream_format": "sse"}, timeout=60
    )
    assert f'"output_tokens": {NUM_CODES}'.replace(" ", "") in events.text.replace(" ", "")
    for model in ("tiny", "written"):
        written = httpx.post(server.url + "/v1/audio/speech", json={**body, "model": model}, timeout=60)
        assert written.status_code in (400, 404), written.text
        assert "audio" in written.text or "written" in written.text
