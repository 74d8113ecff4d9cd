"""Qwen2.5-Omni with talkers beside the front end and on two hosts, which die, leave, return and start under load."""

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from tests.hosts.deployments import (
    NOTICED_S,
    TIMEOUT_S,
    Deployment,
    answer,
    assert_equal,
    deploy,
    wait_for,
)
from vllm_omni.engine.draining import HostStatus
from vllm_omni.entrypoints.openai.draining import draining_router
from vllm_omni.errors import StageFailed
from vllm_omni.messages.outputs import OmniRequestOutput
from vllm_omni.process.status import StageState

pytestmark = [pytest.mark.timeout(600), pytest.mark.long]

NUM_UNDER_LOAD = 12
NUM_CLIENTS = 2  # that ask without a pause while a host leaves and returns
KILLED_AFTER_S = (0.05, 0.2)


@pytest.fixture(scope="module")
def deployment(
    checkpoint: Path, expected: list[OmniRequestOutput], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Deployment]:
    overrides = ["talker.replicas=2", "talker.max_replicas=3", "talker.host=[null, box-b, box-c]"]
    hosts = {"talker/1": "box-b", "talker/2": "box-c"}
    places = tmp_path_factory.mktemp("logs"), tmp_path_factory.mktemp("h")
    with deploy(checkpoint, places[0], hosts, *overrides, "talker.balance=round_robin", hosts_dir=places[1]) as made:
        yield made


def test_a_replica_on_another_host_answers_as_the_one_here(
    deployment: Deployment, expected: list[OmniRequestOutput]
) -> None:
    assert_equal(deployment.ask_all(), expected)
    assert all(num_tasks(deployment)[:2])


def num_tasks(deployment: Deployment) -> list[int]:
    """Requests that each talker has been given."""
    given = deployment.omni.engine.orchestrator.nodes["talker"].router.statistics().num_tasks
    return [given.get(f"talker/{number}", 0) for number in range(3)]


async def post(deployment: Deployment, route: str, **body: Any) -> Any:
    """Ask the server's route, without the rest of a server."""
    app = FastAPI()
    app.include_router(draining_router)
    app.state.engine_client = deployment.omni.engine
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://server", timeout=None) as client:
        response = await client.post(route, json=body)
    assert response.status_code == 200, response.text
    return response.json()["engines"]


async def until(what: str, is_true: Callable[[], object]) -> None:
    await asyncio.to_thread(wait_for, what, is_true)


def under_load(deployment: Deployment, expected: list[OmniRequestOutput], change: Callable[[], Any]) -> None:
    """Run ``change`` while clients ask without a pause; all answers are as expected."""
    answers: list[tuple[OmniRequestOutput, OmniRequestOutput]] = []
    is_over = False

    async def ask(number: int) -> None:
        answers.append((await answer(deployment.omni, number % len(expected)), expected[number % len(expected)]))

    async def client(number: int) -> None:
        while not is_over:
            await ask(number)

    async def run() -> None:
        nonlocal is_over
        requests = [asyncio.create_task(ask(number)) for number in range(NUM_UNDER_LOAD)]
        requests += [asyncio.create_task(client(number)) for number in range(NUM_CLIENTS)]
        try:
            await change()
        finally:
            is_over = True
            await asyncio.gather(*requests)

    deployment.omni.run(run())
    assert_equal(*zip(*answers, strict=True))


async def all_work(deployment: Deployment, *talkers: int) -> None:
    """Wait until each of these talkers has been given another request."""
    before = num_tasks(deployment)
    await until("work", lambda: all(num_tasks(deployment)[one] > before[one] for one in talkers))


