"""``HostWeights``: a model's tensors in a file of shared memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path

import torch
from torch import Tensor, nn

from vllm_omni.model_executor.weight_tensors import (
    check_kept,
    check_same,
    count_published,
    places_of,
    tensor_at,
    tensors_of,
)
from vllm_omni.process.shared_weights import WeightsFile, num_bytes_of


class HostWeights:
    """Weights are loaded as ever and then written, each freed when it is in the file, which is mapped in their place:
    only then are they as kernels for the CPU want them.

    See ``SharedModel``.
    """

    def __init__(self, directory: Path, key: str) -> None:
        self._file = WeightsFile(directory, key)
        self.path = self._file.path

    def claim(self) -> AbstractContextManager[bool]:
        return self._file.claim()

    def prepare(self, model: nn.Module) -> None:
        tensors = tensors_of(model)
        self._file.check_room(num_bytes_of(places_of(tensors)))
        self._names = tensors.keys()

    def publish(self, model: nn.Module) -> None:
        check_kept(model, self._names)
        tensors = tensors_of(model)
        places = places_of(tensors)

        def contents() -> Iterator[tuple[str, memoryview]]:
            written = set()
            for name, tensor in tensors.items():
                if places[name].offset not in written:
                    written.add(places[name].offset)
                    flat = tensor.detach().contiguous().reshape(-1)
                    yield name, memoryview(flat.view(torch.uint8).numpy())
                    tensor.data = torch.empty(0, dtype=tensor.dtype)

        self._file.write(places, contents())
        count_published(num_bytes_of(places))
        self._bind(tensors)

    def adopt(self, model: nn.Module) -> None:
        self._bind(tensors_of(model))

    def _bind(self, tensors: Mapping[str, Tensor]) -> None:
        places, data = self._file.map()
        check_same(tensors.keys(), places, self.path)
        whole = torch.frombuffer(data, dtype=torch.uint8)
        for name, tensor in tensors.items():
            tensor.data = tensor_at(places[name], whole)
