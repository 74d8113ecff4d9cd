"""Qwen2.5-Omni with each stage on a host of its own, and hosts that join wrongly, die and are cut off.

The hosts are network namespaces, or loopback addresses where the machine makes none (``tests/hosts/machines.py``).
"""

import asyncio
import os
import re
import socket
from collections.abc import Callable, Iterator
from contextlib import aclosing, suppress
from pathlib import Path
from typing import Any

import pytest
import zmq

from tests import machine
from tests.hosts.deployments import (
    NOTICED_S,
    NUM_REQUESTS,
    PARAMS,
    PORT,
    PROMPT,
    SMALL,
    TIMEOUT_S,
    Deployment,
    answer,
    answer_to_image,
    assert_equal,
    deploy,
    wait_for,
)
from vllm_omni.engine.metrics import METRICS
from vllm_omni.errors import CallAborted, DeadlineExceeded, EngineLost, InvalidRequest, StageFailed, StageUnavailable
from vllm_omni.flow import ENTRY, FlowStatistics
from vllm_omni.flow.run.frame import Frame
from vllm_omni.messages.outputs import OmniRequestOutput, collect
from vllm_omni.process.status import StageState
from vllm_omni.relay.secret import MIN_BYTES, Secret
from vllm_omni.testing import qwen2_5_omni as tiny

pytestmark = [pytest.mark.timeout(600), pytest.mark.long]  # units: tests/hosts/test_joining.py

STAGES = {"thinker": "box-a", "talker": "box-b", "token2wav": "box-c"}
SHORT_ORPHAN_S = 5.0


@pytest.fixture(scope="module")
def deployment(
    checkpoint: Path, expected: list[OmniRequestOutput], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Deployment]:
    hosts = [f"{stage}.host={host}" for stage, host in STAGES.items()]
    places = tmp_path_factory.mktemp("logs"), tmp_path_factory.mktemp("h")
    counted = {**SMALL, "log_stats": True}
    with deploy(checkpoint, places[0], STAGES, *hosts, hosts_dir=places[1], engine=counted) as made:
        yield made


def test_engines_elsewhere_are_counted_as_those_here(deployment: Deployment, expected: list[OmniRequestOutput]) -> None:
    """The first of these tests: what hosts have counted of earlier requests may arrive while these are counted."""
    engines = deployment.omni.engine.orchestrator.engines

    def num_tokens() -> dict[str, int]:
        totals = {name: METRICS.totals(engine.vllm_config) for name, engine in engines.items()}
        return {name: one.num_tokens for name, one in totals.items() if one is not None}

    assert num_tokens() == dict.fromkeys(STAGES, 0)
    assert_equal(deployment.ask_all(), expected)
    tokens = {"thinker": 24 * NUM_REQUESTS, "talker": 40 * NUM_REQUESTS}
    wait_for("the counts", lambda: num_tokens().items() >= tokens.items(), NOTICED_S)
    assert num_tokens()["token2wav"] > 0
    assert {engine.num_requests for engine in engines.values()} == {0}


def test_stages_on_other_hosts_answer_as_one_machine(deployment: Deployment, expected: list[OmniRequestOutput]) -> None:
    assert_equal(deployment.ask_all(), expected)
    assert_equal(deployment.ask_all(), expected)


def test_frames_between_stages_do_not_pass_through_the_front_end(
    deployment: Deployment, expected: list[OmniRequestOutput], monkeypatch: pytest.MonkeyPatch
) -> None:
    orchestrator = deployment.omni.engine.orchestrator
    controllers = orchestrator.controllers
    assert controllers is not None
    heard: list[Any] = []
    dispatch = controllers.link._dispatch
    monkeypatch.setattr(controllers.link, "_dispatch", lambda message: (heard.append(message), dispatch(message)))
    assert_equal(deployment.ask_all(), expected)
    assert {one.target for one in heard} == {ENTRY}
    outputs = {one.field for one in heard if isinstance(one, Frame)}
    assert outputs == set(orchestrator.plan_of(None).outputs) & outputs
    assert outputs >= {"text", "audio"}
    clients = [engine.llm for engine in orchestrator.engines.values()]
    assert [client.output_handler for client in clients] == [None] * 3, "no request was the front end's"


def test_a_prompt_with_an_image_is_read_here_and_answered_there(
    deployment: Deployment, expected_of_image: OmniRequestOutput
) -> None:
    assert_equal([deployment.omni.run(answer_to_image(deployment.omni))] * 2, [expected_of_image] * 2)


