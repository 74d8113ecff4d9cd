"""Weights of linear layers as products of few rows read them fastest on a CPU; they stay the layers' own parameters.

Both functions replace ``data`` of parameters: call them when the model is loaded. New weights that are copied into the
parameters later are read as ever.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional


def store_by_column(*layers: nn.Module) -> None:
    """Store the weights of those that are linear layers column by column: up to twice as fast for 16 rows."""
    for layer in layers:
        if isinstance(layer, nn.Linear):
            layer.weight.data = _by_column(layer.weight)


class JoinedLinears:
    """One product in place of those of layers that read the same rows; their parameters become views of its own."""

    def __init__(self, *layers: nn.Linear) -> None:
        self._sizes = [layer.out_features for layer in layers]
        self._weight = _by_column(torch.cat([layer.weight for layer in layers]))
        biases = [layer.bias for layer in layers if layer.bias is not None]
        assert len(biases) in (0, len(layers)), "some of the layers have a bias, and others do not"
        self._bias = torch.cat(biases).detach() if biases else None
        for layer, weight in zip(layers, self._weight.split(self._sizes), strict=True):
            layer.weight.data = weight
        if self._bias is not None:
            for layer, bias in zip(layers, self._bias.split(self._sizes), strict=True):
                layer.bias.data = bias

    def __call__(self, x: Tensor) -> Sequence[Tensor]:
        """What each layer makes of the rows."""
        return self.product(x).split(self._sizes, dim=-1)

    def product(self, x: Tensor) -> Tensor:
        """The same in one tensor, one layer after the other."""
        return functional.linear(x, self._weight, self._bias)


def _by_column(weight: Tensor) -> Tensor:
    return weight.detach().t().contiguous().t()
