"""``SlabRelay`` beyond the contract suite: blocks and leases."""

import gc
import weakref
from collections.abc import Iterator

import pytest
import torch

from tests.relay.io import DEADLINE_S
from vllm_omni.errors import PoolExhausted
from vllm_omni.relay.io_thread import io_thread
from vllm_omni.relay.shm import ShmRelay
from vllm_omni.relay.shm.memory import NUM_SLOTS

PAGE = 4096


@pytest.fixture
def relay() -> Iterator[ShmRelay]:
    relay = ShmRelay(NUM_SLOTS * PAGE)
    yield relay
    relay.check_integrity()
    relay.close()


def page(value: int) -> torch.Tensor:
    return torch.full((PAGE,), value, dtype=torch.uint8)


def fill_slots(relay: ShmRelay) -> None:
    while True:
        try:
            relay.put_nowait("others", page(0))
        except PoolExhausted:
            return


def test_a_request_that_continues_after_an_abort_does_not_keep_old_tensors(relay: ShmRelay) -> None:
    ref = relay.put_nowait("request", page(1))
    relay.get_blocking(ref)
    relay.abort("request")
    relay.put_nowait("request", page(2))
    relay.release(ref)
    assert relay.statistics().num_leases == 1
    relay.abort("request")
    assert relay.statistics().num_leases == 0


def test_a_put_that_failed_is_not_counted(relay: ShmRelay) -> None:
    with pytest.raises(PoolExhausted):
        relay.put_nowait("request", torch.zeros(NUM_SLOTS * PAGE + 1, dtype=torch.uint8))
    assert relay.statistics().num_puts == 0


def test_a_buffer_stays_its_requests_when_there_is_no_slot_for_it(relay: ShmRelay) -> None:
    buffer = relay.empty("request", (PAGE,), torch.uint8)
    buffer.fill_(7)
    fill_slots(relay)
    with pytest.raises(PoolExhausted):
        relay.put_nowait("request", buffer)
    relay.check_integrity()
    relay.abort("others")
    relay.put_nowait("others", page(0))
    assert torch.equal(relay.get_blocking(relay.put_nowait("request", buffer)), page(7))


def test_a_buffer_of_an_aborted_request_does_not_publish_the_one_now_in_its_place(relay: ShmRelay) -> None:
    stale = relay.empty("aborted", (PAGE,), torch.uint8)
    relay.abort("aborted")
    buffer = relay.empty("request", (PAGE,), torch.uint8)
    assert stale.data_ptr() == buffer.data_ptr()
    relay.put_nowait("aborted", stale)
    relay.abort("aborted")
    buffer.fill_(7)
    relay.put_nowait("third", page(9))
    assert torch.equal(relay.get_blocking(relay.put_nowait("request", buffer)), page(7))


def test_a_closed_relay_keeps_no_memory() -> None:
    relay = ShmRelay(PAGE)
    relay.put_nowait("request", page(0))  # starts the timer of its lease
    slab = weakref.ref(relay.memory)
    relay.close()
    _await_io_thread()
    del relay
    gc.collect()
    assert slab() is None


def _await_io_thread() -> None:
    async def nothing() -> None:
        pass

    for _ in range(2):
        io_thread().submit(nothing()).result(DEADLINE_S)


def test_a_lease_that_is_renewed_lives_as_long_as_a_new_one() -> None:
    now = 0.0
    relay = ShmRelay(4 * PAGE)
    relay.lease_s, relay.clock = 10, lambda: now
    renewed, forgotten = relay.put_nowait("request", page(1)), relay.put_nowait("request", page(2))
    now = 6.0
    assert relay.renew(renewed)
    now = 12.0
    assert relay.statistics().num_leases == 1
    assert relay.renew(renewed) and not relay.renew(forgotten)
    assert relay.get_blocking(renewed)[0] == 1
    relay.release(renewed, for_all=True)
    assert not relay.renew(renewed)
    relay.close()
