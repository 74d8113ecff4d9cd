"""Take the tensors out of nested containers, and put them back: the path of a tensor names it in its payload."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from vllm_omni.errors import RelayBroken

MAX_DEPTH = 32


def extract(tree: Any) -> tuple[Any, dict[str, torch.Tensor]]:
    """Take the tensors out of nested dicts, lists and tuples.

    Returns:
        New containers with None in the tensors' places (tuples become lists), and the tensors by path.

    Raises:
        TypeError: something that cannot travel, named by its path: another type, a key that is not a str, a nesting
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
                    raise TypeError(f"{_join(path) or 'payload'}: the key {key!r} is not a str, and cannot travel")
            return {key: _extract(value, (*path, key), tensors) for key, value in tree.items()}
        case list() | tuple():
            return [_extract(value, (*path, str(index)), tensors) for index, value in enumerate(tree)]
        case None | bool() | int() | float() | str() | bytes():
            return tree
    raise TypeError(f"{_join(path) or 'payload'}: {type(tree).__name__} cannot travel: neither tensor nor msgpack type")


def restore(values: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    """Inverse of ``extract``: new containers, so that no two readers share one, with the tensors in their places.

    Raises:
        RelayBroken: a path that does not lead to a tensor's place.
    """
    root = [_copy(values, 0)]
    for path, tensor in tensors.items():
        keys = ["0", *(_split(path) if path else ())]
        container: Any = root
        for key in keys[:-1]:
            container = _enter(container, key, path)
        if _enter(container, keys[-1], path) is not None:
            raise RelayBroken(f"{path!r} is not a tensor's place in its payload")
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
    raise RelayBroken(f"{path!r} does not exist in its payload")


def _join(path: tuple[str, ...]) -> str:
    """Escapes keys as a JSON pointer (RFC 6901) does."""
    return "/".join(key.replace("~", "~0").replace("/", "~1") for key in path)


def _split(path: str) -> Iterator[str]:
    return (key.replace("~1", "/").replace("~0", "~") for key in path.split("/"))
