"""Payload <-> bytes: tensors as references named by their path, everything else as msgpack. Nothing is pickled.

What comes off a wire is checked before it is used: a message that is too large, nested too deeply, or whose references
do not fit into what it holds is refused whole.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec
import numpy as np
import torch

from vllm_omni.errors import RelayBroken
from vllm_omni.relay.base import TensorRef

MAX_PAYLOAD_BYTES = 1 << 30  # inline tensors included
MAX_DEPTH = 32
MAX_TENSORS = 65536


class Payload(msgspec.Struct, frozen=True):
    """What a stage hands to the next in one chunk. Paths are keys and indices, joined by "/": ``layers/0/hidden``."""

    tensors: dict[str, TensorRef] = {}  # path -> reference
    values: Any = {}  # what is no tensor, nested: msgpack types only; None where a tensor was taken out
    streams: dict[str, TensorRef] = {}  # name -> the reference of a stream (relay/stream.py)


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Payload)


def encode(payload: Payload) -> bytes:
    """Raises ``TypeError`` for values that msgpack does not have."""
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
    if len(payload.tensors) > MAX_TENSORS:
        raise RelayBroken(f"a payload with {len(payload.tensors)} tensors; at most {MAX_TENSORS} can travel")
    return payload


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


# -- nested containers ------------------------------------------------------------------------------------------------


def extract(tree: Any) -> tuple[Any, dict[str, torch.Tensor]]:
    """Take the tensors out of nested dicts, lists and tuples.

    Returns:
        New containers with None in the tensors' places (tuples become lists), and the tensors by path.

    Raises:
        TypeError: something that cannot travel, named by its path: another type, a key that is no str, a nesting
            deeper than ``MAX_DEPTH``.
    """
    tensors: dict[str, torch.Tensor] = {}
    return _extract(tree, (), tensors), tensors


def _extract(tree: Any, path: tuple[str, ...], tensors: dict[str, torch.Tensor]) -> Any:
    if len(path) > MAX_DEPTH:
        raise TypeError(f"{_join(path[:4])}/...: containers are nested more than {MAX_DEPTH} deep")
    match tree:
        case torch.Tensor():
            tensors[_join(path)] = tree
            return None
        case dict():
            for key in tree:
                if not isinstance(key, str):
                    raise TypeError(f"{_join(path) or 'payload'}: the key {key!r} is no str, and cannot travel")
            return {key: _extract(value, (*path, key), tensors) for key, value in tree.items()}
        case list() | tuple():
            return [_extract(value, (*path, str(index)), tensors) for index, value in enumerate(tree)]
        case None | bool() | int() | float() | str() | bytes():
            return tree
    raise TypeError(f"{_join(path) or 'payload'}: {type(tree).__name__} cannot travel: neither tensor nor msgpack type")


def restore(values: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    """Inverse of ``extract``: new containers, so that no two readers share one, with the tensors in their places.

    Raises:
        RelayBroken: a path that leads nowhere, or to something else than a tensor's place.
    """
    root = [_copy(values, 0)]
    for path, tensor in tensors.items():
        keys = ["0", *(_split(path) if path else ())]
        container: Any = root
        for key in keys[:-1]:
            container = _enter(container, key, path)
        if _enter(container, keys[-1], path) is not None:
            raise RelayBroken(f"{path!r} is no tensor's place in its payload")
        container[int(keys[-1]) if isinstance(container, list) else keys[-1]] = tensor
    return root[0]


def _copy(values: Any, depth: int) -> Any:
    if depth > MAX_DEPTH + 1:
        raise RelayBroken(f"a payload whose containers are nested more than {MAX_DEPTH} deep")
    if isinstance(values, dict):
        return {key: _copy(value, depth + 1) for key, value in values.items()}
    return [_copy(value, depth + 1) for value in values] if isinstance(values, list) else values


def _enter(container: Any, key: str, path: str) -> Any:
    if isinstance(container, dict) and key in container:
        return container[key]
    if isinstance(container, list) and key.isdecimal() and len(key) < 10 and int(key) < len(container):
        return container[int(key)]
    raise RelayBroken(f"{path!r} leads nowhere in its payload")


def _join(path: tuple[str, ...]) -> str:
    """As a JSON pointer (RFC 6901) escapes its keys."""
    return "/".join(key.replace("~", "~0").replace("/", "~1") for key in path)


def _split(path: str) -> Iterator[str]:
    return (key.replace("~1", "/").replace("~0", "~") for key in path.split("/"))
