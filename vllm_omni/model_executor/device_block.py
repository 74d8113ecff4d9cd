"""``CudaMemory``: blocks of a GPU's memory that processes share by file descriptors.

By the driver's functions for virtual memory: a block exists while a process has mapped it or has its descriptor open.
A block of ``cudaMalloc`` (``relay/cuda_ipc``) ends with the process that made it.
"""

from __future__ import annotations

import ctypes
import os
from typing import Any, Protocol

import torch
from torch import Tensor

from vllm_omni.errors import ConfigError
from vllm_omni.process.memory import format_bytes

# Of the driver's API (cuda.h).
PINNED = 1  # CU_MEM_ALLOCATION_TYPE_PINNED
ON_DEVICE = 1  # CU_MEM_LOCATION_TYPE_DEVICE
BY_DESCRIPTOR = 1  # CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
READ_WRITE = 3  # CU_MEM_ACCESS_FLAGS_PROT_READWRITE; memory of a device cannot be mapped read-only
OUT_OF_MEMORY = 2  # CUDA_ERROR_OUT_OF_MEMORY


class BlockMemory(Protocol):
    """Memory in which blocks are made and mapped."""

    device: torch.device

    def create(self, num_bytes: int) -> int:
        """Make a block; returns its descriptor, which the caller closes.

        Raises:
            ConfigError: there is too little memory.
        """

    def map(self, descriptor: int, num_bytes: int) -> Tensor:
        """Map a block of so many bytes until this process ends; it sees what others write. uint8, [>= num_bytes]"""


class _Location(ctypes.Structure):
    _fields_ = [("type", ctypes.c_int), ("id", ctypes.c_int)]


class _Properties(ctypes.Structure):
    """CUmemAllocationProp"""

    _fields_ = [
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location", _Location),
        ("win32_handle", ctypes.c_void_p),
        ("flags", ctypes.c_ubyte * 8),
    ]


class _Access(ctypes.Structure):
    """CUmemAccessDesc"""

    _fields_ = [("location", _Location), ("flags", ctypes.c_int)]


class DriverError(RuntimeError):
    """A function of the driver has failed."""

    def __init__(self, function: str, code: int, name: str) -> None:
        super().__init__(f"{function} failed with {name} ({code})")
        self.code = code


class CudaMemory:
    """Of this process's current GPU."""

    def __init__(self) -> None:
        index = torch.cuda.current_device()
        self.device = torch.device("cuda", index)
        self.uuid = str(torch.cuda.get_device_properties(index).uuid)
        self._location = _Location(ON_DEVICE, index)
        torch.cuda.current_stream(index).synchronize()  # makes the context

    def create(self, num_bytes: int) -> int:
        properties = _Properties(PINNED, BY_DESCRIPTOR, self._location)
        block, descriptor = ctypes.c_ulonglong(), ctypes.c_int()
        try:
            size = ctypes.c_size_t(self._rounded(num_bytes))
            _driver("cuMemCreate", ctypes.byref(block), size, ctypes.byref(properties), ctypes.c_ulonglong(0))
        except DriverError as exc:
            if exc.code != OUT_OF_MEMORY:
                raise
            free, _ = torch.cuda.mem_get_info(self.device)
            raise ConfigError(
                f"the GPU has no room for {format_bytes(num_bytes)} of weights: {format_bytes(free)} are free"
            ) from exc
        try:
            no_flags = ctypes.c_ulonglong(0)
            _driver(
                "cuMemExportToShareableHandle", ctypes.byref(descriptor), block, ctypes.c_int(BY_DESCRIPTOR), no_flags
            )
        finally:
            _driver("cuMemRelease", block)  # the descriptor holds it
        os.set_inheritable(descriptor.value, False)
        return descriptor.value

    def map(self, descriptor: int, num_bytes: int) -> Tensor:
        size, zero, none = ctypes.c_size_t(self._rounded(num_bytes)), ctypes.c_size_t(0), ctypes.c_ulonglong(0)
        block, address = ctypes.c_ulonglong(), ctypes.c_ulonglong()
        _driver(
            "cuMemImportFromShareableHandle",
            ctypes.byref(block),
            ctypes.c_void_p(descriptor),
            ctypes.c_int(BY_DESCRIPTOR),
        )
        _driver("cuMemAddressReserve", ctypes.byref(address), size, zero, none, none)
        _driver("cuMemMap", address, size, zero, block, none)
        access = _Access(self._location, READ_WRITE)
        _driver("cuMemSetAccess", address, size, ctypes.byref(access), ctypes.c_size_t(1))
        _driver("cuMemRelease", block)  # the mapping holds it
        return torch.as_tensor(_Mapped(address.value, size.value), device=self.device)

    def _rounded(self, num_bytes: int) -> int:
        properties, size = _Properties(PINNED, BY_DESCRIPTOR, self._location), ctypes.c_size_t()
        smallest = ctypes.c_int(0)  # CU_MEM_ALLOC_GRANULARITY_MINIMUM
        _driver("cuMemGetAllocationGranularity", ctypes.byref(size), ctypes.byref(properties), smallest)
        return -(-num_bytes // size.value) * size.value


class _Mapped:
    """What torch reads of memory that is not its own."""

    def __init__(self, address: int, num_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 2,
        }


def _driver(function: str, *args: Any) -> None:
    library = ctypes.CDLL("libcuda.so.1")
    if (code := getattr(library, function)(*args)) != 0:
        name = ctypes.c_char_p()
        library.cuGetErrorName(code, ctypes.byref(name))
        raise DriverError(function, code, (name.value or b"an unknown error").decode())
