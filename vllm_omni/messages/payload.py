"""Tensor references and payloads: what control messages carry instead of tensors. Nothing is pickled.

A reference comes off a wire: its claims are checked before a byte of a tensor is touched, and a payload that is too
large or malformed is rejected as a whole.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch

from vllm_omni.errors import RelayBroken

MAX_DIMS = 16
MAX_NUM_BYTES = 1 << 40  # of one tensor
MAX_PAYLOAD_BYTES = 1 << 30  # inline tensors included
MAX_TENSORS = 65536  # in one payload
NUM_CACHED = "num_cached_rows"  # how many of them were not computed, but kept (a value, if there are any)
ROWS = "rows"  # the path of an autoregressive stage's rows, and the name of the stream of those that follow

# Spelled out, not getattr(torch, name): a reference comes off a wire and must not reach other attributes of torch.
DTYPES: dict[str, torch.dtype] = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float64": torch.float64,
    "int64": torch.int64,
    "int32": torch.int32,
    "int16": torch.int16,
    "int8": torch.int8,
    "uint16": torch.uint16,
    "uint8": torch.uint8,
    "bool": torch.bool,
    "float8_e4m3fn": torch.float8_e4m3fn,
    "float8_e5m2": torch.float8_e5m2,
    "complex64": torch.complex64,
    "complex128": torch.complex128,
}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


# -- references -------------------------------------------------------------------------------------------------------


class TensorRef(msgspec.Struct, frozen=True, array_like=True):
    """Names a published tensor: which relay can pull it, and from where."""

    backend: str  # name of the relay's backend: "shm", "tcp", ...
    shape: tuple[int, ...]
    dtype: str  # torch's name without the prefix: "float32", "bfloat16", "int64"
    location: bytes  # parsed by the backend alone; "inline" puts the bytes themselves here
    lease: int = 0  # number of the producer's lease on the memory; 0: nothing is leased

    @property
    def num_rows(self) -> int:
        """Length of the first dimension; 0 for a scalar."""
        return self.shape[0] if self.shape else 0


class Layout(NamedTuple):
    """Dtype, shape and size of a contiguous tensor; of a reference, once they have been checked."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    num_bytes: int
    strides: tuple[int, ...]  # in items


@functools.lru_cache(1024)  # a stage sends the same few shapes again and again
def make_layout(dtype: torch.dtype, shape: tuple[int, ...]) -> Layout:
    """Compute the layout of a contiguous tensor."""
    num_items, strides = 1, []
    for size in reversed(shape):
        strides.append(num_items)
        num_items *= size
    return Layout(dtype, shape, num_items * dtype.itemsize, tuple(reversed(strides)))


def check_ref(ref: TensorRef, backend: str) -> Layout:
    """Check what a reference claims, before a byte of the tensor is touched.

    Raises:
        RelayBroken: the reference is of another backend, or has an unknown dtype or an impossible shape.
    """
    if ref.backend != backend:
        raise RelayBroken(f"a reference of backend {ref.backend!r} was given to {backend!r}")
    return _check_layout(ref.dtype, ref.shape)


@functools.lru_cache(1024)
def _check_layout(name: str, shape: tuple[int, ...]) -> Layout:
    dtype = DTYPES.get(name)
    if dtype is None:
        raise RelayBroken(f"a reference has dtype {name!r}; known: {', '.join(DTYPES)}")
    if min(shape, default=0) < 0:
        raise RelayBroken(f"a reference has the shape {list(shape)[:MAX_DIMS]}")
    if len(shape) <= MAX_DIMS:
        # Sizes of 0 are left out: torch multiplies the others for the strides.
        extent = math.prod(max(size, 1) for size in shape) * dtype.itemsize
        if extent <= MAX_NUM_BYTES:
            return make_layout(dtype, shape)
    raise RelayBroken(f"a reference has the shape {list(shape)[:MAX_DIMS]}, beyond what can travel")


def dtype_name(tensor: torch.Tensor) -> str:
    """Return the name of a tensor's dtype in references. Raises ``TypeError`` for a dtype that cannot travel."""
    name = DTYPE_NAMES.get(tensor.dtype)
    if name is None:
        raise TypeError(f"cannot publish a tensor of {tensor.dtype}; supported: {', '.join(DTYPES)}")
    return name


# -- payloads ---------------------------------------------------------------------------------------------------------


class Payload(msgspec.Struct, frozen=True):
    """One chunk of a stage's output for the stages that read it.

    Tensors are named by their path: keys and indices joined by "/", as in ``layers/0/hidden``.
    """

    tensors: dict[str, TensorRef] = {}  # path -> reference
    values: Any = {}  # everything else, nested, msgpack types only; None in the place of each tensor
    streams: dict[str, TensorRef] = {}  # reading node of the graph -> its stream (relay/stream.py); see ``of``
    apart: dict[str, dict[str, TensorRef]] = {}  # reading node -> its references, where they are not ``tensors``

    def of(self, node: str) -> Payload:
        """What one of the reading nodes gets: its tensors, and its stream by the name ``ROWS``; of that, all."""
        if not self.streams and not self.apart:
            return self
        stream = self.streams.get(node) or self.streams.get(ROWS)
        streams = {} if stream is None else {ROWS: stream}
        return Payload(self.apart.get(node, self.tensors), self.values, streams)

    def refs(self) -> list[TensorRef]:
        """All references, of every reader."""
        apart = (ref for refs in self.apart.values() for ref in refs.values())
        return [*self.tensors.values(), *self.streams.values(), *apart]


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Payload)


def encode(payload: Payload) -> bytes:
    """Serialize a payload. Raises ``TypeError`` for values that msgpack does not have."""
    try:
        return _encoder.encode(payload)
    except (OverflowError, UnicodeEncodeError, RecursionError) as exc:
        raise TypeError(f"a payload cannot travel: {exc}") from exc


def decode(data: bytes | memoryview) -> Payload:
    """Parse a payload that came off a wire.

    Raises:
        RelayBroken: not a payload of this project, or one beyond its bounds.
    """
    if len(data) > MAX_PAYLOAD_BYTES:
        raise RelayBroken(f"a payload of {len(data)} bytes; at most {MAX_PAYLOAD_BYTES} can travel")
    try:
        payload = _decoder.decode(data)
    except (msgspec.MsgspecError, RecursionError, ValueError) as exc:
        raise RelayBroken(f"malformed payload: {exc}") from exc
    if (num_refs := len(payload.refs())) > MAX_TENSORS:
        raise RelayBroken(f"a payload with {num_refs} tensors; at most {MAX_TENSORS} can travel")
    return payload


def pack(payload: Payload) -> torch.Tensor:
    """Serialize a payload into the one tensor that vLLM's ``pooling_output`` can carry: uint8 [num_bytes], host."""
    return torch.frombuffer(bytearray(encode(payload)), dtype=torch.uint8)


def unpack(tensor: torch.Tensor) -> Payload:
    """Inverse of ``pack``.

    Raises:
        RelayBroken: the tensor does not hold a payload.
    """
    if tensor.dtype != torch.uint8 or tensor.dim() != 1:
        raise RelayBroken(f"a packed payload is uint8 [n], not {tensor.dtype} {list(tensor.shape)}")
    return decode(np.ascontiguousarray(tensor.numpy()).data)
