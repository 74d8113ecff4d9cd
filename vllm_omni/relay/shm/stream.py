"""Streams in shared memory: a block of the producer's slab with a ring in it.

Neither end makes a system call: each publishes its progress in a word that the other reads. Only an end that waits is
notified, through the socket.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from vllm_omni.errors import RelayBroken, RelayClosed
from vllm_omni.messages.payload import Layout, TensorRef
from vllm_omni.relay.shm.memory import (
    NUM_READ,
    NUM_WRITTEN,
    RELEASED,
    SLOT_WORDS,
    TABLE_BYTES,
    Readable,
    fence,
    parse_location,
)
from vllm_omni.relay.slab import Lease, typed_view
from vllm_omni.relay.stream import StreamReader, StreamWriter

if TYPE_CHECKING:
    from vllm_omni.relay.shm.relay import ShmRelay

# The header of a stream's block: words of 8 bytes (behind NUM_WRITTEN and NUM_READ), and the text of an error.
STATE, READER_WAITS, WRITER_WAITS = 2, 3, 4
ERROR_OFFSET = 64
HEADER_BYTES = 256
OPEN, ENDED, FAILED = range(3)


class ShmWriter(StreamWriter):
    def __init__(self, relay: ShmRelay, ref: TensorRef, lease: Lease):
        super().__init__(relay, ref, lease, HEADER_BYTES)
        self._relay = relay
        self._words = relay.mapping.words
        self._start = (TABLE_BYTES + lease.offset) // 8

    def num_read(self) -> int:
        return self._words[self._start + NUM_READ]

    def has_reader_gone(self) -> bool:
        lease = self.lease
        if lease.is_revoked or lease.num_gone or self._relay.lease_of(lease.number) is None:
            return True
        return max(self._relay.mapping.flags(lease.slot)) >= RELEASED

    def publish(self) -> None:
        fence()
        self._words[self._start + NUM_WRITTEN] = self.num_written
        self._wake_reader()

    def publish_end(self, error: str) -> None:
        text = error.encode(errors="replace")[: HEADER_BYTES - ERROR_OFFSET]
        first = TABLE_BYTES + self.lease.offset + ERROR_OFFSET
        self._relay.mapping.bytes[first : first + len(text)] = text
        fence()
        self._words[self._start + STATE] = FAILED if error else ENDED
        self._wake_reader()

    def announce_wait(self) -> None:
        with self._relay.lock:
            if not self.has_reader_gone():  # otherwise the block may have another owner
                self._words[self._start + WRITER_WAITS] = 1
                fence()

    def _wake_reader(self) -> None:
        fence()
        if self._words[self._start + READER_WAITS]:
            self._words[self._start + READER_WAITS] = 0
            self._relay.wake_readers()


class ShmReader(StreamReader):
    """Raises ``RelayBroken`` if the reference does not name a stream."""

    def __init__(self, relay: ShmRelay, source: Readable, ref: TensorRef, layout: Layout):
        super().__init__(source.wakes)
        self._relay = relay
        self._source = source
        self._ref = ref
        self._location = parse_location(ref)
        self._words = source.mapping.words
        self._slot = self._location.slot * SLOT_WORDS
        self._offset = self._words[self._slot + 1]  # of the block in the slab
        self._start = (TABLE_BYTES + self._offset) // 8
        self._credits = ref.shape[0]
        self._ring = typed_view(source.mapping.typed, self._offset + HEADER_BYTES, layout)
        self._num_read = self._words[self._start + NUM_READ]
        if not 0 <= self._words[self._start + NUM_WRITTEN] - self._num_read <= self._credits:
            source.release(self._location, ref.lease)
            raise RelayBroken("a reference names as a stream what is not one")
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
        is_broken = self.is_broken  # before the count, so that no row can follow those which are counted
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
            self._relay.nudge(self._source)
        return rows

    def announce_wait(self) -> None:
        self._check_open()
        self._words[self._start + READER_WAITS] = 1
        fence()

    def _check_open(self) -> None:
        # A block that was released may have another owner: it is neither read nor written.
        if self._is_closed:
            raise RelayClosed("this stream was closed by its reader")
        self._relay.check_open()

    def _error(self) -> str:
        block = self._source.mapping.bytes[TABLE_BYTES + self._offset :]
        return bytes(block[ERROR_OFFSET:HEADER_BYTES]).rstrip(b"\0").decode(errors="replace")

    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            if self._source.release(self._location, self._ref.lease) or self._words[self._start + WRITER_WAITS]:
                self._relay.nudge(self._source)
