"""A stream in shared memory: a block of the producer's slab with a ring in it.

Neither end makes a system call: each publishes how far it has come in a word that the other reads. Only an end that
waits is told, through the socket.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

import torch

from vllm_omni.errors import PoolExhausted, RelayBroken, RelayClosed, RelayTimeout
from vllm_omni.messages.payload import Layout, TensorRef, check_ref
from vllm_omni.relay.base import TIMEOUT_S
from vllm_omni.relay.pool import Block
from vllm_omni.relay.shm.memory import (
    NUM_READ,
    NUM_WRITTEN,
    RELEASED,
    SLOT_WORDS,
    TABLE_BYTES,
    Location,
    Readable,
    fence,
)
from vllm_omni.relay.slab import Lease, typed_view
from vllm_omni.relay.stream import StreamReader, StreamWriter, check_rows, write_ring

if TYPE_CHECKING:
    from vllm_omni.relay.shm import ShmRelay

# A stream's block: words of 8 bytes (behind NUM_WRITTEN and NUM_READ), the error's text, and the ring.
STATE, READER_WAITS, WRITER_WAITS = 2, 3, 4
ERROR_OFFSET = 64
RING_OFFSET = 256
OPEN, ENDED, FAILED = range(3)


class ShmWriter(StreamWriter):
    def __init__(self, relay: ShmRelay, ref: TensorRef, lease: Lease, block: Block):
        self.ref = ref
        self._relay = relay
        self._lease = lease
        self._words = relay._mapping.words
        self._start = (TABLE_BYTES + block.offset) // 8
        self._credits = ref.shape[0]
        layout = check_ref(ref, relay.backend)
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
        if self._lease.is_revoked or self._lease.num_gone:
            return True
        return number not in self._relay._leases or max(self._relay._flags(self._lease)) >= RELEASED

    def write_nowait(self, rows: torch.Tensor) -> None:
        if self._has_ended:
            raise RelayClosed("this stream has ended")
        self._relay._check_open()
        check_rows(rows, self._ring)
        with self._relay._lock:
            self._relay._check_open()
            if self._has_reader_gone():
                return
            write_ring(self._ring, self._num_written, rows, self.num_credits)
            self._num_written += len(rows)
            fence()
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
                if self._is_held_back(len(rows)):
                    await self._relay._await_room(room, deadline - time.monotonic(), cause)

    def _is_held_back(self, num_rows: int) -> bool:
        """Whether there are too few credits still; the reader then tells when it gives some back."""
        with self._relay._lock:
            if self._has_reader_gone():  # and the block may be another's
                return False
            self._words[self._start + WRITER_WAITS] = 1
            fence()
            return num_rows > self.num_credits

    def end(self, error: str = "") -> None:
        if self._has_ended:
            return
        self._has_ended = True
        with self._relay._lock:
            if self._has_reader_gone():
                return
            text = error.encode(errors="replace")[: RING_OFFSET - ERROR_OFFSET]
            self._relay._mapping.bytes[self._error_at : self._error_at + len(text)] = text
            fence()
            self._words[self._start + STATE] = FAILED if error else ENDED
            self._wake_reader()

    def _wake_reader(self) -> None:
        fence()
        if self._words[self._start + READER_WAITS]:
            self._words[self._start + READER_WAITS] = 0
            self._relay._wake_readers()


class ShmReader(StreamReader):
    def __init__(self, relay: ShmRelay, source: Readable, ref: TensorRef, layout: Layout, location: Location):
        self._relay = relay
        self._source = source
        self._ref = ref
        self._location = location
        self._offset = source.mapping.words[location.slot * SLOT_WORDS + 1]  # of the block in the slab
        self._words = source.mapping.words
        self._start = (TABLE_BYTES + self._offset) // 8
        self._slot = location.slot * SLOT_WORDS
        self._credits = ref.shape[0]
        self._ring = typed_view(source.mapping.typed, self._offset + RING_OFFSET, layout)
        self._num_read = self._words[self._start + NUM_READ]
        if not 0 <= self._words[self._start + NUM_WRITTEN] - self._num_read <= self._credits:
            source.release(location, ref.lease)
            raise RelayBroken("a reference names as a stream what is none")
        self._is_closed = False

    @property
    def num_unread(self) -> int:
        return min(max(self._words[self._start + NUM_WRITTEN] - self._num_read, 0), self._credits)

    @property
    def has_ended(self) -> bool:
        return bool(self._words[self._start + STATE] == ENDED)

    @property
    def is_broken(self) -> bool:
        state = self._words[self._start + STATE]
        return state == FAILED or (
            state == OPEN and (self._source.is_broken or self._words[self._slot] != self._ref.lease)
        )

    def read_nowait(self) -> torch.Tensor:
        self._check_open()
        is_broken = self.is_broken  # first: what is unread after it is all there is
        fence()
        num_rows = self.num_unread
        if not num_rows and is_broken:
            if self._words[self._start + STATE] == FAILED:
                raise RelayBroken(self._error())
            raise RelayBroken("the producer of a stream is gone, or the stream's request was aborted")
        first = self._num_read % self._credits
        head = min(num_rows, self._credits - first)
        rows = self._ring[first : first + head].clone()
        if head < num_rows:
            rows = torch.cat([rows, self._ring[: num_rows - head]])
        self._num_read += num_rows
        fence()
        self._words[self._start + NUM_READ] = self._num_read
        fence()
        if num_rows and self._words[self._start + WRITER_WAITS]:
            self._words[self._start + WRITER_WAITS] = 0
            self._wake_producer()
        return rows

    def _check_open(self) -> None:
        # What was released may be another's: it is neither read nor written.
        if self._is_closed:
            raise RelayClosed("this stream was closed by its reader")
        self._relay._check_open()

    def _error(self) -> str:
        block = self._source.mapping.bytes[TABLE_BYTES + self._offset :]
        return bytes(block[ERROR_OFFSET:RING_OFFSET]).rstrip(b"\0").decode(errors="replace")

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

            self._check_open()
            self._source.on_nudge.append(wake)
            try:
                self._words[self._start + READER_WAITS] = 1
                fence()
                has_ended = self.has_ended  # first: what is read after it is all there is
                rows = self.read_nowait()
                if len(rows) or has_ended:
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
