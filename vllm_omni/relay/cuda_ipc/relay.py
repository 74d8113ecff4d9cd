"""CUDA IPC: the slab lies on the GPU, and consumers on the same GPU read it in place.

Not yet served: a server never chooses it, and it has not been run on a GPU.

The slab is one ``cudaMalloc``, which a consumer opens once; torch sees it through ``__cuda_array_interface__``. Both
are public, unlike torch's own sharing (``_share_cuda_``), which counts references that a killed consumer never gives
back. Leases live in a small ``ShmRelay``: each is a ticket there, which says where the tensor lies in the slab. A
ticket is read, released, revoked, and freed when its reader dies, as any tensor of that relay.

CUDA streams are ordered by the host: a producer synchronizes its stream before it announces, and a consumer its own
before it releases. Each side waits for the work that it has queued; events between processes would save that.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
import weakref
from collections.abc import Iterator
from concurrent.futures import Future

import msgspec
import torch

from vllm_omni.errors import MissingDependency, PoolExhausted, RelayBroken
from vllm_omni.messages.payload import Layout, TensorRef, check_ref
from vllm_omni.relay.base import LEASE_S, TIMEOUT_S, Clock
from vllm_omni.relay.cuda_ipc.memory import HANDLE_BYTES, DeviceMemory, find_device, uuid_of
from vllm_omni.relay.shm import ShmRelay
from vllm_omni.relay.shm.memory import NUM_SLOTS
from vllm_omni.relay.slab import CHUNK_BYTES, NUM_BYTES, Lease, SlabRelay, typed_view


class Ticket(msgspec.Struct, frozen=True, array_like=True):
    """Where a tensor lies in the slab."""

    handle: bytes  # of the slab
    slab_bytes: int
    gpu: str  # its UUID: processes may count GPUs differently
    lease: int
    offset: int
    num_bytes: int


encode = msgspec.msgpack.Encoder().encode
decode_ticket = msgspec.msgpack.Decoder(Ticket).decode
decode_ref = msgspec.msgpack.Decoder(TensorRef).decode


# By handle: a process cannot open its own slab.
_slabs: weakref.WeakValueDictionary[bytes, torch.Tensor] = weakref.WeakValueDictionary()


class CudaIpcRelay(SlabRelay):
    """A slab on this process's GPU, and those of others on the same one.

    Args:
        num_bytes: of the slab, whole chunks. 0: this process only reads.
        device: index of the GPU; by default the current one.

    Raises:
        MissingDependency: torch sees no CUDA device.
    """

    backend = "cuda_ipc"

    def __init__(
        self,
        num_bytes: int = NUM_BYTES,
        *,
        device: int | None = None,
        lease_s: float = LEASE_S,
        clock: Clock = time.monotonic,
    ):
        if not torch.cuda.is_available():
            raise MissingDependency("the cuda_ipc relay needs a GPU: torch sees no CUDA device")
        self._device = torch.cuda.current_device() if device is None else device
        self._slab_bytes = max(num_bytes, CHUNK_BYTES)
        owner = DeviceMemory(self._slab_bytes, self._device)
        memory = torch.as_tensor(owner, device=torch.device("cuda", self._device))
        super().__init__(memory, lease_s=lease_s, clock=clock)
        self._handle = owner.share()
        _slabs[self._handle] = memory
        self._gpu = uuid_of(self._device)
        # A page for each ticket. Tickets expire later than the leases, so that leases decide.
        self._control = ShmRelay(
            NUM_SLOTS * CHUNK_BYTES if num_bytes else 0, prefault=False, lease_s=2 * lease_s, clock=clock
        )
        self._tickets: dict[int, TensorRef] = {}  # by lease
        self._opened: dict[bytes, dict[torch.dtype, torch.Tensor]] = {}  # slabs by handle, then by dtype

    # -- producer -----------------------------------------------------------------------------------------------------

    def locate(self, lease: Lease) -> bytes:
        return encode(self._tickets[lease.number])

    def announce(self, lease: Lease) -> None:
        torch.cuda.current_stream(self._device).synchronize()  # the tensor has been written when it is announced
        ticket = Ticket(self._handle, self._slab_bytes, self._gpu, lease.number, lease.offset, lease.num_bytes)
        data = torch.frombuffer(bytearray(encode(ticket)), dtype=torch.uint8)
        try:
            ref = self._control.put_nowait(lease.request_id, data, num_readers=lease.num_readers)
        except PoolExhausted:
            self.collect()
            ref = self._control.put_nowait(lease.request_id, data, num_readers=lease.num_readers)
        self._tickets[lease.number] = ref

    def renew(self, ref: TensorRef) -> bool:
        with self.lock:
            ticket = self._tickets.get(ref.lease)
            return super().renew(ref) and (ticket is None or self._control.renew(ticket))

    def _held(self, lease: Lease) -> Lease | None:
        """Return the ticket's lease; None once it has ended."""
        return self._control.lease_of(self._tickets[lease.number].lease)

    def is_released(self, lease: Lease) -> bool:
        with self._control.lock:
            held = self._held(lease)
            return held is None or self._control.is_released(held)

    def is_being_read(self, lease: Lease) -> bool:
        with self._control.lock:
            held = self._held(lease)
            return held is not None and self._control.is_being_read(held)

    def revoke(self, lease: Lease) -> bool:
        with self._control.lock:
            held = self._held(lease)
            if held is None:
                return False
            held.is_revoked = True
            return self._control.revoke(held)

    def forget(self, lease: Lease) -> None:
        with self._control.lock:
            held = self._held(lease)
            if held is not None:
                self._control.drop(held)
        del self._tickets[lease.number]

    @contextlib.contextmanager
    def waiting_for_room(self) -> Iterator[Future[None]]:
        with self._control.waiting_for_room() as room:  # the relay that the consumers notify
            yield room

    def notify_room(self) -> None:
        self._control.notify_room()

    # -- consumer -----------------------------------------------------------------------------------------------------

    def get_nowait(self, ref: TensorRef) -> torch.Tensor | None:
        layout = check_ref(ref, self.backend)
        self.check_open()
        if not layout.num_bytes:
            self._num_gets += 1
            return torch.empty(layout.shape, dtype=layout.dtype, device=self.memory.device)
        held = _parse(ref)
        ticket = self._control.get_nowait(held)
        return None if ticket is None else self._take(ref, layout, held, ticket)

    async def get(self, ref: TensorRef, *, timeout_s: float = TIMEOUT_S) -> torch.Tensor:
        tensor = self.get_nowait(ref)
        return await asyncio.to_thread(self.get_blocking, ref, timeout_s) if tensor is None else tensor

    def get_blocking(self, ref: TensorRef, timeout_s: float = TIMEOUT_S) -> torch.Tensor:
        tensor = self.get_nowait(ref)
        if tensor is not None:
            return tensor
        held = _parse(ref)
        ticket = self._control.get_blocking(held, timeout_s)
        return self._take(ref, check_ref(ref, self.backend), held, ticket)

    def _take(self, ref: TensorRef, layout: Layout, held: TensorRef, data: torch.Tensor) -> torch.Tensor:
        try:
            ticket = decode_ticket(data.numpy().tobytes())
            fits = ticket.num_bytes == layout.num_bytes and ticket.lease == ref.lease
            if not fits or not 0 <= ticket.offset <= ticket.slab_bytes - ticket.num_bytes:
                raise RelayBroken(f"a reference needs {layout.num_bytes} bytes, {ticket.num_bytes} were put")
            view = typed_view(self._open(ticket), ticket.offset, layout)
        except BaseException as exc:
            self._control.release(held)
            if isinstance(exc, msgspec.DecodeError | RuntimeError):
                raise RelayBroken(f"the producer's slab cannot be opened: {exc}") from exc
            raise
        self._num_gets += 1
        return view

    def _open(self, ticket: Ticket) -> dict[torch.dtype, torch.Tensor]:
        with self.lock:
            typed = self._opened.get(ticket.handle)
            if typed is None:
                memory = _slabs.get(ticket.handle)
                if memory is None:
                    if len(ticket.handle) != HANDLE_BYTES:
                        raise RelayBroken(f"a handle of {len(ticket.handle)} bytes")
                    device = find_device(ticket.gpu)
                    owner = DeviceMemory(ticket.slab_bytes, device, ticket.handle)
                    memory = torch.as_tensor(owner, device=torch.device("cuda", device))
                    _slabs[ticket.handle] = memory
                typed = self._opened[ticket.handle] = {torch.uint8: memory}
            return typed

    def release(self, ref: TensorRef, *, for_all: bool = False) -> None:
        if ref.lease and not self.is_closed:
            torch.cuda.current_stream(self._device).synchronize()  # queued kernels have read it
            self._control.release(_parse(ref), for_all=for_all)

    def close(self) -> None:
        if not self.is_closed:
            super().close()
            self._control.close()
            self._opened.clear()


def _parse(ref: TensorRef) -> TensorRef:
    try:
        return decode_ref(ref.location)
    except (msgspec.DecodeError, UnicodeDecodeError) as exc:
        raise RelayBroken(f"a reference has a malformed location: {exc}") from exc
