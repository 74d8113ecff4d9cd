"""Slots of another process's slab, pulled by their number. The connection itself: test_remote.py."""

import socket
from collections.abc import Iterator

import psutil
import pytest

from vllm_omni.errors import RelayBroken, RelayTimeout
from vllm_omni.relay.remote.pages import PageRelay, address_of
from vllm_omni.relay.secret import MIN_BYTES, Secret

NUM_SLOTS, PAGE_BYTES, STRIDE = 4, 3 << 20, (3 << 20) + 64  # several pieces each
DEADLINE_S = 20.0
HOST = "127.0.0.1"


@pytest.fixture
def memory() -> bytearray:
    return bytearray(b"".join(bytes([slot]) * STRIDE for slot in range(1, NUM_SLOTS + 1)))


@pytest.fixture
def holder(memory: bytearray) -> Iterator[PageRelay]:
    relay = PageRelay(memoryview(memory).toreadonly(), PAGE_BYTES, STRIDE, host=HOST)
    yield relay
    relay.close()


@pytest.fixture
def reader() -> Iterator[PageRelay]:
    relay = PageRelay(memoryview(bytes(STRIDE)), PAGE_BYTES, STRIDE, host=HOST)
    yield relay
    relay.close()


def pulled(reader: PageRelay, source: str, *slots: int) -> list[set[int]]:
    """The different bytes of each page."""
    copies = reader.pull(source, slots, DEADLINE_S)
    assert all(copy.numel() == PAGE_BYTES for copy in copies)
    return [set(copy.unique().tolist()) for copy in copies]


def test_slots_arrive_in_the_order_in_which_they_were_asked_for(holder: PageRelay, reader: PageRelay) -> None:
    assert pulled(reader, holder.name, 2, 0, 3) == [{3}, {1}, {4}]


def test_a_copy_is_not_changed_by_what_its_slot_holds_later(
    holder: PageRelay, reader: PageRelay, memory: bytearray
) -> None:
    (copy,) = reader.pull(holder.name, [1], DEADLINE_S)
    memory[STRIDE : 2 * STRIDE] = bytes(STRIDE)
    assert set(copy.unique().tolist()) == {2} and pulled(reader, holder.name, 1) == [{0}]


def test_nothing_is_left_behind_after_a_pull(holder: PageRelay, reader: PageRelay) -> None:
    pulled(reader, holder.name, 0, 1)
    assert holder.statistics().num_leases == 0
    holder.check_integrity()


@pytest.mark.parametrize("slot", [NUM_SLOTS, 1 << 53])
def test_a_slot_that_is_not_there_is_rejected(holder: PageRelay, reader: PageRelay, slot: int) -> None:
    with pytest.raises(RelayBroken, match="not there"):
        reader.pull(holder.name, [slot], DEADLINE_S)
    assert pulled(reader, holder.name, 0) == [{1}]


def test_pages_of_another_size_are_rejected(holder: PageRelay) -> None:
    other = PageRelay(memoryview(bytes(STRIDE)), PAGE_BYTES - 1, STRIDE, host=HOST)
    with pytest.raises(RelayBroken, match="not there"):
        other.pull(holder.name, [0], DEADLINE_S)
    other.close()


def test_without_the_secret_nothing_is_read(holder: PageRelay, reader: PageRelay) -> None:
    with pytest.raises(RelayBroken, match="another producer"):
        reader.pull(f"{holder.address}#{bytes(16).hex()}", [0], DEADLINE_S)
    for name in (
        holder.address,
        f"{holder.address}#00",
        f"{holder.address}#xx",
        "tcp://example.org:1#" + "00" * 16,
        "",
    ):
        with pytest.raises(RelayBroken):
            reader.pull(name, [0], DEADLINE_S)


def test_with_a_secret_only_those_that_have_it_read(holder: PageRelay, memory: bytearray) -> None:
    one, other = Secret(b"1" * MIN_BYTES), Secret(b"2" * MIN_BYTES)
    slots = memoryview(memory).toreadonly()
    secrets = {"holder": one, "same": one, "other": other, "none": None}
    relays = {name: PageRelay(slots, PAGE_BYTES, STRIDE, host=HOST, secret=each) for name, each in secrets.items()}
    try:
        assert pulled(relays["same"], relays["holder"].name, 0, 2) == [{1}, {3}]
        for name in ("other", "none"):
            with pytest.raises((RelayBroken, RelayTimeout)):
                relays[name].pull(relays["holder"].name, [0], 1.0)
        with pytest.raises((RelayBroken, RelayTimeout)):  # nor do they ask one without it
            relays["same"].pull(holder.name, [0], 1.0)
    finally:
        for relay in relays.values():
            relay.close()


def test_what_is_logged_of_a_name_has_no_secret(holder: PageRelay) -> None:
    assert address_of(holder.name) == holder.address
    assert holder.token.hex() in holder.name and holder.token.hex() not in address_of(holder.name)


def test_a_holder_that_is_gone_is_broken(holder: PageRelay, reader: PageRelay) -> None:
    assert pulled(reader, holder.name, 0) == [{1}]
    holder.close()
    with pytest.raises(RelayBroken, match=r"gone|does not answer"):
        reader.pull(holder.name, [0], DEADLINE_S)


def test_a_silent_peer_holds_a_reader_up_until_its_deadline(reader: PageRelay) -> None:
    with socket.socket() as mute:
        mute.bind((HOST, 0))
        mute.listen()
        secret = "ab" * 16
        with pytest.raises(RelayTimeout, match="pages of tcp://127") as raised:
            reader.pull(f"tcp://{HOST}:{mute.getsockname()[1]}#{secret}", [0], 0.05)
    assert secret not in str(raised.value)


def test_it_listens_at_the_address_that_it_announces_alone(holder: PageRelay) -> None:
    assert holder.address.startswith(f"tcp://{HOST}:")
    port = int(holder.address.rpartition(":")[2])
    own = psutil.Process().net_connections("tcp")
    assert [one.laddr for one in own if one.status == "LISTEN" and one.laddr[1] == port] == [(HOST, port)]
