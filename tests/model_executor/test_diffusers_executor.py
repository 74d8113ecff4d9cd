"""The executor with a real pipeline and the real scheduler, stepped as the engine core steps them, in this process."""

import copy
import logging
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.engine import EngineCoreOutput, FinishReason
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from vllm_omni.config.diffusion import DIFFUSION, DiffusionConfig
from vllm_omni.config.diffusion_params import DiffusionParams
from vllm_omni.core.sched.diffusion import DiffusionScheduler
from vllm_omni.diffusion import stepper
from vllm_omni.engine.diffusion_request import make_sampling_params
from vllm_omni.messages.payload import unpack
from vllm_omni.model_executor.diffusers_executor import DiffusersPipelineExecutor
from vllm_omni.plugin import register
from vllm_omni.relay import hub

pytestmark = pytest.mark.filterwarnings("ignore:`torch_dtype` is deprecated:FutureWarning")

SIZE = {"height": 32, "width": 32}
SECTION = {"cache_threshold": 0.4, "cache_bytes": 1 << 30}


@pytest.fixture(scope="module")
def vllm_config(tiny_pipeline: Callable[[str], Path]) -> VllmConfig:
    register()
    config = EngineArgs(
        model=str(tiny_pipeline("qwen-image")),
        config_format="diffusers",
        dtype="float32",
        skip_tokenizer_init=True,
        enable_prefix_caching=False,
        enforce_eager=True,
        max_num_seqs=8,
        max_model_len=16,
        additional_config={DIFFUSION: SECTION},
    ).create_engine_config()
    config.cache_config.num_gpu_blocks = 1  # set by the engine core, which plans no cache for such a stage
    return config


@pytest.fixture(scope="module")
def shared_executor(vllm_config: VllmConfig) -> Iterator[DiffusersPipelineExecutor]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hub, "_process_hub", None)  # that of this process, which other tests use
        patch.setattr(stepper, "MAX_STEP_S", math.inf)
        executor = DiffusersPipelineExecutor(vllm_config)
        yield executor
        executor.shutdown()


class Engine:
    """The part of vLLM's engine core that steps."""

    def __init__(self, vllm_config: VllmConfig, executor: DiffusersPipelineExecutor) -> None:
        self.executor = executor
        self.scheduler = DiffusionScheduler(
            vllm_config=vllm_config,
            kv_cache_config=KVCacheConfig(num_blocks=1, kv_cache_tensors=[], kv_cache_groups=[]),
            structured_output_manager=StructuredOutputManager(vllm_config),
            block_size=16,
        )
        self.finished: dict[str, EngineCoreOutput] = {}
        self.reported: list[tuple[str, dict[str, Any]]] = []

    def add(self, request_id: str, prompt: str = "a red cat", **params: Any) -> None:
        params = {**SIZE, "output_type": "float", "num_inference_steps": 4, "seed": 1, **params}
        sampling_params = make_sampling_params(prompt, DiffusionParams(**params), DiffusionConfig(**SECTION))
        self.scheduler.add_request(Request(request_id, [0], sampling_params, None))

    def step(self) -> list[str]:
        """Ids of those that were scheduled."""
        output = self.scheduler.schedule()
        answer = self.executor.execute_model(output, non_block=True).result()
        for core_outputs in self.scheduler.update_from_output(output, answer).values():
            for one in core_outputs.outputs:
                if one.finished:
                    self.finished[one.request_id] = one
                elif one.pooling_output is not None:
                    payload = unpack(one.pooling_output)
                    self.executor.hub.release_payload(payload)
                    self.reported.append((one.request_id, payload.values))
        self.scheduler.cache.check_integrity()
        return list(output.num_scheduled_tokens)

    def run(self) -> None:
        while self.scheduler.has_requests():
            self.step()

    def abort(self, request_id: str) -> None:
        self.scheduler.finish_requests(request_id, RequestStatus.FINISHED_ABORTED)

    def result(self, request_id: str) -> dict[str, Any]:
        packed = self.finished[request_id].pooling_output
        assert isinstance(packed, torch.Tensor)
        payload = unpack(packed)
        result = self.executor.hub.pull_blocking(payload)
        self.executor.hub.release_payload(payload)
        return result

    def images(self, request_id: str) -> Tensor:
        return self.result(request_id)["images"].clone()

    def is_empty(self) -> bool:
        """Whether neither side remembers a request."""
        runner = self.executor.runner
        assert runner.cache is not None
        return not (
            runner.stepper.running
            or runner.requests
            or runner.cache.statistics().num_requests
            or self.scheduler.jobs
            or self.scheduler.cache.statistics().num_requests
        )


@pytest.fixture
def engine(vllm_config: VllmConfig, shared_executor: DiffusersPipelineExecutor) -> Iterator[Engine]:
    engine = Engine(vllm_config, shared_executor)
    yield engine
    for request_id in list(engine.scheduler.jobs):
        engine.abort(request_id)
    engine.run()
    assert engine.is_empty()


def alone(engine: Engine, **params: Any) -> Tensor:
    engine.add("alone", **params)
    engine.run()
    return engine.images("alone")


