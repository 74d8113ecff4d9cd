"""The real scheduler, driven through ``schedule`` and ``update_from_output`` as the engine core drives it."""

import copy
import random
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from vllm.config import VllmConfig
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput, FinishReason
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from vllm_omni.config.diffusion import DIFFUSION
from vllm_omni.core.sched.diffusion import DiffusionScheduler
from vllm_omni.messages.cache_update import DiTCacheUpdate
from vllm_omni.messages.denoise_step import CallSize, make_output
from vllm_omni.messages.failure import Failure
from vllm_omni.messages.payload import Payload, unpack
from vllm_omni.messages.stage_step import STAGE_ARGS


def make_scheduler(vllm_config: VllmConfig, *, max_num_seqs: int = 16, **section: Any) -> DiffusionScheduler:
    config = copy.copy(vllm_config)
    config.additional_config = {DIFFUSION: section}
    config.scheduler_config = copy.copy(vllm_config.scheduler_config)
    config.scheduler_config.max_num_seqs = max_num_seqs
    return DiffusionScheduler(
        vllm_config=config,
        kv_cache_config=KVCacheConfig(num_blocks=1, kv_cache_tensors=[], kv_cache_groups=[]),
        structured_output_manager=StructuredOutputManager(config),
        block_size=16,
    )


def make_request(request_id: str, *, priority: int = 0, **params: Any) -> Request:
    args = {STAGE_ARGS: {DIFFUSION: {"prompt": "a prompt", "images": [], "params": params}}}
    sampling_params = SamplingParams(max_tokens=1, extra_args=args)
    return Request(request_id, [0], sampling_params, None, priority=priority)


class Runner:
    """Answers steps as a runner does: a request ends after so many calls of the denoiser."""

    def __init__(self, num_calls: Mapping[str, int], *, num_bytes: Mapping[str, int] | None = None) -> None:
        self.num_calls_left = dict(num_calls)
        self.num_bytes = num_bytes or {}

    def answer(self, output: SchedulerOutput, failures: Mapping[str, Failure] | None = None) -> ModelRunnerOutput:
        ids = list(output.num_scheduled_tokens)
        for one in ids:
            self.num_calls_left[one] -= 1
        ended = [one for one in ids if not self.num_calls_left[one] and one not in (failures or {})]
        pending = {one: CallSize(1, self.num_bytes.get(one, 0)) for one in ids if one not in ended}
        return make_output(ids, {}, ended=ended, failures=failures or {}, pending=pending)


def scheduled(output: SchedulerOutput) -> list[str]:
    return list(output.num_scheduled_tokens)


def run(scheduler: Scheduler, runner: Runner, num_steps: int | None = None) -> list[list[str]]:
    """The batches of so many steps, or of all until nothing is left."""
    batches = []
    while scheduler.has_unfinished_requests() and (num_steps is None or len(batches) < num_steps):
        output = scheduler.schedule()
        batches.append(scheduled(output))
        scheduler.update_from_output(output, runner.answer(output))
    return batches


def outputs_of(scheduler: Scheduler, output: SchedulerOutput, answer: ModelRunnerOutput) -> list[EngineCoreOutput]:
    return [one for outputs in scheduler.update_from_output(output, answer).values() for one in outputs.outputs]


# -- a request ends when its runner says so ---------------------------------------------------------------------------


def test_a_request_runs_until_the_runner_gives_its_token(generation_vllm_config: VllmConfig) -> None:
    scheduler = make_scheduler(generation_vllm_config)
    scheduler.add_request(make_request("a"))
    assert run(scheduler, Runner({"a": 5})) == [["a"]] * 5
    assert scheduler.schedule().finished_req_ids == {"a"}


