"""Restore the order of a field: a link may deliver frames late, twice or out of order."""

import asyncio
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, Protocol, TypeAlias, TypeVar

from vllm_omni.flow.run.credit import ReceiveWindow

T = TypeVar("T")
SeqId: TypeAlias = int  # 0, 1, 2, ... per edge and path, written by the producer


class _Numbered(Protocol):
    @property
    def seq(self) -> SeqId: ...

    @property
    def last(self) -> bool: ...


Numbered = TypeVar("Numbered", bound=_Numbered)  # a frame


class SequenceQueue(Generic[Numbered]):
    """Puts the frames of one field back in order.

    Early frames wait in a dict keyed by seq: arrival in order, the usual case, touches neither dict nor heap, and a
    gap costs one look-up per released frame.

    From: Omni-Flow section 3.2.2, Algorithm 1, invariant (i): only the expected sequence number passes.
    """

    __slots__ = ("_early", "_expected", "ended")

    def __init__(self) -> None:
        self._expected: SeqId = 0
        self._early: dict[SeqId, Numbered] | None = None  # created with the first early frame
        self.ended = False  # the frame with last=True has been released

    def __len__(self) -> int:
        """The number of early frames."""
        return len(self._early) if self._early else 0

    def push(self, frame: Numbered) -> list[Numbered]:
        """Add a frame; returns the frames that are due now, in order. Drops duplicates and frames behind the last."""
        seq = frame.seq
        if self.ended or seq < self._expected:
            return []
        if seq > self._expected:
            if self._early is None:
                self._early = {}
            self._early.setdefault(seq, frame)
            return []
        self._expected += 1
        due = [frame]
        if not self._early:
            self.ended = frame.last
            return due
        while not due[-1].last and self._expected in self._early:
            due.append(self._early.pop(self._expected))
            self._expected += 1
        if due[-1].last:
            self.ended = True
            self._early = None
        return due


@dataclass(slots=True)
class StreamTimes:
    """When a stream carried something; seconds of ``time.time``, 0.0 before that."""

    put_at: float = 0.0  # the first item
    read_at: float = 0.0  # the first one
    last_read_at: float = 0.0
    num_read: int = 0

    def note_read(self) -> None:
        self.last_read_at = time.time()
        self.read_at = self.read_at or self.last_read_at
        self.num_read += 1


class Stream(Generic[T]):
    """An unbounded queue with an end, for one reader.

    A deque and at most one future. asyncio.Queue would do, but it keeps a list of waiting readers and cannot end.
    Cancelling the reader loses nothing.

    Args:
        on_wait: called whenever the reader starts to wait because the queue is empty.
    """

    __slots__ = ("_error", "_finished", "_items", "_waiter", "on_wait", "times")

    def __init__(self, on_wait: Callable[[], None] | None = None) -> None:
        self.on_wait = on_wait
        self._items: deque[tuple[T, ReceiveWindow | None]] = deque()
        self._finished = False
        self._error: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None
        self.times = StreamTimes()

    def __len__(self) -> int:
        return len(self._items)

    def put_nowait(self, item: T, window: ReceiveWindow | None = None) -> None:
        """Append an item; ``window`` is notified when the reader takes it."""
        self._items.append((item, window))
        if not self.times.put_at:
            self.times.put_at = time.time()
        if self._waiter is not None:
            self._wake(self._waiter)

    def finish(self, error: Exception | None = None) -> None:
        """Mark the end; behind the last item the reader stops, or gets ``error`` at every further read."""
        self._finished = True
        self._error = error
        self.on_wait = None
        if self._waiter is not None:
            self._wake(self._waiter)

    def peek(self) -> T:
        """The next item, without removing it; the queue must not be empty."""
        return self._items[0][0]

    def clear(self) -> None:
        """Drop all unread items."""
        self._items.clear()

    def __aiter__(self) -> "Stream[T]":
        return self

    async def __anext__(self) -> T:
        while not self._items:
            if self._error is not None:
                raise self._error
            if self._finished:
                raise StopAsyncIteration
            if self._waiter is not None:
                raise RuntimeError("a stream has one reader, which is already waiting")
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                if self.on_wait is not None:
                    self.on_wait()
                await self._waiter
            finally:
                self._waiter = None
        item, window = self._items.popleft()
        self.times.note_read()
        if window is not None and not self._finished:  # otherwise the producer has ended and needs no more credit
            window.on_read()
        return item

    @property
    def is_waited_for(self) -> bool:
        return self._waiter is not None and not self._waiter.done()

    @staticmethod
    def _wake(waiter: asyncio.Future[None]) -> None:
        if not waiter.done():
            waiter.set_result(None)
