"""Streams between hosts: a ring at the writer, a queue at the reader, and credit that comes back as rows are read.

Rows are sent as soon as they are written, without a copy: a row stays in the ring, and is not overwritten, until the
reader has read it. The reader gives credit back when it has read half a window, or after a moment if it was less: a
message for each row would cost more than the row.

From: SGLang-Omni (communication, Streaming Flow).
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
import zmq

from vllm_omni.errors import RelayBroken, RelayClosed, RelayError
from vllm_omni.messages.payload import Layout, TensorRef
from vllm_omni.relay.io_thread import io_thread
from vllm_omni.relay.remote.messages import MAX_TEXT, Credit, End, Rows
from vllm_omni.relay.slab import Lease, SlabRelay
from vllm_omni.relay.stream import StreamReader, StreamWriter

if TYPE_CHECKING:
    from vllm_omni.relay.remote.consumers import Consumers

ROWS_BYTES = 1 << 20  # of a message with several rows
CREDIT_S = 0.002  # after this time less than half a window is given back, too


class RemoteWriter(StreamWriter):
    """Rows [num_read, num_written) are in the ring; those before num_sent have been sent.

    Args:
        slab: the relay's memory.
    """

    def __init__(self, relay: SlabRelay, ref: TensorRef, lease: Lease, slab: memoryview):
        super().__init__(relay, ref, lease)
        self._relay = relay
        self._slab = slab
        self._row_bytes = lease.num_bytes // self._credits
        self._num_read = 0  # as far as the reader has reported
        self._error: str | None = None
        self._is_push_due = False
        # The following belongs to the I/O thread.
        self._num_sent = 0
        self._is_end_sent = False
        self._peer = b""  # the reader's connection
        self._consumers: Consumers | None = None

    def num_read(self) -> int:
        return self._num_read

    def has_reader_gone(self) -> bool:
        return self._relay.lease_of(self.lease.number) is None

    def publish_end(self, error: str) -> None:
        self._error = error[:MAX_TEXT] or None
        self.publish()

    def publish(self) -> None:
        if not self._is_push_due and not self._relay.is_closed:
            self._is_push_due = True
            io_thread().call(self._push)

    # -- I/O thread ---------------------------------------------------------------------------------------------------

    @property
    def has_reader(self) -> bool:
        return self._consumers is not None

    def subscribe(self, peer: bytes, consumers: Consumers) -> None:
        """Send the rows to a reader's connection from now on."""
        self._peer, self._consumers = peer, consumers
        self._num_sent, self._is_end_sent = self._num_read, False
        self._push()

    def unsubscribe(self) -> None:
        """Send no more rows."""
        self._peer, self._consumers = b"", None

    def give_credit(self, peer: bytes, num_read: int) -> bool:
        """Take note of what the reader has read; False if that is impossible."""
        if peer != self._peer or not self._num_read <= num_read <= self._num_sent:
            return False
        self._num_read = num_read
        self._relay.notify_room()
        return True

    def _push(self) -> None:
        with self._relay.lock:
            self._is_push_due = False
            while self._consumers is not None and not self.has_reader_gone() and self._num_sent < self.num_written:
                self._send_rows(self._consumers)
            if self._consumers is None or self._is_end_sent:
                return
            if self._has_ended or self.lease.is_revoked:
                self._is_end_sent = True
                error = self._error if self._has_ended else "the stream's request was aborted"
                self._consumers.send(self._peer, End(self.lease.number, self.num_written, error))

    def _send_rows(self, consumers: Consumers) -> None:
        """Send rows that lie side by side in the ring."""
        first = self._num_sent % self._credits
        num_unsent = self.num_written - self._num_sent
        num_rows = min(num_unsent, self._credits - first, max(ROWS_BYTES // self._row_bytes, 1))
        start = self.lease.offset + first * self._row_bytes
        rows = Rows(self.lease.number, self._num_sent, num_rows)
        self._num_sent += num_rows
        consumers.send(self._peer, rows, self._slab[start : start + num_rows * self._row_bytes])


class RemoteReader(StreamReader):
    """Queues rows as they arrive; they are copied once, when they are read.

    Args:
        send: sends a message to the producer; called on the I/O thread.
        release: releases the stream.
    """

    def __init__(
        self,
        ref: TensorRef,
        layout: Layout,
        send: Callable[[Credit], None],
        release: Callable[[TensorRef], None],
    ):
        super().__init__([])
        self.lease = ref.lease
        self._ref = ref
        self._dtype = layout.dtype
        self._credits = ref.shape[0]
        self._row_bytes = layout.num_bytes // self._credits
        self._send = send
        self._release = release
        self._lock = threading.Lock()  # of the queue and of what follows it
        self._queue: list[zmq.Frame] = []  # with whole rows
        self._num_received: int | None = None  # rows since the stream's start; None: the first has not arrived
        self._num_read = 0
        self._has_ended = False
        self._error: RelayError | None = None
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

    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self.wake()
            self._release(self._ref)

    # -- I/O thread ---------------------------------------------------------------------------------------------------

    def take(self, first: int, num_rows: int, body: zmq.Frame) -> None:
        """Queue rows that have arrived."""
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
        self.wake()

    def take_end(self, num_rows: int, error: str | None) -> None:
        """End the stream, with an error if there is one."""
        if error is not None:
            self.fail(RelayBroken(error))
        elif self._num_received is not None and num_rows != self._num_received:
            self.fail(RelayBroken(f"a stream of {num_rows} rows ended after {self._num_received}"))
        else:
            self._has_ended = True
            self.wake()

    def fail(self, error: RelayError) -> None:
        """Break the stream, unless it has ended."""
        if not self._has_ended and self._error is None:
            self._error = error
            self.wake()

    def _send_credit(self) -> None:
        self._is_credit_due = False
        num_read = self._num_read
        if num_read > self._num_given_back and not (self._is_closed or self._has_ended or self._error):
            self._num_given_back = num_read
            self._send(Credit(self.lease, num_read))