def test_the_arguments_of_a_request_are_sent_once(generation_vllm_config: VllmConfig) -> None:
    scheduler = make_scheduler(generation_vllm_config)
    scheduler.add_request(make_request("a"))
    runner = Runner({"a": 3})
    first = scheduler.schedule()
    scheduler.update_from_output(first, runner.answer(first))
    second = scheduler.schedule()
    assert [request.req_id for request in first.scheduled_new_reqs] == ["a"]
    assert first.scheduled_cached_reqs.req_ids == []
    assert second.scheduled_new_reqs == []
    assert second.scheduled_cached_reqs.req_ids == ["a"]


def test_a_step_without_an_end_gives_the_front_end_nothing(generation_vllm_config: VllmConfig) -> None:
    scheduler = make_scheduler(generation_vllm_config)
    scheduler.add_request(make_request("a"))
    output = scheduler.schedule()
    assert outputs_of(scheduler, output, Runner({"a": 2}).answer(output)) == []


def test_progress_reaches_the_front_end_and_does_not_end_the_request(generation_vllm_config: VllmConfig) -> None:
    scheduler = make_scheduler(generation_vllm_config)
    scheduler.add_request(make_request("a"))
    output = scheduler.schedule()
    progress = Payload(values={"step": 1, "num_steps": 4})
    (core_output,) = outputs_of(scheduler, output, make_output(["a"], {"a": progress}, ended=(), failures={}))
    assert not core_output.finished
    assert isinstance(core_output.pooling_output, torch.Tensor)
    assert unpack(core_output.pooling_output) == progress
    assert scheduled(scheduler.schedule()) == ["a"]


def test_requests_join_and_leave_between_any_two_steps(generation_vllm_config: VllmConfig) -> None:
    scheduler = make_scheduler(generation_vllm_config)
    runner = Runner({"long": 6, "short": 2, "late": 1})
    scheduler.add_request(make_request("long"))
    batches = run(scheduler, runner, 2)
    scheduler.add_request(make_request("short"))
    batches += run(scheduler, runner, 1)
    scheduler.add_request(make_request("late"))
    batches += run(scheduler, runner)
    assert batches == [["long"], ["long"], ["long", "short"], ["long", "short", "late"], ["long"], ["long"]]


# -- failure and abort ------------------------------------------------------------------------------------------------


def test_a_failed_request_ends_with_its_message_and_the_others_go_on(generation_vllm_config: VllmConfig) -> None:
    scheduler = make_scheduler(generation_vllm_config)
    for name in "ab":
        scheduler.add_request(make_request(name))
    runner = Runner({"a": 3, "b": 3})
    output = scheduler.schedule()
    (core_output,) = outputs_of(scheduler, output, runner.answer(output, {"a": Failure("ValueError: no", True)}))
    assert (core_output.request_id, core_output.finish_reason) == ("a", FinishReason.ERROR)
    assert isinstance(core_output.pooling_output, torch.Tensor)
    assert unpack(core_output.pooling_output).values == {"error": "ValueError: no", "invalid": True}
    output = scheduler.schedule()
    assert (scheduled(output), output.finished_req_ids) == (["b"], {"a"})


def test_an_aborted_request_is_in_no_later_step_and_the_runner_is_notified(generation_vllm_config: VllmConfig) -> None:
    scheduler = make_scheduler(generation_vllm_config)
    for name in "ab":
        scheduler.add_request(make_request(name))
    run(scheduler, Runner({"a": 9, "b": 9}), 2)
    scheduler.finish_requests("a", RequestStatus.FINISHED_ABORTED)
    output = scheduler.schedule()
    assert (scheduled(output), output.finished_req_ids) == (["b"], {"a"})


def test_a_request_aborted_before_its_first_step_is_never_scheduled(generation_vllm_config: VllmConfig) -> None:
    scheduler = make_scheduler(generation_vllm_config)
    for name in "ab":
        scheduler.add_request(make_request(name))
    scheduler.finish_requests("a", RequestStatus.FINISHED_ABORTED)
    assert scheduled(scheduler.schedule()) == ["b"]


