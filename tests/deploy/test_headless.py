"""The engines that a host makes when it has joined; that it serves them: tests/hosts."""

from pathlib import Path

import pytest

from vllm_omni.config import load_config
from vllm_omni.config.travel import pack_config
from vllm_omni.deploy.headless import _Host, _run_directory
from vllm_omni.hosts import messages as msg
from vllm_omni.hosts.connection import HostConnection
from vllm_omni.hosts.endpoint import Endpoint
from vllm_omni.process.memory_division import MEMORY
from vllm_omni.relay.secret import MIN_BYTES, Secret


def test_a_host_divides_memory_among_the_engines_of_the_start_and_later_ones_take_what_is_free(
    tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine that waited for one that does not start would never be ready."""
    monkeypatch.delenv("VLLM_CPU_KVCACHE_SPACE", raising=False)
    stages = ["talker.host=[null, box-b, box-c, box-b]", "talker.replicas=2", "talker.max_replicas=4"]
    config = load_config(tiny_checkpoint, stage_overrides=[*stages, "token2wav.host=box-b"], dtype="float32")
    connection = HostConnection(Endpoint("127.0.0.1", 1), Secret(bytes(MIN_BYTES)))  # it is not used before a start
    with _run_directory() as directory:
        host = _Host(connection, directory, str(tiny_checkpoint), None, "127.0.0.1", "token")
        host.prepare(msg.Joined(["talker/1", "talker/3", "token2wav"], pack_config(config), "box-b", 1))
        sections = {name: one._config.additional_config[MEMORY] for name, one in host._engines.items()}
        host.end()
    connection.close()
    assert {name: (one["division"], one["ranks"]["cpu"]) for name, one in sections.items()} == {
        "talker/1": ("", ["talker/1", "token2wav"]),
        "token2wav": ("", ["talker/1", "token2wav"]),
        "talker/3": ("talker/3", ["talker/3"]),
    }
