"""Shared memory between processes of one host: one slab per producer, mapped once by each consumer.

Where the time goes in shared memory is page faults, 0.85 us for each 4 KB, not the making of a name: so the slab is made
and touched once, at start, and a tensor is one copy into it, or none. It is a memfd, whose descriptor goes over a Unix
socket; it has no name, so that nothing stays behind in /dev/shm however its owner ends.

Releasing is one byte: in front of the slab lies a table of slots, one for each lease, in which every reader has a byte
of its own. Nobody is woken up; the producer looks when it needs room. Only who waits (a producer for room, either end
of a stream) is told through the socket, and whose end of the socket closes is dead.

    table   64 bytes per slot: the lease's number (8), then a byte per reader: 0, READING or RELEASED
    slab    blocks of whole pages

A reader marks a slot READING before it compares the lease's number, and the producer wipes the number before it looks
for readers: one of the two sees the other, so no block is freed under a reader.

From: SGLang-Omni (communication, ``shm``); Omni-Flow section 4.2.
"""

from __future__ import annotations

import asyncio
import contextlib
import mmap
import os
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future

import msgspec
import torch

from vllm_omni.errors import PoolExhausted, RelayBroken, RelayClosed, RelayTimeout
from vllm_omni.relay.base import LEASE_S, TIMEOUT_S, Clock, Layout, TensorRef, check_ref, dtype_name, io_thread
from vllm_omni.relay.buffer_pool import Block
from vllm_omni.relay.slab import CHUNK_BYTES, NUM_BYTES, Lease, SlabRelay, typed_view
from vllm_omni.relay.stream import CREDITS, StreamReader, Streams, StreamWriter

SLOT_BYTES = 64
MAX_READERS = SLOT_BYTES - 8  # processes, the producer's own included
NUM_SLOTS = 4096
TABLE_BYTES = NUM_SLOTS * SLOT_BYTES
PRODUCER_WAITS = 8  # byte of slot 0, which is never leased, that is set while the producer waits for room
READING, RELEASED = 1, 2
OWN_READER = 0  # the byte of the producer's process

# A stream's block: words of 8 bytes, the error's text, and the ring.
NUM_WRITTEN, NUM_READ, STATE, READER_WAITS, WRITER_WAITS = range(5)
ERROR_OFFSET = 64
RING_OFFSET = 256
OPEN, ENDED, FAILED = range(3)

_NUDGE = b"!"
_fence_lock = threading.Lock()


def _fence() -> None:
    """Order stores and loads around it: taking a lock is a locked instruction on every machine."""
    with _fence_lock:
        pass


class Location(msgspec.Struct, frozen=True, array_like=True):
    address: str  # the producer's abstract Unix socket, without the leading zero byte
    slot: int
    offset: int  # in the slab, bytes


class Hello(msgspec.Struct, frozen=True, array_like=True):
    """The producer's first and only message, with the slab's descriptor."""

    num_bytes: int  # of the slab
    reader: int  # the consumer's byte in each slot


_encode = msgspec.msgpack.Encoder().encode
_decode_location = msgspec.msgpack.Decoder(Location).decode
_decode_hello = msgspec.msgpack.Decoder(Hello).decode


class _Mapping:
    """Table and slab, as one process sees them."""

    def __init__(self, fd: int, num_bytes: int):
        flags = mmap.MAP_SHARED | mmap.MAP_POPULATE
        whole = mmap.mmap(fd, TABLE_BYTES + num_bytes, flags=flags)
        self.num_bytes = num_bytes
        self.bytes = memoryview(whole)
        self.words = self.bytes.cast("Q")
        self.memory = torch.frombuffer(whole, dtype=torch.uint8, offset=TABLE_BYTES)
        self.typed = {torch.uint8: self.memory}