def test_the_end_of_the_last_request_is_sent_with_a_step_without_requests(generation_vllm_config: VllmConfig) -> None:
    scheduler = make_scheduler(generation_vllm_config)
    scheduler.add_request(make_request("a"))
    run(scheduler, Runner({"a": 9}), 1)
    scheduler.finish_requests("a", RequestStatus.FINISHED_ABORTED)
    assert scheduler.has_requests()
    output = scheduler.schedule()
    assert (output.total_num_scheduled_tokens, output.finished_req_ids) == (0, {"a"})
    assert not scheduler.has_requests()


def test_what_was_published_for_a_request_aborted_during_the_step_is_released(
    generation_vllm_config: VllmConfig,
) -> None:
    scheduler = make_scheduler(generation_vllm_config)
    scheduler.add_request(make_request("a"))
    output = scheduler.schedule()
    payload = scheduler.hub.publish("a", {"images": torch.zeros(1 << 20, dtype=torch.uint8)})
    scheduler.finish_requests("a", RequestStatus.FINISHED_ABORTED)
    scheduler.update_from_output(output, make_output(["a"], {"a": payload}, ended=["a"], failures={}))
    assert all(statistics.num_leases == 0 for statistics in scheduler.hub.statistics().values())
    assert not scheduler.has_unfinished_requests()


def test_a_failure_of_a_request_aborted_during_the_step_is_dropped(generation_vllm_config: VllmConfig) -> None:
    scheduler = make_scheduler(generation_vllm_config)
    scheduler.add_request(make_request("a"))
    output = scheduler.schedule()
    scheduler.finish_requests("a", RequestStatus.FINISHED_ABORTED)
    assert outputs_of(scheduler, output, Runner({"a": 9}).answer(output, {"a": Failure("no", True)})) == []


# -- what fits into a batch -------------------------------------------------------------------------------------------


def test_a_batch_has_at_most_so_many_rows(generation_vllm_config: VllmConfig) -> None:
    scheduler = make_scheduler(generation_vllm_config, max_rows=3)
    for name in "abcd":
        scheduler.add_request(make_request(name))
    assert run(scheduler, Runner(dict.fromkeys("abcd", 2))) == [["a", "b", "c"]] * 2 + [["d"]] * 2


def test_each_output_of_a_request_is_a_row(generation_vllm_config: VllmConfig) -> None:
    scheduler = make_scheduler(generation_vllm_config, max_rows=4)
    scheduler.add_request(make_request("a", num_outputs_per_prompt=3))
    scheduler.add_request(make_request("b", num_outputs_per_prompt=2))
    scheduler.add_request(make_request("c"))
    # "b" does not fit beside "a", and does not hold up "c".
    assert scheduled(scheduler.schedule()) == ["a", "c"]


def test_rows_are_counted_as_the_runner_reports_them(generation_vllm_config: VllmConfig) -> None:
    scheduler = make_scheduler(generation_vllm_config, max_rows=4)
    for name in "abc":
        scheduler.add_request(make_request(name))
    output = scheduler.schedule()
    guided = {name: CallSize(num_rows=2, num_bytes=0) for name in "abc"}
    scheduler.update_from_output(output, make_output(list("abc"), {}, ended=(), failures={}, pending=guided))
    assert scheduled(scheduler.schedule()) == ["a", "b"]


def test_a_request_that_was_passed_over_runs_when_those_before_it_have_ended(
    generation_vllm_config: VllmConfig,
) -> None:
    scheduler = make_scheduler(generation_vllm_config, max_rows=2)
    scheduler.add_request(make_request("a"))
    scheduler.add_request(make_request("wide", num_outputs_per_prompt=2))
    for name in "bcd":
        scheduler.add_request(make_request(name))
    runner = Runner({"a": 2, "wide": 1, "b": 1, "c": 9, "d": 9})
    assert run(scheduler, runner, 3) == [["a", "b"], ["a", "c"], ["wide"]]