# -- steps ------------------------------------------------------------------------------------------------------------


def test_a_request_ends_with_the_step_of_its_last_call(engine: Engine) -> None:
    engine.add("plain", num_inference_steps=3)
    engine.add("guided", num_inference_steps=3, negative_prompt="grey", true_cfg_scale=4.0)
    scheduled = []
    while engine.scheduler.has_unfinished_requests():
        scheduled.append(engine.step())
    # The first step starts them, the second encodes their texts and makes the first call; guidance takes two calls.
    assert scheduled == [["plain", "guided"]] * 4 + [["guided"]] * 3
    assert engine.finished["guided"].new_token_ids == [0]


def test_ended_requests_leave_no_state(engine: Engine) -> None:
    for name in "abc":
        engine.add(name, num_inference_steps=2)
    engine.run()
    assert engine.is_empty()


def test_progress_is_reported_once_for_a_step_of_two_calls(engine: Engine) -> None:
    engine.add("a", num_inference_steps=3, negative_prompt="grey", true_cfg_scale=4.0, progress=True)
    engine.run()
    assert engine.reported == [("a", {"step": 1, "num_steps": 3}), ("a", {"step": 2, "num_steps": 3})]
    assert {key: engine.result("a")[key] for key in ("step", "num_steps")} == {"step": 3, "num_steps": 3}


def test_a_step_with_a_preview_is_reported_once(engine: Engine) -> None:
    guided = {"negative_prompt": "grey", "true_cfg_scale": 4.0}
    engine.add("a", num_inference_steps=5, **guided, progress=True, preview_every=2)
    engine.run()
    assert [(values["step"], "preview" in values) for _, values in engine.reported] == [
        (1, False),
        (2, True),
        (3, False),
        (4, True),
    ]


def test_the_scheduler_receives_the_size_of_a_call(engine: Engine) -> None:
    engine.add("a", num_outputs_per_prompt=2)
    engine.step()
    engine.step()
    job = engine.scheduler.jobs["a"]
    assert job.num_rows == 2
    # At least the two latents: 2 x 2 tokens of 64 float32 each.
    assert job.num_bytes is not None and job.num_bytes >= 2 * 4 * 64 * 4


# -- failures ---------------------------------------------------------------------------------------------------------


def test_a_rejected_request_fails_alone(engine: Engine) -> None:
    expected = alone(engine)
    engine.add("bad", extra_args={"max_sequence_length": 5000})
    engine.add("worse", extra_args={"no_such_argument": 1})
    engine.add("good")
    engine.run()
    for name, said in (("bad", "max_sequence_length"), ("worse", "takes no extra argument 'no_such_argument'")):
        assert engine.finished[name].finish_reason is FinishReason.ERROR
        assert engine.result(name)["invalid"]
        assert said in engine.result(name)["error"]
    assert (engine.images("good") - expected).abs().max() < 1e-5


