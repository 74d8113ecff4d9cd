"""The sockets through which a producer and its consumers meet, wake each other, and notice that the other has died."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import socket
import struct
from collections.abc import Callable

import msgspec

from vllm_omni.errors import RelayBroken, RelayTimeout
from vllm_omni.relay.io_thread import io_thread
from vllm_omni.relay.shm.memory import MAX_READERS, TABLE_BYTES, Mapping, Readable, encode
from vllm_omni.relay.slab import CHUNK_BYTES

logger = logging.getLogger(__name__)

NUDGE = b"!"
MIN_TIMEOUT_S = 0.001  # 0 would make the socket non-blocking
ACCEPT_RETRY_S = 0.5  # a consumer waits for longer (``TIMEOUT_S``)


class Hello(msgspec.Struct, frozen=True, array_like=True):
    """The producer's first and only message, with the slab's descriptor."""

    num_bytes: int  # of the slab
    reader: int  # the consumer's byte in each slot


_decode_hello = msgspec.msgpack.Decoder(Hello).decode


class Producer(Readable):
    """Another process's slab, and the connection to it."""

    def __init__(self, address: str, timeout_s: float, prefault: bool, on_close: Callable[[Producer], None]):
        self.address = address
        self._on_close = on_close
        try:
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
        except OSError as exc:  # no file descriptor is free
            raise RelayBroken(f"the producer {address} cannot be reached: {exc}") from exc
        try:
            mapping, reader = self._open_slab(timeout_s, prefault)
        except BaseException:
            self._socket.close()
            raise
        super().__init__(mapping, reader)
        self._socket.setblocking(False)
        io_thread().call(lambda: io_thread().loop.add_reader(self._socket, self._on_readable))

    def _open_slab(self, timeout_s: float, prefault: bool) -> tuple[Mapping, int]:
        """Connect, and map the slab that the producer sends; returns it with this process's byte in each slot."""
        try:
            self._socket.settimeout(max(timeout_s, MIN_TIMEOUT_S))
            self._socket.connect(b"\0" + self.address.encode())
            _reject_other_users(self._socket)
            data, fds, flags, _ = socket.recv_fds(self._socket, 4096, 1, socket.MSG_CMSG_CLOEXEC)
            if not fds:
                has_lost_one = flags & socket.MSG_CTRUNC
                raise ConnectionError("no file descriptor is free" if has_lost_one else "it closed the connection")
        except (TimeoutError, BlockingIOError) as exc:  # the latter: its queue of connections is full
            raise RelayTimeout(f"the producer {self.address} did not answer within {timeout_s:g} s") from exc
        except OSError as exc:
            raise RelayBroken(f"the producer {self.address} cannot be reached: {exc}") from exc
        try:
            hello = _decode_hello(data)
            # A mapping that can shrink would kill this process when it touches the missing part.
            is_sealed = fcntl.fcntl(fds[0], fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK
            is_whole = os.fstat(fds[0]).st_size == TABLE_BYTES + hello.num_bytes and not hello.num_bytes % CHUNK_BYTES
            if not is_sealed or not is_whole or hello.num_bytes < 1 or not 0 < hello.reader < MAX_READERS:
                raise ValueError(f"{hello} does not fit the descriptor sent with it")
            return Mapping(fds[0], hello.num_bytes, prefault), hello.reader
        except (msgspec.DecodeError, OSError, ValueError) as exc:
            raise RelayBroken(f"the slab of the producer {self.address} cannot be mapped: {exc}") from exc
        finally:
            os.close(fds[0])

    def _on_readable(self) -> None:
        if (data := _receive(self._socket)) == b"":
            self.close()
        elif data:
            self.wake_readers()

    def nudge(self) -> None:
        with contextlib.suppress(OSError):  # full: it is being notified already; or gone: the I/O thread notices
            self._socket.send(NUDGE)

    def close(self) -> None:
        """End the connection, on the I/O thread. Closing twice does nothing."""
        if not self.is_broken:
            self.is_broken = True
            io_thread().loop.remove_reader(self._socket)
            self._socket.close()
            self._on_close(self)
            self.wake_readers()


class Consumers:
    """The producer's side of the connections: accepts readers, and notices their end.

    Args:
        fd: of table and slab; ``close`` closes it.
        on_lost: called with a reader's byte when its process has died.
        on_nudge: called when a reader has released something, has read rows of a stream, or has died.
    """

    def __init__(
        self, address: str, fd: int, num_bytes: int, on_lost: Callable[[int], None], on_nudge: Callable[[], None]
    ):
        self._fd = fd
        self._num_bytes = num_bytes
        self._on_lost = on_lost
        self._on_nudge = on_nudge
        self._sockets: dict[int, socket.socket] = {}  # by reader
        self._cannot_accept = False
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
        self._listener.bind(b"\0" + address.encode())
        self._listener.listen(MAX_READERS)
        self._listener.setblocking(False)
        io_thread().call(self._listen)

    def _listen(self) -> None:
        if self._listener.fileno() != -1:  # otherwise it has been closed
            io_thread().loop.add_reader(self._listener, self._accept)

    def _accept(self) -> None:
        try:
            consumer, _ = self._listener.accept()
        except (BlockingIOError, ConnectionError):  # the consumer has left
            return
        except OSError as exc:  # no file descriptor is free: the listener would be readable all the time
            if not self._cannot_accept:
                logger.warning("readers of tensors cannot connect: %s; retrying every %g s", exc, ACCEPT_RETRY_S)
            self._cannot_accept = True
            io_thread().loop.remove_reader(self._listener)
            io_thread().loop.call_later(ACCEPT_RETRY_S, self._listen)
            return
        self._cannot_accept = False
        reader = next((one for one in range(1, MAX_READERS) if one not in self._sockets), None)
        try:
            _reject_other_users(consumer)
            if reader is None:
                raise ConnectionError(f"more than {MAX_READERS - 1} processes read from one producer")
            consumer.setblocking(False)
            self._on_lost(reader)  # the byte's previous owner has died
            self._sockets[reader] = consumer
            io_thread().loop.add_reader(consumer, self._on_readable, reader)
            socket.send_fds(consumer, [encode(Hello(self._num_bytes, reader))], [self._fd])
        except OSError:
            if reader is not None and self._sockets.get(reader) is consumer:
                self._remove(reader)
            consumer.close()

    def _remove(self, reader: int) -> None:
        consumer = self._sockets.pop(reader)
        io_thread().loop.remove_reader(consumer)
        consumer.close()

    def _on_readable(self, reader: int) -> None:
        if (data := _receive(self._sockets[reader])) is None:
            return
        if not data:
            self._remove(reader)
            self._on_lost(reader)
        self._on_nudge()

    def nudge(self) -> None:
        """Wake all consumers: the producer does not know which of them reads a stream."""
        for consumer in list(self._sockets.values()):
            with contextlib.suppress(OSError):
                consumer.send(NUDGE)

    def close(self) -> None:
        """End all connections, on the I/O thread."""
        for one in (self._listener, *self._sockets.values()):
            io_thread().loop.remove_reader(one)
            one.close()
        self._sockets.clear()
        os.close(self._fd)


def _receive(peer: socket.socket) -> bytes | None:
    """Return what has arrived: None for nothing, no bytes when the connection has ended."""
    try:
        return peer.recv(64)
    except BlockingIOError:
        return None
    except OSError:
        return b""


def _reject_other_users(peer: socket.socket) -> None:
    """Raise ``ConnectionError`` unless the peer is this user, or root: an abstract socket has no permissions."""
    _, uid, _ = struct.unpack("3i", peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    if uid not in (os.geteuid(), 0):
        raise ConnectionError(f"user {uid} is at the other end")
