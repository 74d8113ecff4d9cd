"""What relays have in common whose tensors lie in a slab of the producer's memory: blocks, leases, their end.

How a consumer gets at the bytes, and how its release comes back, is the backend's (``shm``, ``tcp``, ...).
"""

from __future__ import annotations

import asyncio
import ctypes
import time
from abc import abstractmethod
from dataclasses import dataclass

import torch

from vllm_omni.errors import PoolExhausted
from vllm_omni.messages.payload import Layout, TensorRef, dtype_name, make_layout
from vllm_omni.relay.base import LEASE_S, Clock, Relay, RelayStatistics, io_thread
from vllm_omni.relay.base import new_lease as next_number
from vllm_omni.relay.pool import Block, BufferPool

NUM_BYTES = 256 << 20
CHUNK_BYTES = 4096
MEMMOVE_BYTES = 128 << 10  # up to here, or with one thread, memmove is faster than torch; beyond, torch shares the work


@dataclass(slots=True, eq=False)
class Lease:
    """A block that somebody elsewhere may read."""

    number: int
    request_id: str
    block: Block
    offset: int  # of the tensor, in the slab; somewhere in the block
    num_bytes: int
    num_readers: int  # who have to release it
    expires_at: float  # by the relay's clock, if nobody reads it
    num_gone: int = 0  # of the readers, those that died or left after they had begun to read it
    is_revoked: bool = False  # aborted or expired: free as soon as nobody reads it
    slot: int = 0  # the backend's, of whatever it keeps for a lease


