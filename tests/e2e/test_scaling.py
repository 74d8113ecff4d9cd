"""Replicas that start and end while requests run: Qwen2.5-Omni, whose stages stream to one another."""

import asyncio
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from tests.server import SHORT, Server, serve, wait_for
from vllm_omni import OmniLLM
from vllm_omni.entrypoints.cli.main import main
from vllm_omni.errors import InvalidRequest, StageFailed
from vllm_omni.messages.outputs import OmniRequestOutput, collect
from vllm_omni.process.proc import mapped_shared_memory
from vllm_omni.testing import qwen2_5_omni as tiny

pytestmark = [pytest.mark.timeout(500), pytest.mark.long]  # proposals: tests/deploy/test_autoscale.py

STAGES = ("thinker", "talker", "token2wav")
PROMPT = "<|im_start|>user\nHello {}<|im_end|>\n<|im_start|>assistant\n"
PARAMS: dict[str, Any] = {
    "thinker": {"temperature": 0.0, "max_tokens": 16, "ignore_eos": True},
    "talker": {"temperature": 0.0, "max_tokens": 30},
    "token2wav": {"seed": 0},
}
NUM_PROMPTS = 4
NUM_CLIENTS = 4
SMALL: dict[str, Any] = {"enforce_eager": True, "max_model_len": 1024, "skip_mm_profiling": True}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.build(tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture(scope="module")
def omni(checkpoint: Path) -> Iterator[OmniLLM]:
    overrides = [f"{name}.max_replicas=3" for name in STAGES]
    with OmniLLM(checkpoint, dtype="float32", stage_overrides=overrides, **SMALL) as omni:
        yield omni


async def ask(omni: OmniLLM, number: int) -> OmniRequestOutput:
    return await collect(omni.engine.generate(PROMPT.format(number), PARAMS))


@pytest.fixture(scope="module")
def alone(omni: OmniLLM) -> list[OmniRequestOutput]:
    async def run() -> list[OmniRequestOutput]:
        return [await ask(omni, number) for number in range(NUM_PROMPTS)]

    return omni.run(run())


def assert_equal(one: OmniRequestOutput, other: OmniRequestOutput) -> None:
    assert one.outputs[0].token_ids == other.outputs[0].token_ids
    audio = one.multimodal_output["audio"]
    assert len(audio)  # its samples depend on what else is in a batch, by the order of sums
    torch.testing.assert_close(audio, other.multimodal_output["audio"], rtol=0, atol=1e-4 * float(audio.abs().max()))


async def until(is_true: Callable[[], bool], timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not is_true():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)


def engines(omni: OmniLLM, stage: str) -> list[str]:
    return [one.name for one in omni.engine.orchestrator.engines_of(stage)]


def processes() -> set[int]:
    return {one.pid for one in psutil.Process().children(recursive=True) if one.status() != psutil.STATUS_ZOMBIE}


async def under_load(omni: OmniLLM, alone: list[OmniRequestOutput], change: Callable[[], Any]) -> int:
    """Run ``change`` while clients ask without a pause; every answer is as it is alone. Returns how many there were."""
    is_over, num_answers = False, 0

    async def client(number: int) -> None:
        nonlocal num_answers
        while not is_over:
            assert_equal(await ask(omni, number % NUM_PROMPTS), alone[number % NUM_PROMPTS])
            num_answers += 1

    clients = [asyncio.create_task(client(number)) for number in range(NUM_CLIENTS)]
    try:
        await change()
        await asyncio.sleep(0)
    finally:
        is_over = True
        await asyncio.gather(*clients)
    return num_answers


@pytest.mark.parametrize("stage", STAGES)
def test_replicas_start_and_end_under_load(omni: OmniLLM, alone: list[OmniRequestOutput], stage: str) -> None:
    """Of a stage that reads the prompt, of one that reads and makes streams, and of one that is read by the user."""
    before, blocks = processes(), None

    async def change() -> None:
        nonlocal blocks
        assert (await omni.engine.scale(stage, 3)).replicas == 3
        assert engines(omni, stage) == [f"{stage}/{number}" for number in range(3)]
        blocks = {name: mapped_shared_memory(pid) for name in engines(omni, stage)[1:] for pid in pids(omni, name)}
        tasks = omni.engine.orchestrator.nodes[stage].router
        await until(lambda: len(tasks.statistics().num_tasks) == 3)
        assert (await omni.engine.scale(stage, 1)).replicas == 1

    assert omni.run(under_load(omni, alone, change)) >= 3
    assert engines(omni, stage) == [f"{stage}/0"]
    assert processes() == before
    own = mapped_shared_memory(psutil.Process().pid)
    assert blocks and not [block for of in blocks.values() for block in of - own if block.exists()]
    assert all(one.state == "running" for one in omni.engine.stage_report().values())


def pids(omni: OmniLLM, name: str) -> list[int]:
    return omni.engine.orchestrator.engines[name].pids()


def test_a_replica_that_was_ended_can_start_again(omni: OmniLLM, alone: list[OmniRequestOutput]) -> None:
    async def run() -> None:
        for number in (2, 1, 2):
            await omni.engine.scale("talker", number)
        assert_equal(await ask(omni, 0), alone[0])
        await omni.engine.scale("talker", 1)

    omni.run(run())


def test_the_last_of_several_targets_counts(omni: OmniLLM) -> None:
    async def run() -> None:
        scaling = omni.engine.orchestrator.scaling
        for number in (3, 2, 1, 2):
            scaling.set_target("token2wav", number)
        assert (await scaling.wait("token2wav")).replicas == 2
        scaling.set_target("token2wav", 1)
        scaling.set_target("token2wav", 2)
        assert (await scaling.wait("token2wav")).replicas == 2
        await omni.engine.scale("token2wav", 1)

    omni.run(run())


def test_a_replica_whose_process_is_killed_while_it_starts_is_none(
    omni: OmniLLM, alone: list[OmniRequestOutput]
) -> None:
    before = processes()

    async def run() -> None:
        task = asyncio.create_task(omni.engine.scale("talker", 2))
        await until(lambda: bool(processes() - before))
        for pid in processes() - before:
            psutil.Process(pid).kill()
        with pytest.raises(StageFailed, match=r"talker/1.*did not start"):
            await task
        assert [(one.replicas, one.target) for one in omni.engine.orchestrator.scaling.report()] == [(1, 1)] * 3
        assert_equal(await ask(omni, 0), alone[0])

    omni.run(run())
    assert processes() == before


def test_a_replica_with_requests_that_do_not_end_in_time_stays(omni: OmniLLM) -> None:
    async def run() -> None:
        await omni.engine.scale("thinker", 2)
        endless = PARAMS | {"thinker": {"max_tokens": 900, "ignore_eos": True}}
        running = [asyncio.create_task(collect(omni.engine.generate(PROMPT.format(n), endless))) for n in range(2)]
        name = "thinker/1"
        await until(lambda: omni.engine.orchestrator.engines[name].num_requests > 0)
        with pytest.raises(StageFailed, match="after 0 s, 1 requests still run on thinker/1"):
            await omni.engine.scale("thinker", 1, drain_timeout_s=0)
        assert omni.engine.stage_report()[name].state == "running"
        for one in running:
            one.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        assert (await omni.engine.scale("thinker", 1, drain_timeout_s=60)).replicas == 1

    omni.run(run())


@pytest.mark.parametrize(
    ("stage", "replicas", "message"),
    [
        ("talker", 4, "4 replicas of stage 'talker': there must be 1 to 3"),
        ("talker", 0, "0 replicas of stage 'talker': there must be 1 to 3"),
        ("talkr", 2, "stage 'talkr' cannot be scaled; .*did you mean 'talker'"),
    ],
)
def test_a_wrong_target_is_rejected(omni: OmniLLM, stage: str, replicas: int, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        omni.run(omni.engine.scale(stage, replicas))


SPOKEN: dict[str, Any] = SHORT | {"modalities": ["text", "audio"], "audio": {"voice": "Ethan", "format": "wav"}}

# -- through a server --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def server(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """With two front ends, which do not have the engines."""
    flags = ["--dtype=float32", "--enforce-eager", "--max-model-len=1024", "--skip-mm-profiling", "--autoscale"]
    flags += ["--stage=talker.max_replicas=2", "--stage=talker.max_num_seqs=2", "--api-server-count=2"]
    with serve(checkpoint, tmp_path_factory.mktemp("server") / "log", *flags) as server:
        yield server


def run(server: Server, *args: str) -> None:
    main([*args, "--url", server.url])


def scales(server: Server) -> dict[str, Any]:
    (stage,) = server.get("/scale").json()["stages"]
    return stage


def test_the_command_line_scales_a_server(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    run(server, "scale", "talker=2")
    assert capsys.readouterr().out.splitlines()[1].split() == ["talker", "2", "2", "2"]
    states = {name: one["state"] for name, one in server.get("/health").json()["stages"].items()}
    assert states == dict.fromkeys(("thinker", "talker/0", "talker/1", "token2wav"), "running")
    assert 'stage="talker/1"' in server.get("/metrics").text
    run(server, "scale", "talker=1")
    assert sorted(server.get("/health").json()["stages"]) == ["talker/0", "thinker", "token2wav"]
    for _ in range(4):  # of both front ends
        assert server.client.chat.completions.create(**SPOKEN).choices[0].message.audio is not None
    assert 'stage="talker/1"' not in server.get("/metrics").text
    with pytest.raises(SystemExit):
        run(server, "scale", "talker=3")
    assert "there must be 1 to 2 (max_replicas)" in capsys.readouterr().err
    response = server.post("/scale", {"stage": "thinker", "replicas": 2})
    assert response.status_code == 400
    assert "stage 'thinker' cannot be scaled" in response.json()["error"]["message"]


def test_the_load_starts_a_replica(server: Server) -> None:
    """Nine requests for two slots; that replicas end again is a matter of minutes (tests/deploy/test_autoscale.py)."""
    stages = [{}, {"max_tokens": 200, "min_tokens": 200}, {}]
    deadline, client = time.monotonic() + 200, server.client.with_options(timeout=200)

    def speak() -> None:
        while scales(server)["replicas"] == 1 and time.monotonic() < deadline:
            client.chat.completions.create(**SPOKEN, extra_body={"sampling_params_list": stages})

    async def speak_all() -> None:
        await asyncio.gather(*(asyncio.to_thread(speak) for _ in range(9)))

    asyncio.run(speak_all())
    wait_for("another talker", lambda: scales(server)["replicas"] == 2)
    assert scales(server)["error"] is None