def test_a_prompt_that_cannot_be_read_is_the_clients(deployment: Deployment) -> None:
    with pytest.raises(InvalidRequest, match="maximum context length is 1024 tokens"):
        deployment.omni.run(collect(deployment.omni.engine.generate(PROMPT.format("a " * 2000), PARAMS)))
    with pytest.raises(InvalidRequest, match="temperature"):
        deployment.omni.run(collect(deployment.omni.engine.generate(PROMPT, {"thinker": {"temperature": -1.0}})))


def test_a_request_that_is_left_or_late_leaves_nothing(
    deployment: Deployment, expected: list[OmniRequestOutput]
) -> None:
    long: dict[str, Any] = {**PARAMS, "thinker": {**PARAMS["thinker"], "max_tokens": 400}}

    async def leave() -> None:
        async with aclosing(deployment.omni.engine.generate(PROMPT.format(0), long)) as outputs:
            await anext(outputs)

    deployment.omni.run(leave())
    with pytest.raises(DeadlineExceeded):
        deployment.omni.run(collect(deployment.omni.engine.generate(PROMPT.format(0), long, deadline_s=0.2)))
    assert_equal(deployment.ask_all(), expected)
    assert deployment.omni.engine.orchestrator.runtime.statistics() == FlowStatistics(0, 0, 0, 0)
    for stage in STAGES:
        wait_for("the end of all leases", lambda stage=stage: not _num_leases(deployment, stage), NOTICED_S)


def test_a_pause_holds_requests_and_aborts_those_that_run(
    deployment: Deployment, expected: list[OmniRequestOutput]
) -> None:
    engine = deployment.omni.engine
    long: dict[str, Any] = {**PARAMS, "thinker": {**PARAMS["thinker"], "max_tokens": 400}}

    async def pause() -> list[OmniRequestOutput]:
        running = asyncio.ensure_future(collect(engine.generate(PROMPT.format(0), long)))
        await asyncio.sleep(0.2)
        await engine.pause_generation(mode="abort")
        with pytest.raises(CallAborted):
            await running
        held = [asyncio.ensure_future(answer(deployment.omni, number)) for number in range(NUM_REQUESTS)]
        left = asyncio.ensure_future(answer(deployment.omni, 0))
        await asyncio.sleep(0.2)
        assert not any(one.done() for one in held)
        left.cancel()
        await engine.resume_generation()
        return await asyncio.gather(*held)

    assert_equal(deployment.omni.run(pause()), expected)


def test_no_engine_of_the_front_end_runs_beside_it(deployment: Deployment) -> None:
    engines = deployment.omni.engine.orchestrator.engines.values()
    assert {engine.llm.engine_core.resources.engine_manager for engine in engines} == {None}


def test_a_host_with_the_only_engine_of_a_stage_is_not_drained(deployment: Deployment) -> None:
    with pytest.raises(InvalidRequest, match=r"host 'box-b' cannot be drained: no engine elsewhere .* stage 'talker'"):
        deployment.omni.run(deployment.omni.engine.drain("box-b", TIMEOUT_S))
    deployment.recovered()


def test_hosts_listen_at_their_own_addresses_alone(deployment: Deployment) -> None:
    machine.require("networks")
    for host in deployment.hosts.values():
        assert {address for address, _ in host.listening()} <= {host.address, "127.0.0.1"}
    assert deployment.hosts["thinker"].listening()  # its relay's


def test_strangers_at_the_ports_are_not_heard(deployment: Deployment, expected: list[OmniRequestOutput]) -> None:
    places = [(deployment.net.address, PORT)]
    places += [place for host in deployment.hosts.values() for place in host.listening() if place[0] == host.address]
    assert len(places) > 1
    context = zmq.Context()
    wrong = [context.socket(zmq.DEALER) for _ in places]
    for place, one in zip(places, wrong, strict=True):
        for size in (1, 64, 100_000):
            # The listener ends the connection when it likes.
            with socket.create_connection(place, NOTICED_S) as stranger, suppress(OSError):
                stranger.sendall(os.urandom(size))
                stranger.shutdown(socket.SHUT_WR)
                while stranger.recv(4096):
                    pass
        Secret(b"w" * MIN_BYTES).protect_caller(one)
        one.connect(f"tcp://{place[0]}:{place[1]}")
        one.send(b"a frame")
    assert_equal(deployment.ask_all(), expected)
    for one in wrong:
        one.close(linger=0)
    context.destroy(linger=0)


def test_a_host_with_another_secret_ends_with_the_reason(deployment: Deployment, tmp_path: Path) -> None:
    other = tmp_path / "token"
    other.write_text("w" * MIN_BYTES)
    other.chmod(0o600)
    process = deployment.join("talker", token=other, log=tmp_path / "log")
    assert process.wait(TIMEOUT_S) == 2
    assert "does not accept the secret of this host's token file" in (tmp_path / "log").read_text()


