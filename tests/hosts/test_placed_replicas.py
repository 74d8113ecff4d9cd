"""Qwen2.5-Omni whose replicas are all on hosts, and their controllers with them; hosts that die, leave and return."""

import asyncio
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest
from vllm.sampling_params import RequestOutputKind, SamplingParams

from tests.hosts.chaos import RESTARTS, pid_inside, processes_of
from tests.hosts.deployments import (
    NOTICED_S,
    NUM_REQUESTS,
    PARAMS,
    PROMPT,
    TIMEOUT_S,
    Deployment,
    answer,
    assert_equal,
    deploy,
    wait_for,
)
from vllm_omni.engine.replicas import ReplicaGroup
from vllm_omni.errors import CallAborted, EngineLost, StageFailed
from vllm_omni.flow import ENTRY, FlowStatistics
from vllm_omni.messages.outputs import OmniRequestOutput, collect

pytestmark = [pytest.mark.timeout(600), pytest.mark.long]

HOSTS = {"thinker": "box-a", "talker/0 token2wav/0": "box-b", "talker/1 token2wav/1": "box-c"}
FIRST, SECOND = [*HOSTS][1:]
LONG = {**PARAMS, "thinker": {**PARAMS["thinker"], "max_tokens": 400}}


@pytest.fixture(scope="module")
def deployment(
    checkpoint: Path, expected: list[OmniRequestOutput], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Deployment]:
    overrides = ["thinker.host=box-a"]
    overrides += ["talker.replicas=2", "talker.host=[box-b, box-c]", "talker.balance=round_robin"]
    overrides += ["token2wav.max_replicas=2", "token2wav.host=[box-b, box-c]", "token2wav.balance=round_robin"]
    places = tmp_path_factory.mktemp("logs"), tmp_path_factory.mktemp("h")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in RESTARTS.items():
            patch.setenv(name, value)
        with deploy(checkpoint, places[0], HOSTS, *overrides, hosts_dir=places[1]) as made:
            yield made


def num_tasks(deployment: Deployment, stage: str = "talker") -> list[int]:
    """Requests that each replica has been given."""
    group = deployment.omni.engine.orchestrator.nodes[stage]
    assert isinstance(group, ReplicaGroup)
    given = group.router.statistics().num_tasks
    return [given.get(f"{stage}/{number}", 0) for number in range(2)]


def assert_idle(deployment: Deployment) -> None:
    orchestrator = deployment.omni.engine.orchestrator
    assert orchestrator.runtime.statistics() == FlowStatistics(0, 0, 0, 0)
    assert {name: one.num_requests for name, one in orchestrator.engines.items() if one.num_requests} == {}
    groups = [one for one in orchestrator.nodes.values() if isinstance(one, ReplicaGroup)]
    assert {
        name: one.router.num_open(name) for one in groups for name in one.engines if one.router.num_open(name)
    } == {}
    assert orchestrator.controllers is not None
    assert not orchestrator.controllers._placed
    assert not orchestrator.controllers._running_on
    assert not orchestrator.gate.admitted


def test_replicas_answer_as_one_machine_and_frames_between_stages_do_not_pass_through_the_front_end(
    deployment: Deployment, expected: list[OmniRequestOutput], monkeypatch: pytest.MonkeyPatch
) -> None:
    controllers = deployment.omni.engine.orchestrator.controllers
    assert controllers is not None
    heard: list[Any] = []
    dispatch = controllers.link._dispatch
    monkeypatch.setattr(controllers.link, "_dispatch", lambda message: (heard.append(message), dispatch(message)))
    assert_equal(deployment.ask_all(), expected)
    assert all(num_tasks(deployment))
    assert {one.target for one in heard} == {ENTRY}
    assert_idle(deployment)


def test_replicas_start_and_end_while_requests_run(deployment: Deployment, expected: list[OmniRequestOutput]) -> None:
    scale = deployment.omni.engine.scale

    async def ask(number: int) -> OmniRequestOutput:
        return await answer(deployment.omni, number % NUM_REQUESTS)

    async def run() -> list[OmniRequestOutput]:
        asked = [asyncio.ensure_future(ask(number)) for number in range(NUM_REQUESTS)]
        assert (await scale("token2wav", 2)).replicas == 2
        asked += [asyncio.ensure_future(ask(number)) for number in range(2 * NUM_REQUESTS)]
        while not all(num_tasks(deployment, "token2wav")):  # noqa: ASYNC110 - nothing notifies of it
            await asyncio.sleep(0.01)
        assert (await scale("token2wav", 1)).replicas == 1
        return await asyncio.gather(*asked)

    assert_equal(deployment.omni.run(run()), expected * 3)
    assert all(num_tasks(deployment, "token2wav"))
    assert_idle(deployment)


def stop_and(deployment: Deployment, change: Callable[[], None]) -> None:
    """Do something while the thinker makes no step."""
    pids = processes_of(deployment.hosts["thinker"])
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        change()
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)


