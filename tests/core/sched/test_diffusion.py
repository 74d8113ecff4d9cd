"""The real scheduler, driven through ``schedule`` and ``update_from_output`` as the engine core drives it."""

import pytest
from vllm.config import VllmConfig
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from vllm_omni.core.sched.diffusion import DiffusionScheduler


def make_scheduler(vllm_config: VllmConfig) -> DiffusionScheduler:
    return DiffusionScheduler(
        vllm_config=vllm_config,
        kv_cache_config=KVCacheConfig(num_blocks=1, kv_cache_tensors=[], kv_cache_groups=[]),
        structured_output_manager=StructuredOutputManager(vllm_config),
        block_size=16,
    )


def make_request(request_id: str) -> Request:
    params = SamplingParams(max_tokens=1)
    return Request(request_id=request_id, prompt_token_ids=[0], sampling_params=params, pooling_params=None)


def answer(output: SchedulerOutput) -> ModelRunnerOutput:
    request_ids = list(output.num_scheduled_tokens)
    return ModelRunnerOutput(
        req_ids=request_ids,
        req_id_to_index={request_id: index for index, request_id in enumerate(request_ids)},
        sampled_token_ids=[[0] for _ in request_ids],
    )


@pytest.fixture
def scheduler(generation_vllm_config: VllmConfig) -> DiffusionScheduler:
    return make_scheduler(generation_vllm_config)


def test_requests_are_answered_in_the_order_of_their_arrival(scheduler: DiffusionScheduler) -> None:
    for name in "abcde":
        scheduler.add_request(make_request(name))
    batches = []
    while scheduler.has_unfinished_requests():
        output = scheduler.schedule()
        batches.append([request.req_id for request in output.scheduled_new_reqs])
        scheduler.update_from_output(output, answer(output))
    assert batches == [["a", "b"], ["c", "d"], ["e"]]


def test_a_request_ends_with_the_step_that_answers_it(scheduler: DiffusionScheduler) -> None:
    scheduler.add_request(make_request("a"))
    output = scheduler.schedule()
    outputs = scheduler.update_from_output(output, answer(output))
    (core_output,) = outputs[0].outputs
    assert core_output.finished
    assert scheduler.schedule().finished_req_ids == {"a"}


def test_an_aborted_request_is_never_scheduled(scheduler: DiffusionScheduler) -> None:
    for name in "ab":
        scheduler.add_request(make_request(name))
    scheduler.finish_requests("a", RequestStatus.FINISHED_ABORTED)
    output = scheduler.schedule()
    assert [request.req_id for request in output.scheduled_new_reqs] == ["b"]


def test_a_request_aborted_while_it_runs_leaves_room_for_the_next(scheduler: DiffusionScheduler) -> None:
    for name in "abc":
        scheduler.add_request(make_request(name))
    output = scheduler.schedule()
    scheduler.finish_requests(["a", "b"], RequestStatus.FINISHED_ABORTED)
    scheduler.update_from_output(output, answer(output))
    assert [request.req_id for request in scheduler.schedule().scheduled_new_reqs] == ["c"]


def test_an_idle_scheduler_schedules_nothing(scheduler: DiffusionScheduler) -> None:
    output = scheduler.schedule()
    assert output.total_num_scheduled_tokens == 0
    assert not scheduler.has_unfinished_requests()
