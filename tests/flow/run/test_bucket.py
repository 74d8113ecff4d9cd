import pytest

from tests.flow.builders import spin
from vllm_omni.errors import GraphError
from vllm_omni.flow import EndReason, Frame
from vllm_omni.flow.graph.plan import Edge, GroupPlan, NodePlan
from vllm_omni.flow.run.activation import chain
from vllm_omni.flow.run.bucket import Bucket, BucketState
from vllm_omni.flow.run.frame import NO_ITERATION, NOT_ACTIVATED, RAN, SlotEos, Trace


def make_bucket(fields, counts=None, depth=0, loops=()):
    """fields: input field -> how many edges feed it."""
    slots, edges = {}, []
    for field, num_edges in fields.items():
        slots[field] = tuple(range(len(edges), len(edges) + num_edges))
        edges += [
            Edge(f"s{i}.run", "y", "j.run", field, slot=i, root="r.run", is_last_of_field=i == slots[field][-1])
            for i in slots[field]
        ]
    critical = frozenset(each[0] for each in slots.values() if len(each) == 1)
    group = GroupPlan(0, slots, "r.run", False, None, counts, critical, tuple(range(len(edges))), (), True, False)
    return Bucket(NodePlan("j.run", "j", "run", tuple(edges), (group,), {}), group, depth, loops)


def frame(slot, payload="x", *, seq=0, last=True, path=(), reason=EndReason.NONE, loops=(), termination=RAN):
    trace = Trace(path, (), loops, termination)
    return Frame("c", f"s{slot}.run", "j.run", slot, "", 1, seq, last, payload, reason, slot + 10, trace)


def empty(slot, reason=EndReason.EMPTY, path=(), payload=None, termination=RAN):
    return frame(slot, payload, path=path, reason=reason, termination=termination)


def count(slot, count, path=()):
    return SlotEos("c", f"s{slot}.run", "j.run", slot, "", 1, Trace(path), count)


async def payloads(bucket):
    got = {}
    for field, slots in bucket.inputs():
        got[field] = [chunk.payload async for chunk in chain([slot.stream for slot in slots], bucket.limit(field))]
    return got


async def test_fires_when_every_slot_has_a_frame():
    bucket = make_bucket({"a": 1, "b": 1})
    assert bucket.push(frame(0, "a")) is BucketState.WAITING
    assert bucket.push(frame(1, "b")) is BucketState.FIRED
    assert await payloads(bucket) == {"a": ["a"], "b": ["b"]}


async def test_fires_with_the_first_frames_of_streams():
    bucket = make_bucket({"a": 1, "b": 1})
    bucket.push(frame(0, "a0", last=False))
    assert bucket.push(frame(1, "b0", last=False)) is BucketState.FIRED
    bucket.push(frame(0, "a1", seq=1))
    bucket.push(frame(1, "b1", seq=1))
    assert await payloads(bucket) == {"a": ["a0", "a1"], "b": ["b0", "b1"]}


async def test_empty_critical_slot_makes_the_bucket_unreachable():
    bucket = make_bucket({"a": 1, "b": 1})
    bucket.push(frame(0))
    assert bucket.push(empty(1)) is BucketState.UNREACHABLE


async def test_unreachable_bucket_does_not_wait_for_the_other_slots():
    bucket = make_bucket({"a": 1, "b": 1, "c": 2})
    assert bucket.push(empty(0)) is BucketState.UNREACHABLE


async def test_other_slot_of_a_field_stands_in_for_one_that_ends_empty():
    bucket = make_bucket({"a": 2, "b": 1})
    bucket.push(frame(2, "b"))
    assert bucket.push(empty(0)) is BucketState.WAITING
    assert bucket.push(frame(1, "a")) is BucketState.FIRED
    assert await payloads(bucket) == {"a": ["a"], "b": ["b"]}


async def test_field_whose_slots_all_end_empty_makes_the_bucket_unreachable():
    bucket = make_bucket({"a": 2, "b": 1})
    assert bucket.push(empty(0)) is BucketState.WAITING
    assert bucket.push(empty(1)) is BucketState.UNREACHABLE


async def test_empty_slot_counts_once_despite_duplicates():
    bucket = make_bucket({"a": 2, "b": 1})
    for _ in range(3):
        assert bucket.push(empty(0)) is BucketState.WAITING


async def test_slots_of_a_field_are_read_one_after_the_other():
    bucket = make_bucket({"a": 2})
    bucket.push(frame(1, "late", seq=0))
    bucket.push(frame(0, "early", seq=0))
    assert await payloads(bucket) == {"a": ["early", "late"]}


async def test_frames_of_several_activations_gather_in_the_order_of_their_paths():
    bucket = make_bucket({"a": 1}, depth=1)
    bucket.push(frame(0, "second", path=(4, 1)))
    bucket.set_count(count(0, 2, path=(4,)))
    assert bucket.push(frame(0, "first", path=(4, 0))) is BucketState.FIRED
    assert await payloads(bucket) == {"a": ["first", "second"]}


async def test_count_of_zero_ends_a_slot():
    bucket = make_bucket({"a": 1, "b": 1})
    assert bucket.push(frame(0)) is BucketState.WAITING
    assert bucket.set_count(count(1, 0)) is BucketState.UNREACHABLE


