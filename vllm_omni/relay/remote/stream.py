"""A stream between hosts: a ring at the writer, a queue at the reader, and credit that comes back as rows are read.

Rows are sent as soon as they are written, for the ring is the credit: what the reader has not read is still in it. So
the writer overwrites only what has arrived, and sends without a copy. The reader gives credit back when it has read
half a window, or after a moment if it was less: a message for each row would cost more than the row.

From: SGLang-Omni (communication, Streaming Flow).
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
import zmq

from vllm_omni.errors import PoolExhausted, RelayBroken, RelayClosed, RelayError, RelayTimeout
from vllm_omni.messages.payload import Layout, TensorRef, check_ref
from vllm_omni.relay.base import TIMEOUT_S, io_thread
from vllm_omni.relay.remote.wire import MAX_TEXT, Credit, End, Rows
from vllm_omni.relay.slab import Lease
from vllm_omni.relay.stream import StreamReader, StreamWriter, check_rows, write_ring

if TYPE_CHECKING:
    from vllm_omni.relay.remote.relay import Consumers, Producer, RemoteRelay

ROWS_BYTES = 1 << 20  # of a message with several rows
CREDIT_S = 0.002  # after which less than half a window is given back, too


class RemoteWriter(StreamWriter):
    """Rows [num_read, num_written) are in the ring, those from num_sent on are not under way yet."""

    def __init__(self, relay: RemoteRelay, ref: TensorRef, lease: Lease):
        layout = check_ref(ref, relay.backend)
        self.ref = ref
        self._relay = relay
        self._lease = lease
        self._credits = ref.shape[0]
        self._row_bytes = layout.num_bytes // self._credits
        self._ring = relay._view(lease.offset, layout)
        self._num_written = 0
        self._num_read = 0  # as far as the reader has told
        self._has_ended = False
        self._error: str | None = None
        self._is_push_due = False
        # What follows belongs to the I/O thread.
        self._num_sent = 0
        self._is_end_sent = False
        self._peer = b""  # the reader's connection
        self._consumers: Consumers | None = None

    @property
    def num_credits(self) -> int:
        if self._has_reader_gone():
            return self._credits
        return self._credits - (self._num_written - self._num_read)

    def _has_reader_gone(self) -> bool:
        return self._lease.number not in self._relay._leases

    def write_nowait(self, rows: torch.Tensor) -> None:
        if self._has_ended:
            raise RelayClosed("this stream has ended")
        check_rows(rows, self._ring)
        with self._relay._lock:
            self._relay._check_open()
            if self._has_reader_gone():
                return
            write_ring(self._ring, self._num_written, rows, self.num_credits)
            self._num_written += len(rows)
            self.push_soon()

    async def write(self, rows: torch.Tensor, *, timeout_s: float = TIMEOUT_S) -> None:
        deadline = time.monotonic() + timeout_s
        while True:
            with self._relay._room() as room:
                try:
                    self.write_nowait(rows)
                    return
                except PoolExhausted as exc:
                    if exc.is_final:
                        raise
                    cause = exc
                await self._relay._await_room(room, deadline - time.monotonic(), cause)

    def end(self, error: str = "") -> None:
        with self._relay._lock:
            if not self._has_ended:
                self._has_ended = True
                self._error = error[:MAX_TEXT] or None
                self.push_soon()

    # -- I/O thread ---------------------------------------------------------------------------------------------------

    def push_soon(self) -> None:
        """Send what is to be sent; from any thread, under the relay's lock."""
        if not self._is_push_due and not self._relay._closed:
            self._is_push_due = True
            io_thread().call(self._push)

    @property
    def has_reader(self) -> bool:
        return self._consumers is not None

    def subscribe(self, peer: bytes, consumers: Consumers) -> None:
        self._peer, self._consumers = peer, consumers
        self._num_sent, self._is_end_sent = self._num_read, False
        self._push()

    def unsubscribe(self) -> None:
        self._peer, self._consumers = b"", None

    def give_credit(self, peer: bytes, num_read: int) -> bool:
        """False: the reader claims what cannot be."""
        if peer != self._peer or not self._num_read <= num_read <= self._num_sent:
            return False
        self._num_read = num_read
        self._relay._tell_room()
        return True

    def _push(self) -> None:
        with self._relay._lock:
            self._is_push_due = False
            while self._consumers is not None and not self._has_reader_gone() and self._num_sent < self._num_written:
                first = self._num_sent % self._credits
                num_rows = min(
                    self._num_written - self._num_sent, self._credits - first, max(ROWS_BYTES // self._row_bytes, 1)
                )
                start = self._lease.offset + first * self._row_bytes
                body = self._relay._bytes[start : start + num_rows * self._row_bytes]
                rows = Rows(self._lease.number, self._num_sent, num_rows)
                self._num_sent += num_rows
                self._consumers.send(self._peer, rows, body)
            if self._consumers is None or self._is_end_sent:
                return
            if self._has_ended:
                self._is_end_sent = True
                self._consumers.send(self._peer, End(self._lease.number, self._num_written, self._error))
            elif self._lease.is_revoked:
                self._is_end_sent = True
                error = "the stream's request was aborted"
                self._consumers.send(self._peer, End(self._lease.number, self._num_written, error))


class RemoteReader(StreamReader):
    """Rows queue up here as they came, and are copied once, when they are read."""

    def __init__(self, relay: RemoteRelay, producer: Producer, ref: TensorRef, layout: Layout):
        self.lease = ref.lease
        self._relay = relay
        self._producer = producer
        self._ref = ref
        self._dtype = layout.dtype
        self._credits = ref.shape[0]
        self._row_bytes = layout.num_bytes // self._credits
        self._lock = threading.Lock()  # of the queue and what follows it
        self._queue: list[zmq.Frame] = []  # with whole rows
        self._num_received: int | None = None  # rows since the stream's begin; None: the first has not come
        self._num_read = 0
        self._has_ended = False
        self._error: RelayError | None = None
        self._wakes: list[Callable[[], None]] = []
        self._is_closed = False
        self._num_given_back = 0
        self._is_credit_due = False

    @property
    def num_unread(self) -> int:
        received = self._num_received
        return 0 if received is None else max(received - self._num_read, 0)

    @property
    def has_ended(self) -> bool:
        return self._has_ended

    @property
    def is_broken(self) -> bool:
        return self._error is not None

    def read_nowait(self) -> torch.Tensor:
        if self._is_closed:
            raise RelayClosed("this stream was closed by its reader")
        with self._lock:
            queue, self._queue = self._queue, []
            num_rows, error = self.num_unread, self._error
            self._num_read += num_rows
        if not num_rows and error is not None:
            raise error
        data = torch.empty(num_rows * self._row_bytes, dtype=torch.uint8)
        place, view = 0, memoryview(data.numpy())
        for frame in queue:
            view[place : place + len(frame)] = frame.buffer
            place += len(frame)
        if num_rows:
            self._give_back()
        return data.view(self._dtype).reshape(num_rows, *self._ref.shape[1:])

    def _give_back(self) -> None:
        if 2 * (self._num_read - self._num_given_back) >= self._credits:
            io_thread().call(self._send_credit)
        elif not self._is_credit_due:
            self._is_credit_due = True
            io_thread().call(io_thread().loop.call_later, CREDIT_S, self._send_credit)

    async def read(self, *, timeout_s: float = TIMEOUT_S) -> torch.Tensor:
        deadline = time.monotonic() + timeout_s
        loop = asyncio.get_running_loop()
        woken = asyncio.Event()

        def wake() -> None:
            with contextlib.suppress(RuntimeError):  # the loop was closed
                loop.call_soon_threadsafe(woken.set)

        self._wakes.append(wake)
        try:
            while True:
                woken.clear()
                has_ended = self._has_ended
                rows = self.read_nowait()
                if len(rows) or has_ended:
                    return rows
                await asyncio.wait_for(woken.wait(), max(deadline - time.monotonic(), 0))
        except TimeoutError as exc:
            raise RelayTimeout(f"no row came within {timeout_s:g} s") from exc
        finally:
            self._wakes.remove(wake)

    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._wake()
            self._relay.release(self._ref)

    # -- I/O thread ---------------------------------------------------------------------------------------------------

    def take(self, first: int, num_rows: int, body: zmq.Frame) -> None:
        """Rows have come."""
        num_received = first if self._num_received is None else self._num_received
        is_whole = num_rows > 0 and len(body) == num_rows * self._row_bytes
        if first != num_received or not is_whole or first + num_rows - self._num_given_back > self._credits:
            self.fail(RelayBroken(f"the producer of a stream sent {num_rows} rows from {first}, which do not fit"))
            return
        with self._lock:
            if self._num_received is None:  # an earlier reader may have read some
                self._num_read = self._num_given_back = first
            self._queue.append(body)
            self._num_received = first + num_rows
        self._wake()

    def take_end(self, num_rows: int, error: str | None) -> None:
        if error is not None:
            self.fail(RelayBroken(error))
        elif self._num_received is not None and num_rows != self._num_received:
            self.fail(RelayBroken(f"a stream of {num_rows} rows ended after {self._num_received}"))
        else:
            self._has_ended = True
            self._wake()

    def fail(self, error: RelayError) -> None:
        """Nothing follows, and that is not the end."""
        if not self._has_ended and self._error is None:
            self._error = error
            self._wake()

    def _wake(self) -> None:
        for wake in list(self._wakes):
            wake()

    def _send_credit(self) -> None:
        self._is_credit_due = False
        num_read = self._num_read
        if num_read > self._num_given_back and not (self._is_closed or self._has_ended or self._error):
            self._num_given_back = num_read
            self._producer.send(Credit(self.lease, num_read))
