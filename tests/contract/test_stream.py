"""The contract of every relay with streams; a new one sets ``streams`` in ``relays.BACKENDS`` and must pass."""

import asyncio
import itertools
import threading
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

import msgspec
import pytest
import torch

from tests.contract.relays import NUM_BYTES, Pair, make_pair
from tests.contract.usable import ONE_SIDED, STREAMING
from tests.relay.io import DEADLINE_S
from vllm_omni.errors import PoolExhausted, RelayBroken, RelayClosed, RelayError, RelayTimeout
from vllm_omni.messages.payload import TensorRef
from vllm_omni.relay import StreamReader, StreamWriter

CREDITS = 4
# The one-sided backends send rows by the code of tcp, over the same connection.
BACKENDS = [pytest.param(name, marks=pytest.mark.long) if name in ONE_SIDED else name for name in STREAMING]


@pytest.fixture(params=BACKENDS)
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    with make_pair(request.param) as pair:
        yield pair
        pair.producer.check_integrity()


class Ends(NamedTuple):
    writer: StreamWriter
    reader: StreamReader


async def make_ends(pair: Pair, credits: int = CREDITS, width: int = 2) -> Ends:
    writer = pair.producer.open_stream("request", (width,), torch.float32, credits=credits)
    return Ends(writer, await pair.consumer.read_stream(writer.ref, timeout_s=DEADLINE_S))


def rows_of(*numbers: int, width: int = 2) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.float32).reshape(-1, 1).expand(-1, width).contiguous()


def numbers_of(rows: torch.Tensor) -> list[int]:
    assert torch.equal(rows, rows[:, :1].expand_as(rows)), "a row was torn"
    return [int(number) for number in rows[:, 0]]