class SlabRelay(Relay):
    """A slab, a pool over it, and a lease for each published tensor.

    A lease ends when all its readers have released it, when its request is aborted, or when it expires; but never under
    a reader: what is being read is freed when that reader has released it or died.

    Args:
        memory: the slab, uint8 [num_bytes].
        lease_s: how long a tensor waits for its readers.
        clock: seconds, monotonic.
    """

    def __init__(self, memory: torch.Tensor, *, lease_s: float = LEASE_S, clock: Clock = time.monotonic):
        super().__init__()
        self.pool = BufferPool(memory.numel(), CHUNK_BYTES)
        self._memory = memory
        self._base = memory.data_ptr()
        self._typed = {torch.uint8: memory}  # views of the slab by dtype
        self._lease_s = lease_s
        self._clock = clock
        self._leases: dict[int, Lease] = {}  # by number, the oldest first
        self._buffers: dict[int, str] = {}  # offset of a block of ``empty`` that was not put yet -> request
        self._num_expired = 0
        self._has_timer = False
        self._timer: asyncio.TimerHandle | None = None

    # -- producer -----------------------------------------------------------------------------------------------------

    def put_nowait(self, request_id: str, tensor: torch.Tensor, *, num_readers: int = 1) -> TensorRef:
        dtype = dtype_name(tensor)
        with self._lock:
            self._check_open()
            layout = make_layout(tensor.dtype, tuple(tensor.shape))
            if not layout.num_bytes:
                self._num_puts += 1
                return TensorRef(self.backend, layout.shape, dtype, b"")
            block, offset = self._place(request_id, tensor, layout)
            try:
                lease = self._grant(request_id, block, offset, layout.num_bytes, num_readers)
            except BaseException:
                if block.offset not in self._buffers:
                    self.pool.free(block)
                raise
            self._buffers.pop(block.offset, None)
            self._num_puts += 1
            self._num_bytes += layout.num_bytes
            return TensorRef(self.backend, layout.shape, dtype, self._locate(lease), lease.number)

    def empty(self, request_id: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        with self._lock:
            self._check_open()
            layout = make_layout(dtype, tuple(shape))
            if not layout.num_bytes:
                return torch.empty(shape, dtype=dtype)
            block = self._allocate(layout.num_bytes)
            self._buffers[block.offset] = request_id
            return self._view(block.offset, layout)

    def abort(self, request_id: str) -> None:
        with self._lock:
            # Looked for among all: an abort is rare, and entering each lease under its request is not.
            for lease in [lease for lease in self._leases.values() if lease.request_id == request_id]:
                self._end(lease)
            for offset in [offset for offset, owner in self._buffers.items() if owner == request_id]:
                del self._buffers[offset]
                self._free_at(offset)
            self._tell_room()

    def renew(self, ref: TensorRef) -> bool:
        with self._lock:
            lease = self._leases.get(ref.lease)
            if lease is None or lease.is_revoked or self._is_released(lease):
                return not ref.lease
            lease.expires_at = self._clock() + self._lease_s
            return True

    def _place(self, request_id: str, tensor: torch.Tensor, layout: Layout) -> tuple[Block, int]:
        """The block that a tensor lies in, and where: its own if it was made by ``empty``, otherwise a copy's."""
        offset = tensor.data_ptr() - self._base
        if 0 <= offset < self.pool.num_bytes and tensor.is_contiguous():
            block = self.pool.find_block(offset)
            # Another's: this request was aborted, and what was its buffer has been given away.
            if block is not None and self._buffers.get(block.offset) == request_id:
                return block, offset
        block = self._allocate(layout.num_bytes)
        try:
            is_plain = tensor.is_cpu and tensor.is_contiguous()
            if is_plain and (layout.num_bytes <= MEMMOVE_BYTES or torch.get_num_threads() == 1):
                ctypes.memmove(self._base + block.offset, tensor.data_ptr(), layout.num_bytes)
            else:
                self._view(block.offset, layout).copy_(tensor)
        except BaseException:
            self.pool.free(block)
            raise
        return block, block.offset

    def _allocate(self, num_bytes: int) -> Block:
        for oldest in self._leases.values():  # what is put and released in turn needs a look at this one alone
            if self._is_released(oldest):
                if oldest.block.num_bytes == num_bytes:
                    self._remove(oldest)
                    return oldest.block
                self._drop(oldest)
            break
        try:
            return self.pool.allocate(num_bytes)
        except PoolExhausted:
            self._collect()
        return self.pool.allocate(num_bytes)

    def _free_at(self, offset: int) -> None:
        block = self.pool.find_block(offset)
        assert block is not None, f"nothing is allocated at {offset}"
        self.pool.free(block)

    def _view(self, offset: int, layout: Layout) -> torch.Tensor:
        return typed_view(self._typed, offset, layout)

    # -- leases -------------------------------------------------------------------------------------------------------

    def _grant(self, request_id: str, block: Block, offset: int, num_bytes: int, num_readers: int) -> Lease:
        expires_at = self._clock() + self._lease_s
        lease = Lease(next_number(), request_id, block, offset, num_bytes, num_readers, expires_at)
        self._announce(lease)
        self._leases[lease.number] = lease
        if not self._has_timer:
            self._has_timer = True
            io_thread().call(self._start_timer)
        return lease

    def _collect(self) -> None:
        """Free every lease that is over or has expired."""
        now = self._clock()
        for lease in list(self._leases.values()):
            if self._is_released(lease):
                self._drop(lease)
            elif lease.is_revoked:
                self._end(lease)
            elif now >= lease.expires_at and not self._is_being_read(lease):
                self._num_expired += 1
                self._end(lease)

    def _end(self, lease: Lease) -> None:
        """Nobody may begin to read it; it goes at once, or with the last who is reading."""
        lease.is_revoked = True
        if not self._revoke(lease):
            self._drop(lease)

    def _drop(self, lease: Lease) -> None:
        self._remove(lease)
        self.pool.free(lease.block)

    def _remove(self, lease: Lease) -> None:
        """The block stays allocated."""
        del self._leases[lease.number]
        self._forget(lease)

    def _start_timer(self, delay_s: float | None = None) -> None:
        if not self._closed:
            self._timer = io_thread().loop.call_later(self._lease_s if delay_s is None else delay_s, self._on_timer)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _on_timer(self) -> None:
        with self._lock:
            self._collect()
            self._tell_room()
            self._has_timer = bool(self._leases) and not self._closed
            if self._has_timer:
                first = min(lease.expires_at for lease in self._leases.values())
                # What has expired and is still being read is looked at again after a while.
                self._start_timer(max(first - self._clock(), self._lease_s / 10))

    # -- the backend's part -------------------------------------------------------------------------------------------

    @abstractmethod
    def _locate(self, lease: Lease) -> bytes:
        """What a consumer needs to find it: ``TensorRef.location``."""

    @abstractmethod
    def _announce(self, lease: Lease) -> None:
        """Let consumers read it from now on. Raises ``PoolExhausted`` if so many leases cannot be kept."""

    @abstractmethod
    def _is_released(self, lease: Lease) -> bool:
        """Whether all its readers have released it."""

    @abstractmethod
    def _is_being_read(self, lease: Lease) -> bool:
        """Whether somebody who lives has begun to read it, and has not released it."""

    @abstractmethod
    def _revoke(self, lease: Lease) -> bool:
        """Let nobody begin to read it any more; whether somebody is still reading."""

    def _forget(self, lease: Lease) -> None:
        """It is over: its number will not be seen again."""

    def close(self) -> None:
        super().close()
        if self._has_timer:
            io_thread().call(self._stop_timer)  # it would keep the slab until it is due

    def statistics(self) -> RelayStatistics:
        with self._lock:
            self._collect()
            num_bytes = sum(lease.block.num_bytes for lease in self._leases.values())
            counts = (self._num_puts, self._num_gets, self._num_bytes)
            return RelayStatistics(*counts, len(self._leases), num_bytes, self._num_expired)

    def check_integrity(self) -> None:
        """For tests: what the pool holds is leased or a buffer, and nothing else."""
        with self._lock:
            self.pool.check_integrity()
            blocks = {lease.block.offset for lease in self._leases.values()} | set(self._buffers)
            assert len(blocks) == self.pool.statistics().num_blocks, "a block belongs to nobody"


def typed_view(typed: dict[torch.dtype, torch.Tensor], offset: int, layout: Layout) -> torch.Tensor:
    """A tensor over a slab, at a multiple of its item's size; ``typed`` keeps the slab's view by dtype (one torch call
    for a tensor instead of three)."""
    whole = typed.get(layout.dtype)
    if whole is None:
        whole = typed[layout.dtype] = typed[torch.uint8].view(layout.dtype)
    return whole.as_strided(layout.shape, layout.strides, offset // layout.dtype.itemsize)