def test_a_batch_has_at_most_so_many_bytes(generation_vllm_config: VllmConfig) -> None:
    scheduler = make_scheduler(generation_vllm_config, max_batch_bytes=100)
    for name in "abc":
        scheduler.add_request(make_request(name))
    runner = Runner(dict.fromkeys("abc", 9), num_bytes={"a": 50, "b": 60, "c": 50})
    assert run(scheduler, runner, 2) == [["a", "b", "c"], ["a", "c"]]


def test_the_bytes_of_a_call_that_is_not_known_are_those_of_its_shape(generation_vllm_config: VllmConfig) -> None:
    scheduler = make_scheduler(generation_vllm_config, max_batch_bytes=100)
    scheduler.add_request(make_request("a"))
    runner = Runner(dict.fromkeys("abc", 9), num_bytes=dict.fromkeys("abc", 40))
    run(scheduler, runner, 1)
    for name in "bc":
        scheduler.add_request(make_request(name))
    assert scheduled(scheduler.schedule()) == ["a", "b"]


def test_a_request_larger_than_a_batch_goes_alone(generation_vllm_config: VllmConfig) -> None:
    scheduler = make_scheduler(generation_vllm_config, max_rows=2, max_batch_bytes=10)
    scheduler.add_request(make_request("wide", num_outputs_per_prompt=5))
    runner = Runner({"wide": 2}, num_bytes={"wide": 1000})
    assert run(scheduler, runner) == [["wide"], ["wide"]]


# -- shapes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"height": 64, "width": 32}, {"height": 32, "width": 64}),
        ({"num_frames": 9}, {"num_frames": 13}),
        ({"extra_args": {"audio_end_in_s": 1.0}}, {"extra_args": {"audio_end_in_s": 2.0}}),
    ],
)
def test_a_batch_has_one_shape(generation_vllm_config: VllmConfig, one: dict[str, Any], other: dict[str, Any]) -> None:
    scheduler = make_scheduler(generation_vllm_config)
    for name, params in (("a", one), ("b", other), ("c", one)):
        scheduler.add_request(make_request(name, **params))
    assert scheduled(scheduler.schedule()) == ["a", "c"]


def test_what_does_not_change_the_shape_shares_a_batch(generation_vllm_config: VllmConfig) -> None:
    scheduler = make_scheduler(generation_vllm_config)
    scheduler.add_request(make_request("a", height=64, num_inference_steps=4, true_cfg_scale=1.0, seed=1))
    scheduler.add_request(make_request("b", height=64, num_inference_steps=50, true_cfg_scale=4.0, negative_prompt="x"))
    assert scheduled(scheduler.schedule()) == ["a", "b"]


def test_a_shape_waits_for_at_most_so_many_batches(generation_vllm_config: VllmConfig) -> None:
    scheduler = make_scheduler(generation_vllm_config, max_wait_batches=3)
    scheduler.add_request(make_request("large", height=64))
    scheduler.add_request(make_request("small", height=32))
    batches = run(scheduler, Runner({"large": 8, "small": 3}))
    assert [batch[0][0] for batch in batches] == list("lllslllslls")


def test_of_two_shapes_the_older_request_goes_first_again(generation_vllm_config: VllmConfig) -> None:
    scheduler = make_scheduler(generation_vllm_config, max_wait_batches=2)
    scheduler.add_request(make_request("small", height=32))
    scheduler.add_request(make_request("large", height=64))
    batches = run(scheduler, Runner({"large": 2, "small": 5}))
    assert [batch[0][0] for batch in batches] == list("sslssls")


