"""Replicas of every kind of stage: Qwen2.5-Omni with two thinkers, talkers and vocoders, behind a graph of streams."""

import asyncio
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.processes import paused
from tests.redis_server import run_redis
from tests.server import SHORT, Server, engine_core, serve, wait_for
from vllm_omni import OmniLLM
from vllm_omni.engine.replicas import ReplicaGroup
from vllm_omni.entrypoints.cli.main import main
from vllm_omni.errors import InvalidRequest
from vllm_omni.flow.remote.registry.redis import RedisRegistry
from vllm_omni.messages.outputs import OmniRequestOutput, collect
from vllm_omni.process.status import StageState
from vllm_omni.testing import qwen2_5_omni as tiny

pytestmark = [pytest.mark.timeout(500), pytest.mark.long]  # units: tests/engine/test_replicas.py

STAGES = ("thinker", "talker", "token2wav")
PROMPT = "<|im_start|>user\nHello {}<|im_end|>\n<|im_start|>assistant\n"
PARAMS: dict[str, Any] = {
    "thinker": {"temperature": 0.0, "max_tokens": 24, "ignore_eos": True},
    "talker": {"temperature": 0.0, "max_tokens": 40},
    "token2wav": {"seed": 0},
}
NUM_REQUESTS = 6
RESTART_TIMEOUT_S = 120.0


def start(checkpoint: Path, *stage_overrides: str, **more: Any) -> OmniLLM:
    small: dict[str, Any] = {"enforce_eager": True, "max_model_len": 1024, "skip_mm_profiling": True}
    return OmniLLM(checkpoint, dtype="float32", stage_overrides=stage_overrides, **small, **more)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.build(tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture(scope="module")
def omni(checkpoint: Path) -> Iterator[OmniLLM]:
    with start(checkpoint, *(f"{name}.replicas=2" for name in STAGES), "talker.balance=session") as omni:
        yield omni


def group(omni: OmniLLM, stage: str) -> ReplicaGroup:
    node = omni.engine.orchestrator.nodes[stage]
    assert isinstance(node, ReplicaGroup)
    return node


async def ask(omni: OmniLLM, number: int, **more: Any) -> OmniRequestOutput:
    return await collect(omni.engine.generate(PROMPT.format(number), PARAMS, **more))


async def ask_all(omni: OmniLLM) -> list[OmniRequestOutput]:
    return await asyncio.gather(*(ask(omni, number) for number in range(NUM_REQUESTS)))


def assert_equal(one: OmniRequestOutput, other: OmniRequestOutput) -> None:
    assert one.outputs[0].token_ids == other.outputs[0].token_ids
    audio = one.multimodal_output["audio"]
    assert len(audio)  # its samples depend on what else is in a batch, by the order of sums
    torch.testing.assert_close(audio, other.multimodal_output["audio"], rtol=0, atol=1e-4 * float(audio.abs().max()))


def num_tasks(omni: OmniLLM) -> dict[str, int]:
    return {name: n for stage in STAGES for name, n in group(omni, stage).router.statistics().num_tasks.items()}


async def until(is_true: Callable[[], bool], timeout_s: float = RESTART_TIMEOUT_S) -> None:
    deadline = time.monotonic() + timeout_s
    while not is_true():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)


async def recovered(omni: OmniLLM) -> None:
    await until(lambda: {one.state for one in omni.engine.stage_report().values()} == {StageState.RUNNING})


@pytest.fixture(scope="module")
def by_one(omni: OmniLLM) -> list[OmniRequestOutput]:
    """Answers of one engine of each stage; the others are drained."""

    async def run() -> list[OmniRequestOutput]:
        for stage in STAGES:
            assert (await omni.engine.drain(f"{stage}/1", 10))[0].is_idle
        answers = await ask_all(omni)
        for stage in STAGES:
            omni.engine.undrain(f"{stage}/1")
        return answers

    answers = omni.run(run())
    assert set(num_tasks(omni)) == {f"{stage}/0" for stage in STAGES}
    return answers


def test_replicas_answer_as_one_engine(omni: OmniLLM, by_one: list[OmniRequestOutput]) -> None:
    for answer, expected in zip(omni.run(ask_all(omni)), by_one, strict=True):
        assert_equal(answer, expected)
    assert set(num_tasks(omni)) == {f"{stage}/{number}" for stage in STAGES for number in range(2)}


