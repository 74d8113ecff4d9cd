"""Which controllers run beside their engines on other hosts; that they do: tests/hosts/test_stages.py."""

from pathlib import Path

import pytest

from vllm_omni.config import load_config
from vllm_omni.engine.orchestrator import Orchestrator


def roles(checkpoint: Path, *overrides: str) -> dict[str, str]:
    orchestrator = Orchestrator(load_config(checkpoint, stage_overrides=overrides))
    try:
        return orchestrator.roles_on_hosts(orchestrator.config)
    finally:
        orchestrator.shutdown()


HOSTS = ("thinker.host=box-a", "talker.host=box-b", "token2wav.host=box-c")


def test_a_single_engine_of_a_stage_has_its_controller(tiny_checkpoint: Path) -> None:
    assert roles(tiny_checkpoint, *HOSTS) == {"thinker": "box-a", "talker": "box-b", "token2wav": "box-c"}


def test_engines_of_this_host_have_theirs_here(tiny_checkpoint: Path) -> None:
    assert roles(tiny_checkpoint) == {}
    assert roles(tiny_checkpoint, HOSTS[1]) == {"talker": "box-b"}


@pytest.mark.parametrize(
    ("more", "left"),
    [
        # The front end chooses among replicas, and gives one of them what a lost one had read of the thinker.
        (["talker.replicas=2"], {"token2wav": "box-c"}),
        (["talker.max_replicas=2"], {"token2wav": "box-c"}),
        (["token2wav.replicas=2"], {"thinker": "box-a", "talker": "box-b"}),
        (["thinker.epd.instances=E:1,P:1,D:1"], {"talker": "box-b", "token2wav": "box-c"}),
        (
            ["thinker.nodes=2", "thinker.tensor_parallel_size=2", "thinker.host=[box-a, box-d]"],
            {"talker": "box-b", "token2wav": "box-c"},
        ),
    ],
)
def test_several_engines_of_a_stage_have_theirs_in_the_front_end(
    tiny_checkpoint: Path, more: list[str], left: dict[str, str]
) -> None:
    assert roles(tiny_checkpoint, *HOSTS, *more) == left
