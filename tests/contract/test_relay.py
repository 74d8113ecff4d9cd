"""The contract of every relay: a producer and a consumer that know each other by references alone.

A new backend is added to ``relays.BACKENDS`` and must pass unchanged.
"""

import asyncio
import itertools
import threading
from collections.abc import Iterator

import msgspec
import pytest
import torch

from tests import machine
from tests.contract.relays import BACKENDS, NUM_BYTES, Pair, make_pair
from tests.contract.usable import COPYING, LEASING, POOLED, USABLE
from tests.relay.io import DEADLINE_S
from vllm_omni.errors import PoolExhausted, RelayBroken, RelayClosed, RelayTimeout
from vllm_omni.messages.payload import DTYPES, TensorRef

HALF = NUM_BYTES // 2


def only(*names: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("pair", names, indirect=True)


@pytest.fixture(params=USABLE)
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    with make_pair(request.param) as pair:
        yield pair


@pytest.mark.parametrize("name", [name for name, backend in BACKENDS.items() if not backend.is_usable])
def test_the_backend_can_be_loaded(name: str) -> None:
    """Skips once for each backend that this machine cannot load; the suites leave those out."""
    machine.require(BACKENDS[name].needs)


# -- tensors arrive ---------------------------------------------------------------------------------------------------


async def test_a_tensor_arrives_as_it_was_put(pair: Pair) -> None:
    for dtype, shape in itertools.product(DTYPES.values(), [(), (1,), (3, 5), (0, 4), (2, 0), (2, 3, 4)]):
        tensor = (torch.rand(shape) * 100).to(dtype)
        ref = await pair.producer.put("request", tensor)
        arrived = await pair.consumer.get(ref)
        assert arrived.dtype == dtype
        assert arrived.shape == tensor.shape, f"{dtype}, {shape}"
        if dtype.itemsize == 1:  # torch does not compare float8
            arrived, tensor = arrived.view(torch.uint8), tensor.view(torch.uint8)
        assert torch.equal(arrived, tensor), f"{dtype}, {shape}"
        pair.consumer.release(ref)


async def test_every_byte_of_a_large_tensor_arrives(pair: Pair) -> None:
    for num_bytes in (1, 4095, 4096, 4097, 1 << 20, 3_000_001):
        tensor = torch.arange(num_bytes, dtype=torch.int64).to(torch.uint8)
        ref = await pair.producer.put("request", tensor)
        assert torch.equal(await pair.consumer.get(ref), tensor), num_bytes
        pair.consumer.release(ref)


async def test_a_view_arrives_without_what_lies_around_it(pair: Pair) -> None:
    tensor = torch.arange(24.0).reshape(4, 6)
    ref = await pair.producer.put("request", tensor[1:3, ::2].T)
    assert torch.equal(await pair.consumer.get(ref), tensor[1:3, ::2].T)


@only(*COPYING)
async def test_the_producer_may_change_its_tensor_after_put(pair: Pair) -> None:
    tensor = torch.zeros(4)
    ref = await pair.producer.put("request", tensor)
    tensor.fill_(1.0)
    assert torch.equal(await pair.consumer.get(ref), torch.zeros(4))


async def test_a_buffer_of_the_relay_arrives_as_it_was_filled(pair: Pair) -> None:
    buffer = pair.producer.empty("request", (3, 5), torch.float32)
    buffer.copy_(torch.arange(15.0).reshape(3, 5))
    ref = await pair.producer.put("request", buffer)
    assert torch.equal(await pair.consumer.get(ref), torch.arange(15.0).reshape(3, 5))


@only(*LEASING)
async def test_a_buffer_may_be_written_until_its_reference_is_sent(pair: Pair) -> None:
    buffer = pair.producer.empty("request", (3, 5), torch.float32)
    ref = await pair.producer.put("request", buffer)
    assert pair.producer.renew(ref)
    buffer.copy_(torch.arange(15.0).reshape(3, 5))
    assert torch.equal(await pair.consumer.get(ref), torch.arange(15.0).reshape(3, 5))


async def test_a_part_of_a_buffer_arrives_alone(pair: Pair) -> None:
    buffer = pair.producer.empty("request", (8, 4), torch.float32)
    buffer.copy_(torch.arange(32.0).reshape(8, 4))
    ref = await pair.producer.put("request", buffer[2:5])
    assert torch.equal(await pair.consumer.get(ref), torch.arange(8.0, 20.0).reshape(3, 4))


async def test_the_producer_can_read_what_it_put_itself(pair: Pair) -> None:
    ref = await pair.producer.put("request", torch.ones(4))
    assert torch.equal(await pair.producer.get(ref), torch.ones(4))


async def test_a_reference_survives_the_wire(pair: Pair) -> None:
    tensor = torch.randn(7, 3)
    wire = msgspec.msgpack.encode(await pair.producer.put("request", tensor))
    assert torch.equal(await pair.consumer.get(msgspec.msgpack.decode(wire, type=TensorRef)), tensor)


async def test_a_reference_can_be_pulled_again_until_it_is_released(pair: Pair) -> None:
    ref = await pair.producer.put("request", torch.ones(4))
    first = await pair.consumer.get(ref)
    assert torch.equal(first, await pair.consumer.get(ref))


def test_a_thread_without_a_loop_can_pull(pair: Pair) -> None:
    ref = pair.producer.put_nowait("request", torch.ones(4))
    assert torch.equal(pair.consumer.get_blocking(ref), torch.ones(4))


async def test_many_tensors_in_flight_are_not_confused(pair: Pair) -> None:
    refs = [await pair.producer.put(f"request-{index}", torch.full((300,), index)) for index in range(200)]
    for index in reversed(range(200)):
        assert torch.equal(await pair.consumer.get(refs[index]), torch.full((300,), index))
        pair.consumer.release(refs[index])


# -- leases -----------------------------------------------------------------------------------------------------------


async def num_leases(pair: Pair, expected: int) -> int:
    """The producer's leases, once releases have arrived there; waits five seconds at most."""
    for _ in range(500):
        if pair.producer.statistics().num_leases == expected:
            break
        await asyncio.sleep(0.01)
    return pair.producer.statistics().num_leases


async def test_releasing_twice_does_nothing(pair: Pair) -> None:
    ref = await pair.producer.put("request", torch.zeros(4))
    await pair.consumer.get(ref)
    pair.consumer.release(ref)
    pair.consumer.release(ref)
    assert await num_leases(pair, 0) == 0


async def test_a_tensor_can_be_released_without_being_read(pair: Pair) -> None:
    pair.consumer.release(await pair.producer.put("request", torch.zeros(4)))
    assert await num_leases(pair, 0) == 0


@only(*LEASING)
async def test_a_lease_ends_with_its_last_reader(pair: Pair) -> None:
    ref = await pair.producer.put("request", torch.zeros(4), num_readers=2)
    await pair.consumer.get(ref)
    pair.consumer.release(ref)
    assert torch.equal(await pair.producer.get(ref), torch.zeros(4))
    assert pair.producer.statistics().num_leases == 1
    pair.producer.release(ref)
    assert await num_leases(pair, 0) == 0


@only(*LEASING)
async def test_a_release_for_all_ends_the_lease_without_other_readers(pair: Pair) -> None:
    ref = await pair.producer.put("request", torch.zeros(4), num_readers=3)
    pair.consumer.release(ref, for_all=True)
    assert await num_leases(pair, 0) == 0


async def test_aborting_a_request_leaves_no_lease(pair: Pair) -> None:
    for _ in range(3):
        await pair.producer.put("request", torch.zeros(4))
    pair.producer.abort("request")
    pair.producer.abort("unknown")
    assert pair.producer.statistics().num_leases == 0


async def test_aborting_all_requests_leaves_no_lease(pair: Pair) -> None:
    for number in range(3):
        await pair.producer.put(str(number), torch.zeros(4))
    buffer = pair.producer.empty("buffer", (4,), torch.float32)
    pair.producer.abort(None)
    assert pair.producer.statistics().num_leases == 0
    with_room = await pair.producer.put("buffer", buffer)  # of another owner now, and copied
    pair.producer.abort("buffer")
    assert pair.producer.statistics().num_leases == 0 and with_room.shape == (4,)


@only(*LEASING)
async def test_aborting_a_request_leaves_the_others_alone(pair: Pair) -> None:
    ref = await pair.producer.put("other", torch.ones(4))
    await pair.producer.put("request", torch.zeros(4))
    pair.producer.abort("request")
    assert torch.equal(await pair.consumer.get(ref), torch.ones(4))


@only(*LEASING)
async def test_an_aborted_tensor_cannot_be_pulled(pair: Pair) -> None:
    ref = await pair.producer.put("request", torch.zeros(4))
    pair.producer.abort("request")
    with pytest.raises(RelayBroken):
        await pair.consumer.get(ref)


@only(*LEASING)
async def test_a_released_tensor_cannot_be_pulled(pair: Pair) -> None:
    ref = await pair.producer.put("request", torch.zeros(4))
    await pair.consumer.get(ref)
    pair.consumer.release(ref)
    assert await num_leases(pair, 0) == 0
    with pytest.raises(RelayBroken):
        await pair.consumer.get(ref)


@only(*LEASING)
async def test_a_released_buffer_is_not_confused_with_the_next_one_in_its_place(pair: Pair) -> None:
    for index in range(50):
        ref = await pair.producer.put("request", torch.full((100,), float(index)))
        assert torch.equal(await pair.consumer.get(ref), torch.full((100,), float(index)))
        pair.consumer.release(ref)
        pair.consumer.release(ref)


async def test_statistics_count_puts_gets_and_bytes(pair: Pair) -> None:
    ref = await pair.producer.put("request", torch.zeros(4))
    await pair.consumer.get(ref)
    assert (pair.producer.statistics().num_puts, pair.producer.statistics().num_bytes_put) == (1, 16)
    assert pair.consumer.statistics().num_gets == 1


@pytest.mark.parametrize("name", POOLED)
async def test_an_unread_lease_expires(name: str) -> None:
    with make_pair(name, lease_s=0.05) as pair:
        ref = await pair.producer.put("request", torch.zeros(4))
        assert await num_leases(pair, 0) == 0
        assert pair.producer.statistics().num_expired == 1
        with pytest.raises(RelayBroken):
            await pair.consumer.get(ref)


# -- credits ----------------------------------------------------------------------------------------------------------


@only(*POOLED)
async def test_a_consumer_that_never_releases_receives_at_most_one_pool(pair: Pair) -> None:
    refs = [pair.producer.put_nowait("request", torch.zeros(HALF, dtype=torch.uint8)) for _ in range(2)]
    with pytest.raises(PoolExhausted):
        pair.producer.put_nowait("request", torch.zeros(1))
    with pytest.raises(RelayTimeout):
        await pair.producer.put("request", torch.zeros(1), timeout_s=0.01)
    assert pair.producer.statistics().num_bytes_leased == NUM_BYTES
    assert len(refs) == 2


@only(*POOLED)
async def test_a_waiting_put_resumes_after_a_release(pair: Pair) -> None:
    refs = [pair.producer.put_nowait("request", torch.zeros(HALF, dtype=torch.uint8)) for _ in range(2)]
    waiting = asyncio.create_task(pair.producer.put("request", torch.ones(HALF, dtype=torch.uint8)))
    await asyncio.sleep(0)
    assert not waiting.done()
    await pair.consumer.get(refs[0])
    pair.consumer.release(refs[0])
    assert (await pair.consumer.get(await waiting)).all()


@only(*POOLED)
async def test_a_waiting_put_resumes_after_an_abort(pair: Pair) -> None:
    pair.producer.put_nowait("request", torch.zeros(NUM_BYTES, dtype=torch.uint8))
    waiting = asyncio.create_task(pair.producer.put("other", torch.ones(HALF, dtype=torch.uint8)))
    await asyncio.sleep(0)
    pair.producer.abort("request")
    await waiting


@only(*POOLED)
async def test_a_tensor_larger_than_the_pool_is_rejected_at_once(pair: Pair) -> None:
    with pytest.raises(PoolExhausted) as error:
        await pair.producer.put("request", torch.zeros(NUM_BYTES + 1, dtype=torch.uint8))
    assert error.value.is_final


@only(*POOLED)
async def test_an_abort_does_not_free_a_buffer_that_is_being_read(pair: Pair) -> None:
    ref = await pair.producer.put("request", torch.ones(HALF, dtype=torch.uint8))
    arrived = await pair.consumer.get(ref)
    pair.producer.abort("request")
    pair.producer.put_nowait("other", torch.zeros(HALF, dtype=torch.uint8))
    with pytest.raises(PoolExhausted):
        pair.producer.put_nowait("third", torch.zeros(HALF, dtype=torch.uint8))
    assert arrived.all()
    pair.consumer.release(ref)
    assert await num_leases(pair, 1) == 1


# -- errors -----------------------------------------------------------------------------------------------------------


async def test_an_invalid_reference_is_rejected(pair: Pair) -> None:
    ref = await pair.producer.put("request", torch.zeros(4))
    for change in (
        {"backend": "another"},
        {"dtype": "float33"},
        {"dtype": "__class__"},
        {"dtype": "float64"},
        {"shape": (5,)},
        {"shape": (-4,)},
        {"shape": (-2, -2)},
        {"shape": (1 << 62, 1 << 62)},
        {"shape": (1 << 30,)},
        {"shape": (1,) * 40},
        {"location": b""},
        {"location": b"\xc1"},
        {"location": b"\x93\xa0\x01\x02"},
        {"location": b"\x93\xa3abc\xff\x02"},
    ):
        try:
            await pair.consumer.get(msgspec.structs.replace(ref, **change), timeout_s=DEADLINE_S)
        except RelayBroken:
            continue
        pytest.fail(f"a reference with {change} was read")


@only(*LEASING)
async def test_a_wrong_lease_number_is_rejected(pair: Pair) -> None:
    ref = await pair.producer.put("request", torch.zeros(4))
    with pytest.raises(RelayBroken):
        await pair.consumer.get(msgspec.structs.replace(ref, lease=ref.lease + 1))


@only(*LEASING)
async def test_a_closed_producer_raises_broken_at_its_consumer(pair: Pair) -> None:
    first = await pair.producer.put("request", torch.zeros(4))
    second = await pair.producer.put("request", torch.zeros(4))
    await pair.consumer.get(first)
    pair.producer.close()
    for _ in range(100):
        try:
            await pair.consumer.get(second, timeout_s=DEADLINE_S)
        except RelayBroken:
            break
        await asyncio.sleep(0.01)
    else:
        pytest.fail("the consumer did not notice within a second")
    pair.consumer.release(first)


async def test_a_closed_relay_raises_closed(pair: Pair) -> None:
    ref = await pair.producer.put("request", torch.zeros(4))
    pair.producer.close()
    pair.producer.close()
    with pytest.raises(RelayClosed):
        pair.producer.put_nowait("request", torch.zeros(4))
    pair.consumer.close()
    with pytest.raises(RelayClosed):
        await pair.consumer.get(ref)


async def test_a_dtype_that_cannot_travel_is_named(pair: Pair) -> None:
    with pytest.raises(TypeError, match="uint32"):
        await pair.producer.put("request", torch.zeros(4, dtype=torch.uint32))


# -- threads ----------------------------------------------------------------------------------------------------------


def test_threads_put_and_pull_at_the_same_time(pair: Pair) -> None:
    wrong: list[int] = []

    def work(seed: int) -> None:
        for index in range(100):
            ref = pair.producer.put_nowait(f"request-{seed}", torch.full((50,), seed * 1000 + index))
            if not torch.equal(pair.consumer.get_blocking(ref), torch.full((50,), seed * 1000 + index)):
                wrong.append(index)
            pair.consumer.release(ref)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not wrong
    assert not any(thread.is_alive() for thread in threads)
