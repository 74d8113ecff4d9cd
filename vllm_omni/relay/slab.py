"""The common part of relays whose tensors lie in a slab of the producer's memory: blocks and leases.

How a consumer reaches the bytes, and how its release comes back, is up to the backend (``shm``, ``tcp``, ...).
"""

from __future__ import annotations

import asyncio
import ctypes
import time
from abc import abstractmethod
from dataclasses import dataclass

import torch

from vllm_omni.errors import PoolExhausted
from vllm_omni.messages.payload import Layout, TensorRef, check_ref, dtype_name, make_layout
from vllm_omni.relay.base import LEASE_S, Clock, Relay, RelayStatistics, new_lease
from vllm_omni.relay.io_thread import io_thread
from vllm_omni.relay.pool import Block, BufferPool

NUM_BYTES = 256 << 20
CHUNK_BYTES = 4096
MEMMOVE_BYTES = 128 << 10  # up to here, or with one thread, memmove is faster than torch; beyond, torch shares the work


@dataclass(slots=True, eq=False)
class Lease:
    """A block that other processes may read."""

    number: int
    request_id: str
    block: Block
    offset: int  # of the tensor in the slab; somewhere in the block
    num_bytes: int
    num_readers: int  # that have to release it
    expires_at: float  # by the relay's clock, unless it is being read
    num_gone: int = 0  # readers that died or left after they had started to read it
    is_revoked: bool = False  # aborted or expired: freed as soon as no reader is reading
    slot: int = 0  # for the backend


