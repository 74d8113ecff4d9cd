"""Memory on a GPU that other processes can open."""

from __future__ import annotations

import contextlib
import ctypes
from typing import Any

import torch

from vllm_omni.errors import RelayBroken

HANDLE_BYTES = 64  # of a cudaIpcMemHandle_t
LAZY_ENABLE_PEER_ACCESS = 1  # the only flag


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
