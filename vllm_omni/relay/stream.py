"""Streams: rows go from one stage to the next while the request runs, with credits.

A relay opens a stream for a request (``Streams.open_stream``). The stream's reference travels like a tensor's, and the
process that receives it reads the rows (``Streams.read_stream``). The number of a row is the chunk id of SGLang-Omni's
streams. Credits bound how many rows the writer may be ahead of its reader; a writer knows them before it writes.

The rows lie in a ring in the writer's slab, whose length is the credit: a row stays there until its reader has read it.

From: SGLang-Omni (communication, Streaming Flow).
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from abc import ABC, abstractmethod
from collections.abc import Callable

import torch

from vllm_omni.errors import PoolExhausted, RelayBroken, RelayClosed, RelayTimeout
from vllm_omni.messages.payload import Layout, TensorRef, check_ref
from vllm_omni.relay.base import TIMEOUT_S
from vllm_omni.relay.io_thread import wait_for
from vllm_omni.relay.slab import Lease, SlabRelay

CREDITS = 256  # rows


class StreamWriter(ABC):
    """The producer's end. One thread writes.

    Args:
        header_bytes: what lies in front of the ring in its block.
    """

    def __init__(self, relay: SlabRelay, ref: TensorRef, lease: Lease, header_bytes: int = 0):
        self.ref = ref  # shape: [credits, *row]
        self.lease = lease
        self.num_written = 0  # rows since the stream was opened
        self._ring = relay.view(lease.offset + header_bytes, check_ref(ref, relay.backend))
        self._owner = relay
        self._credits = ref.shape[0]
        self._has_ended = False

    @property
    def num_credits(self) -> int:
        """Rows that can be written now; all of them when the reader has closed, because rows are dropped then."""
        with self._owner.lock:
            if self.has_reader_gone():
                return self._credits
            return self._credits - (self.num_written - self.num_read())

    def write_nowait(self, rows: torch.Tensor) -> None:
        """Append rows, [n, *row].

        Raises:
            PoolExhausted: not enough credits; nothing was written.
            ValueError: rows of another shape or dtype.
            RelayClosed: after ``end``.
        """
        if self._has_ended:
            raise RelayClosed("this stream has ended")
        ring = self._ring
        if rows.shape[1:] != ring.shape[1:] or rows.dtype != ring.dtype:
            raise ValueError(
                f"{rows.dtype} {list(rows.shape[1:])} in a stream whose rows are {ring.dtype} {list(ring.shape[1:])}"
            )
        with self._owner.lock:
            self._owner.check_open()
            if not self.has_reader_gone():
                self._write_ring(rows, self.num_credits)
                self.num_written += len(rows)
                self.publish()

    def _write_ring(self, rows: torch.Tensor, num_credits: int) -> None:
        num_rows, credits = len(rows), self._credits
        if num_rows > num_credits:
            raise PoolExhausted(
                f"{num_rows} rows for a stream with {num_credits} of {credits} credits left",
                is_final=num_rows > credits,
            )
        first = self.num_written % credits
        head = min(num_rows, credits - first)
        with torch.inference_mode():  # the ring may be a view that an engine's step has made, which torch protects
            self._ring[first : first + head] = rows[:head]
            if head < num_rows:
                self._ring[: num_rows - head] = rows[head:]

    async def write(self, rows: torch.Tensor, *, timeout_s: float = TIMEOUT_S) -> None:
        """Append rows as soon as there are credits.

        Raises:
            RelayTimeout: the reader did not read enough in time.
        """
        await self._owner.when_room(lambda: self.write_nowait(rows), timeout_s, self.announce_wait)

    def end(self, error: str = "") -> None:
        """End the stream; the reader raises ``error``, if there is one, behind the rows written. Twice does nothing."""
        with self._owner.lock:
            if not self._has_ended:
                self._has_ended = True
                if not self.has_reader_gone():
                    self.publish_end(error)

    # -- what a backend implements; called with the relay's lock held -------------------------------------------------

    @abstractmethod
    def num_read(self) -> int:
        """Rows that the reader has read, as far as is known here."""

    @abstractmethod
    def has_reader_gone(self) -> bool:
        """Whether rows are dropped; the ring's memory may then have another owner."""

    @abstractmethod
    def publish(self) -> None:
        """Notify the reader of ``num_written``."""

    @abstractmethod
    def publish_end(self, error: str) -> None:
        """Notify the reader that the stream has ended; with an error if the text is not empty."""

    def announce_wait(self) -> None:
        """Ask the reader to notify the relay when it gives credit back; called without the lock."""
        return