def test_a_session_stays_at_its_talker(omni: OmniLLM) -> None:
    async def run() -> None:
        await asyncio.gather(*(ask(omni, number, session_id="s") for number in range(4)))

    before = num_tasks(omni)
    omni.run(run())
    after = num_tasks(omni)
    assert sorted(after[f"talker/{number}"] - before[f"talker/{number}"] for number in range(2)) == [0, 4]


def test_the_only_engine_of_a_stage_that_gets_requests_cannot_be_drained(omni: OmniLLM) -> None:
    async def run() -> None:
        await omni.engine.drain("talker/0", 1)
        with pytest.raises(InvalidRequest, match="'talker/1' cannot be drained: no other engine of its stage"):
            await omni.engine.drain("talker/1", 1)
        assert omni.engine.stage_report()["talker/0"].state is StageState.DRAINED
        await omni.engine.check_health()
        omni.engine.undrain("talker/0")
        with pytest.raises(InvalidRequest, match="no engine 'talker/2': did you mean 'talker/"):
            await omni.engine.drain("talker/2", 1)

    omni.run(run())


def test_a_drained_replica_ends_its_requests(omni: OmniLLM, by_one: list[OmniRequestOutput]) -> None:
    async def run() -> OmniRequestOutput:
        engines = group(omni, "thinker").engines
        with paused(*(pid for engine in engines.values() for pid in engine.pids())):
            running = asyncio.create_task(ask(omni, 0))
            await until(lambda: any(engine.num_requests for engine in engines.values()))
            (name,) = (name for name, engine in engines.items() if engine.num_requests)
            assert (await omni.engine.drain(name, 0.1))[0].num_requests == 1
        answer = await running
        assert (await omni.engine.drain(name, 10))[0].is_idle
        omni.engine.undrain(name)
        return answer

    assert_equal(omni.run(run()), by_one[0])


def test_a_request_moves_from_a_killed_thinker_and_the_thinker_returns(
    omni: OmniLLM, by_one: list[OmniRequestOutput]
) -> None:
    async def run() -> list[OmniRequestOutput]:
        engines = group(omni, "thinker").engines
        victim = engines["thinker/1"]
        with paused(*victim.pids()):
            answers = asyncio.gather(*(ask(omni, number) for number in range(NUM_REQUESTS)))
            await until(lambda: victim.num_requests > 0)
            victim.kill()
            got = await answers
        await omni.engine.check_health()
        assert omni.engine.stage_report()["thinker/1"].state is StageState.RESTARTING
        await recovered(omni)
        return got

    for answer, expected in zip(omni.run(run()), by_one, strict=True):
        assert_equal(answer, expected)
    assert group(omni, "thinker").router.statistics().num_redone
    before = num_tasks(omni)["thinker/1"]
    for answer, expected in zip(omni.run(ask_all(omni)), by_one, strict=True):
        assert_equal(answer, expected)
    assert num_tasks(omni)["thinker/1"] > before


