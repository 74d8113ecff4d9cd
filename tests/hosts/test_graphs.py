"""Graphs that are no chains, with stages on other hosts: joins of two replies, loops over a painter that reads a
writer's hidden states, graphs that call one another.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.graphs.pipelines import GraphsPipeline
from tests.e2e.graphs.test_graphs import PROMPT, ask, ask_all, assert_equal, build
from tests.hosts.deployments import Deployment, deploy, wait_for
from vllm_omni import OmniLLM
from vllm_omni.messages.outputs import OmniRequestOutput

pytestmark = [pytest.mark.timeout(400), pytest.mark.long]

HOSTS = {"writer": "box-b", "painter": "box-c"}
FLAGS = ["--pipeline=tests.e2e.graphs.pipelines:GraphsPipeline"]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    return build(tmp_path_factory.mktemp("graphs"))


@pytest.fixture(scope="module")
def expected(checkpoint: tuple[Path, list[str]]) -> dict[str, OmniRequestOutput]:
    """The answers of one machine, by graph."""
    model, settings = checkpoint
    with OmniLLM(model, pipeline=GraphsPipeline, stage_overrides=settings) as omni:
        answers: dict[str, OmniRequestOutput] = omni.run(ask_all(omni.engine))
    return answers


@pytest.fixture(scope="module")
def deployment(
    checkpoint: tuple[Path, list[str]],
    expected: dict[str, OmniRequestOutput],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Deployment]:
    """The critic is beside the front end."""
    model, settings = checkpoint
    settings = [*settings, *(f"{stage}.host={host}" for stage, host in HOSTS.items())]
    places = tmp_path_factory.mktemp("logs"), tmp_path_factory.mktemp("h")
    more = {"hosts_dir": places[1], "flags": FLAGS, "engine": {"pipeline": GraphsPipeline}}
    with deploy(model, places[0], HOSTS, *settings, **more) as made:
        yield made


def test_graphs_across_hosts_answer_as_on_one_machine(
    deployment: Deployment, expected: dict[str, OmniRequestOutput]
) -> None:
    assert {"diamond", "gathered", "agent", "embedded", "retouched", "critique"} <= expected.keys()
    answers = deployment.omni.run(ask_all(deployment.omni.engine))
    assert answers.keys() == expected.keys()
    for graph, answer in answers.items():
        assert_equal(answer, expected[graph])


def test_hidden_states_travel_from_host_to_host_and_are_released(deployment: Deployment) -> None:
    engine = deployment.omni.engine

    def statistics(stage: str) -> dict[str, int]:
        (rank,) = deployment.omni.run(engine.orchestrator.front(stage).relay_statistics())
        return rank["tcp"]

    deployment.omni.run(ask(engine, "retouched", PROMPT * 40))  # too many to travel inline
    assert statistics("writer")["num_puts"] > 0
    assert statistics("painter")["num_gets"] > 0
    wait_for("that they are released", lambda: not statistics("writer")["num_leases"])