def test_a_host_that_is_drained_leaves_and_returns_without_losing_a_request(
    deployment: Deployment, expected: list[OmniRequestOutput]
) -> None:
    """It stays drained when it returns, until it is told otherwise."""
    host, report = deployment.hosts["talker/1"], deployment.omni.engine.orchestrator.draining.host_report

    async def change() -> None:
        await all_work(deployment, 0, 1)
        (got,) = await post(deployment, "/drain", name="box-b", timeout_s=TIMEOUT_S)
        assert got | {"engine": "talker/1", "num_requests": 0, "is_idle": True, "state": "drained"} == got
        await asyncio.to_thread(host.kill)
        before = num_tasks(deployment)
        await until("the loss", lambda: deployment.status("talker/1") is StageState.RESTARTING)
        assert report()["box-b"] == HostStatus(["talker/1"], None, is_drained=True)
        deployment.join("talker/1")
        await all_work(deployment, 0)
        await until("the return", lambda: deployment.status("talker/1") is StageState.DRAINED)
        assert report()["box-b"] == HostStatus(["talker/1"], host.address, is_drained=True)
        assert report()["box-c"] == HostStatus([], deployment.hosts["talker/2"].address, is_drained=False)
        await all_work(deployment, 0)
        assert num_tasks(deployment)[1] == before[1]
        (got,) = await post(deployment, "/undrain", name="box-b")
        assert (got["engine"], got["state"]) == ("talker/1", "running")
        await all_work(deployment, 0, 1)

    under_load(deployment, expected, change)


def test_a_replica_starts_and_ends_on_a_host_that_has_joined_for_it(
    deployment: Deployment, expected: list[OmniRequestOutput]
) -> None:
    """And again: the host stays."""

    async def change() -> None:
        for _ in range(2):
            assert (await deployment.omni.engine.scale("talker", 3)).replicas == 3
            await all_work(deployment, 0, 1, 2)
            assert (await deployment.omni.engine.scale("talker", 2)).replicas == 2
        before = num_tasks(deployment)
        await all_work(deployment, 0, 1)
        assert num_tasks(deployment)[2] == before[2]

    under_load(deployment, expected, change)
    assert not deployment.hosts["talker/2"].has_ended()


def test_a_replica_waits_for_its_host_until_a_deadline_and_starts_when_it_has_joined(
    deployment: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    scale = deployment.omni.engine.scale
    deployment.hosts["talker/2"].kill()
    wait_for("the loss", lambda: deployment.omni.engine.orchestrator.running.hosts()["box-c"] is None)
    with monkeypatch.context() as patch:
        patch.setenv("VLLM_OMNI_STAGE_READY_TIMEOUT_S", "0.5")
        with pytest.raises(StageFailed, match=r"no host for a replica has joined within 0\.5 s: 'box-c': vllm serve"):
            deployment.omni.run(scale("talker", 3))
    deployment.join("talker/2")
    assert deployment.omni.run(scale("talker", 3)).replicas == 3
    assert deployment.omni.run(scale("talker", 2)).replicas == 2


@pytest.mark.parametrize("after_s", KILLED_AFTER_S)
def test_requests_of_a_host_that_dies_are_answered_once_or_fail_with_the_stages_name(
    deployment: Deployment, expected: list[OmniRequestOutput], after_s: float
) -> None:
    """One without output continues on the other replica."""

    async def run() -> list[OmniRequestOutput | BaseException]:
        number = len(expected)
        tasks = [asyncio.ensure_future(answer(deployment.omni, one % number)) for one in range(NUM_UNDER_LOAD)]
        await asyncio.sleep(after_s)
        await asyncio.to_thread(deployment.hosts["talker/1"].kill)
        done = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 6 * NOTICED_S)
        return list(done)

    outcomes = deployment.omni.run(run())
    answered = [(one, expected[number % len(expected)]) for number, one in enumerate(outcomes)]
    assert_equal(*zip(*((one, other) for one, other in answered if isinstance(one, OmniRequestOutput)), strict=True))
    for error in (one for one in outcomes if not isinstance(one, OmniRequestOutput)):
        assert isinstance(error, StageFailed)
        assert error.stage.startswith("talker")
    assert_equal(deployment.ask_all(), expected)  # on the talker beside the front end
    deployment.join("talker/1")
    deployment.recovered()
    assert_equal(deployment.ask_all(), expected)