@pytest.mark.parametrize("what", ["engine", "host"])
def test_requests_without_an_output_move_from_what_is_killed(
    deployment: Deployment, expected: list[OmniRequestOutput], what: str
) -> None:
    orchestrator, host = deployment.omni.engine.orchestrator, deployment.hosts[FIRST]
    deployment.omni.run(deployment.omni.engine.scale("token2wav", 2))
    before = num_tasks(deployment)

    def kill() -> None:
        if what == "host":
            host.kill()
        else:
            inside = orchestrator.engines["talker/0"].pids()
            for pid in processes_of(host):
                if pid_inside(pid) in inside:
                    os.kill(pid, signal.SIGKILL)

    async def run() -> list[OmniRequestOutput]:
        asked = [asyncio.ensure_future(answer(deployment.omni, number)) for number in range(NUM_REQUESTS)]
        while sum(num_tasks(deployment)) < sum(before) + NUM_REQUESTS:  # noqa: ASYNC110 - nothing notifies of it
            await asyncio.sleep(0.01)
        has_died = orchestrator.engines["talker/0"]
        await asyncio.to_thread(kill)
        while not has_died.has_died:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        return asked

    asked: list[Any] = []
    stop_and(deployment, lambda: asked.extend(deployment.omni.run(run())))

    async def read() -> list[OmniRequestOutput]:
        return await asyncio.gather(*asked)

    assert_equal(deployment.omni.run(read()), expected)
    assert num_tasks(deployment)[1] - before[1] == NUM_REQUESTS
    assert_idle(deployment)
    if what == "host":
        deployment.join(FIRST)
    deployment.recovered()
    assert_equal(deployment.ask_all(), expected)


def test_a_request_with_an_output_fails_with_the_name_of_the_replica_that_was_killed(
    deployment: Deployment, expected: list[OmniRequestOutput]
) -> None:
    async def run() -> list[str]:
        failed = []
        outputs = [deployment.omni.engine.generate(PROMPT.format(number), LONG) for number in range(2)]
        async with aclosing(outputs[0]), aclosing(outputs[1]):
            for one in outputs:
                await anext(one)
            await asyncio.to_thread(deployment.hosts[FIRST].kill)
            for one in outputs:
                try:
                    async for _ in one:
                        pass
                except EngineLost as exc:
                    failed.append(exc.stage)
        return failed

    failed = deployment.omni.run(run())
    assert failed
    assert set(failed) <= {"talker/0", "token2wav/0"}
    assert_idle(deployment)
    deployment.join(FIRST)
    deployment.recovered()
    assert_equal(deployment.ask_all(), expected)


def test_requests_that_are_read_whole_are_all_answered_when_a_host_is_killed(
    deployment: Deployment, expected: list[OmniRequestOutput]
) -> None:
    """Also those that have outputs: their users have none of these."""
    whole = SamplingParams(output_kind=RequestOutputKind.FINAL_ONLY, **PARAMS["thinker"])

    async def ask(number: int) -> OmniRequestOutput:
        params = {**PARAMS, "thinker": whole}
        prompt = PROMPT.format(number % NUM_REQUESTS)
        (answered,) = [one async for one in deployment.omni.engine.generate(prompt, params, f"whole-{number}")]
        assert answered.request_id == f"whole-{number}"
        return answered

    async def run() -> list[OmniRequestOutput]:
        asked = [asyncio.ensure_future(ask(number)) for number in range(3 * NUM_REQUESTS)]
        await asyncio.sleep(0.4)
        await asyncio.to_thread(deployment.hosts[FIRST].kill)
        return await asyncio.gather(*asked)

    assert_equal(deployment.omni.run(run()), expected * 3)
    assert_idle(deployment)
    deployment.join(FIRST)
    deployment.recovered()


def test_a_request_that_moves_can_be_aborted_and_fails_if_no_other_replica_is_left(
    deployment: Deployment, expected: list[OmniRequestOutput]
) -> None:
    async def run() -> None:
        await deployment.omni.engine.drain("talker/1", TIMEOUT_S)
        asked = asyncio.ensure_future(answer(deployment.omni, 0))
        aborted = asyncio.ensure_future(
            collect(deployment.omni.engine.generate(PROMPT.format(1), LONG, "to-be-aborted"))
        )
        await asyncio.sleep(0.3)
        await deployment.omni.engine.abort("to-be-aborted")
        with pytest.raises(CallAborted):
            await aborted
        await asked
        asked = asyncio.ensure_future(collect(deployment.omni.engine.generate(PROMPT.format(0), LONG)))
        await asyncio.sleep(0.3)
        await asyncio.to_thread(deployment.hosts[FIRST].kill)
        with pytest.raises(StageFailed, match=r"talker/0|token2wav/0"):
            await asyncio.wait_for(asked, NOTICED_S)
        deployment.omni.engine.undrain("talker/1")

    deployment.omni.run(run())
    assert_idle(deployment)
    deployment.join(FIRST)
    deployment.recovered()
    wait_for("both work", lambda: assert_equal(deployment.ask_all(), expected) is None)


def test_a_host_that_is_drained_gets_no_requests_and_loses_none(
    deployment: Deployment, expected: list[OmniRequestOutput]
) -> None:
    async def run() -> list[OmniRequestOutput]:
        asked = [asyncio.ensure_future(answer(deployment.omni, number)) for number in range(NUM_REQUESTS)]
        await asyncio.sleep(0.1)
        drained = await deployment.omni.engine.drain("box-c", TIMEOUT_S)
        assert all(one.is_idle for one in drained)
        before = num_tasks(deployment)
        asked += [asyncio.ensure_future(answer(deployment.omni, number)) for number in range(NUM_REQUESTS)]
        answers = await asyncio.gather(*asked)
        assert num_tasks(deployment)[1] == before[1]
        deployment.omni.engine.undrain("box-c")
        return answers

    assert_equal(deployment.omni.run(run()), expected * 2)
    assert_idle(deployment)