class StreamReader(ABC):
    """The consumer's end. One thread reads.

    Args:
        wakes: functions that the backend calls when something may have arrived; a waiting reader adds its own.
    """

    def __init__(self, wakes: list[Callable[[], None]]):
        self._wakes = wakes

    @property
    @abstractmethod
    def num_unread(self) -> int:
        """Rows that ``read_nowait`` would return."""

    @property
    @abstractmethod
    def has_ended(self) -> bool:
        """Whether the stream ends behind the unread rows."""

    @property
    @abstractmethod
    def is_broken(self) -> bool:
        """Whether ``read_nowait`` would raise ``RelayBroken`` behind the unread rows."""

    @abstractmethod
    def read_nowait(self) -> torch.Tensor:
        """Return all rows that have arrived since the last call, [n, *row], n >= 0; they belong to the caller.

        Raises:
            RelayBroken: the producer has gone, was aborted, or ended with an error; after the rows before that.
        """

    async def read(self, *, timeout_s: float = TIMEOUT_S) -> torch.Tensor:
        """Return rows as soon as there are some; no rows mean that the stream has ended.

        Raises:
            RelayTimeout: neither a row nor the end came in time.
        """
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
                self.announce_wait()
                has_ended = self.has_ended  # before the read, so that no row can follow those which are read
                rows = self.read_nowait()
                if len(rows) or has_ended:
                    return rows
                await asyncio.wait_for(woken.wait(), max(deadline - time.monotonic(), 0))
        except TimeoutError as exc:
            raise RelayTimeout(f"no row came within {timeout_s:g} s") from exc
        finally:
            self._wakes.remove(wake)

    @abstractmethod
    def close(self) -> None:
        """Stop reading; the writer then never waits for credits. Closing twice does nothing."""

    def wake(self) -> None:
        for wake in list(self._wakes):
            wake()

    def announce_wait(self) -> None:
        """Ask the writer to wake this reader."""
        return


class Streams(SlabRelay):
    """A relay that has streams, too."""

    @abstractmethod
    def open_stream(
        self, request_id: str, row_shape: tuple[int, ...], dtype: torch.dtype, *, credits: int = CREDITS
    ) -> StreamWriter:
        """Open a stream of a request; ``abort`` of the request breaks it.

        Raises:
            PoolExhausted: no room for the ring.
        """

    async def read_stream(self, ref: TensorRef, *, timeout_s: float = TIMEOUT_S) -> StreamReader:
        """Connect to a stream.

        Raises:
            RelayBroken: the producer is gone, or the stream was aborted.
            RelayTimeout: the producer did not answer.
        """
        self.check_open()
        layout = check_ref(ref, self.backend)
        if not layout.num_bytes or not layout.shape:
            raise RelayBroken(f"a stream's reference has the shape {list(ref.shape)}")
        return await wait_for(self._subscribe(ref, layout, timeout_s), timeout_s, "a stream")

    @abstractmethod
    async def _subscribe(self, ref: TensorRef, layout: Layout, timeout_s: float) -> StreamReader:
        """``read_stream``, on the I/O thread's loop."""

    @abstractmethod
    def credits_of(self, ref: TensorRef) -> Callable[[], int] | None:
        """Return a function that counts the rows its writer may still write, for the scheduler of the writing stage;
        None if that is not known in this process.

        Until its reader has connected, a stream has all of its credits: what the reader waits for may be further down
        in the writer's own output, and a reader that never comes must not hold back the others.

        Raises:
            RelayBroken: the producer is gone.
        """
