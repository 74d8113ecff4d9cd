"""What a scheduler notes of each request, and what it sends of that with which output."""

import pytest
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.engine import EngineCoreOutput
from vllm.v1.metrics.stats import KV_FETCH_COMPLETED_WAITING, KV_FETCH_IN_PROGRESS
from vllm.v1.request import Request, RequestStatus

from tests.core.sched.drive import LayeredRunner, SynthesisedRunner, assert_same_steps, drive, make_request
from tests.core.sched.drive import make_scheduler as make_any_scheduler
from tests.core.sched.random_requests import IMAGE_TOKEN, Engine, Image, PlannedRequest, make_stream
from vllm_omni.config.budgets import EPD_CONFIG
from vllm_omni.core.sched.epd import EPDScheduler
from vllm_omni.core.sched.stream import StreamScheduler
from vllm_omni.messages.epd_step import EPDModelRunnerOutput
from vllm_omni.messages.timeline import TIMELINE, TIMELINES, Mark, Task, Timeline

ENGINE = Engine(max_num_batched_tokens=16, prefix_caching=False)


class World:
    """A scheduler with timelines, its runner, and a clock that advances by a second with each step."""

    def __init__(self, engine: Engine = ENGINE, **epd: object) -> None:
        self.engine = engine
        scheduler_cls = EPDScheduler if epd else StreamScheduler
        self.scheduler = make_any_scheduler(scheduler_cls, engine, {TIMELINES: True, EPD_CONFIG: epd})
        self.timelines = self.scheduler.timelines
        self.now = 0.0
        self.scheduler.clock = lambda: self.now  # type: ignore[method-assign]
        self.runner = (LayeredRunner if epd else SynthesisedRunner)(self.scheduler)
        self.sent: dict[str, list[Timeline]] = {}

    def add(self, name: str, num_text: int, *images: Image, max_tokens: int = 3) -> Request:
        prompt = [10] * num_text
        for image in images:
            prompt += [IMAGE_TOKEN] * image.length + [10]
        request = make_request(PlannedRequest(name, tuple(prompt), images, max_tokens), self.engine)
        self.scheduler.add_request(request)
        return request

    def step(self) -> list[EngineCoreOutput]:
        output = self.scheduler.schedule()
        runner_output = self.runner.execute(output)
        if output.scheduled_encoder_inputs:
            times = self.now + 0.25, self.now + 0.5
            runner_output = EPDModelRunnerOutput(**vars(runner_output), encode_times=times)
        self.now += 1
        outputs = self.scheduler.update_from_output(output, runner_output)
        every = [one for of_client in outputs.values() for one in of_client.outputs]
        for one in every:
            if one.kv_transfer_params:
                self.sent.setdefault(one.request_id, []).append(Timeline.unpack(one.kv_transfer_params[TIMELINE]))
        return every

    def steps(self, number: int) -> None:
        for _ in range(number):
            self.step()


def test_a_timeline_leaves_with_the_first_token_and_its_end_with_the_last() -> None:
    world = World()
    world.add("1", 20)  # in two chunks
    world.steps(5)
    assert world.sent["1"] == [
        Timeline(Task.WHOLE, [(Mark.QUEUED, 0), (Mark.SCHEDULED, 0), (Mark.TOKEN, 2)]),
        Timeline(Task.WHOLE, [(Mark.ENDED, 4)]),
    ]


def test_one_token_alone_brings_everything() -> None:
    world = World()
    world.step()
    world.add("1", 5, max_tokens=1)
    world.step()
    (timeline,) = world.sent["1"]
    assert timeline.marks == [(Mark.QUEUED, 1), (Mark.SCHEDULED, 1), (Mark.TOKEN, 2), (Mark.ENDED, 2)]


def test_a_request_that_waits_for_a_seat_is_scheduled_when_it_has_one() -> None:
    world = World(Engine(max_num_seqs=1, prefix_caching=False))
    world.add("1", 5)
    world.add("2", 5)
    world.steps(6)
    (timeline, _) = world.sent["2"]
    assert timeline.marks == [(Mark.QUEUED, 0), (Mark.SCHEDULED, 3), (Mark.TOKEN, 4)]


def test_encodes_within_budgets_are_noted_for_all_requests_with_the_image() -> None:
    world = World(token_budget=16, image_budget=8, num_encode_layers=2)
    world.add("1", 3, max_tokens=12)
    world.step()
    image = Image("a", 2, 6)
    world.add("2", 2, image)
    world.step()
    world.add("3", 2, image)
    world.steps(6)
    (timeline, _), (other, _) = world.sent["2"], world.sent["3"]
    assert timeline.first(Mark.ENCODE_BEGAN) == 1 and timeline.last(Mark.ENCODE_ENDED) == 4
    assert other.first(Mark.QUEUED) == other.first(Mark.ENCODE_BEGAN) == 2  # not before it came
    assert other.last(Mark.ENCODE_ENDED) == 4
    assert timeline.first(Mark.SCHEDULED) == other.first(Mark.SCHEDULED) == 4
    assert world.timelines.is_empty


