"""CUDA IPC: the slab lies on the GPU, and consumers on the same GPU read it in place.

A server chooses it for two stages on one GPU (``relay/select.py``).

The slab is one ``cudaMalloc``, which a consumer opens once; torch sees it through ``__cuda_array_interface__``. Both
are public, unlike torch's own sharing (``_share_cuda_``), which counts references that a killed consumer never gives
back. Leases live in a small ``ShmRelay``: each is a ticket there, which says where the tensor lies in the slab. A
ticket is read, released, revoked, and freed when its reader dies, as any tensor of that relay.

CUDA streams are ordered by the host: a producer synchronizes its stream before it announces, and a consumer its own
before it releases. Each side waits for the work that it has queued; events between processes would save that.
"""

from __future__ import annotations

import contextlib
import ctypes
import weakref
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import msgspec
import torch

from vllm_omni.errors import MissingDependency, PoolExhausted, RelayBroken
from vllm_omni.messages.payload import Layout, TensorRef
from vllm_omni.relay.shm import ShmRelay
from vllm_omni.relay.shm.memory import NUM_SLOTS
from vllm_omni.relay.slab import CHUNK_BYTES, NUM_BYTES, Lease, SlabRelay, typed_view

HANDLE_BYTES = 64  # of a cudaIpcMemHandle_t
LAZY_ENABLE_PEER_ACCESS = 1  # the only flag


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
    """A slab on this process's current GPU, and those of others on the same one.

    Args:
        num_bytes: of the slab, whole chunks. 0: this process only reads.

    Raises:
        MissingDependency: torch sees no CUDA device.
    """

    backend = "cuda_ipc"

    def __init__(self, num_bytes: int = NUM_BYTES):
        if not torch.cuda.is_available():
            raise MissingDependency("the cuda_ipc relay needs a GPU: torch sees no CUDA device")
        self._device = torch.cuda.current_device()
        self._slab_bytes = max(num_bytes, CHUNK_BYTES)
        owner = DeviceMemory(self._slab_bytes, self._device)
        memory = torch.as_tensor(owner, device=torch.device("cuda", self._device))
        super().__init__(memory)
        self._handle = owner.share()
        _slabs[self._handle] = memory
        self._gpu = uuid_of(self._device)
        self._control = ShmRelay(NUM_SLOTS * CHUNK_BYTES if num_bytes else 0, prefault=False)  # a page for each ticket
        self._control.lease_s = 2 * self.lease_s  # tickets expire later than the leases, so that leases decide
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

    def take(self, ref: TensorRef, layout: Layout) -> torch.Tensor | None:
        held = _parse(ref)
        ticket = self._control.get_nowait(held)
        return None if ticket is None else self._take(ref, layout, held, ticket)

    async def fetch(self, ref: TensorRef, layout: Layout, timeout_s: float) -> torch.Tensor:
        held = _parse(ref)
        ticket = await self._control.get(held, timeout_s=timeout_s)
        return self._take(ref, layout, held, ticket)

    def _take(self, ref: TensorRef, layout: Layout, held: TensorRef, data: torch.Tensor) -> torch.Tensor:
        try:
            ticket = decode_ticket(data.numpy().tobytes())
            fits = ticket.num_bytes == layout.num_bytes and ticket.lease == ref.lease
            if not fits or not 0 <= ticket.offset <= ticket.slab_bytes - ticket.num_bytes:
                raise RelayBroken(f"a reference needs {layout.num_bytes} bytes, {ticket.num_bytes} were put")
            return typed_view(self._open(ticket), ticket.offset, layout)
        except BaseException as exc:
            self._control.release(held)
            if isinstance(exc, msgspec.DecodeError | RuntimeError):
                raise RelayBroken(f"the producer's slab cannot be opened: {exc}") from exc
            raise

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


# -- memory on a GPU that other processes can open -------------------------------------------------------------------


class _Handle(ctypes.Structure):
    _fields_ = [("reserved", ctypes.c_char * HANDLE_BYTES)]


def _cuda(function: str, *args: Any) -> None:
    """Call the CUDA runtime that torch has loaded; it keeps the current device by thread, as torch does."""
    runtime = ctypes.CDLL(f"libcudart.so.{str(torch.version.cuda).partition('.')[0]}")
    if (code := getattr(runtime, function)(*args)) != 0:
        raise RuntimeError(f"{function} failed with cudaError {code}")


class DeviceMemory:
    """A slab on a GPU, allocated or opened by this process, for as long as a tensor refers to it.

    Args:
        handle: of another process's; None: allocate one.
    """

    def __init__(self, num_bytes: int, device: int, handle: bytes | None = None):
        pointer = ctypes.c_void_p()
        with torch.cuda.device(device):
            torch.cuda.current_stream().synchronize()  # makes the context
            if handle is None:
                _cuda("cudaMalloc", ctypes.byref(pointer), ctypes.c_size_t(num_bytes))
            else:
                theirs = _Handle.from_buffer_copy(handle)
                _cuda("cudaIpcOpenMemHandle", ctypes.byref(pointer), theirs, ctypes.c_uint(LAZY_ENABLE_PEER_ACCESS))
        self._free = "cudaFree" if handle is None else "cudaIpcCloseMemHandle"
        self._pointer = pointer
        self._device = device
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (pointer.value, False),
            "version": 2,
        }

    def share(self) -> bytes:
        handle = _Handle()
        with torch.cuda.device(self._device):
            _cuda("cudaIpcGetMemHandle", ctypes.byref(handle), self._pointer)
        return bytes(handle)

    def __del__(self) -> None:
        if hasattr(self, "_free"):
            with contextlib.suppress(Exception), torch.cuda.device(self._device):  # the context may be gone at exit
                _cuda(self._free, self._pointer)


def uuid_of(device: int) -> str:
    """Return a GPU's UUID: processes may number GPUs differently."""
    return str(torch.cuda.get_device_properties(device).uuid)


def find_device(gpu: str) -> int:
    """Return the index of a GPU. Raises ``RelayBroken`` if this process does not see it."""
    for device in range(torch.cuda.device_count()):
        if uuid_of(device) == gpu:
            return device
    raise RelayBroken(f"a tensor lies on GPU {gpu}, which this process does not see")
