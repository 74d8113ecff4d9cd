"""A model's tensors that engines share, by name, and how those of one model are made those of another.

They have the shapes of the end of loading: sliced for the rank, merged (q, k and v) and, for experts, packed for the
kernels. They keep their identity as parameters: only ``data`` changes.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor, nn

from vllm_omni.errors import ConfigError
from vllm_omni.process.shared_weights import ALIGNMENT, LOAD_FORMAT, TensorPlace, place_tensors

_published_bytes = 0


class SharedModel(Protocol):
    """One copy of a model's tensors, on the host (``HostWeights``) or on a GPU (``DeviceWeights``)."""

    path: Path

    def claim(self) -> AbstractContextManager[bool]:
        """See ``SharedWeights.claim``."""

    def prepare(self, model: nn.Module) -> None:
        """Make room for a model that has just been made and is about to load its checkpoint; the caller has claimed it.

        Raises:
            ConfigError: there is too little memory.
        """

    def publish(self, model: nn.Module) -> None:
        """Publish the tensors of the prepared model, which has been loaded.

        Raises:
            ConfigError: it has other tensors now, which no other process could have; or the memory is full.
        """

    def adopt(self, model: nn.Module) -> None:
        """Give a model that has just been made the published tensors.

        Raises:
            ConfigError: they are another model's.
        """


def published_bytes() -> int:
    """Bytes of the weights that this process has published, in memory that is not its own."""
    return _published_bytes


def count_published(num_bytes: int) -> None:
    global _published_bytes
    _published_bytes += num_bytes


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers by name, also by their second names (tied embeddings), without empty ones."""
    named = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    return {name: tensor for name, tensor in named if tensor.numel()}


def places_of(tensors: Mapping[str, Tensor], alignment: int = ALIGNMENT) -> dict[str, TensorPlace]:
    """Give tensors places; those of several names have one."""
    first: dict[int, str] = {}  # id of a tensor -> its first name
    for name, tensor in tensors.items():
        first.setdefault(id(tensor), name)
    sizes = {
        name: (dtype_name(tensors[name]), list(tensors[name].shape), tensors[name].nbytes) for name in first.values()
    }
    places = place_tensors(sizes, alignment)
    return {name: places[first[id(tensor)]] for name, tensor in tensors.items()}


def dtype_name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def tensor_at(place: TensorPlace, whole: Tensor) -> Tensor:
    """The tensor at a place.

    Args:
        whole: all bytes, as uint8.
    """
    flat = whole[place.offset : place.offset + place.num_bytes]
    return flat.view(getattr(torch, place.dtype)).view(place.shape)


def check_kept(model: nn.Module, names: Collection[str]) -> None:
    """Raises ``ConfigError`` if a loaded model has other tensors than before."""
    if others := sorted(tensors_of(model).keys() ^ names):
        raise ConfigError(
            f"load_format = {LOAD_FORMAT!r}: {type(model).__name__} adds or removes tensors while it loads "
            f"({others[0]}), so its weights cannot be shared; leave load_format out"
        )


def check_same(names: Collection[str], places: Mapping[str, TensorPlace], path: Path) -> None:
    """Raises ``ConfigError`` if published tensors are those of another model."""
    if others := sorted(names ^ places.keys()):
        raise ConfigError(f"{path} has weights of another model: {others[0]} is in one of the two only")
