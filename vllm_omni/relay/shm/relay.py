"""Shared memory between processes of one host: one slab per producer, mapped once by each consumer.

Most of the time that shared memory costs is page faults, 0.85 us for each 4 KB: so the slab is made and touched once,
at start, and a tensor is one copy into it, or none. It is a memfd, whose descriptor goes over a Unix socket; it has no
name, so that nothing stays in /dev/shm however its owner ends.

A release is one byte: in front of the slab lies a table of slots, one for each lease, in which every reader has a byte
of its own. It wakes no process; the producer looks at the table when it needs room. Only an end that waits (a producer
for room, either end of a stream) is notified through the socket. A process has died when its end of the socket closes.

From: SGLang-Omni (communication, ``shm``); Omni-Flow section 4.2.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import secrets
from collections.abc import Callable, Iterator
from concurrent.futures import Future

import torch

from vllm_omni.errors import PoolExhausted, RelayBroken, RelayTimeout
from vllm_omni.messages.payload import Layout, TensorRef, make_layout
from vllm_omni.relay.base import TIMEOUT_S
from vllm_omni.relay.io_thread import io_thread
from vllm_omni.relay.shm.connection import Consumers, Producer
from vllm_omni.relay.shm.memory import (
    EMPTY_SLOT,
    FLAGS,
    NUM_SLOTS,
    OWN_READER,
    PRODUCER_WAITS,
    READING,
    RELEASED,
    RELEASED_FOR_ALL,
    SLOT_BYTES,
    SLOT_WORDS,
    TABLE_BYTES,
    Location,
    Mapping,
    Readable,
    encode,
    fence,
    parse_location,
)
from vllm_omni.relay.shm.stream import HEADER_BYTES, ShmReader, ShmWriter
from vllm_omni.relay.slab import CHUNK_BYTES, NUM_BYTES, Lease
from vllm_omni.relay.stream import CREDITS, StreamReader, Streams, StreamWriter


class ShmRelay(Streams):
    """One slab of this process, and those of the producers that it reads from. Linux.

    Args:
        num_bytes: of the slab, whole chunks. 0: this process only reads.
        prefault: touch the slab at once, 0.9 ms for each MB, and map those of others whole.
    """

    backend = "shm"

    def __init__(self, num_bytes: int = NUM_BYTES, *, prefault: bool = True):
        self.address = f"vllm-omni-{os.getpid()}-{secrets.token_hex(8)}"
        size = max(num_bytes, CHUNK_BYTES)
        fd = os.memfd_create(self.address, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        with contextlib.ExitStack() as unless_it_listens:
            unless_it_listens.callback(os.close, fd)
            os.truncate(fd, TABLE_BYTES + size)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
            self.mapping = Mapping(fd, size, prefault)  # for the streams' writers
            super().__init__(self.mapping.memory)
            self._prefault = prefault
            self._own = Readable(self.mapping, OWN_READER)
            self._typed = self.mapping.typed
            self._slots = list(range(NUM_SLOTS - 1, 0, -1))  # free ones
            self._locations: dict[int, bytes] = {}  # by slot
            self._producers: dict[str, Producer] = {}
            self._consumers: Consumers | None = None
            if num_bytes:
                self._consumers = Consumers(self.address, fd, size, self._lose_reader, self._on_nudge)
                unless_it_listens.pop_all()

    # -- producer -----------------------------------------------------------------------------------------------------

    def locate(self, lease: Lease) -> bytes:
        location = self._locations.get(lease.slot)
        if location is None:
            location = self._locations[lease.slot] = encode(Location(self.address, lease.slot))
        return location

    def announce(self, lease: Lease) -> None:
        if not self._slots:
            self.collect()
            if not self._slots:
                raise PoolExhausted(f"{NUM_SLOTS - 1} tensors are put and not released")
        lease.slot = self._slots.pop()
        words, word = self.mapping.words, lease.slot * SLOT_WORDS
        words[word + 1], words[word + 2] = lease.offset, lease.num_bytes
        fence()
        words[word] = lease.number

    def is_released(self, lease: Lease) -> bool:
        flags = self.mapping.flags(lease.slot)
        if lease.is_revoked:
            return READING not in flags
        if RELEASED_FOR_ALL not in flags and flags.count(RELEASED) + lease.num_gone < lease.num_readers:
            return False
        # Revoked for good: a reader that comes too late may overwrite its byte.
        lease.is_revoked = True
        return not self.revoke(lease)

    def is_being_read(self, lease: Lease) -> bool:
        return READING in self.mapping.flags(lease.slot)

    def revoke(self, lease: Lease) -> bool:
        self.mapping.words[lease.slot * SLOT_WORDS] = 0
        fence()
        return self.is_being_read(lease)

    def forget(self, lease: Lease) -> None:
        start = lease.slot * SLOT_BYTES
        self.mapping.bytes[start : start + SLOT_BYTES] = EMPTY_SLOT
        self._slots.append(lease.slot)

    def _lose_reader(self, reader: int) -> None:
        """End the reads of a process that has died; its byte is free for the next reader."""
        with self.lock:
            self.collect()  # before its bytes are cleared: one may say RELEASED_FOR_ALL
            for lease in self._leases.values():
                flag = lease.slot * SLOT_BYTES + FLAGS + reader
                if self.mapping.bytes[flag]:
                    self.mapping.bytes[flag] = 0
                    lease.num_gone += 1
            self.collect()

    @contextlib.contextmanager
    def waiting_for_room(self) -> Iterator[Future[None]]:
        with super().waiting_for_room() as room:
            self.mapping.bytes[PRODUCER_WAITS] = 1
            fence()
            yield room

    def _on_nudge(self) -> None:
        """A reader has released something, has read rows of a stream, or has died."""
        self.mapping.bytes[PRODUCER_WAITS] = 0
        self.notify_room()

    def abort(self, request_id: str | None) -> None:
        super().abort(request_id)
        self.wake_readers()

    def wake_readers(self) -> None:
        """Wake the readers of this relay's streams, in all processes."""
        if self._consumers is not None:
            self._consumers.nudge()
        self._own.wake_readers()

    # -- consumer -----------------------------------------------------------------------------------------------------

    def take(self, ref: TensorRef, layout: Layout) -> torch.Tensor | None:
        location = parse_location(ref)
        source = self._source(location)
        return None if source is None else source.take(location, ref.lease, layout)

    async def fetch(self, ref: TensorRef, layout: Layout, timeout_s: float) -> torch.Tensor:
        location = parse_location(ref)
        return (await self._reach(location, timeout_s)).take(location, ref.lease, layout)

    def release(self, ref: TensorRef, *, for_all: bool = False) -> None:
        if not ref.lease or self.is_closed:
            return
        location = parse_location(ref)
        try:
            source = self._source(location) or self._connect(location.address, TIMEOUT_S)
        except (RelayBroken, RelayTimeout):  # the producer is gone, and the lease with it
            return
        if source.release(location, ref.lease, for_all):
            self.nudge(source)

    def nudge(self, source: Readable) -> None:
        """Wake the producer of a slab: another process, or this relay itself."""
        source.nudge()
        if source is self._own:
            self._on_nudge()

    def _source(self, location: Location) -> Readable | None:
        """The slab that a tensor lies in, if it is mapped already."""
        return self._own if location.address == self.address else self._producers.get(location.address)

    async def _reach(self, location: Location, timeout_s: float) -> Readable:
        source = self._source(location)
        return await asyncio.to_thread(self._connect, location.address, timeout_s) if source is None else source

    def _connect(self, address: str, timeout_s: float) -> Readable:
        with self.lock:
            self.check_open()
            producer = self._producers.get(address)
        if producer is not None:
            return producer
        # Without the lock: the producer that answers takes its own, perhaps while it connects to this relay.
        producer = made = Producer(address, timeout_s, self._prefault, self._remove_producer)
        with self.lock:
            if not self.is_closed and not made.is_broken:
                producer = self._producers.setdefault(address, made)
        if self.is_closed or producer is not made:  # closed meanwhile, or another thread was faster
            io_thread().call(made.close)
            self.check_open()
        return producer

    def _remove_producer(self, producer: Producer) -> None:
        """Its connection has ended: its slab stays mapped only as long as tensors that were taken from it live."""
        with self.lock:
            if self._producers.get(producer.address) is producer:
                del self._producers[producer.address]

    # -- streams ------------------------------------------------------------------------------------------------------

    def open_stream(
        self, request_id: str, row_shape: tuple[int, ...], dtype: torch.dtype, *, credits: int = CREDITS
    ) -> StreamWriter:
        return ShmWriter(self, *self.open_ring(request_id, row_shape, dtype, credits, HEADER_BYTES))

    async def _subscribe(self, ref: TensorRef, layout: Layout, timeout_s: float) -> StreamReader:
        location = parse_location(ref)
        source = await self._reach(location, timeout_s)
        num_bytes = HEADER_BYTES + layout.num_bytes
        source.take(location, ref.lease, make_layout(torch.uint8, (num_bytes,)))
        return ShmReader(self, source, ref, layout)

    def credits_of(self, ref: TensorRef) -> Callable[[], int]:
        location = parse_location(ref)
        if not ref.shape:
            raise RelayBroken(f"a stream's reference has the shape {list(ref.shape)}")
        source = self._source(location) or self._connect(location.address, TIMEOUT_S)
        return source.credits_of(location, ref.lease, ref.shape[0])

    # -- both ---------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        if self.is_closed:
            return
        super().close()
        with self.lock:
            producers, self._producers = list(self._producers.values()), {}
        for producer in producers:
            io_thread().call(producer.close)
        self._own.is_broken = True
        if self._consumers is not None:
            io_thread().call(self._consumers.close)
        self._own.wake_readers()
