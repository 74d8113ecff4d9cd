"""Payload <-> bytes: named tensors as references, everything else as msgpack. Nothing on the wire is pickled."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import torch

from vllm_omni.errors import RelayBroken
from vllm_omni.relay.base import TensorRef


class Payload(msgspec.Struct, frozen=True):
    """What a stage hands to the next in one chunk."""

    tensors: dict[str, TensorRef] = {}  # name -> reference
    values: dict[str, Any] = {}  # name -> msgpack types only


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Payload)


def encode(payload: Payload) -> bytes:
    return _encoder.encode(payload)


def decode(data: bytes | memoryview) -> Payload:
    """Parse a payload that came off a wire.

    Raises:
        RelayBroken: not a payload of this project.
    """
    try:
        return _decoder.decode(data)
    except msgspec.DecodeError as exc:
        raise RelayBroken(f"malformed payload: {exc}") from exc


def pack(payload: Payload) -> torch.Tensor:
    """Put a payload into the one tensor that vLLM's ``pooling_output`` can carry: uint8 [num_bytes], host."""
    return torch.frombuffer(bytearray(encode(payload)), dtype=torch.uint8)


def unpack(tensor: torch.Tensor) -> Payload:
    """Inverse of ``pack``.

    Raises:
        RelayBroken: the tensor does not hold a payload.
    """
    if tensor.dtype != torch.uint8 or tensor.dim() != 1:
        raise RelayBroken(f"a packed payload is uint8 [n], not {tensor.dtype} {list(tensor.shape)}")
    return decode(np.ascontiguousarray(tensor.numpy()).data)
