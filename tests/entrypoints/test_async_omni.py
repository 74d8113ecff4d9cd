"""An operator's commands to a running ``AsyncOmni``, with real engines on a tiny checkpoint."""

import asyncio
import json
import os
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from prometheus_client import REGISTRY
from safetensors.torch import save_file
from vllm.lora.request import LoRARequest

from tests.reference.media import format_prompt
from tests.shared_engines import QWEN, SharedEngines
from vllm_omni import AsyncOmni, OmniLLM
from vllm_omni.engine import reading
from vllm_omni.engine.queue_limits import QueueLimits
from vllm_omni.errors import (
    CallAborted,
    ConfigError,
    DeadlineExceeded,
    EngineLost,
    InvalidRequest,
    Overloaded,
    StageFailed,
)
from vllm_omni.flow.run import credit
from vllm_omni.messages.outputs import OmniRequestOutput
from vllm_omni.process.status import StageState

PROMPT = format_prompt("Hello, who are you?")
STAGES = ("thinker", "talker", "token2wav")
SHORT = {"thinker": {"temperature": 0.0, "max_tokens": 8}, "talker": {"temperature": 0.0, "max_tokens": 20}}
LONG = {"thinker": {"temperature": 0.0, "max_tokens": 300}, "talker": {"temperature": 0.0, "max_tokens": 600}}


@pytest.fixture
def llm(engines: SharedEngines) -> OmniLLM:
    return engines.get(QWEN)


@pytest.fixture
def omni(llm: OmniLLM) -> AsyncOmni:
    return llm.engine


async def ask(omni: AsyncOmni, params: Any = SHORT, **more: Any) -> tuple[str, list[Any]]:
    """Text and codes of an answer."""
    text, codes = "", []
    async for output in omni.generate(PROMPT, params, **{"modalities": ["codec_ids"], **more}):
        text += "".join(completion.text for completion in output.outputs)
        codes += output.multimodal_output.get("codec_ids", [])
    return text, codes


async def start(omni: AsyncOmni, request_id: str, modality: str) -> asyncio.Task[Any]:
    """Start a long request, and wait for its first output of a modality."""
    has_started = asyncio.Event()

    async def read() -> tuple[str, list[Any]]:
        text, codes = "", []
        async for output in omni.generate(PROMPT, LONG, request_id, modalities=["text", "codec_ids"]):
            text += "".join(completion.text for completion in output.outputs)
            codes += output.multimodal_output.get("codec_ids", [])
            if codes or modality == "text":
                has_started.set()
        return text, codes

    task = asyncio.create_task(read())
    await asyncio.wait_for(has_started.wait(), 60)
    return task


# -- abort -------------------------------------------------------------------------------------------------------------


async def holds_no_blocks(omni: AsyncOmni, stage: str) -> bool:
    """An engine forgets its cached prefixes only when no request holds a block."""
    return await omni.orchestrator.engines[stage].llm.reset_prefix_cache()


def test_an_abort_returns_when_every_engine_has_dropped_the_request(llm: OmniLLM, omni: AsyncOmni) -> None:
    async def run() -> None:
        for number in range(12):
            modality, stage = (("text", "thinker"), ("codec_ids", "talker"))[number % 2]
            task = await start(omni, f"long {number}", modality)
            assert not await holds_no_blocks(omni, stage)
            await omni.abort(f"long {number}")
            assert await holds_no_blocks(omni, "thinker")
            assert await holds_no_blocks(omni, "talker")
            with pytest.raises(CallAborted):
                await task
        for engine in omni.orchestrator.engines.values():
            assert engine.llm.output_processor.request_states == {}
            assert not engine.llm.output_processor.external_req_ids
        statistics = omni.orchestrator.runtime.statistics()
        assert statistics.num_running_activations == statistics.num_buffered_frames == 0

    llm.run(run())


# -- limits ------------------------------------------------------------------------------------------------------------


