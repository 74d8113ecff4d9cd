"""Which controllers run beside their engines on other hosts; that they do: tests/hosts/test_stages.py."""

from pathlib import Path

import pytest

from vllm_omni.config import load_config
from vllm_omni.engine.orchestrator import Orchestrator


def roles(checkpoint: Path, *overrides: str) -> dict[str, str]:
    orchestrator = Orchestrator(load_config(checkpoint, stage_overrides=overrides))
    try:
        return orchestrator.controllers_on_hosts(orchestrator.config)
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
        # The front end chooses among replicas of which one is beside it, and gives one what a lost one had read.
        (["talker.replicas=2", "talker.host=[null, box-b]"], {"token2wav": "box-c"}),
        (["talker.replicas=2", "talker.balance=affinity"], {"token2wav": "box-c"}),  # it knows the prompts
        (["token2wav.replicas=2", "token2wav.host=null"], {"thinker": "box-a", "talker": "box-b"}),
        (["thinker.epd.instances=E:1,P:1,D:1"], {"talker": "box-b", "token2wav": "box-c"}),
    ],
)
def test_engines_among_which_the_front_end_chooses_have_theirs_there(
    tiny_checkpoint: Path, more: list[str], left: dict[str, str]
) -> None:
    assert roles(tiny_checkpoint, *HOSTS, *more) == left


def test_an_engine_that_spans_hosts_has_its_controller_beside_its_engine_core(tiny_checkpoint: Path) -> None:
    spans = ["thinker.nodes=2", "thinker.tensor_parallel_size=2"]
    expected = {"thinker": "box-a", "talker": "box-b", "token2wav": "box-c"}
    assert roles(tiny_checkpoint, *HOSTS, *spans, "thinker.host=[box-a, box-d]") == expected


def test_replicas_that_are_all_elsewhere_have_theirs_beside_them(tiny_checkpoint: Path) -> None:
    """Also those that may start later."""
    several = ["talker.replicas=2", "talker.max_replicas=3", "talker.host=[box-b, box-b, box-d]"]
    placed = {"talker/0": "box-b", "talker/1": "box-b", "talker/2": "box-d"}
    expected = {"thinker": "box-a", **placed, "token2wav": "box-c"}
    assert roles(tiny_checkpoint, *HOSTS, *several) == expected
