"""Qwen2.5-Omni with a thinker and a talker whose ranks are on two hosts, and what becomes of one is that of both."""

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from tests import machine
from tests.hosts.deployments import NOTICED_S, PARAMS, PROMPT, Deployment, assert_equal, deploy, wait_for
from vllm_omni.errors import StageFailed
from vllm_omni.messages.outputs import OmniRequestOutput, collect

pytestmark = [pytest.mark.timeout(600), pytest.mark.long]  # units: tests/hosts/test_parts.py

FIRST, SECOND = "thinker talker", "thinker/node1 talker/node1"
STAGES = ("thinker", "talker")
OVERRIDES = [
    f"{stage}.{setting}" for stage in STAGES for setting in ("tensor_parallel_size=2", "nodes=2", "host=[box-a, box-b]")
]


@pytest.fixture(scope="module")
def deployment(
    checkpoint: Path, expected: list[OmniRequestOutput], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Deployment]:
    hosts = {FIRST: "box-a", SECOND: "box-b"}
    places = tmp_path_factory.mktemp("logs"), tmp_path_factory.mktemp("h")
    with deploy(checkpoint, places[0], hosts, *OVERRIDES, hosts_dir=places[1]) as made:
        yield made


def _ranks(deployment: Deployment, host: str) -> dict[str, psutil.Process]:
    """The processes of a host's ranks, by the part to which they belong."""
    (program,) = deployment.hosts[host].running()
    titles = {"".join(one.cmdline()): one for one in psutil.Process(program.pid).children(recursive=True)}
    return {title.split("::")[1]: one for title, one in titles.items() if "::Worker_TP" in title}


async def _ask_while(deployment: Deployment, happens: Callable[[], object]) -> list[OmniRequestOutput | BaseException]:
    """Answers, or errors, of requests during which something happens to a host."""
    params = {**PARAMS, "thinker": {**PARAMS["thinker"], "max_tokens": 400}, "talker": {"max_tokens": 800}}
    ask = [collect(deployment.omni.engine.generate(PROMPT.format(number), params)) for number in range(2)]
    tasks = [asyncio.ensure_future(one) for one in ask]
    await asyncio.sleep(0.5)
    await asyncio.to_thread(happens)
    return await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), NOTICED_S)


def _assert_failed(deployment: Deployment, happens: Callable[[], object]) -> None:
    for error in deployment.omni.run(_ask_while(deployment, happens)):
        assert isinstance(error, StageFailed)
        assert error.stage in STAGES


def test_ranks_on_two_hosts_answer_as_one_machine(deployment: Deployment, expected: list[OmniRequestOutput]) -> None:
    controllers = deployment.omni.engine.orchestrator.controllers
    assert controllers is not None
    assert controllers._hosts == dict.fromkeys(STAGES, "box-a")  # of their engine cores
    assert_equal(deployment.ask_all(), expected)
    assert_equal(deployment.ask_all(), expected)


def test_the_ranks_listen_at_addresses_of_their_hosts_alone(deployment: Deployment) -> None:
    machine.require("networks")
    for host in deployment.hosts.values():
        addresses = [address for address, _ in host.listening()]
        assert set(addresses) <= {host.address, "127.0.0.1"}
        assert addresses.count(host.address) > len(STAGES)  # beside the relays


def test_processes_and_lines_are_named_after_the_part(deployment: Deployment) -> None:
    assert _ranks(deployment, FIRST).keys() == {"thinker", "talker"}
    assert _ranks(deployment, SECOND).keys() == {"thinker/node1", "talker/node1"}
    assert "(thinker/node1 Worker_TP1 " in deployment.log(SECOND).read_text()


def test_a_rank_that_is_killed_is_restarted_with_the_others_of_its_engine(
    deployment: Deployment, expected: list[OmniRequestOutput]
) -> None:
    before = {**_ranks(deployment, FIRST), **_ranks(deployment, SECOND)}
    report = deployment.omni.engine.stage_report
    num_restarts = report()["thinker"].num_restarts
    _assert_failed(deployment, before["thinker/node1"].kill)
    # The controller fails requests at once; that the engine has died is another message.
    wait_for("a restart", lambda: report()["thinker"].num_restarts > num_restarts)
    deployment.recovered()
    assert_equal(deployment.ask_all(), expected)
    ended = {part for part, rank in before.items() if not rank.is_running()}
    assert ended == {"thinker", "thinker/node1"}


def test_a_host_that_is_killed_ends_the_ranks_on_the_other_and_may_come_back(
    deployment: Deployment, expected: list[OmniRequestOutput]
) -> None:
    others = _ranks(deployment, SECOND)
    _assert_failed(deployment, deployment.hosts[FIRST].kill)
    wait_for("the end of the ranks", lambda: not any(rank.is_running() for rank in others.values()), NOTICED_S)
    deployment.join(FIRST)
    deployment.recovered()
    assert_equal(deployment.ask_all(), expected)


def test_a_host_that_is_cut_off_joins_again(deployment: Deployment, expected: list[OmniRequestOutput]) -> None:
    machine.require("networks")
    host = deployment.hosts[SECOND]
    _assert_failed(deployment, host.cut)
    host.mend()
    deployment.recovered()
    assert_equal(deployment.ask_all(), expected)