def test_a_full_stage_rejects_requests_that_need_it_and_no_others(
    llm: OmniLLM, omni: AsyncOmni, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(omni.orchestrator, "queue_limits", QueueLimits({"talker": 1, "thinker": 2}))

    async def run() -> None:
        speaks = await start(omni, "speaks", "codec_ids")
        with pytest.raises(Overloaded, match="stage 'talker' has 1 of at most 1 requests"):
            await ask(omni)
        with pytest.raises(Overloaded, match="stage 'talker'"):
            omni.check_available(["codec_ids"])
        omni.check_admission()
        with pytest.raises(Overloaded, match=r"stage 'thinker' has 1 of at most 2 requests.* counts 2"):
            omni.check_admission(2)
        text, _ = await ask(omni, modalities=["text"])
        assert text
        await omni.abort("speaks")
        with pytest.raises(CallAborted):
            await speaks
        assert (await ask(omni))[0] == text
        assert omni.orchestrator.queue_limits.num_open() == {"talker": (0, 1), "thinker": (0, 2)}

    llm.run(run())


# -- slow readers ------------------------------------------------------------------------------------------------------

NUM_TOKENS = 400
MOST_AHEAD = (
    150  # four outputs that the user has not read, of at most 16 tokens, and 16 behind them; some are on their way
)
VERY_LONG = {"thinker": {"temperature": 0.0, "max_tokens": NUM_TOKENS, "ignore_eos": True}}
MUCH_SPEECH = {"thinker": SHORT["thinker"], "talker": {"temperature": 0.0, "max_tokens": 600, "min_tokens": 500}}


@pytest.fixture
def small_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "TOKENS_AHEAD", 16)
    monkeypatch.setattr(credit, "WINDOW", 4)


async def num_made_when_held(omni: AsyncOmni, stage: str, request_id: str) -> int:
    """Wait until a stage generates no more for a request that has not ended; returns its number of tokens."""
    llm, num_made, deadline = omni.orchestrator.engines[stage].llm, 0, time.monotonic() + 60
    while time.monotonic() < deadline:
        await asyncio.sleep(1.0)
        (now,) = llm.num_received(f"{request_id}-{stage}").values() or (0,)
        if now == num_made > 0:
            return now
        num_made = now
    raise TimeoutError(f"stage {stage} has not been held: {num_made} tokens")


async def token_ids(outputs: AsyncIterator[OmniRequestOutput]) -> list[int]:
    return [token async for output in outputs for one in output.outputs for token in one.token_ids]


async def first(outputs: AsyncIterator[OmniRequestOutput]) -> AsyncIterator[OmniRequestOutput]:
    yield await anext(outputs)


async def num_samples(omni: AsyncOmni, request_id: str | None = None) -> int:
    """Of much speech."""
    outputs = omni.generate(PROMPT, MUCH_SPEECH, request_id, modalities=["audio"])
    return sum([len(output.multimodal_output.get("audio", ())) async for output in outputs])


@pytest.mark.usefixtures("small_windows")
def test_a_user_that_reads_slowly_holds_its_stage_and_nobody_elses(llm: OmniLLM, omni: AsyncOmni) -> None:
    async def run() -> None:
        slow = omni.generate(PROMPT, VERY_LONG, "slow", modalities=["text"])
        token = await token_ids(first(slow))
        assert await num_made_when_held(omni, "thinker", "slow") < MOST_AHEAD
        at_once = await token_ids(omni.generate(PROMPT, VERY_LONG, modalities=["text"]))
        assert len(at_once) == NUM_TOKENS
        assert token + await token_ids(slow) == at_once

    llm.run(run())


@pytest.mark.usefixtures("small_windows")
def test_a_stopped_vocoder_holds_its_talker(llm: OmniLLM, omni: AsyncOmni) -> None:
    async def run() -> None:
        at_once = await num_samples(omni)
        pids = omni.orchestrator.engines["token2wav"].pids()
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        try:
            asked = asyncio.create_task(num_samples(omni, "stopped"))
            assert await num_made_when_held(omni, "talker", "stopped") < MOST_AHEAD
        finally:
            for pid in pids:
                os.kill(pid, signal.SIGCONT)
        assert await asked == at_once

    llm.run(run())


