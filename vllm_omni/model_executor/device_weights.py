"""``DeviceWeights``: a model's tensors in one block of a GPU's memory, which the server holds (``BlockHolder``)."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager
from pathlib import Path
from typing import NamedTuple

import msgspec
import torch
from torch import Tensor, nn

from vllm_omni.errors import ConfigError
from vllm_omni.model_executor.device_block import BlockMemory
from vllm_omni.model_executor.weight_tensors import (
    check_kept,
    check_same,
    count_published,
    dtype_name,
    places_of,
    tensor_at,
    tensors_of,
)
from vllm_omni.process.block_holder import fetch, hand_over
from vllm_omni.process.shared_weights import LOAD_FORMAT, SharedWeights, TensorPlace, num_bytes_of

DEVICE_ALIGNMENT = 512  # of torch's own allocations: kernels choose their loads by it


class _Prepared(NamedTuple):
    """The block of a model that loads."""

    descriptor: int
    whole: Tensor  # uint8, device
    places: dict[str, TensorPlace]


class DeviceWeights:
    """Weights are loaded straight into the block, so that they are nowhere twice.

    A model is made on the host, where memory that is not written costs nothing, and its parameters are bound to their
    places. What one engine writes there, all see: so buffers, which models may write, are copied into each process.

    See ``SharedModel``.

    Args:
        key: also of the GPU.
    """

    def __init__(self, directory: Path, key: str, memory: BlockMemory) -> None:
        self._directory, self._key, self._memory = directory, key, memory
        self.path = directory / f"{key}.weights"  # the places
        self._weights = SharedWeights(directory, key, self.path)
        self._prepared: _Prepared | None = None

    def claim(self) -> AbstractContextManager[bool]:
        return self._weights.claim()

    def prepare(self, model: nn.Module) -> None:
        tensors = tensors_of(model)
        places = places_of(tensors, DEVICE_ALIGNMENT)
        num_bytes = num_bytes_of(places)
        descriptor = self._memory.create(num_bytes)
        whole = self._memory.map(descriptor, num_bytes)
        for name, tensor in tensors.items():
            if isinstance(tensor, nn.Parameter):
                place = tensor_at(places[name], whole)
                if tensor.device.type != "meta":
                    place.copy_(tensor.data)  # what no checkpoint has: zeros, ones
                tensor.data = place
        move_the_rest(model, self._memory.device)
        self._prepared = _Prepared(descriptor, whole, places)

    def publish(self, model: nn.Module) -> None:
        assert self._prepared is not None, "the model was not prepared"
        descriptor, whole, places = self._prepared
        check_kept(model, places.keys())
        places = {name: _settle(name, tensor, places[name], whole) for name, tensor in tensors_of(model).items()}
        if self._memory.device.type == "cuda":
            torch.cuda.synchronize(self._memory.device)
        hand_over(self._directory, self._key, descriptor)
        os.close(descriptor)
        unfinished = self.path.with_suffix(".unfinished")
        unfinished.write_bytes(msgspec.json.encode(places))
        unfinished.rename(self.path)
        count_published(num_bytes_of(places))
        self._prepared = None

    def adopt(self, model: nn.Module) -> None:
        places = msgspec.json.decode(self.path.read_bytes(), type=dict[str, TensorPlace])
        tensors = tensors_of(model)
        check_same(tensors.keys(), places, self.path)
        descriptor = fetch(self._directory, self._key)
        whole = self._memory.map(descriptor, num_bytes_of(places))
        os.close(descriptor)
        for name, tensor in tensors.items():
            place = tensor_at(places[name], whole)
            tensor.data = place if isinstance(tensor, nn.Parameter) else place.clone()
        move_the_rest(model, self._memory.device)


def _settle(name: str, tensor: Tensor, place: TensorPlace, whole: Tensor) -> TensorPlace:
    """Copy a tensor to its place, if loading has put it elsewhere, and bind it there if it is a parameter."""
    if tensor.nbytes != place.num_bytes:
        raise ConfigError(
            f"load_format = {LOAD_FORMAT!r}: {name} has {tensor.nbytes} bytes when it is loaded, and {place.num_bytes} "
            "before, so these weights cannot be shared; leave load_format out"
        )
    place = TensorPlace(dtype_name(tensor), list(tensor.shape), place.offset, place.num_bytes)
    target = tensor_at(place, whole)
    is_there = tensor.data_ptr() == target.data_ptr() and tensor.is_contiguous()
    if not is_there:
        target.copy_(tensor.detach().clone(memory_format=torch.contiguous_format))
    if isinstance(tensor, nn.Parameter) and not is_there:
        tensor.data = target
    return place


def move_the_rest(model: nn.Module, device: torch.device) -> None:
    """Move buffers, and tensors that modules keep as plain attributes, from the host to a device."""
    for buffer in model.buffers():
        buffer.data = buffer.data.to(device)
    for module in model.modules():
        for name, value in list(vars(module).items()):
            if isinstance(value, Tensor):
                setattr(module, name, value.to(device))