class _Readable:
    """A mapping with this process's place in it: how to take and release what lies there."""

    def __init__(self, mapping: _Mapping, reader: int):
        self.mapping = mapping
        self.reader = reader
        self.is_broken = False
        self.on_nudge: list[Callable[[], None]] = []  # of readers that wait for a stream
        self._lock = threading.Lock()

    def take(self, location: Location, lease: int, layout: Layout) -> torch.Tensor:
        mapping = self.mapping
        if not (0 < location.slot < NUM_SLOTS and 0 <= location.offset <= mapping.num_bytes - layout.num_bytes):
            raise RelayBroken(f"a reference names slot {location.slot}, byte {location.offset}: outside of the slab")
        if location.offset % layout.dtype.itemsize:
            raise RelayBroken(f"a reference names byte {location.offset}, where no {layout.dtype} begins")
        if self.is_broken or not self._mark(location.slot, lease):
            raise RelayBroken("the tensor is not there any more: released, expired, or its request was aborted")
        return typed_view(mapping.typed, location.offset, layout)

    def release(self, location: Location, lease: int) -> bool:
        """Whether the producer waits to hear of it."""
        if not 0 < location.slot < NUM_SLOTS:
            return False
        # Marked as if it were read, if it was not: so the slot is not given to another lease meanwhile.
        if self._mark(location.slot, lease):
            self.mapping.bytes[location.slot * SLOT_BYTES + 8 + self.reader] = RELEASED
            _fence()
        return bool(self.mapping.bytes[PRODUCER_WAITS])

    def _mark(self, slot: int, lease: int) -> bool:
        """Keep a lease from ending, unless it has."""
        flag, word = slot * SLOT_BYTES + 8 + self.reader, slot * (SLOT_BYTES // 8)
        mapping = self.mapping
        with self._lock:
            if mapping.words[word] != lease:  # what this process has in the slot belongs to another lease
                return False
            mapping.bytes[flag] = READING
            _fence()
            if mapping.words[word] != lease:
                mapping.bytes[flag] = 0
                return False
        return True

    def nudge(self) -> None:
        """Wake the producer."""


class _Producer(_Readable):
    """Another process's slab, and the connection to it."""

    def __init__(self, address: str, timeout_s: float):
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
        try:
            self.socket.settimeout(timeout_s)
            self.socket.connect(b"\0" + address.encode())
            _refuse_strangers(self.socket)
            data, fds, _, _ = socket.recv_fds(self.socket, 4096, 1)
            if not fds:
                raise ConnectionError("it closed the connection")
        except TimeoutError as exc:
            self.socket.close()
            raise RelayTimeout(f"the producer {address} did not answer within {timeout_s:g} s") from exc
        except OSError as exc:
            self.socket.close()
            raise RelayBroken(f"the producer {address} is gone: {exc}") from exc
        try:
            hello = _decode_hello(data)
            if os.fstat(fds[0]).st_size != TABLE_BYTES + hello.num_bytes or not 0 < hello.reader < MAX_READERS:
                raise RelayBroken(f"the producer {address} sent what is no slab")
            mapping = _Mapping(fds[0], hello.num_bytes)
        except msgspec.DecodeError as exc:
            self.socket.close()
            raise RelayBroken(f"the producer {address} sent what is no greeting: {exc}") from exc
        finally:
            os.close(fds[0])
        super().__init__(mapping, hello.reader)
        self.address = address
        self.socket.setblocking(False)
        io_thread().call(self._watch)

    def _watch(self) -> None:
        io_thread().loop.add_reader(self.socket, self._on_readable)

    def _on_readable(self) -> None:
        try:
            data = self.socket.recv(64)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self.close()
        for call in list(self.on_nudge):
            call()

    def nudge(self) -> None:
        try:
            self.socket.send(_NUDGE)
        except OSError:  # full: it is being told already; or gone: the reader of the socket notices
            pass

    def close(self) -> None:
        """On the I/O thread."""
        self.is_broken = True
        io_thread().loop.remove_reader(self.socket)
        self.socket.close()


class _Consumers:
    """The producer's side of the connections: who reads, and who has died."""

    def __init__(self, relay: ShmRelay):
        self._relay = relay
        self._sockets: dict[int, socket.socket] = {}  # by reader
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
        self._listener.bind(b"\0" + relay.address.encode())
        self._listener.listen(MAX_READERS)
        self._listener.setblocking(False)
        io_thread().call(lambda: io_thread().loop.add_reader(self._listener, self._accept))

    def _accept(self) -> None:
        try:
            consumer, _ = self._listener.accept()
        except OSError:
            return
        free = set(range(1, MAX_READERS)) - set(self._sockets)
        try:
            _refuse_strangers(consumer)
            if not free:
                raise ConnectionError(f"more than {MAX_READERS - 1} processes read from one producer")
            consumer.setblocking(False)
            reader = min(free)
            # Whoever had the byte before died with it.
            self._relay._lose_reader(reader)
            hello = _encode(Hello(self._relay.pool.num_bytes, reader))
            socket.send_fds(consumer, [hello], [self._relay._fd])
        except OSError:
            consumer.close()
            return
        self._sockets[reader] = consumer
        io_thread().loop.add_reader(consumer, self._on_readable, reader)

    def _on_readable(self, reader: int) -> None:
        try:
            data = self._sockets[reader].recv(64)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            consumer = self._sockets.pop(reader)
            io_thread().loop.remove_reader(consumer)
            consumer.close()
            self._relay._lose_reader(reader)
        self._relay._on_nudge()

    def nudge(self) -> None:
        """Wake all: which of them reads a stream is not known here."""
        for consumer in list(self._sockets.values()):
            try:
                consumer.send(_NUDGE)
            except OSError:
                pass

    def close(self) -> None:
        """On the I/O thread."""
        for one in (self._listener, *self._sockets.values()):
            io_thread().loop.remove_reader(one)
            one.close()
        self._sockets.clear()


class ShmRelay(SlabRelay, Streams):
    """One slab of this process, and those of the producers that it reads from. Linux.

    Args:
        num_bytes: of the slab, whole chunks; touched at once, 0.9 ms for each MB. 0: this process only reads.
    """

    backend = "shm"

    def __init__(self, num_bytes: int = NUM_BYTES, *, lease_s: float = LEASE_S, clock: Clock = time.monotonic):
        self.address = f"vllm-omni-{os.getpid()}-{secrets.token_hex(8)}"
        size = max(num_bytes, CHUNK_BYTES)
        self._fd = os.memfd_create(self.address, os.MFD_CLOEXEC)
        os.truncate(self._fd, TABLE_BYTES + size)
        self._mapping = _Mapping(self._fd, size)
        super().__init__(self._mapping.memory, lease_s=lease_s, clock=clock)
        self._own = _Readable(self._mapping, OWN_READER)
        self._typed = self._mapping.typed
        self._slots = list(range(NUM_SLOTS - 1, 0, -1))  # free ones
        self._slot_of: dict[int, int] = {}  # lease's number -> slot
        self._producers: dict[str, _Producer] = {}
        self._consumers = _Consumers(self) if num_bytes else None

    # -- producer -----------------------------------------------------------------------------------------------------

    def _locate(self, lease: Lease, offset: int) -> bytes:
        return _encode(Location(self.address, self._slot_of[lease.number], offset))

    def _announce(self, lease: Lease) -> None:
        if not self._slots:
            self._collect()
            if not self._slots:
                raise PoolExhausted(f"{NUM_SLOTS - 1} tensors are put and not released")
        slot = self._slots.pop()
        self._slot_of[lease.number] = slot
        self._mapping.words[slot * (SLOT_BYTES // 8)] = lease.number

    def _flags(self, lease: Lease) -> bytes:
        start = self._slot_of[lease.number] * SLOT_BYTES + 8
        return bytes(self._mapping.bytes[start : start + MAX_READERS])

    def _is_released(self, lease: Lease) -> bool:
        flags = self._flags(lease)
        if lease.is_revoked:
            return READING not in flags
        if flags.count(RELEASED) < lease.num_readers:
            return False
        return not self._revoke(lease)

    def _revoke(self, lease: Lease) -> bool:
        self._mapping.words[self._slot_of[lease.number] * (SLOT_BYTES // 8)] = 0
        _fence()
        return READING in self._flags(lease)

    def _forget(self, lease: Lease) -> None:
        slot = self._slot_of.pop(lease.number)
        start = slot * SLOT_BYTES
        self._mapping.bytes[start : start + SLOT_BYTES] = bytes(SLOT_BYTES)
        self._slots.append(slot)

    def _lose_reader(self, reader: int) -> None:
        """It has died: what it was reading, it reads no more."""
        with self._lock:
            for slot in self._slot_of.values():
                flag = slot * SLOT_BYTES + 8 + reader
                if self._mapping.bytes[flag] == READING:
                    self._mapping.bytes[flag] = RELEASED

    @contextlib.contextmanager
    def _room(self) -> Iterator[Future[None]]:
        with super()._room() as room:
            self._mapping.bytes[PRODUCER_WAITS] = 1
            _fence()
            yield room

    def _on_nudge(self) -> None:
        """A reader has released something, read of a stream, or died."""
        self._mapping.bytes[PRODUCER_WAITS] = 0
        self._tell_room()

    def abort(self, request_id: str) -> None:
        super().abort(request_id)
        self._wake_readers()

    def _wake_readers(self) -> None:
        if self._consumers is not None:
            self._consumers.nudge()
        for wake in list(self._own.on_nudge):
            wake()

    # -- consumer -----------------------------------------------------------------------------------------------------

    def get_nowait(self, ref: TensorRef) -> torch.Tensor | None:
        layout = check_ref(ref, self.backend)
        self._check_open()
        self._num_gets += 1
        if not layout.num_bytes:
            return torch.empty(layout.shape, dtype=layout.dtype)
        location = _parse(ref)
        source = self._source(location)
        return None if source is None else source.take(location, ref.lease, layout)

    async def _fetch(self, ref: TensorRef) -> torch.Tensor:
        layout, location = check_ref(ref, self.backend), _parse(ref)
        source = await asyncio.to_thread(self._connect, location.address, TIMEOUT_S)
        return source.take(location, ref.lease, layout)

    def get_blocking(self, ref: TensorRef, timeout_s: float = TIMEOUT_S) -> torch.Tensor:
        tensor = self.get_nowait(ref)
        if tensor is not None:
            return tensor
        layout, location = check_ref(ref, self.backend), _parse(ref)
        return self._connect(location.address, timeout_s).take(location, ref.lease, layout)

    def release(self, ref: TensorRef) -> None:
        if not ref.lease or self._closed:
            return
        location = _parse(ref)
        source = self._source(location)
        if source is None:
            try:
                source = self._connect(location.address, TIMEOUT_S)
            except (RelayBroken, RelayTimeout):  # nothing is left to be released
                return
        if source.release(location, ref.lease):
            source.nudge()
            if source is self._own:
                self._on_nudge()

    def _source(self, location: Location) -> _Readable | None:
        """Where a tensor lies, if it is mapped already."""
        if location.address == self.address:
            return self._own
        producer = self._producers.get(location.address)
        if producer is not None and producer.is_broken:
            self._producers.pop(location.address, None)
            raise RelayBroken(f"the producer {location.address} is gone")
        return producer

    def _connect(self, address: str, timeout_s: float) -> _Readable:
        with self._lock:
            self._check_open()
            producer = self._producers.get(address)
            if producer is None:
                producer = self._producers[address] = _Producer(address, timeout_s)
            return producer

    # -- streams ------------------------------------------------------------------------------------------------------

    def open_stream(
        self, request_id: str, row_shape: tuple[int, ...], dtype: torch.dtype, *, credits: int = CREDITS
    ) -> StreamWriter:
        shape = (credits, *row_shape)
        ring = torch.empty(shape, dtype=dtype, device="meta")
        with self._lock:
            self._check_open()
            block = self._allocate(RING_OFFSET + ring.numel() * ring.element_size())
            start = (TABLE_BYTES + block.offset) // 8
            for word in range(RING_OFFSET // 8):
                self._mapping.words[start + word] = 0
            try:
                lease = self._grant(request_id, block, 1)
            except BaseException:
                self.pool.free(block)
                raise
            ref = TensorRef(self.backend, shape, dtype_name(ring), self._locate(lease, block.offset), lease.number)
        return _ShmWriter(self, ref, lease, block)

    async def read_stream(self, ref: TensorRef, *, timeout_s: float = TIMEOUT_S) -> StreamReader:
        if self._source(_parse(ref)) is None:
            await asyncio.to_thread(self._connect, _parse(ref).address, timeout_s)
        return self.read_stream_blocking(ref, timeout_s)

    def read_stream_blocking(self, ref: TensorRef, timeout_s: float = TIMEOUT_S) -> StreamReader:
        layout, location = check_ref(ref, self.backend), _parse(ref)
        if not layout.num_bytes:
            raise RelayBroken(f"a stream's reference has the shape {list(ref.shape)}")
        source = self._source(location) or self._connect(location.address, timeout_s)
        block = Layout(torch.uint8, (RING_OFFSET + layout.num_bytes,), RING_OFFSET + layout.num_bytes)
        source.take(location, ref.lease, block)
        return _ShmReader(self, source, ref, layout, location)

    # -- both ---------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        if self._closed:
            return
        super().close()
        with self._lock:
            producers, self._producers = list(self._producers.values()), {}
        for one in (*producers, *([self._consumers] if self._consumers else [])):
            io_thread().call(one.close)
        os.close(self._fd)


def _parse(ref: TensorRef) -> Location:
    try:
        return _decode_location(ref.location)
    except (msgspec.DecodeError, UnicodeDecodeError) as exc:
        raise RelayBroken(f"a reference does not say where it points: {exc}") from exc


def _refuse_strangers(peer: socket.socket) -> None:
    """An abstract socket has no permissions: both ends must be this user's, or root's."""
    _, uid, _ = struct.unpack("3i", peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    if uid not in (os.geteuid(), 0):
        raise ConnectionError(f"user {uid} is at the other end")


class _ShmWriter(StreamWriter):
    def __init__(self, relay: ShmRelay, ref: TensorRef, lease: Lease, block: Block):
        self.ref = ref
        self._relay = relay
        self._lease = lease
        self._words = relay._mapping.words
        self._start = (TABLE_BYTES + block.offset) // 8
        self._credits = ref.shape[0]
        self._row_shape = ref.shape[1:]
        layout = check_ref(ref, relay.backend)
        self._dtype = layout.dtype
        self._ring = relay._view(block.offset + RING_OFFSET, layout)
        self._num_written = 0
        self._error_at = TABLE_BYTES + block.offset + ERROR_OFFSET
        self._has_ended = False

    @property
    def num_credits(self) -> int:
        with self._relay._lock:
            if self._has_reader_gone():
                return self._credits
            return self._credits - (self._num_written - self._words[self._start + NUM_READ])

    def _has_reader_gone(self) -> bool:
        number = self._lease.number
        return number not in self._relay._leases or RELEASED in self._relay._flags(self._lease)

    def write_nowait(self, rows: torch.Tensor) -> None:
        if self._has_ended:
            raise RelayClosed("this stream has ended")
        if rows.shape[1:] != self._row_shape or rows.dtype != self._dtype:
            raise ValueError(
                f"rows are {self._dtype} {list(self._row_shape)} in this stream, not {rows.dtype} {list(rows.shape[1:])}"
            )
        with self._relay._lock:
            if self._has_reader_gone():
                return
            num_rows = len(rows)
            if num_rows > self.num_credits:
                raise PoolExhausted(
                    f"{num_rows} rows for a stream with {self.num_credits} of {self._credits} credits left",
                    is_final=num_rows > self._credits,
                )
            first = self._num_written % self._credits
            head = min(num_rows, self._credits - first)
            self._ring[first : first + head] = rows[:head]
            if head < num_rows:
                self._ring[: num_rows - head] = rows[head:]
            self._num_written += num_rows
            _fence()
            self._words[self._start + NUM_WRITTEN] = self._num_written
            self._wake_reader()

    async def write(self, rows: torch.Tensor, *, timeout_s: float = TIMEOUT_S) -> None:
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                self.write_nowait(rows)
                return
            except PoolExhausted as exc:
                if exc.is_final:
                    raise
                cause = exc
            with self._relay._room() as room:
                self._words[self._start + WRITER_WAITS] = 1
                _fence()
                if len(rows) > self.num_credits:
                    await self._relay._await_room(room, deadline - time.monotonic(), cause)

    def end(self, error: str = "") -> None:
        if self._has_ended:
            return
        self._has_ended = True
        with self._relay._lock:
            if self._has_reader_gone():
                return
            text = error.encode(errors="replace")[: RING_OFFSET - ERROR_OFFSET]
            self._relay._mapping.bytes[self._error_at : self._error_at + len(text)] = text
            _fence()
            self._words[self._start + STATE] = FAILED if error else ENDED
            self._wake_reader()

    def _wake_reader(self) -> None:
        _fence()
        if self._words[self._start + READER_WAITS]:
            self._words[self._start + READER_WAITS] = 0
            self._relay._wake_readers()


class _ShmReader(StreamReader):
    def __init__(self, relay: ShmRelay, source: _Readable, ref: TensorRef, layout: Layout, location: Location):
        self._relay = relay
        self._source = source
        self._ref = ref
        self._location = location
        self._words = source.mapping.words
        self._start = (TABLE_BYTES + location.offset) // 8
        self._slot = location.slot * (SLOT_BYTES // 8)
        self._credits = ref.shape[0]
        self._ring = typed_view(source.mapping.typed, location.offset + RING_OFFSET, layout)
        self._num_read = self._words[self._start + NUM_READ]
        self._is_closed = False

    @property
    def num_unread(self) -> int:
        return min(max(self._words[self._start + NUM_WRITTEN] - self._num_read, 0), self._credits)

    @property
    def has_ended(self) -> bool:
        return bool(self._words[self._start + STATE] == ENDED)

    def _is_broken(self) -> bool:
        return self._source.is_broken or self._words[self._slot] != self._ref.lease

    def read_nowait(self) -> torch.Tensor:
        if self._is_closed:
            raise RelayClosed("this stream was closed by its reader")
        state = self._words[self._start + STATE]
        _fence()
        num_rows = self.num_unread
        if not num_rows and state == FAILED:
            block = self._source.mapping.bytes[TABLE_BYTES + self._location.offset :]
            text = bytes(block[ERROR_OFFSET:RING_OFFSET]).rstrip(b"\0")
            raise RelayBroken(text.decode(errors="replace"))
        if not num_rows and state == OPEN and self._is_broken():
            raise RelayBroken("the producer of a stream is gone, or the stream's request was aborted")
        first = self._num_read % self._credits
        head = min(num_rows, self._credits - first)
        rows = self._ring[first : first + head].clone()
        if head < num_rows:
            rows = torch.cat([rows, self._ring[: num_rows - head]])
        self._num_read += num_rows
        _fence()
        self._words[self._start + NUM_READ] = self._num_read
        _fence()
        if num_rows and self._words[self._start + WRITER_WAITS]:
            self._words[self._start + WRITER_WAITS] = 0
            self._wake_producer()
        return rows

    def _wake_producer(self) -> None:
        self._source.nudge()
        if self._source is self._relay._own:
            self._relay._on_nudge()

    async def read(self, *, timeout_s: float = TIMEOUT_S) -> torch.Tensor:
        deadline = time.monotonic() + timeout_s
        loop = asyncio.get_running_loop()
        while True:
            woken = asyncio.Event()

            def wake(woken: asyncio.Event = woken) -> None:
                loop.call_soon_threadsafe(woken.set)

            self._source.on_nudge.append(wake)
            try:
                self._words[self._start + READER_WAITS] = 1
                _fence()
                if self.num_unread or self.has_ended:
                    return self.read_nowait()
                rows = self.read_nowait()  # raises what there is to raise
                if len(rows) or self.has_ended:
                    return rows
                await asyncio.wait_for(woken.wait(), max(deadline - time.monotonic(), 0))
            except TimeoutError as exc:
                raise RelayTimeout(f"no row came within {timeout_s:g} s") from exc
            finally:
                self._source.on_nudge.remove(wake)

    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            if self._source.release(self._location, self._ref.lease) or self._words[self._start + WRITER_WAITS]:
                self._wake_producer()