def test_a_second_host_for_a_stage_ends_with_the_reason(deployment: Deployment, tmp_path: Path) -> None:
    process = deployment.join("talker", log=tmp_path / "log")
    assert process.wait(TIMEOUT_S) == 2
    assert "rejects this host: stage 'talker' is served by" in (tmp_path / "log").read_text()


def test_a_host_with_another_checkpoint_ends_with_both_values(
    deployment: Deployment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deployment, "checkpoint", tiny.build(tmp_path / "other", seed=1))
    process = deployment.join("talker", log=tmp_path / "log")
    assert process.wait(TIMEOUT_S) == 2
    said = (tmp_path / "log").read_text()
    assert re.search(r"it differs from the front end's host: checkpoint: \w{16} there, \w{16} here", said)


def _num_leases(deployment: Deployment, stage: str) -> int:
    ranks = deployment.omni.run(deployment.omni.engine.orchestrator.engines[stage].relay_statistics())
    return sum(one["num_leases"] for rank in ranks for one in rank.values())


async def _ask_while(deployment: Deployment, happens: Callable[[], None]) -> list[OmniRequestOutput | BaseException]:
    """Answers, or errors, of requests during which something happens to a host."""

    async def one(number: int) -> OmniRequestOutput:
        params = {**PARAMS, "thinker": {**PARAMS["thinker"], "max_tokens": 400}, "talker": {"max_tokens": 800}}
        return await collect(deployment.omni.engine.generate(PROMPT.format(number), params))

    tasks = [asyncio.ensure_future(one(number)) for number in range(2)]
    await asyncio.sleep(0.5)
    await asyncio.to_thread(happens)
    return await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), NOTICED_S)


def test_a_host_that_is_killed_fails_its_requests_and_may_come_back(
    deployment: Deployment, expected: list[OmniRequestOutput]
) -> None:
    host = deployment.hosts["talker"]
    answers = deployment.omni.run(_ask_while(deployment, host.kill))
    for error in answers:
        assert isinstance(error, StageFailed)
        assert error.stage == "talker"
        assert f"its host 'box-b' ({host.address}) does not answer any longer" in str(error)
    with pytest.raises(StageUnavailable, match="talker"):
        deployment.omni.run(answer(deployment.omni, 0))
    deployment.join("talker")
    deployment.recovered()
    assert_equal(deployment.ask_all(), expected)


def test_an_engine_that_is_killed_is_restarted_on_its_host(
    deployment: Deployment, expected: list[OmniRequestOutput]
) -> None:
    """As beside the front end; the host stays."""
    report = deployment.omni.engine.stage_report
    before = report()["token2wav"].num_restarts
    engine = deployment.omni.engine.orchestrator.engines["token2wav"]
    wait_for("the host reports its processes", engine.pids)
    engine.kill()
    wait_for("a restart", lambda: report()["token2wav"].num_restarts == before + 1)
    deployment.recovered()
    assert_equal(deployment.ask_all(), expected)


def test_a_host_that_is_cut_off_is_lost_and_joins_again(
    deployment: Deployment, expected: list[OmniRequestOutput]
) -> None:
    machine.require("networks")
    host = deployment.hosts["talker"]
    engine = deployment.omni.engine.orchestrator.engines["talker"]
    wait_for("the host reports its processes", engine.pids)
    pids = engine.pids()
    answers = deployment.omni.run(_ask_while(deployment, host.cut))
    assert [type(error) for error in answers] == [EngineLost, EngineLost]
    host.mend()
    deployment.recovered()
    assert_equal(deployment.ask_all(), expected)
    wait_for("the host reports its processes", engine.pids)
    assert engine.pids() == pids  # it has not loaded its weights again
    wait_for("the end of all leases", lambda: not _num_leases(deployment, "talker"), NOTICED_S)
    assert "is lost; this host joins it again, or ends after" in deployment.log("talker").read_text()


def test_a_host_that_stays_cut_off_ends_its_engines_and_itself(
    deployment: Deployment, expected: list[OmniRequestOutput]
) -> None:
    machine.require("networks")
    host = deployment.hosts["talker"]
    host.kill()
    wait_for("the loss", lambda: deployment.status("talker") is not StageState.RUNNING)
    deployment.join("talker", orphan_s=SHORT_ORPHAN_S)
    deployment.recovered()
    host.cut()
    wait_for("the host's end", host.has_ended, 60.0)
    said = deployment.log("talker").read_text()
    assert f"was not reached for {SHORT_ORPHAN_S:g} s (VLLM_OMNI_ORPHAN_S): the engines of this host were ended" in said
    host.mend()
    deployment.join("talker")
    deployment.recovered()
    assert_equal(deployment.ask_all(), expected)