@pytest.mark.parametrize("max_wait_batches", [1, 3, 7])
@pytest.mark.parametrize("num_shapes", [2, 3, 6])
def test_no_shape_waits_longer_whatever_comes(
    generation_vllm_config: VllmConfig, num_shapes: int, max_wait_batches: int
) -> None:
    rng = random.Random(num_shapes * 100 + max_wait_batches)
    scheduler = make_scheduler(generation_vllm_config, max_wait_batches=max_wait_batches, max_num_seqs=1000)
    runner, waits = Runner({}), dict.fromkeys(range(num_shapes), 0)
    bound = max(max_wait_batches, num_shapes - 1)
    for step in range(300):
        for _ in range(rng.choice([0, 0, 1, 2])):
            name, shape = f"{len(runner.num_calls_left)}", rng.randrange(num_shapes)
            runner.num_calls_left[name] = rng.randint(1, 6)
            scheduler.add_request(make_request(name, height=shape))
        alive = {job.shape[0] for job in scheduler.jobs.values()}
        output = scheduler.schedule()
        served = {scheduler.jobs[one].shape[0] for one in scheduled(output)}
        assert len(served) == min(len(alive), 1), f"step {step}"
        waits = {shape: 0 if shape in served or shape not in alive else waits[shape] + 1 for shape in waits}
        assert max(waits.values()) <= bound, f"step {step}: {waits}"
        scheduler.update_from_output(output, runner.answer(output))


def test_a_shape_without_a_seat_gets_the_next_one(generation_vllm_config: VllmConfig) -> None:
    scheduler = make_scheduler(generation_vllm_config, max_num_seqs=2, max_wait_batches=2)
    for name in "abcd":
        scheduler.add_request(make_request(name, height=64))
    scheduler.add_request(make_request("small", height=32))
    runner = Runner({"a": 4, "b": 9, "c": 9, "d": 9, "small": 1})
    assert run(scheduler, runner, 6) == [["a", "b"]] * 4 + [["small"], ["b", "c"]]


# -- priorities -------------------------------------------------------------------------------------------------------


def test_a_free_slot_goes_to_the_most_urgent_request(generation_vllm_config: VllmConfig) -> None:
    scheduler = make_scheduler(generation_vllm_config, max_num_seqs=1)
    for name in "abc":
        scheduler.add_request(make_request(name))
    scheduler.add_request(make_request("urgent", priority=-1))
    assert run(scheduler, Runner({"a": 1, "b": 1, "c": 1, "urgent": 1})) == [["urgent"], ["a"], ["b"], ["c"]]


def test_an_urgent_request_is_in_every_batch(generation_vllm_config: VllmConfig) -> None:
    scheduler = make_scheduler(generation_vllm_config, max_rows=2)
    for name in "abc":
        scheduler.add_request(make_request(name, priority=5))
    runner = Runner(dict.fromkeys(["a", "b", "c", "urgent"], 2))
    batches = run(scheduler, runner, 1)
    scheduler.add_request(make_request("urgent", priority=1))
    batches += run(scheduler, runner)
    assert batches == [["a", "b"], ["urgent", "a"], ["urgent", "b"], ["c"], ["c"]]


def test_the_shape_of_an_urgent_request_does_not_yield_to_those_that_wait(generation_vllm_config: VllmConfig) -> None:
    scheduler = make_scheduler(generation_vllm_config, max_wait_batches=1)
    scheduler.add_request(make_request("large", height=64))
    scheduler.add_request(make_request("small", height=32, priority=-1))
    scheduler.add_request(make_request("tiny", height=16, priority=-1))
    batches = run(scheduler, Runner({"large": 2, "small": 2, "tiny": 2}))
    assert [batch[0] for batch in batches] == ["small", "tiny", "small", "tiny", "large", "large"]


def test_an_urgent_request_without_a_slot_holds_up_no_shape(generation_vllm_config: VllmConfig) -> None:
    scheduler = make_scheduler(generation_vllm_config, max_num_seqs=1)
    scheduler.add_request(make_request("a", height=64))
    runner = Runner({"a": 3, "urgent": 1})
    batches = run(scheduler, runner, 1)
    scheduler.add_request(make_request("urgent", height=32, priority=-1))
    assert batches + run(scheduler, runner) == [["a"], ["a"], ["a"], ["urgent"]]


# -- the denoiser's cache ---------------------------------------------------------------------------------------------


