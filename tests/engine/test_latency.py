"""The eight parts of a request's latency, from the timelines of its tasks."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_omni.engine.latency import PARTS, break_down
from vllm_omni.messages.timeline import Mark, StageTimes, Task, TaskTimes, Timeline, task_of


def make_timeline(task: Task, *marks: tuple[Mark, float]) -> Timeline:
    return Timeline(task, list(marks))


def parts_of(arrived_at: float, ended_at: float, *timelines: Timeline) -> dict[str, float]:
    """The parts that are not 0, in the order of the paper."""
    parts = break_down(arrived_at, ended_at, timelines)
    assert tuple(parts) == PARTS
    assert sum(parts.values()) == pytest.approx(max(0.0, ended_at - arrived_at))
    return {str(name): pytest.approx(seconds) for name, seconds in parts.items() if seconds > 1e-9}


def test_a_text_on_one_engine_has_prefill_and_decode():
    timeline = make_timeline(Task.WHOLE, (Mark.QUEUED, 1), (Mark.SCHEDULED, 3), (Mark.TOKEN, 4), (Mark.ENDED, 9))
    # From 0 to 1 the prompt is rendered; from 9 to 10 the last token travels to its reader.
    assert parts_of(0, 10, timeline) == {"prefill_queueing": 3, "prefill_execution": 1, "decode_execution": 6}


def test_an_image_encoded_beside_the_language_model_then_queues_for_its_prefill():
    timeline = make_timeline(
        Task.WHOLE,
        (Mark.QUEUED, 0),
        (Mark.ENCODE_BEGAN, 1),
        (Mark.ENCODE_ENDED, 3),
        (Mark.SCHEDULED, 3.5),
        (Mark.TOKEN, 5),
    )
    assert parts_of(0, 8, timeline) == {
        "encode_queueing": 1,
        "encode_execution": 2,
        "prefill_queueing": 0.5,
        "prefill_execution": 1.5,
        "decode_execution": 3,
    }


def test_an_encode_within_a_prefill_is_subtracted_from_it():
    timeline = make_timeline(
        Task.WHOLE,
        (Mark.QUEUED, 0),
        (Mark.SCHEDULED, 2),
        (Mark.TOKEN, 9),
        (Mark.ENCODE_BEGAN, 3),  # marks may come unsorted
        (Mark.ENCODE_ENDED, 6),
    )
    assert parts_of(0, 9, timeline) == {"encode_queueing": 2, "encode_execution": 3, "prefill_execution": 4}


def test_three_instances_have_all_eight_parts():
    encode = make_timeline(
        Task.ENCODE, (Mark.QUEUED, 1), (Mark.ENCODE_BEGAN, 2), (Mark.ENCODE_ENDED, 4), (Mark.ENDED, 4.5)
    )
    prefill = make_timeline(
        Task.PREFILL,
        (Mark.QUEUED, 5),
        (Mark.PULL_BEGAN, 5.5),
        (Mark.PULL_ENDED, 6),
        (Mark.SCHEDULED, 7),
        (Mark.TOKEN, 9),
        (Mark.ENDED, 9),
    )
    decode = make_timeline(
        Task.DECODE,
        (Mark.QUEUED, 9.5),
        (Mark.PULL_BEGAN, 10),
        (Mark.PULL_ENDED, 11),
        (Mark.SCHEDULED, 11.5),
        (Mark.TOKEN, 12),
        (Mark.ENDED, 20),
    )
    assert parts_of(0, 20, encode, prefill, decode) == {
        "encode_queueing": 2,
        "encode_execution": 2,
        "ep_migration": 1.5,  # published from 4 to 5, pulled from 5.5 to 6
        "prefill_queueing": 1.5,
        "prefill_execution": 2,
        "pd_migration": 1.5,
        "decode_queueing": 1,  # until it was admitted, and until it was scheduled
        "decode_execution": 8.5,
    }


def test_a_repeated_prefill_queues_again():
    lost = make_timeline(Task.PREFILL, (Mark.QUEUED, 1), (Mark.ENDED, 4))  # its engine died and reported nothing
    again = make_timeline(Task.PREFILL, (Mark.QUEUED, 5), (Mark.SCHEDULED, 6), (Mark.TOKEN, 7), (Mark.ENDED, 7))
    decode = make_timeline(Task.DECODE, (Mark.QUEUED, 8), (Mark.SCHEDULED, 8), (Mark.TOKEN, 9))
    assert parts_of(0, 10, lost, again, decode) == {
        "prefill_queueing": 6,
        "prefill_execution": 1,
        "pd_migration": 1,
        "decode_execution": 2,
    }


def test_a_decode_task_that_computes_its_prompt_itself_prefills():
    decode = make_timeline(
        Task.DECODE,
        (Mark.QUEUED, 0),
        (Mark.PULL_BEGAN, 1),
        (Mark.PULL_ENDED, 2),
        (Mark.SCHEDULED, 3),
        (Mark.RECOMPUTES, 3),
        (Mark.TOKEN, 5),
    )
    assert parts_of(0, 6, decode) == {
        "prefill_execution": 2,
        "pd_migration": 1,
        "decode_queueing": 2,
        "decode_execution": 1,
    }


def test_a_decode_that_is_preempted_queues_as_a_decode():
    timeline = make_timeline(
        Task.WHOLE,
        (Mark.QUEUED, 0),
        (Mark.SCHEDULED, 0),
        (Mark.TOKEN, 1),
        (Mark.PREEMPTED, 3),
        (Mark.SCHEDULED, 7),
        (Mark.TOKEN, 8),
    )
    assert parts_of(0, 9, timeline) == {"prefill_execution": 1, "decode_queueing": 4, "decode_execution": 4}


def test_a_request_without_timelines_is_all_queueing():
    assert parts_of(2, 5) == {"prefill_queueing": 3}
    assert parts_of(5, 2) == {}


def test_execution_counts_before_queueing_where_answers_overlap():
    one = make_timeline(Task.WHOLE, (Mark.QUEUED, 0), (Mark.SCHEDULED, 1), (Mark.TOKEN, 2), (Mark.ENDED, 5))
    other = make_timeline(Task.WHOLE, (Mark.QUEUED, 0), (Mark.SCHEDULED, 4), (Mark.TOKEN, 6), (Mark.ENDED, 8))
    assert parts_of(0, 8, one, other) == {"prefill_queueing": 1, "prefill_execution": 3, "decode_execution": 4}


times = st.floats(min_value=0, max_value=100, allow_nan=False)
marks = st.tuples(st.sampled_from(Mark), times)
timelines = st.lists(st.builds(Timeline, st.sampled_from(Task), st.lists(marks, max_size=12)), max_size=6)


@given(times, times, timelines)
def test_parts_sum_to_the_latency_for_any_marks(arrived_at, ended_at, lines):
    parts = break_down(arrived_at, ended_at, lines)
    assert tuple(parts) == PARTS
    assert all(seconds >= 0 for seconds in parts.values())
    assert sum(parts.values()) == pytest.approx(max(0.0, ended_at - arrived_at), abs=1e-6)


@given(st.lists(times, min_size=4, max_size=4, unique=True))
def test_parts_that_a_request_did_not_have_are_zero(at):
    begin, *middle, end = sorted(at)
    timeline = Timeline(Task.WHOLE, [*zip((Mark.QUEUED, Mark.SCHEDULED, Mark.TOKEN), (begin, *middle), strict=True)])
    parts = break_down(begin, end, [timeline])
    for part, (left, right) in zip(
        ("prefill_queueing", "prefill_execution", "decode_execution"), pairwise(sorted(at)), strict=True
    ):
        assert parts[part] == pytest.approx(right - left, abs=1e-6)
    assert not any(parts[part] for part in ("encode_queueing", "encode_execution", "ep_migration", "pd_migration"))


def test_a_timeline_is_unpacked_as_it_was_packed():
    timeline = make_timeline(Task.DECODE, (Mark.QUEUED, 1.5), (Mark.PULL_BEGAN, 2.25))
    assert Timeline.unpack(timeline.pack()) == timeline


def test_the_task_follows_from_the_transfer_parameters():
    assert task_of(None) is Task.WHOLE
    assert task_of({"ec_transfer_params": {"encode_only": True}}) is Task.ENCODE
    assert task_of({"ec_transfer_params": {"images": {}}}) is Task.WHOLE
    assert task_of({"kv_transfer_params": {"do_remote_decode": True}}) is Task.PREFILL
    assert task_of({"kv_transfer_params": {"do_remote_prefill": True}}) is Task.DECODE
    assert task_of({"kv_transfer_params": "nonsense", "ec_transfer_params": 3}) is Task.WHOLE


def test_tokens_of_a_prefill_task_are_not_counted():
    times = StageTimes(0, 0)
    times.add(TaskTimes(Task.PREFILL, 0, 1, [make_timeline(Task.PREFILL, (Mark.QUEUED, 0))], [(0, 1, 1.0)]))
    times.add(TaskTimes(Task.DECODE, 1, 5, token_times=[(0, 1, 4.0)]))
    assert times.token_times == [(0, 1, 4.0)]
    assert [timeline.task for timeline in times.timelines] == [Task.PREFILL, Task.DECODE]
    assert times.ended_at == 5