def test_requests_move_from_a_talker_that_is_killed_while_it_reads_their_streams(
    omni: OmniLLM, by_one: list[OmniRequestOutput]
) -> None:
    long = {**PARAMS, "thinker": {**PARAMS["thinker"], "max_tokens": 160}}

    async def run() -> tuple[list[OmniRequestOutput], OmniRequestOutput, OmniRequestOutput]:
        victim, thinkers = group(omni, "talker").engines["talker/0"], group(omni, "thinker").engines.values()
        with paused(*victim.pids()):
            answers = asyncio.gather(*(ask(omni, number) for number in range(NUM_REQUESTS)))
            await until(lambda: victim.num_requests == NUM_REQUESTS // 2)
            victim.kill()
        got = await answers
        await recovered(omni)
        before.update(num_tasks(omni))
        expected = await collect(omni.engine.generate(PROMPT.format(7), long, session_id="long"))
        (home,) = (name for name in ("talker/0", "talker/1") if num_tasks(omni)[name] != before[name])
        victim = group(omni, "talker").engines[home]
        with paused(*victim.pids()):
            answer = asyncio.create_task(collect(omni.engine.generate(PROMPT.format(7), long, session_id="long")))
            await until(lambda: victim.num_requests == 1)
            assert sum(one.num_requests for one in thinkers) == 1  # the reply is not complete
            victim.kill()
        return got, await answer, expected

    before: dict[str, int] = {}
    got, moved, expected = omni.run(run())
    for answer, one in zip(got, by_one, strict=True):
        assert_equal(answer, one)
    assert_equal(moved, expected)
    assert group(omni, "talker").router.statistics().num_redone
    omni.run(recovered(omni))


def test_without_streams_requests_move_from_a_killed_talker(checkpoint: Path, by_one: list[OmniRequestOutput]) -> None:
    edges = {"edges": {"thinker->talker": {"stream": False}}}
    with start(checkpoint, "talker.replicas=2", overrides=edges) as omni:

        async def run() -> list[OmniRequestOutput]:
            victim = group(omni, "talker").engines["talker/0"]
            answers = asyncio.gather(*(ask(omni, number) for number in range(NUM_REQUESTS)))
            await until(lambda: victim.num_requests > 0)
            victim.kill()
            return await answers

        for answer, expected in zip(omni.run(run()), by_one, strict=True):
            assert_equal(answer, expected)
        assert group(omni, "talker").router.statistics().num_redone


@pytest.fixture
def redis_url(tmp_path: Path) -> Iterator[str]:
    with run_redis(tmp_path) as url:
        yield url


async def published(url: str, server: Server) -> dict[str, str]:
    """What another server reads in the registry: engine -> state."""
    registry = RedisRegistry(url)
    try:
        replicas = await registry.replicas()
    finally:
        await registry.aclose()
    assert {(one.address, one.model) for one in replicas} <= {(server.url, "tiny")}
    return {one.engine: one.state for one in replicas}


def test_a_server_drains_a_replica_by_the_command_line_and_publishes_it(
    checkpoint: Path, tmp_path: Path, redis_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--dtype=float32", "--enforce-eager", "--max-model-len=1024", "--skip-mm-profiling", "--api-key=secret"]
    flags += ["--stage=thinker.replicas=2", f"--replica-registry={redis_url}"]
    with serve(checkpoint, tmp_path / "log", *flags) as server:

        def states() -> dict[str, str]:
            return {name: one["state"] for name, one in server.get("/health").json()["stages"].items()}

        def run(*args: str) -> str:
            main([*args, "--url", server.url])
            return capsys.readouterr().out.strip()

        server.client.api_key = "secret"
        assert server.post("/drain", {"name": "thinker/1"}).status_code == 401
        capsys.readouterr()
        assert run("drain", "thinker/1", "--api-key=secret", "--timeout=60") == "thinker/1: drained"
        up = dict.fromkeys(("thinker/0", "thinker/1", "talker", "token2wav"), "running")
        assert states() == up | {"thinker/1": "drained"}
        wait_for("the heartbeat", lambda: asyncio.run(published(redis_url, server)) == states())
        listed = [line.split()[:5] for line in run("replicas", "--api-key=secret").splitlines()]
        assert listed[0] == ["SERVER", "MODEL", "ENGINE", "STATE", "REQUESTS"]
        assert [server.url, "tiny", "thinker/1", "drained", "0"] in listed and len(listed) == 5
        for _ in range(3):
            assert server.client.chat.completions.create(**SHORT).choices[0].message.content
        tasks = 'vllm_omni:instance_tasks_total{stage="thinker/'
        assert f'{tasks}0"}} 3.0' in server.get("/metrics").text and f"{tasks}1" not in server.get("/metrics").text
        with pytest.raises(SystemExit):
            main(["drain", "thinker/0", "--url", server.url, "--api-key=secret"])
        assert "'thinker/0' cannot be drained: no other engine" in capsys.readouterr().err
        assert run("undrain", "thinker/1", "--api-key=secret") == "thinker/1: running"
        process = engine_core(server, "thinker-1")
        assert "::thinker/1::" in " ".join(process.cmdline())
        process.kill()
        for _ in range(2):
            assert server.client.chat.completions.create(**SHORT).choices[0].message.content
        response = server.get("/health")
        assert response.status_code == 200 and states() == up | {"thinker/1": "restarting"}
        wait_for("the heartbeat", lambda: asyncio.run(published(redis_url, server))["thinker/1"] == "restarting")
    assert asyncio.run(published(redis_url, server)) == {}