async def test_iterations_at_the_base_belong_to_another_bucket():
    bucket = make_bucket({"a": 1}, loops=(3,))
    bucket.push(frame(0, "a", loops=(3,)))
    assert await payloads(bucket) == {"a": ["a"]}


async def test_only_the_last_chunk_of_all_is_last():
    bucket = make_bucket({"a": 1})
    bucket.push(frame(0, path=(0,)))
    bucket.push(frame(0, path=(1,)))
    bucket.set_count(count(0, 2))
    (slot,) = bucket.slots.values()
    assert [chunk.last async for chunk in slot.stream] == [False, False]
    bucket = make_bucket({"a": 1})
    bucket.set_count(count(0, 1))
    bucket.push(frame(0, path=(0,)))
    (slot,) = bucket.slots.values()
    assert [chunk.last async for chunk in slot.stream] == [True]


@pytest.mark.parametrize(
    "first, second, reported",
    [
        (EndReason.EMPTY, EndReason.EMPTY, EndReason.UNREACHABLE),
        (EndReason.UNREACHABLE, EndReason.CANCEL, EndReason.CANCEL),
        (EndReason.CANCEL, EndReason.ERROR, EndReason.ERROR),
        (EndReason.ERROR, EndReason.EMPTY, EndReason.ERROR),
    ],
)
async def test_most_severe_reason_is_reported(first, second, reported):
    bucket = make_bucket({"a": 2})
    bucket.push(empty(0, first, payload="why" if first is EndReason.ERROR else None))
    bucket.push(empty(1, second, payload="why" if second is EndReason.ERROR else None))
    reason, error, termination = bucket.unreachable_reason()
    assert (reason, termination) == (reported, NOT_ACTIVATED)
    assert error == ("why" if reported is EndReason.ERROR else None)


async def test_iteration_that_was_not_started_is_reported_as_such():
    bucket = make_bucket({"a": 1})
    bucket.push(empty(0, EndReason.UNREACHABLE, termination=NO_ITERATION + 1))
    assert bucket.unreachable_reason() == (EndReason.UNREACHABLE, None, NO_ITERATION + 1)


async def test_inner_iteration_that_was_not_started_does_not_decide_the_reason():
    bucket = make_bucket({"a": 1})
    bucket.set_count(count(0, 2))
    bucket.push(empty(0, EndReason.UNREACHABLE, path=(0,), termination=NO_ITERATION + 1))
    bucket.push(empty(0, EndReason.UNREACHABLE, path=(1,), termination=NOT_ACTIVATED))
    assert bucket.unreachable_reason() == (EndReason.UNREACHABLE, None, NOT_ACTIVATED)


async def test_reader_of_a_stream_that_broke_off_meets_the_error():
    bucket = make_bucket({"a": 1})
    bucket.push(frame(0, "a", last=False))
    bucket.push(frame(0, ValueError("broken"), seq=1, reason=EndReason.ERROR))
    with pytest.raises(ValueError, match="broken"):
        await payloads(bucket)


async def test_counted_bucket_fires_at_its_thresholds():
    bucket = make_bucket({"a": 1, "b": 1}, counts={"a": 2})
    bucket.push(frame(0, "a0", last=False))
    bucket.push(frame(1, "b"))
    assert bucket.state is BucketState.WAITING
    assert bucket.push(frame(0, "a1", seq=1, last=False)) is BucketState.FIRED
    bucket.push(frame(0, "a2", seq=2))
    assert await payloads(bucket) == {"a": ["a0", "a1"], "b": ["b"]}


async def test_counted_bucket_is_unreachable_below_its_threshold():
    bucket = make_bucket({"a": 1}, counts={"a": 2})
    assert bucket.push(frame(0, "a0")) is BucketState.UNREACHABLE


async def test_threshold_comes_with_a_field():
    bucket = make_bucket({"a": 1, "n": 1}, counts={"a": "n"})
    bucket.push(frame(0, "a0", path=(0,)))
    assert bucket.state is BucketState.WAITING
    bucket.push(frame(1, 2))
    assert bucket.push(frame(0, "a1", path=(1,))) is BucketState.FIRED
    assert await payloads(bucket) == {"a": ["a0", "a1"], "n": [2]}


async def test_threshold_may_be_zero():
    bucket = make_bucket({"a": 1, "n": 1}, counts={"a": "n"})
    assert bucket.push(frame(1, 0)) is BucketState.FIRED
    assert await payloads(bucket) == {"a": [], "n": [0]}


@pytest.mark.parametrize("number", [-1, "2", None, 1.5])
async def test_threshold_that_is_no_number_is_rejected(number):
    bucket = make_bucket({"a": 1, "n": 1}, counts={"a": "n"})
    with pytest.raises(GraphError, match=r"input 'n' must carry a number of frames to wait for, got"):
        bucket.push(frame(1, number))


async def test_buffered_frames_include_early_ones():
    bucket = make_bucket({"a": 1, "b": 1})
    bucket.push(frame(0, "a"))
    bucket.push(frame(1, "later", path=(1,)))
    assert bucket.num_buffered == 2
    await spin()