def test_encodes_in_front_of_the_forward_are_noted_as_the_runner_timed_them() -> None:
    world = World()
    world.add("1", 2, Image("a", 2, 6))
    world.add("2", 3)
    world.steps(4)
    marks = world.sent["1"][0].marks
    assert (Mark.ENCODE_BEGAN, 0.25) in marks and (Mark.ENCODE_ENDED, 0.5) in marks
    assert Mark.ENCODE_BEGAN not in dict(world.sent["2"][0].marks)


def test_a_preemption_is_sent_with_the_next_token() -> None:
    world = World()
    request = world.add("1", 5, max_tokens=9)
    world.steps(2)
    world.scheduler.running.remove(request)
    world.scheduler._preempt_request(request, 0.0)
    world.steps(2)
    assert world.sent["1"][1:] == [
        Timeline(Task.WHOLE, [(Mark.PREEMPTED, 2), (Mark.SCHEDULED, 2), (Mark.TOKEN, 3)]),
    ]
    assert world.timelines.is_empty


def test_a_pull_is_what_upstreams_book_says() -> None:
    world = World()
    request = world.add("1", 5)
    world.scheduler._set_kv_fetch_stage(request, KV_FETCH_IN_PROGRESS)
    world.now = 3
    world.scheduler._set_kv_fetch_stage(request, KV_FETCH_COMPLETED_WAITING)
    world.step()
    assert world.sent["1"][0].marks[1:3] == [(Mark.PULL_BEGAN, 0), (Mark.PULL_ENDED, 3)]


def test_what_ends_without_a_token_ends_now_and_not_with_the_last_step() -> None:
    world = World()
    request = world.add("1", 5)
    world.now = 5  # encoded meanwhile
    request.status = RequestStatus.FINISHED_STOPPED
    params, _ = world.scheduler._free_request(request)
    assert Timeline.unpack(params[TIMELINE]).marks == [(Mark.QUEUED, 0), (Mark.ENDED, 5)]


def test_an_abort_leaves_nothing() -> None:
    world = World()
    world.add("1", 20)
    world.add("2", 20)
    world.step()
    world.scheduler.finish_requests(["1", "2"], RequestStatus.FINISHED_ABORTED)
    assert world.timelines.is_empty
    assert not world.sent


def test_a_step_of_decodes_looks_at_no_request() -> None:
    world = World()
    world.add("1", 5, max_tokens=5)
    world.steps(2)
    assert world.timelines.is_empty
    assert all(one.kv_transfer_params is None for one in world.step())


def test_an_engine_that_was_not_asked_for_timelines_sends_none() -> None:
    world = World()
    world.scheduler = make_any_scheduler(StreamScheduler, ENGINE)
    world.runner = SynthesisedRunner(world.scheduler)
    world.add("1", 5, max_tokens=1)
    assert [one.kv_transfer_params for one in world.step()] == [None]


@pytest.mark.parametrize("seed", range(12))
def test_decisions_are_the_same_with_timelines(seed: int) -> None:
    stream = make_stream(seed)
    runs = []
    for config in ({}, {TIMELINES: True}):
        scheduler = make_any_scheduler(StreamScheduler, stream.engine, config)
        runs.append(drive(scheduler, stream))
        assert scheduler.timelines.is_empty and scheduler.timelines.is_on == bool(config)
    assert_same_steps(*runs)


def test_every_image_request_of_a_random_stream_has_its_marks_in_order() -> None:
    # A first chunk of text may be scheduled before the image behind it is encoded.
    orders = (
        (Mark.QUEUED, Mark.ENCODE_BEGAN, Mark.ENCODE_ENDED, Mark.TOKEN),
        (Mark.QUEUED, Mark.SCHEDULED, Mark.TOKEN),
    )

    def steps(output: SchedulerOutput) -> None:
        clock[0] += 1

    for seed in range(6):
        stream = make_stream(seed)
        config = {TIMELINES: True, EPD_CONFIG: {"token_budget": 16, "image_budget": 24, "num_encode_layers": 2}}
        scheduler = make_any_scheduler(EPDScheduler, stream.engine, config)
        clock = [0.0]
        scheduler.clock = lambda clock=clock: clock[0]  # type: ignore[method-assign]
        sent: dict[str, Timeline] = {}
        update = scheduler.update_from_output

        def watched(*args: object, update=update, sent=sent):  # type: ignore[no-untyped-def]
            outputs = update(*args)
            for one in (one for of_client in outputs.values() for one in of_client.outputs):
                if one.kv_transfer_params:
                    timeline = Timeline.unpack(one.kv_transfer_params[TIMELINE])
                    sent.setdefault(one.request_id, Timeline(timeline.task)).marks += timeline.marks
            return outputs

        scheduler.update_from_output = watched  # type: ignore[method-assign]
        drive(scheduler, stream, runner=LayeredRunner(scheduler), on_step=steps)
        aborted = {one for ids in stream.aborts.values() for one in ids}
        for request in stream.requests:
            if request.request_id in aborted:
                continue
            timeline = sent[request.request_id]
            for order in orders:
                firsts = [at for mark in order if (at := timeline.first(mark)) is not None]
                assert len(firsts) >= (3 if Mark.SCHEDULED in order else 2), (seed, request.request_id)
                assert firsts == sorted(firsts), (seed, request.request_id)
            assert timeline.last(Mark.ENDED) == max(at for _, at in timeline.marks)