class SlabRelay(Relay):
    """A slab, a pool over it, and a lease for each published tensor.

    A lease ends when all its readers have released it, when its request is aborted, or when it expires. Memory is never
    freed under a reader: it is freed when that reader has released it or died.

    Args:
        memory: the slab, uint8 [num_bytes].
    """

    def __init__(self, memory: torch.Tensor):
        super().__init__()
        self.lease_s = LEASE_S  # after this time a tensor that is not being read is freed
        self.clock: Clock = time.monotonic
        self.pool = BufferPool(memory.numel(), CHUNK_BYTES)
        self.memory = memory
        self._base = memory.data_ptr()
        self._typed = {torch.uint8: memory}  # views of the slab by dtype
        self._leases: dict[int, Lease] = {}  # by number, the oldest first
        self._buffers: dict[int, str] = {}  # block of ``empty`` that was not put yet, by offset -> request
        self._num_expired = 0
        self._has_timer = False
        self._timer: asyncio.TimerHandle | None = None

    # -- producer -----------------------------------------------------------------------------------------------------

    def put_nowait(self, request_id: str, tensor: torch.Tensor, *, num_readers: int = 1) -> TensorRef:
        dtype = dtype_name(tensor)
        with self.lock:
            self.check_open()
            layout = make_layout(tensor.dtype, tuple(tensor.shape))
            if not layout.num_bytes:
                self._num_puts += 1
                return TensorRef(self.backend, layout.shape, dtype, b"")
            block, offset = self._place(request_id, tensor, layout)
            lease = self.grant(request_id, block, offset, layout.num_bytes, num_readers)
            self._buffers.pop(block.offset, None)
            self._num_puts += 1
            self._num_bytes += layout.num_bytes
            return TensorRef(self.backend, layout.shape, dtype, self.locate(lease), lease.number)

    def empty(self, request_id: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        with self.lock:
            self.check_open()
            layout = make_layout(dtype, tuple(shape))
            if not layout.num_bytes:
                return torch.empty(shape, dtype=dtype, device=self.memory.device)
            block = self.allocate(layout.num_bytes)
            self._buffers[block.offset] = request_id
            return self.view(block.offset, layout)

    def abort(self, request_id: str | None) -> None:
        with self.lock:
            # A scan: aborts are rare, and an index by request would cost something for each lease.
            for lease in [lease for lease in self._leases.values() if request_id in (None, lease.request_id)]:
                self._end(lease)
            for offset in [offset for offset, owner in self._buffers.items() if request_id in (None, owner)]:
                del self._buffers[offset]
                self._free_at(offset)
            self.notify_room()

    def renew(self, ref: TensorRef) -> bool:
        with self.lock:
            lease = self._leases.get(ref.lease)
            if lease is None or lease.is_revoked or self.is_released(lease):
                return not ref.lease
            lease.expires_at = self.clock() + self.lease_s
            return True

    # -- consumer -----------------------------------------------------------------------------------------------------

    def get_nowait(self, ref: TensorRef) -> torch.Tensor | None:
        layout = check_ref(ref, self.backend)
        self.check_open()
        if layout.num_bytes:
            tensor = self.take(ref, layout)
        else:
            tensor = torch.empty(layout.shape, dtype=layout.dtype, device=self.memory.device)
        self._num_gets += tensor is not None
        return tensor

    async def _fetch(self, ref: TensorRef, timeout_s: float) -> torch.Tensor:
        tensor = await self.fetch(ref, check_ref(ref, self.backend), timeout_s)
        self._num_gets += 1
        return tensor

    # -- blocks -------------------------------------------------------------------------------------------------------

    def _place(self, request_id: str, tensor: torch.Tensor, layout: Layout) -> tuple[Block, int]:
        """Return the block and the offset of a tensor: its own if ``empty`` made it, otherwise those of a copy."""
        offset = tensor.data_ptr() - self._base
        if 0 <= offset < self.pool.num_bytes and tensor.is_contiguous():
            block = self.pool.find_block(offset)
            # Otherwise this request was aborted, and its buffer may have another owner now.
            if block is not None and self._buffers.get(block.offset) == request_id:
                return block, offset
        block = self.allocate(layout.num_bytes)
        try:
            is_plain = tensor.is_cpu and self.memory.is_cpu and tensor.is_contiguous()
            if is_plain and (layout.num_bytes <= MEMMOVE_BYTES or torch.get_num_threads() == 1):
                ctypes.memmove(self._base + block.offset, tensor.data_ptr(), layout.num_bytes)
            else:
                self.view(block.offset, layout).copy_(tensor)
        except BaseException:
            self.pool.free(block)
            raise
        return block, block.offset

    def allocate(self, num_bytes: int) -> Block:
        for oldest in self._leases.values():  # where puts and releases alternate, this one is enough
            if self.is_released(oldest):
                if oldest.block.num_bytes == num_bytes:
                    self._remove(oldest)
                    return oldest.block
                self.drop(oldest)
            break
        try:
            return self.pool.allocate(num_bytes)
        except PoolExhausted:
            self.collect()
        return self.pool.allocate(num_bytes)

    def _free_at(self, offset: int) -> None:
        block = self.pool.find_block(offset)
        assert block is not None, f"nothing is allocated at {offset}"
        self.pool.free(block)

    def view(self, offset: int, layout: Layout) -> torch.Tensor:
        return typed_view(self._typed, offset, layout)

    # -- leases -------------------------------------------------------------------------------------------------------

    def lease_of(self, number: int) -> Lease | None:
        """Return a lease by its number; None once it has ended."""
        return self._leases.get(number)

    def open_ring(
        self, request_id: str, row_shape: tuple[int, ...], dtype: torch.dtype, credits: int, header_bytes: int = 0
    ) -> tuple[TensorRef, Lease]:
        """Lease the ring of a stream, [credits, *row_shape], behind a header of zeros.

        Raises:
            PoolExhausted: no room for the ring.
        """
        ring = torch.empty((credits, *row_shape), dtype=dtype, device="meta")
        num_bytes = header_bytes + ring.nbytes
        with self.lock:
            self.check_open()
            block = self.allocate(num_bytes)
            self.memory[block.offset : block.offset + header_bytes] = 0
            lease = self.grant(request_id, block, block.offset, num_bytes, 1)
            return TensorRef(self.backend, tuple(ring.shape), dtype_name(ring), self.locate(lease), lease.number), lease

    def grant(self, request_id: str, block: Block, offset: int, num_bytes: int, num_readers: int) -> Lease:
        expires_at = self.clock() + self.lease_s
        lease = Lease(new_lease(), request_id, block, offset, num_bytes, num_readers, expires_at)
        try:
            self.announce(lease)
        except BaseException:
            if block.offset not in self._buffers:
                self.pool.free(block)
            raise
        self._leases[lease.number] = lease
        if not self._has_timer:
            self._has_timer = True
            io_thread().call(self._start_timer)
        return lease

    def collect(self) -> None:
        """Free every lease that has ended or expired."""
        now = self.clock()
        for lease in list(self._leases.values()):
            if self.is_released(lease):
                self.drop(lease)
            elif lease.is_revoked:
                self._end(lease)
            elif now >= lease.expires_at and not self.is_being_read(lease):
                self._num_expired += 1
                self._end(lease)

    def _end(self, lease: Lease) -> None:
        """Let no reader start to read it; frees it at once, or with its last reader."""
        lease.is_revoked = True
        if not self.revoke(lease):
            self.drop(lease)

    def drop(self, lease: Lease) -> None:
        self._remove(lease)
        self.pool.free(lease.block)

    def _remove(self, lease: Lease) -> None:
        """Remove a lease; its block stays allocated."""
        del self._leases[lease.number]
        self.forget(lease)

    def _start_timer(self, delay_s: float | None = None) -> None:
        if not self.is_closed:
            self._timer = io_thread().loop.call_later(self.lease_s if delay_s is None else delay_s, self._on_timer)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _on_timer(self) -> None:
        with self.lock:
            self.collect()
            self.notify_room()
            self._has_timer = bool(self._leases) and not self.is_closed
            if self._has_timer:
                first = min(lease.expires_at for lease in self._leases.values())
                # A lease that has expired and is still being read is looked at again after a while.
                self._start_timer(max(first - self.clock(), self.lease_s / 10))

    # -- inner interface: what a backend implements -------------------------------------------------------------------

    @abstractmethod
    def take(self, ref: TensorRef, layout: Layout) -> torch.Tensor | None:
        """Return a tensor that is not empty; None if it is not at hand."""

    @abstractmethod
    async def fetch(self, ref: TensorRef, layout: Layout, timeout_s: float) -> torch.Tensor:
        """Pull a tensor that is not at hand; on the I/O thread."""

    # -- the same, called with ``lock`` held --------------------------------------------------------------------------

    @abstractmethod
    def locate(self, lease: Lease) -> bytes:
        """Return what a consumer needs to find it: ``TensorRef.location``."""

    @abstractmethod
    def announce(self, lease: Lease) -> None:
        """Let consumers read it from now on. Raises ``PoolExhausted`` if there are too many leases."""

    @abstractmethod
    def is_released(self, lease: Lease) -> bool:
        """Whether all readers have released it."""

    @abstractmethod
    def is_being_read(self, lease: Lease) -> bool:
        """Whether a living reader has started to read it, and has not released it."""

    @abstractmethod
    def revoke(self, lease: Lease) -> bool:
        """Let no reader start to read it; returns whether one is still reading."""

    def forget(self, lease: Lease) -> None:
        """Called when a lease has ended: its number will not be used again."""

    def close(self) -> None:
        super().close()
        if self._has_timer:
            io_thread().call(self._stop_timer)  # it would keep the slab in memory until it is due

    def statistics(self) -> RelayStatistics:
        with self.lock:
            self.collect()
            num_bytes = sum(lease.block.num_bytes for lease in self._leases.values())
            counts = (self._num_puts, self._num_gets, self._num_bytes)
            return RelayStatistics(*counts, len(self._leases), num_bytes, self._num_expired)

    def check_integrity(self) -> None:
        """For tests: each block of the pool belongs to a lease or to a buffer."""
        with self.lock:
            self.pool.check_integrity()
            blocks = {lease.block.offset for lease in self._leases.values()} | set(self._buffers)
            assert len(blocks) == self.pool.statistics().num_blocks, "a block has no owner"


def typed_view(typed: dict[torch.dtype, torch.Tensor], offset: int, layout: Layout) -> torch.Tensor:
    """Return a tensor over a slab, at a multiple of its item's size.

    Args:
        typed: caches the slab's view by dtype, so that a tensor costs one torch call instead of three.
    """
    whole = typed.get(layout.dtype)
    if whole is None:
        whole = typed[layout.dtype] = typed[torch.uint8].view(layout.dtype)
    return whole.as_strided(layout.shape, layout.strides, offset // layout.dtype.itemsize)