@pytest.mark.usefixtures("small_windows")
def test_a_request_whose_user_reads_no_more_is_aborted(
    llm: OmniLLM, omni: AsyncOmni, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_OMNI_READER_TIMEOUT_S", "0.5")

    async def run() -> None:
        slow = omni.generate(PROMPT, VERY_LONG, "slow", modalities=["text"])
        await anext(slow)
        await until_left(omni)
        with pytest.raises(CallAborted, match=r"its outputs were not read for 0\.5 s"):
            await token_ids(slow)

    llm.run(run())


async def until_left(omni: AsyncOmni) -> None:
    """Wait until no request is in the thinker."""
    deadline = time.monotonic() + 60
    while omni.orchestrator.engines["thinker"].num_requests:
        assert time.monotonic() < deadline
        await asyncio.sleep(0.1)
    assert await holds_no_blocks(omni, "thinker")


@pytest.mark.usefixtures("small_windows")
def test_a_deadline_ends_a_request_that_waits_for_its_user(llm: OmniLLM, omni: AsyncOmni) -> None:
    async def run() -> None:
        slow = omni.generate(PROMPT, VERY_LONG, "slow", modalities=["text"], deadline_s=5.0)
        await anext(slow)
        await until_left(omni)
        with pytest.raises(DeadlineExceeded):
            await token_ids(slow)

    llm.run(run())


# -- pausing -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("modality", ["text", "codec_ids"])
def test_a_request_that_is_kept_resumes_where_it_was(llm: OmniLLM, omni: AsyncOmni, modality: str) -> None:
    async def run() -> None:
        expected = await ask(omni, LONG)
        task = await start(omni, "kept", modality)
        await omni.pause_generation(mode="keep", clear_cache=False)
        assert await omni.is_paused()
        assert not task.done()
        await omni.resume_generation()
        assert (await task)[1] == expected[1]

    llm.run(run())


def test_waiting_for_a_pause_lets_requests_through_all_stages(llm: OmniLLM, omni: AsyncOmni) -> None:
    async def run() -> None:
        task = await start(omni, "runs", "text")
        await omni.pause_generation(mode="wait")
        assert omni.orchestrator.gate.admitted == set()
        assert len((await task)[1]) == LONG["talker"]["max_tokens"]
        await omni.resume_generation()

    llm.run(run())


def test_a_request_that_comes_during_a_pause_waits_and_can_be_aborted(llm: OmniLLM, omni: AsyncOmni) -> None:
    async def run() -> None:
        expected = await ask(omni)
        running = await start(omni, "runs", "codec_ids")
        await omni.pause_generation()
        with pytest.raises(CallAborted, match="paused"):
            await running
        late = asyncio.create_task(ask(omni))
        unwanted = asyncio.create_task(ask(omni, request_id="unwanted"))
        with pytest.raises(DeadlineExceeded):
            await ask(omni, deadline_s=0.1)
        await omni.abort("unwanted")
        with pytest.raises(CallAborted):
            await unwanted
        assert not late.done()
        await omni.resume_generation()
        assert await late == expected
        with pytest.raises(InvalidRequest, match="'kep': did you mean 'keep'"):
            await omni.pause_generation(mode="kep")  # type: ignore[arg-type]

    llm.run(run())


@pytest.mark.parametrize("level", [0, 1])
def test_engines_sleep_and_wake_up(llm: OmniLLM, omni: AsyncOmni, level: int) -> None:
    async def run() -> None:
        expected = await ask(omni)
        await omni.sleep(level)
        assert await omni.is_sleeping()
        assert await omni.is_paused()
        late = asyncio.create_task(ask(omni))
        assert await omni.wake_up()
        assert not await omni.is_sleeping()
        assert await late == expected

    llm.run(run())


# -- caches, traces, health, metrics -----------------------------------------------------------------------------------


def test_caches_of_every_stage_are_reset(llm: OmniLLM, omni: AsyncOmni) -> None:
    async def run() -> None:
        expected = await ask(omni)
        await omni.reset_mm_cache()
        await omni.reset_encoder_cache()
        assert await omni.reset_prefix_cache()
        assert await ask(omni) == expected

    llm.run(run())


def test_every_stage_is_traced(llm: OmniLLM, omni: AsyncOmni, engines: SharedEngines) -> None:
    async def run() -> None:
        await omni.start_profile("run")
        with pytest.raises(StageFailed, match=r"'thinker'.*already active"):
            await omni.start_profile("run")
        few = {"thinker": {"max_tokens": 3}, "talker": {"max_tokens": 4}}  # a trace of many steps is long to write
        await ask(omni, few, modalities=["audio"])
        await omni.stop_profile()

    llm.run(run())
    traces = engines.directory(QWEN) / "traces"
    for stage in STAGES:
        assert list(traces.glob(f"run_{stage}_*")), [path.name for path in traces.iterdir()]


def test_health_is_reported_by_stage(llm: OmniLLM, omni: AsyncOmni) -> None:
    llm.run(omni.check_health())
    llm.run(omni.check_health("talker"))
    assert {name: status.state for name, status in omni.stage_report().items()} == dict.fromkeys(
        STAGES, StageState.RUNNING
    )
    with pytest.raises(InvalidRequest, match="'talkr': did you mean 'talker'"):
        llm.run(omni.check_health("talkr"))


def test_metrics_of_every_stage_are_in_the_registry(llm: OmniLLM, omni: AsyncOmni) -> None:
    def value(name: str, stage: str, **labels: str) -> float | None:
        return REGISTRY.get_sample_value(name, {**labels, "stage": stage})

    def num_tokens(stage: str) -> float:
        model_name = omni.model_config.served_model_name
        tokens = value("vllm:generation_tokens_total", stage, engine="0", model_name=str(model_name))
        assert tokens is not None
        return tokens

    before = {stage: num_tokens(stage) for stage in STAGES}
    llm.run(ask(omni, modalities=["audio"]))
    llm.run(omni.do_log_stats())
    assert {stage: num_tokens(stage) - before[stage] for stage in STAGES} == {
        "thinker": 8,
        "talker": 20,
        "token2wav": 1,
    }
    assert [value("vllm_omni:stage_up", stage) for stage in STAGES] == [1, 1, 1]


def test_each_stage_logs_one_line_of_what_it_has_done(
    llm: OmniLLM, omni: AsyncOmni, caplog: pytest.LogCaptureFixture
) -> None:
    llm.run(omni.do_log_stats())  # what earlier tests have done
    caplog.set_level("INFO", "vllm_omni.engine.stage_log")
    llm.run(ask(omni, modalities=["audio"]))
    llm.run(omni.do_log_stats())
    lines = [record.getMessage() for record in caplog.records if record.name == "vllm_omni.engine.stage_log"]
    assert [line.partition(":")[0] for line in lines] == [f"stage {stage}" for stage in STAGES]
    thinker, talker, token2wav = lines
    assert all("Avg generation throughput: " in line and "KV cache usage: " in line for line in (thinker, talker))
    assert "Avg steps: " in token2wav and "Avg sounds: " in token2wav
    assert all("Running: 0 reqs, Waiting: 0 reqs" in line and "Avg latency of 1 reqs: " in line for line in lines)
    caplog.clear()
    llm.run(omni.do_log_stats())
    assert [record.getMessage() for record in caplog.records if record.name == "vllm_omni.engine.stage_log"] == []


# -- leases ------------------------------------------------------------------------------------------------------------


async def num_leases(omni: AsyncOmni, *stages: str) -> int:
    """What the stages have published and not got back."""
    ranks = [rank for name in stages for rank in await omni.orchestrator.engines[name].relay_statistics()]
    return sum(one["num_leases"] for rank in ranks for one in rank.values())


async def until(condition: Callable[[], Awaitable[bool]], timeout_s: float = 60.0) -> bool:
    """Whether it comes true: a runner ends a stream with its next step, and a stage is not back at once."""
    for _ in range(int(timeout_s / 0.02)):
        if await condition():
            return True
        await asyncio.sleep(0.02)
    return False


async def has_no_lease(omni: AsyncOmni, *stages: str) -> bool:
    async def look() -> bool:
        return not await num_leases(omni, *(stages or STAGES))

    return await until(look)


def test_an_answer_leaves_no_lease_in_any_stage(llm: OmniLLM, omni: AsyncOmni) -> None:
    async def run() -> bool:
        await ask(omni)
        return await has_no_lease(omni)

    assert llm.run(run())


def test_aborts_at_any_moment_leave_no_lease_in_any_stage(llm: OmniLLM, omni: AsyncOmni) -> None:
    async def abort_after(num_outputs: int) -> None:
        request_id = f"abort-{num_outputs}"
        outputs = omni.generate(PROMPT, LONG, request_id, modalities=["text", "audio", "codec_ids"])
        with pytest.raises(CallAborted):
            async for _ in outputs:
                num_outputs -= 1
                if num_outputs <= 0:
                    await omni.abort(request_id)

    async def run() -> bool:
        await asyncio.gather(*(abort_after(number) for number in (1, 2, 3, 5, 8, 13, 21, 34)))
        return await has_no_lease(omni)

    assert llm.run(run())


@pytest.mark.long
def test_a_killed_stage_leaves_no_lease_in_the_stage_before(llm: OmniLLM, omni: AsyncOmni) -> None:
    talker = omni.orchestrator.engines["talker"]
    num_blocks = talker.llm.engine_core.vllm_config.cache_config.num_gpu_blocks

    async def has_lease() -> bool:
        return await num_leases(omni, "thinker") > 0

    async def is_back() -> bool:
        return talker.current_status().state is StageState.RUNNING

    async def run() -> None:
        asking = asyncio.create_task(ask(omni, LONG))
        assert await until(has_lease)
        talker.kill()
        with pytest.raises(StageFailed):
            await asking
        assert await has_no_lease(omni, "thinker")
        assert await until(is_back, timeout_s=100)
        await ask(omni)
        assert talker.llm.engine_core.vllm_config.cache_config.num_gpu_blocks == num_blocks > 0

    llm.run(run())


@pytest.mark.long
def test_a_stage_that_cannot_read_of_an_engine_that_died_fails_by_that_engines_name(
    llm: OmniLLM, omni: AsyncOmni
) -> None:
    thinker, talker = (omni.orchestrator.engines[name] for name in ("thinker", "talker"))
    text: list[OmniRequestOutput] = []

    async def asked() -> None:
        async for output in omni.generate(PROMPT, SHORT, modalities=["text", "codec_ids"]):
            text.append(output)

    async def has_answered() -> bool:
        return bool(text) and not thinker.num_requests

    async def is_lost() -> bool:
        return thinker.has_died

    async def is_back() -> bool:
        return thinker.current_status().state is StageState.RUNNING

    async def run() -> None:
        pids = talker.pids()
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        try:
            asking = asyncio.create_task(asked())
            assert await until(has_answered)
            thinker.kill()
            assert await until(is_lost)
        finally:
            for pid in pids:
                os.kill(pid, signal.SIGCONT)
        with pytest.raises(EngineLost, match="stage 'thinker': "):
            await asking
        assert await until(is_back, timeout_s=100)
        await ask(omni)

    llm.run(run())


# -- adapters ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> LoRARequest:
    """In PEFT's layout, large enough to change the text."""
    path = tmp_path_factory.mktemp("adapter")
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for layer in range(2):
        for module, size in (("q_proj", 64), ("v_proj", 32)):
            name = f"base_model.model.thinker.model.layers.{layer}.self_attn.{module}"
            tensors[f"{name}.lora_A.weight"] = torch.randn(8, 64, generator=generator)
            tensors[f"{name}.lora_B.weight"] = 4 * torch.randn(size, 8, generator=generator)
    save_file(tensors, path / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj"], "bias": "none"}
    (path / "adapter_config.json").write_text(json.dumps(config))
    return LoRARequest("adapter", 1, str(path))


@pytest.fixture(scope="module")
def adapting(tiny_checkpoint: Path) -> Iterator[OmniLLM]:
    """On a CPU, a stage with adapters runs one request at a time. (In ``make test``: ``e2e/test_epd_recovery.py``.)"""
    with OmniLLM(
        tiny_checkpoint,
        dtype="float32",
        enforce_eager=True,
        max_model_len=1024,
        skip_mm_profiling=True,
        stage_overrides=["thinker.enable_lora=true", "thinker.max_lora_rank=8"],
    ) as llm:
        yield llm


@pytest.mark.long
def test_an_adapter_of_the_thinker_changes_text_and_speech(adapting: OmniLLM, adapter: LoRARequest) -> None:
    omni = adapting.engine

    async def run() -> None:
        modalities = ["text", "codec_ids"]
        plain = await ask(omni, modalities=modalities)
        adapted, again = await asyncio.gather(
            ask(omni, modalities=modalities, lora_request=adapter), ask(omni, modalities=modalities)
        )
        assert again == plain
        assert adapted[0] != plain[0]
        assert adapted[1] != plain[1]
        assert await omni.list_loras() == {1}
        assert await omni.remove_lora(1)
        assert await omni.list_loras() == set()
        assert await omni.add_lora(adapter)
        assert await omni.pin_lora(1)
        assert await ask(omni, modalities=modalities, lora_request=adapter) == adapted
        await omni.remove_lora(1)

    adapting.run(run())


@pytest.mark.long
def test_an_adapter_that_cannot_be_loaded_fails_its_request_alone(adapting: OmniLLM) -> None:
    omni = adapting.engine

    async def run() -> None:
        with pytest.raises(InvalidRequest, match=r"lora_request: .*/nowhere"):
            await ask(omni, lora_request=LoRARequest("missing", 2, "/nowhere"))
        with pytest.raises(StageFailed, match=r"'thinker'.*not registered"):
            await omni.pin_lora(7)
        assert (await ask(omni))[1]

    adapting.run(run())


def test_adapters_and_batches_exclude_each_other_on_a_cpu(tiny_checkpoint: Path) -> None:
    with pytest.raises(ConfigError, match="'thinker': max_num_seqs = 4: with enable_lora on a CPU it must be 1"):
        OmniLLM(tiny_checkpoint, stage_overrides=["thinker.enable_lora=true", "thinker.max_num_seqs=4"])
