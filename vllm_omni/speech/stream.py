"""Modules that compute a stream piece by piece, with the result that one call for the whole stream has.

A layer that looks back keeps a *state* for each stream: the inputs, or the outputs, that later samples still need. A
state of zeros is the start of a stream. Streams of one batch may stand at different positions, and advance by the same
number of frames.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

from torch import Tensor, nn


class Step:
    """One call of a model for a batch of streams: their states, replaced layer by layer.

    Args:
        states: for each slot, [B, *shape of the layer]; unchanged.
        position: [B] int64, frames of each stream before this call.
        is_start: the position of all streams is 0.
    """

    def __init__(self, states: Sequence[Tensor], position: Tensor, *, is_start: bool) -> None:
        self.states = list(states)
        self.position = position
        self.is_start = is_start


class StreamModule(nn.Module):
    """A module that takes the next inputs of streams."""

    @abstractmethod
    def advance(self, x: Tensor, step: Step) -> Tensor:
        """Outputs of the inputs that follow those of earlier calls; [B, C, n] -> [B, C', n']."""


class StreamLayer(StreamModule):
    """A module with a state for each stream, which stands at ``slot`` in a step's states."""

    slot: int  # set by ``number_layers``

    @abstractmethod
    def state_shape(self) -> tuple[int, ...]:
        """Shape of one stream's state."""


class Chain(nn.ModuleList):
    """Modules one after another, under the names that a list has in a checkpoint."""

    def advance(self, x: Tensor, step: Step) -> Tensor:
        for module in self:
            assert isinstance(module, StreamModule)
            x = module.advance(x, step)
        return x


def number_layers(model: nn.Module) -> list[tuple[int, ...]]:
    """Give each layer of a model its slot; returns the shapes of one stream's states."""
    layers = [module for module in model.modules() if isinstance(module, StreamLayer)]
    for slot, layer in enumerate(layers):
        layer.slot = slot
    return [layer.state_shape() for layer in layers]