async def until(condition: Callable[[], bool], timeout_s: float = DEADLINE_S) -> bool:
    """Wait for a message to arrive at another relay."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        await asyncio.sleep(0.001)
    return True


async def read_numbers(reader: StreamReader, num_rows: int) -> list[int]:
    numbers: list[int] = []
    while len(numbers) < num_rows:
        numbers += numbers_of(await reader.read(timeout_s=DEADLINE_S))
    return numbers


# -- rows arrive ------------------------------------------------------------------------------------------------------


async def test_rows_arrive_in_order(pair: Pair) -> None:
    writer, reader = await make_ends(pair, credits=64)
    for first in range(0, 60, 3):
        writer.write_nowait(rows_of(first, first + 1, first + 2))
    assert await read_numbers(reader, 60) == list(range(60))


async def test_rows_that_were_written_before_the_reader_came_arrive(pair: Pair) -> None:
    writer = pair.producer.open_stream("request", (2,), torch.float32, credits=CREDITS)
    writer.write_nowait(rows_of(1, 2))
    writer.end()
    reader = await pair.consumer.read_stream(writer.ref)
    assert await read_numbers(reader, 2) == [1, 2]
    assert not len(await reader.read(timeout_s=DEADLINE_S))
    assert reader.has_ended


async def test_the_ring_is_used_again_and_again(pair: Pair) -> None:
    writer, reader = await make_ends(pair)
    for first in range(0, 60, 3):
        await writer.write(rows_of(first, first + 1, first + 2), timeout_s=DEADLINE_S)
        assert await read_numbers(reader, 3) == [first, first + 1, first + 2]


async def test_a_whole_ring_can_be_written_behind_a_part_of_one(pair: Pair) -> None:
    writer, reader = await make_ends(pair)
    writer.write_nowait(rows_of(0))
    assert await read_numbers(reader, 1) == [0]
    await writer.write(rows_of(1, 2, 3, 4), timeout_s=DEADLINE_S)
    assert await read_numbers(reader, 4) == [1, 2, 3, 4]


async def test_a_single_credit_is_enough(pair: Pair) -> None:
    writer, reader = await make_ends(pair, credits=1)
    for number in range(10):
        await writer.write(rows_of(number), timeout_s=DEADLINE_S)
        assert await read_numbers(reader, 1) == [number]


async def test_rows_of_every_shape_and_dtype_arrive(pair: Pair) -> None:
    dtypes = (torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool)
    for dtype, shape in itertools.product(dtypes, [(), (3,), (2, 5)]):
        writer = pair.producer.open_stream("request", shape, dtype, credits=CREDITS)
        reader = await pair.consumer.read_stream(writer.ref)
        rows = (torch.rand(3, *shape) * 100).to(dtype)
        writer.write_nowait(rows)
        assert await until(lambda reader=reader: reader.num_unread == 3), f"{dtype}, {shape}"
        arrived = reader.read_nowait()
        assert arrived.dtype == dtype
        assert torch.equal(arrived, rows), f"{dtype}, {shape}"
        reader.close()


async def test_large_rows_arrive_whole(pair: Pair) -> None:
    writer, reader = await make_ends(pair, width=100_000)
    for first in range(0, 12, 4):
        await writer.write(rows_of(first, first + 1, first + 2, first + 3, width=100_000), timeout_s=DEADLINE_S)
        assert await read_numbers(reader, 4) == [first, first + 1, first + 2, first + 3]


async def test_rows_that_were_read_belong_to_the_reader(pair: Pair) -> None:
    writer, reader = await make_ends(pair)
    writer.write_nowait(rows_of(1))
    rows = await reader.read(timeout_s=DEADLINE_S)
    for number in range(2, 10):
        await writer.write(rows_of(number), timeout_s=DEADLINE_S)
        await reader.read(timeout_s=DEADLINE_S)
    assert numbers_of(rows) == [1]


async def test_the_writer_may_change_its_rows_afterwards(pair: Pair) -> None:
    writer, reader = await make_ends(pair)
    rows = rows_of(1)
    writer.write_nowait(rows)
    rows.fill_(2)
    assert await read_numbers(reader, 1) == [1]


async def test_reading_an_empty_stream_returns_no_rows(pair: Pair) -> None:
    writer, reader = await make_ends(pair)
    assert reader.num_unread == 0
    assert reader.read_nowait().shape == (0, 2)
    writer.write_nowait(rows_of())
    assert reader.read_nowait().shape == (0, 2)


async def test_concurrent_streams_are_not_confused(pair: Pair) -> None:
    writers = [pair.producer.open_stream(f"request-{n}", (2,), torch.float32, credits=2) for n in range(20)]
    readers = [await pair.consumer.read_stream(writer.ref) for writer in writers]
    for round_ in range(5):
        for number, writer in enumerate(writers):
            await writer.write(rows_of(100 * round_ + number), timeout_s=DEADLINE_S)
        for number, reader in enumerate(readers):
            assert await read_numbers(reader, 1) == [100 * round_ + number]


async def test_a_relay_can_read_its_own_stream(pair: Pair) -> None:
    writer = pair.producer.open_stream("request", (2,), torch.float32, credits=2)
    reader = await pair.producer.read_stream(writer.ref)
    for number in range(6):
        await writer.write(rows_of(number), timeout_s=DEADLINE_S)
        assert await read_numbers(reader, 1) == [number]
    reader.close()


async def test_a_stream_s_reference_survives_the_wire(pair: Pair) -> None:
    writer = pair.producer.open_stream("request", (2,), torch.float32)
    wire = msgspec.msgpack.encode(writer.ref)
    reader = await pair.consumer.read_stream(msgspec.msgpack.decode(wire, type=TensorRef))
    writer.write_nowait(rows_of(7))
    assert await read_numbers(reader, 1) == [7]


# -- credits ----------------------------------------------------------------------------------------------------------


async def test_credits_fall_with_writing_and_rise_with_reading(pair: Pair) -> None:
    writer, reader = await make_ends(pair)
    assert writer.num_credits == CREDITS
    writer.write_nowait(rows_of(1, 2, 3))
    assert writer.num_credits == 1
    assert await until(lambda: reader.num_unread == 3)
    assert writer.num_credits == 1
    reader.read_nowait()
    assert await until(lambda: writer.num_credits == CREDITS)


async def test_every_credit_comes_back_however_few_rows_are_read_at_once(pair: Pair) -> None:
    writer, reader = await make_ends(pair, credits=100)
    for number in range(5):
        writer.write_nowait(rows_of(number))
        assert await read_numbers(reader, 1) == [number]
    assert await until(lambda: writer.num_credits == 100)


async def test_writing_beyond_the_credits_writes_nothing(pair: Pair) -> None:
    writer, reader = await make_ends(pair)
    writer.write_nowait(rows_of(1, 2, 3))
    with pytest.raises(PoolExhausted) as error:
        writer.write_nowait(rows_of(4, 5))
    assert not error.value.is_final
    assert await read_numbers(reader, 3) == [1, 2, 3]
    assert reader.num_unread == 0


async def test_more_rows_than_the_ring_are_rejected_for_good(pair: Pair) -> None:
    writer, _ = await make_ends(pair)
    with pytest.raises(PoolExhausted) as error:
        await writer.write(rows_of(*range(CREDITS + 1)))
    assert error.value.is_final


async def test_credits_can_be_asked_for_by_reference(pair: Pair) -> None:
    writer, reader = await make_ends(pair)
    count = pair.producer.credits_of(writer.ref)
    assert count is not None
    assert count() == CREDITS
    writer.write_nowait(rows_of(1, 2, 3))
    assert count() == 1
    reader.close()
    assert await until(lambda: count() == CREDITS)


async def test_until_its_reader_comes_a_stream_has_all_credits(pair: Pair) -> None:
    writer = pair.producer.open_stream("request", (2,), torch.float32, credits=CREDITS)
    count = pair.producer.credits_of(writer.ref)
    assert count is not None
    writer.write_nowait(rows_of(1, 2, 3))
    assert (count(), writer.num_credits) == (CREDITS, 1)
    reader = await pair.consumer.read_stream(writer.ref, timeout_s=DEADLINE_S)
    assert await until(lambda: count() == 1)
    reader.close()


async def test_a_ring_larger_than_the_pool_is_rejected(pair: Pair) -> None:
    with pytest.raises(PoolExhausted):
        pair.producer.open_stream("request", (NUM_BYTES,), torch.uint8, credits=2)
    assert pair.producer.statistics().num_leases == 0


# -- waiting ----------------------------------------------------------------------------------------------------------


async def test_a_waiting_reader_is_woken_by_a_row(pair: Pair) -> None:
    writer, reader = await make_ends(pair)
    waiting = asyncio.create_task(reader.read(timeout_s=DEADLINE_S))
    await asyncio.sleep(0)
    assert not waiting.done()
    writer.write_nowait(rows_of(1))
    assert numbers_of(await waiting) == [1]


async def test_a_waiting_reader_is_woken_by_the_end(pair: Pair) -> None:
    writer, reader = await make_ends(pair)
    waiting = asyncio.create_task(reader.read(timeout_s=DEADLINE_S))
    await asyncio.sleep(0)
    writer.end()
    assert not len(await waiting)


async def test_a_waiting_writer_is_woken_by_a_read(pair: Pair) -> None:
    writer, reader = await make_ends(pair)
    writer.write_nowait(rows_of(1, 2, 3, 4))
    waiting = asyncio.create_task(writer.write(rows_of(5, 6, 7, 8), timeout_s=DEADLINE_S))
    await asyncio.sleep(0)
    assert not waiting.done()
    assert await read_numbers(reader, 4) == [1, 2, 3, 4]
    await waiting
    assert await read_numbers(reader, 4) == [5, 6, 7, 8]


async def test_a_reader_s_deadline_passes(pair: Pair) -> None:
    writer, reader = await make_ends(pair)
    with pytest.raises(RelayTimeout):
        await reader.read(timeout_s=0.01)
    writer.write_nowait(rows_of(1))
    assert await read_numbers(reader, 1) == [1]


async def test_a_writer_s_deadline_passes(pair: Pair) -> None:
    writer, reader = await make_ends(pair)
    writer.write_nowait(rows_of(1, 2, 3, 4))
    with pytest.raises(RelayTimeout):
        await writer.write(rows_of(5), timeout_s=0.01)
    assert await read_numbers(reader, 4) == [1, 2, 3, 4]


async def test_a_cancelled_reader_loses_no_row(pair: Pair) -> None:
    writer, reader = await make_ends(pair)
    waiting = asyncio.create_task(reader.read())
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    writer.write_nowait(rows_of(1))
    assert await read_numbers(reader, 1) == [1]


# -- the end ----------------------------------------------------------------------------------------------------------


async def test_the_end_comes_behind_the_last_row(pair: Pair) -> None:
    writer, reader = await make_ends(pair)
    writer.write_nowait(rows_of(1, 2))
    writer.end()
    writer.end("too late")
    assert await until(lambda: reader.num_unread == 2 and reader.has_ended)
    assert numbers_of(reader.read_nowait()) == [1, 2]
    assert not len(await reader.read(timeout_s=DEADLINE_S))
    assert reader.has_ended


async def test_nothing_can_be_written_behind_the_end(pair: Pair) -> None:
    writer, _ = await make_ends(pair)
    writer.end()
    with pytest.raises(RelayClosed):
        writer.write_nowait(rows_of(1))


async def test_an_error_comes_behind_the_last_row(pair: Pair) -> None:
    writer, reader = await make_ends(pair)
    writer.write_nowait(rows_of(1, 2))
    writer.end("the model broke: Σ")
    assert await read_numbers(reader, 2) == [1, 2]
    with pytest.raises(RelayBroken, match="the model broke: Σ"):
        await reader.read(timeout_s=DEADLINE_S)
    assert not reader.has_ended


async def test_a_very_long_error_is_cut(pair: Pair) -> None:
    writer, reader = await make_ends(pair)
    writer.end("x" * 100_000)
    with pytest.raises(RelayBroken, match="xxx"):
        await reader.read(timeout_s=DEADLINE_S)


async def test_a_stream_that_ended_and_was_closed_leaves_no_lease(pair: Pair) -> None:
    writer, reader = await make_ends(pair)
    writer.write_nowait(rows_of(1))
    writer.end()
    assert await read_numbers(reader, 1) == [1]
    assert pair.producer.statistics().num_leases == 1
    reader.close()
    assert await until(lambda: pair.producer.statistics().num_leases == 0)


# -- aborts, closed ends -----------------------------------------------------------------------------------------------


async def test_an_abort_breaks_the_stream_behind_the_rows_before_it(pair: Pair) -> None:
    writer, reader = await make_ends(pair)
    writer.write_nowait(rows_of(1))
    assert await until(lambda: reader.num_unread == 1)
    pair.producer.abort("request")
    assert await read_numbers(reader, 1) == [1]
    with pytest.raises(RelayBroken):
        await reader.read(timeout_s=DEADLINE_S)
    reader.close()
    assert await until(lambda: pair.producer.statistics().num_leases == 0)
    writer.write_nowait(rows_of(*range(CREDITS)))  # dropped


async def test_a_waiting_reader_is_woken_by_an_abort(pair: Pair) -> None:
    _, reader = await make_ends(pair)
    waiting = asyncio.create_task(reader.read(timeout_s=DEADLINE_S))
    await asyncio.sleep(0)
    pair.producer.abort("request")
    with pytest.raises(RelayBroken):
        await waiting


async def test_a_stream_that_was_aborted_cannot_be_read(pair: Pair) -> None:
    writer = pair.producer.open_stream("request", (2,), torch.float32)
    pair.producer.abort("request")
    with pytest.raises(RelayBroken):
        await pair.consumer.read_stream(writer.ref, timeout_s=DEADLINE_S)


async def test_a_closed_reader_does_not_hold_the_writer_back(pair: Pair) -> None:
    writer, reader = await make_ends(pair)
    writer.write_nowait(rows_of(1, 2, 3, 4))
    reader.close()
    reader.close()
    assert await until(lambda: writer.num_credits == CREDITS)
    for _ in range(10):
        writer.write_nowait(rows_of(1, 2, 3, 4))
    writer.end()
    assert await until(lambda: pair.producer.statistics().num_leases == 0)
    with pytest.raises(RelayClosed):
        reader.read_nowait()


async def test_a_waiting_writer_is_woken_when_the_reader_closes(pair: Pair) -> None:
    writer, reader = await make_ends(pair)
    writer.write_nowait(rows_of(1, 2, 3, 4))
    waiting = asyncio.create_task(writer.write(rows_of(5), timeout_s=DEADLINE_S))
    await asyncio.sleep(0)
    reader.close()
    await waiting


async def test_a_stream_released_unread_does_not_hold_the_writer_back(pair: Pair) -> None:
    writer = pair.producer.open_stream("request", (2,), torch.float32, credits=CREDITS)
    writer.write_nowait(rows_of(1, 2, 3, 4))
    pair.consumer.release(writer.ref)
    assert await until(lambda: pair.producer.statistics().num_leases == 0)
    assert writer.num_credits == CREDITS
    writer.write_nowait(rows_of(1, 2, 3, 4))


async def test_a_producer_that_closes_breaks_the_stream(pair: Pair) -> None:
    writer, reader = await make_ends(pair)
    writer.write_nowait(rows_of(1))
    assert await until(lambda: reader.num_unread == 1)
    pair.producer.close()
    assert await read_numbers(reader, 1) == [1]
    with pytest.raises(RelayBroken):
        await reader.read(timeout_s=1)
    with pytest.raises(RelayClosed):
        writer.write_nowait(rows_of(2))
    reader.close()


async def test_a_waiting_writer_is_woken_when_its_relay_closes(pair: Pair) -> None:
    writer, _ = await make_ends(pair)
    writer.write_nowait(rows_of(1, 2, 3, 4))
    waiting = asyncio.create_task(writer.write(rows_of(5), timeout_s=DEADLINE_S))
    await asyncio.sleep(0)
    pair.producer.close()
    with pytest.raises(RelayClosed):
        await waiting


async def test_a_closed_consumer_does_not_hold_the_writer_back(pair: Pair) -> None:
    writer, reader = await make_ends(pair)
    writer.write_nowait(rows_of(1, 2, 3, 4))
    waiting = asyncio.create_task(writer.write(rows_of(5), timeout_s=DEADLINE_S))
    await asyncio.sleep(0)
    pair.consumer.close()
    await waiting
    assert await until(lambda: pair.producer.statistics().num_leases == 0)
    reader.close()


async def test_a_waiting_reader_is_woken_when_its_relay_closes(pair: Pair) -> None:
    _, reader = await make_ends(pair)
    waiting = asyncio.create_task(reader.read(timeout_s=DEADLINE_S))
    await asyncio.sleep(0)
    pair.consumer.close()
    with pytest.raises(RelayError) as error:
        await waiting
    assert not isinstance(error.value, RelayTimeout)


@pytest.mark.parametrize("name", BACKENDS)
async def test_an_unread_stream_expires(name: str) -> None:
    with make_pair(name, lease_s=0.05) as pair:
        writer = pair.producer.open_stream("request", (2,), torch.float32)
        assert await until(lambda: pair.producer.statistics().num_leases == 0)
        with pytest.raises(RelayBroken):
            await pair.consumer.read_stream(writer.ref, timeout_s=DEADLINE_S)
        writer.write_nowait(rows_of(1))


@pytest.mark.parametrize("name", BACKENDS)
async def test_a_stream_that_is_read_does_not_expire(name: str) -> None:
    with make_pair(name, lease_s=0.2) as pair:
        writer, reader = await make_ends(pair)
        expired = pair.producer.put_nowait("other", torch.zeros(4))  # this lease does expire: it measures the time
        assert await until(lambda: pair.producer.statistics().num_expired == 1)
        writer.write_nowait(rows_of(1))
        assert await read_numbers(reader, 1) == [1]
        assert pair.producer.statistics().num_leases == 1
        with pytest.raises(RelayBroken):
            await pair.consumer.get(expired, timeout_s=DEADLINE_S)


# -- invalid input ----------------------------------------------------------------------------------------------------


async def test_rows_of_another_shape_or_dtype_are_rejected(pair: Pair) -> None:
    writer, reader = await make_ends(pair)
    for rows in (torch.zeros(1, 3), torch.zeros(2), torch.zeros(1, 2, 1), torch.zeros(1, 2, dtype=torch.float64)):
        with pytest.raises(ValueError, match="rows are"):
            writer.write_nowait(rows)
    writer.write_nowait(rows_of(1))
    assert await read_numbers(reader, 1) == [1]


async def test_an_invalid_reference_is_rejected(pair: Pair) -> None:
    writer = pair.producer.open_stream("request", (2,), torch.float32, credits=CREDITS)
    for change in (
        {"backend": "another"},
        {"dtype": "float33"},
        {"dtype": "float64"},
        {"shape": ()},
        {"shape": (0, 2)},
        {"shape": (CREDITS + 1, 2)},
        {"shape": (-CREDITS, -2)},
        {"shape": (1 << 30, 1 << 8)},
        {"location": b""},
        {"location": b"\xc1"},
        {"location": b"\x93\xa0\x01\x02"},
        {"location": b"\x92\xa3abc\x01"},
        {"lease": 0},
        {"lease": -1},
        {"lease": 1 << 62},
    ):
        try:
            await pair.consumer.read_stream(msgspec.structs.replace(writer.ref, **change), timeout_s=DEADLINE_S)
        except RelayBroken:
            continue
        pytest.fail(f"a reference with {change} was read")
    reader = await pair.consumer.read_stream(writer.ref, timeout_s=DEADLINE_S)
    writer.write_nowait(rows_of(1))
    assert await read_numbers(reader, 1) == [1]


async def test_tensors_and_streams_are_not_interchangeable(pair: Pair) -> None:
    tensor = await pair.producer.put("request", torch.zeros(CREDITS, 2))
    with pytest.raises(RelayBroken):
        await pair.consumer.read_stream(tensor, timeout_s=DEADLINE_S)
    writer = pair.producer.open_stream("request", (2,), torch.float32, credits=CREDITS)
    with pytest.raises(RelayBroken):
        await pair.consumer.get(writer.ref, timeout_s=DEADLINE_S)


async def test_a_closed_relay_raises_closed(pair: Pair) -> None:
    writer = pair.producer.open_stream("request", (2,), torch.float32)
    pair.consumer.close()
    with pytest.raises(RelayClosed):
        await pair.consumer.read_stream(writer.ref, timeout_s=DEADLINE_S)
    pair.producer.close()
    with pytest.raises(RelayClosed):
        pair.producer.open_stream("request", (2,), torch.float32)


# -- threads ----------------------------------------------------------------------------------------------------------


def test_a_thread_writes_while_another_reads(pair: Pair) -> None:
    num_rows = 2000
    writer = pair.producer.open_stream("request", (2,), torch.float32, credits=64)
    numbers: list[int] = []
    errors: list[BaseException] = []

    def write() -> None:
        done = 0
        while done < num_rows:
            count = min(writer.num_credits, num_rows - done, 7)
            if count:
                writer.write_nowait(rows_of(*range(done, done + count)))
                done += count
            else:
                time.sleep(0.0002)  # an engine computes meanwhile
        writer.end()

    def read() -> None:
        reader = asyncio.run(pair.consumer.read_stream(writer.ref))
        while not (reader.has_ended and not reader.num_unread):
            numbers.extend(numbers_of(reader.read_nowait()))
            time.sleep(0.0002)
        reader.close()

    def guard(work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as exc:
            errors.append(exc)

    threads = [threading.Thread(target=guard, args=(work,), daemon=True) for work in (write, read)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not errors
    assert numbers == list(range(num_rows))
    deadline = time.monotonic() + DEADLINE_S
    while pair.producer.statistics().num_leases and time.monotonic() < deadline:
        time.sleep(0.001)
    assert pair.producer.statistics().num_leases == 0