def step_cached(scheduler: DiffusionScheduler, num_cache_bytes: Mapping[str, int]) -> DiTCacheUpdate:
    """One step in which nothing ends; the update that it sent to the runner's cache."""
    output = scheduler.schedule()
    ids = scheduled(output)
    pending = {one: CallSize(1, 0, num_cache_bytes.get(one, 0)) for one in ids}
    scheduler.update_from_output(output, make_output(ids, {}, ended=(), failures={}, pending=pending))
    scheduler.cache.check_integrity()
    return output.cache_update


def test_room_in_the_cache_is_granted_with_the_step_behind_the_one_that_asked(
    generation_vllm_config: VllmConfig,
) -> None:
    scheduler = make_scheduler(generation_vllm_config, cache_bytes=100)
    for name in "ab":
        scheduler.add_request(make_request(name))
    sizes = {"a": 60, "b": 60}  # there is no room for both, and both run
    assert [step_cached(scheduler, sizes) for _ in range(3)] == [({}, []), ({"a": 60}, []), ({}, [])]


def test_the_room_of_a_request_that_ends_goes_to_another(generation_vllm_config: VllmConfig) -> None:
    scheduler = make_scheduler(generation_vllm_config, cache_bytes=100)
    for name in "ab":
        scheduler.add_request(make_request(name))
    sizes = {"a": 60, "b": 60}
    step_cached(scheduler, sizes)
    step_cached(scheduler, sizes)
    scheduler.finish_requests("a", RequestStatus.FINISHED_ABORTED)
    assert [step_cached(scheduler, sizes) for _ in range(2)] == [({}, ["a"]), ({"b": 60}, [])]


def test_a_shape_that_waits_loses_its_room_to_the_one_that_runs(generation_vllm_config: VllmConfig) -> None:
    scheduler = make_scheduler(generation_vllm_config, cache_bytes=100, max_wait_batches=2)
    scheduler.add_request(make_request("large", height=64))
    scheduler.add_request(make_request("small", height=32))
    updates = [step_cached(scheduler, {"large": 60, "small": 60}) for _ in range(4)]
    assert updates == [({}, []), ({"large": 60}, []), ({}, []), ({"small": 60}, ["large"])]


# -- seats and pauses -------------------------------------------------------------------------------------------------


def test_at_most_max_num_seqs_requests_have_started(generation_vllm_config: VllmConfig) -> None:
    scheduler = make_scheduler(generation_vllm_config, max_num_seqs=2, max_rows=8)
    for name in "abc":
        scheduler.add_request(make_request(name))
    assert run(scheduler, Runner({"a": 1, "b": 3, "c": 1})) == [["a", "b"], ["b", "c"], ["b"]]


@pytest.mark.parametrize(("state", "batches"), [(PauseState.PAUSED_ALL, [[]]), (PauseState.PAUSED_NEW, [["a"]])])
def test_a_paused_engine_starts_no_request(
    generation_vllm_config: VllmConfig, state: PauseState, batches: Sequence[list[str]]
) -> None:
    scheduler = make_scheduler(generation_vllm_config)
    scheduler.add_request(make_request("a"))
    run(scheduler, Runner({"a": 9}), 1)
    scheduler.add_request(make_request("b"))
    scheduler.set_pause_state(state)
    assert [scheduled(scheduler.schedule())] == batches


def test_forgetting_prefixes_takes_no_step_from_what_runs(generation_vllm_config: VllmConfig) -> None:
    scheduler = make_scheduler(generation_vllm_config)
    scheduler.add_request(make_request("a"))
    run(scheduler, Runner({"a": 9}), 1)
    assert scheduler.reset_prefix_cache(reset_running_requests=True)
    assert scheduler.schedule().scheduled_cached_reqs.req_ids == ["a"]


def test_an_idle_scheduler_schedules_nothing(generation_vllm_config: VllmConfig) -> None:
    scheduler = make_scheduler(generation_vllm_config)
    assert scheduler.schedule().total_num_scheduled_tokens == 0
    assert not scheduler.has_unfinished_requests()
