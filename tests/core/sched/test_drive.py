"""The harness that compares schedulers can fail: each fault that is planted in one is found."""

import copy

import pytest
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler

from tests.core.sched.drive import (
    SynthesisedRunner,
    answer,
    assert_is_idle,
    assert_same_steps,
    drive,
    make_scheduler,
    tokens_of,
)
from tests.core.sched.random_requests import Engine, make_stream

NUM_SEEDS = 12


class LastFirst(Scheduler):
    """Takes the running requests in the order opposite to stock's."""

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        self.running.reverse()
        return super().schedule(throttle_prefills)


class OneTokenLess(Scheduler):
    """Leaves one token of the budget unused."""

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        self.max_num_scheduled_tokens -= 1
        try:
            return super().schedule(throttle_prefills)
        finally:
            self.max_num_scheduled_tokens += 1


class ForgetsFrees(Scheduler):
    """Does not tell the runner what left the encoder cache."""

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        output = super().schedule(throttle_prefills)
        output.free_encoder_mm_hashes = []
        return output


class EncodesLate(Scheduler):
    """Sends every encode one step after the step that needs it."""

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        output = super().schedule(throttle_prefills)
        late = self.__dict__.setdefault("late", {})
        self.late = copy.copy(output.scheduled_encoder_inputs)
        output.scheduled_encoder_inputs = {name: late[name] for name in late if name in output.num_scheduled_tokens}
        return output


def difference(faulty: type[Scheduler]) -> str:
    for seed in range(NUM_SEEDS):
        stream = make_stream(seed)
        stock = drive(make_scheduler(Scheduler, stream.engine), stream)
        try:
            assert_same_steps(stock, drive(make_scheduler(faulty, stream.engine), stream))
        except AssertionError as exc:
            return str(exc)
    return ""


@pytest.mark.parametrize(
    ("faulty", "said"),
    [
        (LastFirst, "step"),
        (OneTokenLess, "num_scheduled_tokens"),
        (ForgetsFrees, "free_encoder_mm_hashes"),
        (EncodesLate, "Encoder cache miss"),
    ],
)
def test_a_planted_fault_is_found(faulty: type[Scheduler], said: str) -> None:
    assert said in difference(faulty)


def test_upstream_equals_itself() -> None:
    assert difference(Scheduler) == ""


def test_upstream_gives_the_expected_answers() -> None:
    stream = make_stream(3)
    aborted = {request_id for ids in stream.aborts.values() for request_id in ids}
    tokens = tokens_of(drive(make_scheduler(Scheduler, stream.engine), stream))
    kept = [request for request in stream.requests if request.request_id not in aborted]
    assert kept
    assert [tokens[request.request_id] for request in kept] == [answer(request) for request in kept]


def test_the_streams_preempt_abort_evict_and_hit_prefixes() -> None:
    preemptions = evictions = hits = aborts = 0
    for seed in range(2 * NUM_SEEDS):
        stream = make_stream(seed)
        scheduler = make_scheduler(Scheduler, stream.engine)
        steps = drive(scheduler, stream)
        preemptions += sum(len(step.output["preempted_req_ids"]) for step in steps)
        evictions += sum(len(step.output["free_encoder_mm_hashes"]) for step in steps)
        hits += sum(new.num_computed_tokens for step in steps for new in step.output["scheduled_new_reqs"])
        aborts += sum(map(len, stream.aborts.values()))
    assert preemptions >= 10 and evictions >= 10 and hits >= 50 and aborts >= 10


def test_a_scheduler_that_never_schedules_is_found() -> None:
    stream = make_stream(1)
    scheduler = make_scheduler(Scheduler, stream.engine)
    scheduler.max_num_scheduled_tokens = 0
    with pytest.raises(AssertionError, match="these are left"):
        drive(scheduler, stream, max_steps=100)


def test_a_request_that_is_left_is_found() -> None:
    stream = make_stream(1, engine=Engine())
    scheduler = make_scheduler(Scheduler, stream.engine)
    drive(scheduler, stream, runner=SynthesisedRunner(scheduler))
    assert_is_idle(scheduler)
    next(iter(scheduler.encoder_cache_manager.cached.values())).add("nobody")
    with pytest.raises(AssertionError):
        assert_is_idle(scheduler)
