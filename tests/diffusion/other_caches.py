"""Other first-block caches, of one request at a time, that the row-wise one is compared with."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from diffusers import FirstBlockCacheConfig
from torch import Tensor, nn

from tests.diffusion.tiny_denoisers import Call, Family, Row, kwargs_of


@contextmanager
def diffusers_cache(family: Family, modules: Mapping[str, nn.Module], threshold: float) -> Iterator[Call]:
    """diffusers' own; calls of one row each."""

    def call(component: str, rows: list[Row]) -> list[Tensor]:
        predictions = []
        for row in rows:
            with modules[component].cache_context(row.key.branch):
                predictions.append(modules[component](**kwargs_of(family, [row]))[0][0])
        return predictions

    for module in modules.values():
        module.enable_cache(FirstBlockCacheConfig(threshold=threshold))
    try:
        with torch.no_grad():
            yield call
    finally:
        for module in modules.values():
            module.disable_cache()


@dataclass
class _State:
    residual: Tensor | None = None
    tail: Tensor | None = None


@dataclass
class SlowCache:
    """The formula written down: the whole model always runs, and a hit replaces what its last block returns."""

    family: Family
    module: nn.Module
    threshold: float
    hidden_index: int | None  # in what a block returns; None: it returns a tensor
    num_hits: int = 0
    _states: dict[str, _State] = field(default_factory=dict)

    def __call__(self, component: str, rows: list[Row]) -> list[Tensor]:
        return [self._predict(row) for row in rows]

    def _hidden(self, result: Any) -> Tensor:
        return result if self.hidden_index is None else result[self.hidden_index]

    @torch.no_grad()
    def _predict(self, row: Row) -> Tensor:
        state = self._states.setdefault(row.key.branch, _State())
        blocks = next(
            getattr(self.module, name)
            for name in ("transformer_blocks", "blocks", "layers")
            if hasattr(self.module, name)
        )
        seen: dict[str, Tensor] = {}

        def see_first(block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
            seen["head"] = self._hidden(result)
            seen["residual"] = seen["head"] - (kwargs["hidden_states"] if "hidden_states" in kwargs else args[0])

        def replace_last(block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> Any:
            if state.residual is not None:
                change = (seen["residual"] - state.residual).abs().mean() / state.residual.abs().mean()
                if change.item() <= self.threshold:
                    self.num_hits += 1
                    hidden = seen["head"] + state.tail
                    if self.hidden_index is None:
                        return hidden
                    return tuple(hidden if i == self.hidden_index else part for i, part in enumerate(result))
            state.residual, state.tail = seen["residual"], self._hidden(result) - seen["head"]
            return None

        hooks = [
            blocks[0].register_forward_hook(see_first, with_kwargs=True),
            blocks[-1].register_forward_hook(replace_last, with_kwargs=True),
        ]
        try:
            return self.module(**kwargs_of(self.family, [row]))[0][0]
        finally:
            for hook in hooks:
                hook.remove()
