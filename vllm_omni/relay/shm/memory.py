"""What the processes of one host share: a slab, the table of its leases in front, and the socket by which they met.

    table   64 bytes per slot: words of 8 bytes with the lease's number, the tensor's offset in the slab and its length;
            then a byte per reader: 0, READING, RELEASED or RELEASED_FOR_ALL
    slab    blocks of whole pages

A reader marks a slot READING before it compares the lease's number, and the producer wipes the number before it looks
for readers: one of the two sees the other, so no block is freed under a reader.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import mmap
import os
import socket
import struct
import threading
from collections.abc import Callable

import msgspec
import torch

from vllm_omni.errors import RelayBroken, RelayTimeout
from vllm_omni.messages.payload import Layout, TensorRef
from vllm_omni.relay.base import io_thread
from vllm_omni.relay.slab import CHUNK_BYTES, typed_view

SLOT_BYTES, SLOT_WORDS = 64, 8
EMPTY_SLOT = bytes(SLOT_BYTES)
FLAGS = 24  # offset in a slot
MAX_READERS = SLOT_BYTES - FLAGS  # processes, the producer's own included
NUM_SLOTS = 4096
TABLE_BYTES = NUM_SLOTS * SLOT_BYTES
PRODUCER_WAITS = FLAGS  # byte of slot 0, which is never leased, that is set while the producer waits for room
READING, RELEASED, RELEASED_FOR_ALL = 1, 2, 3
OWN_READER = 0  # the byte of the producer's process

# A stream's block begins with words: how many rows were written, how many read, ...
NUM_WRITTEN, NUM_READ = 0, 1
MAX_LOCATION_BYTES = 128  # a Unix socket's address has less than 108

NUDGE = b"!"
MIN_TIMEOUT_S = 0.001  # 0 would make a socket one that never waits
_fence_lock = threading.Lock()


def fence() -> None:
    """Order stores and loads around it: taking a lock is a locked instruction on every machine."""
    with _fence_lock:
        pass


class Location(msgspec.Struct, frozen=True, array_like=True):
    address: str  # the producer's abstract Unix socket, without the leading zero byte
    slot: int


class Hello(msgspec.Struct, frozen=True, array_like=True):
    """The producer's first and only message, with the slab's descriptor."""

    num_bytes: int  # of the slab
    reader: int  # the consumer's byte in each slot


encode = msgspec.msgpack.Encoder().encode
decode_location = msgspec.msgpack.Decoder(Location).decode
decode_hello = msgspec.msgpack.Decoder(Hello).decode


class Mapping:
    """Table and slab, as one process sees them."""

    def __init__(self, fd: int, num_bytes: int, prefault: bool):
        flags = mmap.MAP_SHARED | (mmap.MAP_POPULATE if prefault else 0)
        whole = mmap.mmap(fd, TABLE_BYTES + num_bytes, flags=flags)
        self.num_bytes = num_bytes
        self.bytes = memoryview(whole)
        self.words = self.bytes.cast("Q")
        self.memory = torch.frombuffer(whole, dtype=torch.uint8, offset=TABLE_BYTES)
        self.typed = {torch.uint8: self.memory}


class Readable:
    """A mapping with this process's place in it: how to take and release what lies there."""

    def __init__(self, mapping: Mapping, reader: int):
        self.mapping = mapping
        self.reader = reader
        self.is_broken = False
        self.on_nudge: list[Callable[[], None]] = []  # of readers that wait for a stream
        self._taken: dict[int, int] = {}  # slot -> lease, of what is read here; it may have been revoked since
        self._lock = threading.Lock()

    def take(self, location: Location, lease: int, layout: Layout) -> torch.Tensor:
        """A view of a leased tensor, which stays until ``release``.

        Raises:
            RelayBroken: the lease is over, or the tensor is not what the reference says.
        """
        mapping, slot = self.mapping, location.slot
        if not 0 < slot < NUM_SLOTS:
            raise RelayBroken(f"a reference names slot {slot} of {NUM_SLOTS}")
        flag = slot * SLOT_BYTES + FLAGS + self.reader
        with self._lock:
            before = mapping.bytes[flag]
            if self.is_broken or not self._mark(slot, lease):
                raise RelayBroken("the tensor is not there any more: released, expired, or its request was aborted")
            offset, num_bytes = mapping.words[slot * SLOT_WORDS + 1], mapping.words[slot * SLOT_WORDS + 2]
            fits = num_bytes == layout.num_bytes and offset + num_bytes <= mapping.num_bytes
            if not fits or offset % layout.dtype.itemsize:
                mapping.bytes[flag] = before
                raise RelayBroken(f"a reference needs {layout.num_bytes} bytes, {num_bytes} were put")
            self._taken[slot] = lease
        return typed_view(mapping.typed, offset, layout)

    def release(self, location: Location, lease: int, for_all: bool = False) -> bool:
        """Whether the producer waits to hear of it."""
        if not 0 < location.slot < NUM_SLOTS:
            return False
        with self._lock:
            # Marked as if it were read, if it was not: so the slot is not given to another lease meanwhile.
            if self._taken.get(location.slot) == lease:
                del self._taken[location.slot]
            elif not self._mark(location.slot, lease):
                return False
            flag = location.slot * SLOT_BYTES + FLAGS + self.reader
            self.mapping.bytes[flag] = RELEASED_FOR_ALL if for_all else RELEASED
            fence()
        return bool(self.mapping.bytes[PRODUCER_WAITS])

    def _mark(self, slot: int, lease: int) -> bool:
        """Keep a lease from ending, unless it has."""
        flag, word = slot * SLOT_BYTES + FLAGS + self.reader, slot * SLOT_WORDS
        mapping = self.mapping
        # Another number: what this process has in the slot belongs to another lease. 0: it belongs to none.
        if lease < 1 or mapping.words[word] != lease:
            return False
        mapping.bytes[flag] = READING
        fence()
        if mapping.words[word] != lease:
            mapping.bytes[flag] = 0
            return False
        return True

    def credits_of(self, location: Location, lease: int, credits: int) -> Callable[[], int]:
        """See ``Streams.credits_of``; nothing is taken."""
        if not 0 < location.slot < NUM_SLOTS:
            raise RelayBroken(f"a reference names slot {location.slot} of {NUM_SLOTS}")
        words, first = self.mapping.words, location.slot * SLOT_WORDS
        offset = words[first + 1]
        if offset + (NUM_READ + 1) * 8 > self.mapping.num_bytes:
            raise RelayBroken("a reference names as a stream what is none")
        start = (TABLE_BYTES + offset) // 8
        flags = slice(location.slot * SLOT_BYTES + FLAGS, (location.slot + 1) * SLOT_BYTES)

        def count() -> int:
            if words[first] != lease or max(self.mapping.bytes[flags]) >= RELEASED:
                return credits
            # Clamped: the stream may just have ended, and its block be another's.
            return min(max(credits - (words[start + NUM_WRITTEN] - words[start + NUM_READ]), 0), credits)

        return count

    def nudge(self) -> None:
        """Wake the producer."""


