"""Inline relay: the bytes ride in the reference itself, so nothing is leased and nothing can leak."""

from __future__ import annotations

import math

import torch

from vllm_omni.errors import RelayBroken, RelayClosed
from vllm_omni.relay.base import RelayStatistics, TensorRef

# Spelled out, not getattr(torch, name): a reference comes off a wire and may name no other attribute.
DTYPES: dict[str, torch.dtype] = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float64": torch.float64,
    "int64": torch.int64,
    "int32": torch.int32,
    "uint8": torch.uint8,
    "bool": torch.bool,
}
_DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


class InlineRelay:
    """Payload bytes travel inside the control message: right for small tensors, two copies for large ones."""

    backend = "inline"

    def __init__(self) -> None:
        self._num_puts = self._num_gets = self._num_bytes = 0
        self._closed = False

    def put(self, request_id: str, tensor: torch.Tensor) -> TensorRef:
        self._check_open()
        if tensor.dtype not in _DTYPE_NAMES:
            raise TypeError(f"cannot publish a tensor of {tensor.dtype}; supported: {', '.join(DTYPES)}")
        # Viewed as bytes first: numpy has no bfloat16.
        data = b""
        if tensor.numel():
            data = tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
        self._num_puts += 1
        self._num_bytes += len(data)
        return TensorRef(self.backend, tuple(tensor.shape), _DTYPE_NAMES[tensor.dtype], data)

    def get(self, ref: TensorRef) -> torch.Tensor:
        self._check_open()
        check_ref(ref, self.backend)
        self._num_gets += 1
        dtype = DTYPES[ref.dtype]
        if not ref.location:
            return torch.empty(ref.shape, dtype=dtype)
        return torch.frombuffer(bytearray(ref.location), dtype=dtype).reshape(ref.shape)

    def release(self, ref: TensorRef) -> None:
        pass

    def abort(self, request_id: str) -> None:
        pass

    def statistics(self) -> RelayStatistics:
        return RelayStatistics(self._num_puts, self._num_gets, self._num_bytes, num_leases=0)

    def close(self) -> None:
        self._closed = True

    def _check_open(self) -> None:
        if self._closed:
            raise RelayClosed("the inline relay was closed")


def check_ref(ref: TensorRef, backend: str) -> None:
    """Validate an inline reference before a byte of it is touched.

    Raises:
        RelayBroken: wrong backend, unknown dtype, negative extent, or a byte count that is not the shape's.
    """
    if ref.backend != backend:
        raise RelayBroken(f"a reference of backend {ref.backend!r} was given to the {backend!r} relay")
    if ref.dtype not in DTYPES:
        raise RelayBroken(f"unknown dtype {ref.dtype!r} in a reference; known: {', '.join(DTYPES)}")
    if any(extent < 0 for extent in ref.shape):
        raise RelayBroken(f"negative extent in shape {ref.shape}")
    num_bytes = math.prod(ref.shape) * DTYPES[ref.dtype].itemsize
    if num_bytes != len(ref.location):
        raise RelayBroken(f"{ref.dtype} {ref.shape} needs {num_bytes} bytes, the message has {len(ref.location)}")
