"""The scheduler of stages that answer each request in one step, driven as the engine core drives it."""

import torch
from vllm.config import VllmConfig
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.engine import FinishReason
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from tests.core.sched.test_diffusion import Runner, outputs_of, run, scheduled
from vllm_omni.core.sched.generation import GenerationScheduler
from vllm_omni.messages.denoise_step import make_output
from vllm_omni.messages.failure import Failure
from vllm_omni.messages.payload import unpack
from vllm_omni.messages.stage_step import STAGE_ARGS


def make_scheduler(config: VllmConfig, names: str) -> GenerationScheduler:
    scheduler = GenerationScheduler(
        vllm_config=config,
        kv_cache_config=KVCacheConfig(num_blocks=1, kv_cache_tensors=[], kv_cache_groups=[]),
        structured_output_manager=StructuredOutputManager(config),
        block_size=16,
    )
    for name in names:
        params = SamplingParams(max_tokens=1, extra_args={STAGE_ARGS: {"codec_ids": [1, 2]}})
        scheduler.add_request(Request(name, [0], params, None))
    return scheduler


def test_requests_are_answered_in_order_two_at_a_time(generation_vllm_config: VllmConfig) -> None:
    scheduler = make_scheduler(generation_vllm_config, "abcde")
    assert run(scheduler, Runner(dict.fromkeys("abcde", 1))) == [["a", "b"], ["c", "d"], ["e"]]
    assert scheduler.schedule().finished_req_ids == {"e"}
    assert not scheduler.has_requests()


def test_a_failed_request_ends_with_its_message_and_the_others_are_answered(generation_vllm_config: VllmConfig) -> None:
    scheduler = make_scheduler(generation_vllm_config, "ab")
    output = scheduler.schedule()
    answer = Runner({"a": 1, "b": 1}).answer(output, {"a": Failure("ValueError: no", True)})
    outputs = {one.request_id: one for one in outputs_of(scheduler, output, answer)}
    assert outputs["a"].finish_reason is FinishReason.ERROR
    assert isinstance(outputs["a"].pooling_output, torch.Tensor)
    assert unpack(outputs["a"].pooling_output).values == {"error": "ValueError: no", "invalid": True}
    assert outputs["b"].finish_reason is FinishReason.LENGTH
    assert not scheduler.has_unfinished_requests()


def test_a_request_aborted_during_its_step_gives_no_output_and_its_payload_is_released(
    generation_vllm_config: VllmConfig,
) -> None:
    scheduler = make_scheduler(generation_vllm_config, "a")
    output = scheduler.schedule()
    payload = scheduler.hub.publish("a", {"audio": torch.zeros(1 << 20, dtype=torch.uint8)})
    scheduler.finish_requests("a", RequestStatus.FINISHED_ABORTED)
    assert outputs_of(scheduler, output, make_output(["a"], {"a": payload}, ended=["a"], failures={})) == []
    assert all(statistics.num_leases == 0 for statistics in scheduler.hub.statistics().values())


def test_a_paused_engine_starts_no_request(generation_vllm_config: VllmConfig) -> None:
    scheduler = make_scheduler(generation_vllm_config, "a")
    for state in (PauseState.PAUSED_NEW, PauseState.PAUSED_ALL):
        scheduler.set_pause_state(state)
        assert scheduled(scheduler.schedule()) == []
    scheduler.set_pause_state(PauseState.UNPAUSED)
    assert scheduled(scheduler.schedule()) == ["a"]
