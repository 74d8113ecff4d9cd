"""The common part of the streams of ``shm`` and ``remote``: a writer with a ring in its slab, and a waiting reader.

The length of the ring is the credit: a row stays in the ring until its reader has read it.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from abc import abstractmethod
from collections.abc import Callable

import torch

from vllm_omni.errors import PoolExhausted, RelayClosed, RelayTimeout
from vllm_omni.messages.payload import TensorRef, check_ref
from vllm_omni.relay.base import TIMEOUT_S
from vllm_omni.relay.slab import Lease, SlabRelay
from vllm_omni.relay.stream import StreamReader, StreamWriter


class RingWriter(StreamWriter):
    """Writes rows into a leased ring. A backend says how the reader is notified.

    Args:
        header_bytes: what lies in front of the ring in its block.
    """

    def __init__(self, relay: SlabRelay, ref: TensorRef, lease: Lease, header_bytes: int = 0):
        self.ref = ref
        self.lease = lease
        self.num_written = 0  # rows since the stream was opened
        self._ring = relay.view(lease.offset + header_bytes, check_ref(ref, relay.backend))
        self._owner = relay
        self._credits = ref.shape[0]
        self._has_ended = False

    @property
    def num_credits(self) -> int:
        with self._owner.lock:
            if self.has_reader_gone():
                return self._credits
            return self._credits - (self.num_written - self.num_read())

    def write_nowait(self, rows: torch.Tensor) -> None:
        if self._has_ended:
            raise RelayClosed("this stream has ended")
        check_rows(rows, self._ring)
        with self._owner.lock:
            self._owner.check_open()
            if self.has_reader_gone():
                return
            write_ring(self._ring, self.num_written, rows, self.num_credits)
            self.num_written += len(rows)
            self.publish()

    async def write(self, rows: torch.Tensor, *, timeout_s: float = TIMEOUT_S) -> None:
        await self._owner.when_room(lambda: self.write_nowait(rows), timeout_s, self.announce_wait)

    def end(self, error: str = "") -> None:
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
        """Let the reader know of ``num_written``."""

    @abstractmethod
    def publish_end(self, error: str) -> None:
        """Let the reader know that the stream has ended; with an error if the text is not empty."""

    def announce_wait(self) -> None:
        """Ask the reader to notify the relay when it gives credit back; called without the lock."""
        return


class RingReader(StreamReader):
    """Waits for rows.

    Args:
        wakes: functions that the backend calls when something may have arrived; a waiting reader adds its own.
    """

    def __init__(self, wakes: list[Callable[[], None]]):
        self._wakes = wakes

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

    def wake(self) -> None:
        for wake in list(self._wakes):
            wake()

    def announce_wait(self) -> None:
        """Ask the writer to wake this reader."""
        return


def check_rows(rows: torch.Tensor, ring: torch.Tensor) -> None:
    """Raises ``ValueError`` for rows of another shape or dtype than the ring's."""
    if rows.shape[1:] != ring.shape[1:] or rows.dtype != ring.dtype:
        raise ValueError(
            f"{rows.dtype} {list(rows.shape[1:])} in a stream whose rows are {ring.dtype} {list(ring.shape[1:])}"
        )


def write_ring(ring: torch.Tensor, num_written: int, rows: torch.Tensor, num_credits: int) -> None:
    """Copy rows behind those already written. Raises ``PoolExhausted``, and copies none, if credits are missing."""
    num_rows, credits = len(rows), len(ring)
    if num_rows > num_credits:
        raise PoolExhausted(
            f"{num_rows} rows for a stream with {num_credits} of {credits} credits left", is_final=num_rows > credits
        )
    first = num_written % credits
    head = min(num_rows, credits - first)
    ring[first : first + head] = rows[:head]
    if head < num_rows:
        ring[: num_rows - head] = rows[head:]