class Producer(Readable):
    """Another process's slab, and the connection to it."""

    def __init__(self, address: str, timeout_s: float, prefault: bool, on_close: Callable[[Producer], None]):
        self.address = address
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
        try:
            super().__init__(*self._open_slab(timeout_s, prefault))
        except BaseException:
            self.socket.close()
            raise
        self._on_close = on_close
        self.socket.setblocking(False)
        io_thread().call(self._watch)

    def _open_slab(self, timeout_s: float, prefault: bool) -> tuple[Mapping, int]:
        """Connect, and map what the producer sends; the second is this process's byte in each slot."""
        try:
            self.socket.settimeout(max(timeout_s, MIN_TIMEOUT_S))
            self.socket.connect(b"\0" + self.address.encode())
            _refuse_strangers(self.socket)
            data, fds, _, _ = socket.recv_fds(self.socket, 4096, 1, socket.MSG_CMSG_CLOEXEC)
            if not fds:
                raise ConnectionError("it closed the connection")
        except (TimeoutError, BlockingIOError) as exc:  # the latter: too many are waiting for it to accept them
            raise RelayTimeout(f"the producer {self.address} did not answer within {timeout_s:g} s") from exc
        except OSError as exc:
            raise RelayBroken(f"the producer {self.address} is gone: {exc}") from exc
        try:
            hello = decode_hello(data)
            # What can shrink under a mapping kills whoever touches it.
            is_sealed = fcntl.fcntl(fds[0], fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK
            is_whole = os.fstat(fds[0]).st_size == TABLE_BYTES + hello.num_bytes and not hello.num_bytes % CHUNK_BYTES
            if not is_sealed or not is_whole or hello.num_bytes < 1 or not 0 < hello.reader < MAX_READERS:
                raise ValueError(f"{hello} does not fit to the descriptor with it")
            return Mapping(fds[0], hello.num_bytes, prefault), hello.reader
        except (msgspec.DecodeError, OSError, ValueError) as exc:
            raise RelayBroken(f"the producer {self.address} sent what is no slab: {exc}") from exc
        finally:
            os.close(fds[0])

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
            return
        self._tell_readers()

    def _tell_readers(self) -> None:
        for call in list(self.on_nudge):
            call()

    def nudge(self) -> None:
        with contextlib.suppress(OSError):  # full: it is being told already; or gone: the I/O thread notices
            self.socket.send(NUDGE)

    def close(self) -> None:
        """On the I/O thread. Twice does nothing: its end may have been noticed there."""
        if not self.is_broken:
            self.is_broken = True
            io_thread().loop.remove_reader(self.socket)
            self.socket.close()
            self._on_close(self)
            self._tell_readers()


class Consumers:
    """The producer's side of the connections: who reads, and who has died.

    Args:
        fd: of table and slab; ``close`` closes it.
    """

    def __init__(
        self, address: str, fd: int, num_bytes: int, on_lost: Callable[[int], None], on_nudge: Callable[[], None]
    ):
        self._fd = fd
        self._num_bytes = num_bytes
        self._on_lost = on_lost  # a reader has died
        self._on_nudge = on_nudge
        self._sockets: dict[int, socket.socket] = {}  # by reader
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
        self._listener.bind(b"\0" + address.encode())
        self._listener.listen(MAX_READERS)
        self._listener.setblocking(False)
        io_thread().call(lambda: io_thread().loop.add_reader(self._listener, self._accept))

    def _accept(self) -> None:
        try:
            consumer, _ = self._listener.accept()
        except OSError:
            return
        reader = next((one for one in range(1, MAX_READERS) if one not in self._sockets), None)
        try:
            _refuse_strangers(consumer)
            if reader is None:
                raise ConnectionError(f"more than {MAX_READERS - 1} processes read from one producer")
            consumer.setblocking(False)
            # Whoever had the byte before died with it.
            self._on_lost(reader)
            self._sockets[reader] = consumer
            io_thread().loop.add_reader(consumer, self._on_readable, reader)
            socket.send_fds(consumer, [encode(Hello(self._num_bytes, reader))], [self._fd])
        except OSError:
            if reader is not None and self._sockets.get(reader) is consumer:
                self._forget(reader)
            consumer.close()

    def _forget(self, reader: int) -> None:
        consumer = self._sockets.pop(reader)
        io_thread().loop.remove_reader(consumer)
        consumer.close()

    def _on_readable(self, reader: int) -> None:
        try:
            data = self._sockets[reader].recv(64)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._forget(reader)
            self._on_lost(reader)
        self._on_nudge()

    def nudge(self) -> None:
        """Wake all: which of them reads a stream is not known here."""
        for consumer in list(self._sockets.values()):
            with contextlib.suppress(OSError):
                consumer.send(NUDGE)

    def close(self) -> None:
        """On the I/O thread."""
        for one in (self._listener, *self._sockets.values()):
            io_thread().loop.remove_reader(one)
            one.close()
        self._sockets.clear()
        os.close(self._fd)


def parse_location(ref: TensorRef) -> Location:
    return _parse_location(ref.location)


@functools.lru_cache(NUM_SLOTS)  # a producer gives the same few slots out again and again
def _parse_location(location: bytes) -> Location:
    if len(location) > MAX_LOCATION_BYTES:
        raise RelayBroken(f"a reference points somewhere with {len(location)} bytes")
    try:
        return decode_location(location)
    except (msgspec.DecodeError, UnicodeDecodeError) as exc:
        raise RelayBroken(f"a reference does not say where it points: {exc}") from exc


def _refuse_strangers(peer: socket.socket) -> None:
    """An abstract socket has no permissions: both ends must be this user's, or root's."""
    _, uid, _ = struct.unpack("3i", peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    if uid not in (os.geteuid(), 0):
        raise ConnectionError(f"user {uid} is at the other end")
