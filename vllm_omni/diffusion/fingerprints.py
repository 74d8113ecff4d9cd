"""``Fingerprints``: find equal tensors of different requests without comparing them."""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Hashable, Mapping
from typing import Any

import torch
from torch import Tensor

from vllm_omni.diffusion.merge_rules import Unmergeable


class Fingerprints:
    """Digests of shared tensors. Each is read once; comparing two tensors would wait for a GPU in every step."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[weakref.ref[Any], int, Hashable]] = {}  # id -> the tensor, its version, its digest

    def __len__(self) -> int:
        """Number of live tensors whose digest is kept."""
        return len(self._known)

    def of(self, value: Any) -> Hashable:
        """Compute a key that is equal for equal values.

        Raises:
            Unmergeable: the value cannot be compared.
        """
        if isinstance(value, Tensor):
            return self._of_tensor(value)
        if isinstance(value, tuple | list):
            return (type(value).__name__, *map(self.of, value))
        if isinstance(value, Mapping):
            return tuple((key, self.of(value[key])) for key in sorted(value))
        if value is None or isinstance(value, Hashable):
            return value
        raise Unmergeable(f"cannot compare a {type(value).__name__}")

    def _of_tensor(self, tensor: Tensor) -> Hashable:
        known = self._known.get(id(tensor))
        if known is not None and known[1] == tensor._version and known[0]() is tensor:
            return known[2]
        content = tensor.detach().contiguous().cpu().view(-1).view(torch.uint8).numpy()
        digest = hashlib.blake2b(content, digest_size=16).digest()
        fingerprint = (tuple(tensor.shape), tensor.dtype, tensor.device, digest)
        key, known_ones = id(tensor), self._known
        reference = weakref.ref(tensor, lambda dead: known_ones.pop(key, None))
        self._known[key] = (reference, tensor._version, fingerprint)
        return fingerprint
