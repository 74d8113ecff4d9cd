"""Linear layers that are prepared for products of few rows, such as those of a batch's frames, on a CPU.

``prepare`` them when their model is loaded. Their weights are then stored by columns, which is fastest for one row, and
where vLLM's operators are loaded also as oneDNN packs them, which is fastest for 2 to 32 rows: in memory twice. A layer
must get no new weights after that; neither may those of vLLM on a CPU. On a GPU only ``JoinedLinears`` gains anything.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from contextlib import suppress

import torch
from torch import Tensor, nn
from torch.nn import functional

PRIMITIVES = 32  # oneDNN's programs, one for each number of rows, that a layer keeps; as vLLM's layers


class Product:
    """Multiplies rows with a weight.

    Args:
        weight: [out, in]; it is copied, see ``weight``.
        bias: [out], or None.

    Attributes:
        weight: the copy, stored by columns.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.weight = weight.detach().t().contiguous().t()
        self.bias = bias
        self._packed: Tensor | None = None  # the address of the packed weight, in a tensor as vLLM's operator takes it
        if weight.is_cpu and hasattr(torch.ops._C, "create_onednn_mm_handler"):
            with suppress(RuntimeError):  # not for all dtypes on all processors
                address = torch.ops._C.create_onednn_mm_handler(weight.detach().contiguous().t(), PRIMITIVES)
                weakref.finalize(self, torch.ops._C.release_dnnl_matmul_handler, address).atexit = False
                self._packed = torch.tensor(address)

    def __call__(self, x: Tensor) -> Tensor:
        """[..., in] -> [..., out]."""
        if self._packed is None or x[..., 0].numel() == 1:
            return functional.linear(x, self.weight, self.bias)
        y = x.new_empty(*x.shape[:-1], len(self.weight))
        torch.ops._C.onednn_mm(y, x.reshape(-1, x.shape[-1]), self.bias, self._packed)
        return y


class FewRowsLinear(nn.Linear):
    """``nn.Linear``, and the same parameters; ``prepare`` makes its products faster."""

    def __init__(self, in_features: int, out_features: int, bias: bool = True) -> None:
        super().__init__(in_features, out_features, bias)
        self._product: Product | None = None

    def prepare(self) -> None:
        self._product = Product(self.weight, self.bias)
        self.weight.data = self._product.weight

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if self._product is None else self._product(x)


def prepare(*layers: nn.Module) -> None:
    """Prepare those that are linear layers."""
    for layer in layers:
        if isinstance(layer, FewRowsLinear):
            layer.prepare()


class JoinedLinears:
    """One product in place of those of layers that read the same rows; their parameters become views of its own."""

    def __init__(self, *layers: nn.Linear) -> None:
        self._sizes = [layer.out_features for layer in layers]
        biases = [layer.bias for layer in layers if layer.bias is not None]
        assert len(biases) in (0, len(layers)), "some of the layers have a bias, and others do not"
        bias = torch.cat(biases).detach() if biases else None
        self.product = Product(torch.cat([layer.weight for layer in layers]), bias)
        for layer, weight in zip(layers, self.product.weight.split(self._sizes), strict=True):
            layer.weight.data = weight
        if bias is not None:
            for layer, one in zip(layers, bias.split(self._sizes), strict=True):
                layer.bias.data = one

    def __call__(self, x: Tensor) -> Sequence[Tensor]:
        """What each layer makes of the rows."""
        return self.product(x).split(self._sizes, dim=-1)