def test_an_error_in_the_denoiser_fails_the_requests_of_that_call_only(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.add("hit")
    engine.step()

    def fail(*args: Any, **kwargs: Any) -> None:
        raise torch.OutOfMemoryError("no memory for this one")

    with monkeypatch.context() as patch:
        patch.setattr(engine.executor.runner.pipeline.transformer, "forward", fail)
        engine.step()
    assert engine.finished["hit"].finish_reason is FinishReason.ERROR
    assert engine.result("hit") == {"error": "OutOfMemoryError: no memory for this one", "invalid": False}
    engine.add("next")
    engine.run()
    assert engine.finished["next"].finish_reason is FinishReason.LENGTH
    engine.executor.check_health()


def test_an_error_of_the_stepper_fails_the_requests_of_the_step_only(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.add("hit")
    engine.add("other", height=64)  # of another shape, and so not in that step
    assert engine.step() == ["hit"]

    def fail(request_ids: Any) -> None:
        raise RuntimeError("a defect")

    with monkeypatch.context() as patch:
        patch.setattr(engine.executor.runner.stepper, "step", fail)
        assert engine.step() == ["hit"]
    engine.run()
    assert engine.result("hit") == {"error": "RuntimeError: a defect", "invalid": False}
    assert engine.finished["other"].finish_reason is FinishReason.LENGTH


def test_a_device_error_fails_the_engine(
    vllm_config: VllmConfig, shared_executor: DiffusersPipelineExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    executor = copy.copy(shared_executor)  # what it notes of itself stays with it
    engine, called = Engine(vllm_config, executor), []
    executor.register_failure_callback(lambda: called.append(True))
    engine.add("a")
    engine.step()

    def fail(request_ids: Any) -> None:
        raise torch.AcceleratorError("unspecified launch failure")

    with monkeypatch.context() as patch:
        patch.setattr(executor.runner.stepper, "step", fail)
        with pytest.raises(torch.AcceleratorError):
            engine.step()
    assert called == [True]
    with pytest.raises(RuntimeError, match="unspecified launch failure"):
        executor.check_health()
    engine.abort("a")
    engine.step()
    assert engine.is_empty()


# -- abort ------------------------------------------------------------------------------------------------------------


def test_an_abort_after_any_step_leaves_nothing_and_changes_no_other_request(engine: Engine) -> None:
    """Before it starts; before it computes; between the two calls of a denoise step; between two steps; at its end."""
    guided = {"negative_prompt": "grey", "true_cfg_scale": 4.0}
    expected = alone(engine, num_inference_steps=5, **guided)
    for num_steps in range(10):
        engine.finished.clear()
        engine.add("aborted", **guided, seed=2)
        engine.add("other", num_inference_steps=5, **guided)
        for _ in range(num_steps):
            engine.step()
        engine.abort("aborted")
        assert "aborted" not in engine.step(), num_steps
        assert "aborted" not in engine.executor.runner.stepper.running, num_steps
        engine.run()
        assert ("aborted" in engine.finished) == (num_steps == 9), num_steps
        assert (engine.images("other") - expected).abs().max() < 1e-5, num_steps
        if "aborted" in engine.finished:
            engine.images("aborted")
        assert engine.is_empty(), num_steps


def test_an_id_can_be_reused_in_the_step_that_reports_its_abort(engine: Engine) -> None:
    expected = alone(engine, seed=3)
    engine.add("a", seed=2)
    engine.step()
    engine.abort("a")
    engine.add("a", seed=3)
    engine.run()
    assert torch.equal(engine.images("a"), expected)


# -- the denoiser's cache ---------------------------------------------------------------------------------------------


def test_granted_requests_use_the_cache_and_others_run_uncached(engine: Engine) -> None:
    runner = engine.executor.runner
    assert runner.cache is not None
    exact = alone(engine, num_inference_steps=12, cache_threshold=0.0)
    engine.add("cached", num_inference_steps=12, cache_threshold=100.0)  # reuses whatever it may
    engine.add("exact", num_inference_steps=12, cache_threshold=0.0)
    for _ in range(4):
        engine.step()
    granted = engine.scheduler.cache.get_cache("cached")
    assert granted is not None and granted.num_bytes == runner.cache.num_bytes("cached") > 0
    assert engine.scheduler.cache.get_cache("exact") is None
    reused_before = runner.cache.statistics().num_rows_reused
    engine.run()
    assert runner.cache.statistics().num_rows_reused > reused_before
    assert (engine.images("exact") - exact).abs().max() < 1e-5


# -- memory and sleep -------------------------------------------------------------------------------------------------


def test_the_available_memory_is_less_than_that_of_the_machine(engine: Engine) -> None:
    (num_bytes,) = engine.executor.determine_available_memory()
    total = 4096 * torch.iinfo(torch.int64).max  # no machine has more
    assert 0 < num_bytes < total
    with open("/proc/meminfo") as file:
        lines = dict(line.split(":") for line in file)
    assert num_bytes <= int(lines["MemTotal"].split()[0]) * 1024


def weights(executor: DiffusersPipelineExecutor) -> list[Tensor]:
    pipeline = executor.runner.pipeline
    return [*pipeline.transformer.parameters(), *pipeline.vae.parameters(), *pipeline.text_encoder.parameters()]


def test_sleep_level_2_drops_the_weights_and_wake_up_restores_them(engine: Engine) -> None:
    expected = alone(engine)
    before = [one.clone() for one in weights(engine.executor)]
    engine.executor.sleep(level=2)
    assert engine.executor.is_sleeping
    assert {one.device.type for one in weights(engine.executor)} == {"meta"}
    engine.executor.wake_up(["kv_cache"])
    assert {one.device.type for one in weights(engine.executor)} == {"meta"}
    engine.executor.wake_up(["weights"])
    assert not engine.executor.is_sleeping
    assert all(torch.equal(old, new) for old, new in zip(before, weights(engine.executor), strict=True))
    assert (alone(engine) - expected).abs().max() < 1e-5


def test_sleep_level_1_warns_that_it_frees_nothing_on_a_cpu(
    engine: Engine, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Heard where it is said: vLLM's logger, our parent, does not propagate, and a command line may have silenced it.
    logger = logging.getLogger("vllm_omni.diffusion.loading")
    monkeypatch.setattr(logger, "handlers", [caplog.handler])
    caplog.set_level(logging.WARNING, logger=logger.name)
    engine.executor.sleep(level=1)
    assert "frees nothing on a CPU" in caplog.text
    assert {one.device.type for one in weights(engine.executor)} == {"cpu"}
    engine.executor.wake_up()
    engine.add("a")
    engine.run()
    assert engine.finished["a"].finish_reason is FinishReason.LENGTH


# -- what an engine core asks of any executor -------------------------------------------------------------------------


def test_there_is_no_kv_cache(engine: Engine) -> None:
    assert engine.executor.get_kv_cache_specs() == [{}]
    assert engine.executor.supported_tasks == ("generate",)


@pytest.mark.parametrize("method", ["save_sharded_state", "add_lora"])
def test_calls_that_need_workers_are_rejected(engine: Engine, method: str) -> None:
    with pytest.raises(ValueError, match=f"no workers to call '{method}' on"):
        engine.executor.collective_rpc(method)
