import asyncio
import itertools

import pytest

from tests.flow.builders import make_frame, spin
from vllm_omni.flow.run.sequence import SequenceQueue, Stream


def push_all(queue, *frames):
    return [due.seq for frame in frames for due in queue.push(frame)]


def test_frames_in_order_pass_at_once():
    queue = SequenceQueue()
    assert [push_all(queue, make_frame(seq)) for seq in range(3)] == [[0], [1], [2]]


def test_early_frame_waits_for_the_gap_to_close():
    queue = SequenceQueue()
    assert push_all(queue, make_frame(1)) == []
    assert len(queue) == 1
    assert push_all(queue, make_frame(0)) == [0, 1]
    assert len(queue) == 0


@pytest.mark.parametrize("order", list(itertools.permutations(range(4))))
def test_any_order_of_arrival_gives_the_order_of_production(order):
    queue = SequenceQueue()
    assert push_all(queue, *(make_frame(seq, last=seq == 3) for seq in order)) == [0, 1, 2, 3]
    assert queue.ended
    assert len(queue) == 0


def test_duplicates_are_dropped_whether_early_or_late():
    queue = SequenceQueue()
    assert push_all(queue, make_frame(1), make_frame(1), make_frame(0), make_frame(0), make_frame(1)) == [0, 1]


def test_first_of_two_early_duplicates_is_kept():
    queue = SequenceQueue()
    queue.push(make_frame(1, payload="first"))
    queue.push(make_frame(1, payload="second"))
    assert [frame.payload for frame in queue.push(make_frame(0))] == [None, "first"]


def test_end_is_known_only_when_the_last_frame_is_due():
    queue = SequenceQueue()
    queue.push(make_frame(1, last=True))
    assert not queue.ended
    queue.push(make_frame(0))
    assert queue.ended


def test_frames_behind_the_last_are_dropped():
    queue = SequenceQueue()
    assert push_all(queue, make_frame(2), make_frame(1, last=True), make_frame(0), make_frame(3)) == [0, 1]
    assert len(queue) == 0


async def test_stream_gives_what_was_put_and_then_ends():
    stream = Stream()
    stream.put_nowait(1)
    stream.put_nowait(2)
    stream.finish()
    assert [item async for item in stream] == [1, 2]


async def test_reader_waits_for_an_item():
    stream = Stream()
    reader = asyncio.create_task(anext(stream))
    await spin()
    assert not reader.done()
    stream.put_nowait("item")
    assert await reader == "item"


async def test_cancelling_the_reader_loses_nothing():
    stream = Stream()
    reader = asyncio.create_task(anext(stream))
    await spin()
    stream.put_nowait("item")
    reader.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reader
    assert await anext(stream) == "item"


async def test_error_comes_after_what_was_put_and_stays():
    stream = Stream()
    stream.put_nowait(1)
    stream.finish(ValueError("broken"))
    assert await anext(stream) == 1
    for _ in range(2):
        with pytest.raises(ValueError, match="broken"):
            await anext(stream)


async def test_second_waiting_reader_is_rejected():
    stream = Stream()
    reader = asyncio.create_task(anext(stream))
    await spin()
    with pytest.raises(RuntimeError, match="one reader"):
        await anext(stream)
    stream.finish()
    with pytest.raises(StopAsyncIteration):
        await reader
