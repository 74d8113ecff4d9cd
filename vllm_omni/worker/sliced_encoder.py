"""``SlicedEncoder``: a forward of an encoder that stops between two layers, or within one, and goes on later."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import nn

from vllm_omni.diffusion.greenlets import import_greenlet, is_autocast, return_here

WEIGHT = 0.25
"""Of the last layer in what a part of a layer is expected to take."""


class Slice(NamedTuple):
    """What one grant of layers did."""

    has_ended: bool
    num_layers: float  # a part of one counts as much as any other
    seconds: float


def _has_matrix(module: nn.Module) -> bool:
    """Of its own; a norm has none. vLLM's CPU backend packs matrices, and leaves empty tensors in their place."""
    return any(weight.dim() > 1 or not weight.numel() for weight in module.parameters(recurse=False))


class SlicedEncoder:
    """Runs a forward in a greenlet, which keeps the place in the tower's code; no model has to be written for it.

    A thread would keep it, too, and its forward would run on another core than the language model's, with kernel
    threads of its own: on two cores of a virtual machine both took a tenth longer. What torch keeps per thread is
    shared, so it stops nowhere within an autocast.

    Args:
        towers: modules that encode. Their layers are the children of each ``ModuleList`` in them, and a layer's parts
            begin with each module in it that has weights, but for the first, with which it begins itself. Where a gap
            between tokens leaves room for one or two layers, by whole ones half of it would be lost.
        clock: in seconds.

    Raises:
        MissingDependency: greenlet is not installed.
    """

    def __init__(self, towers: Iterable[nn.Module], clock: Callable[[], float] = time.perf_counter) -> None:
        self._greenlets = import_greenlet("an encode in slices")
        layers = {
            id(layer): layer
            for tower in towers
            for module in tower.modules()
            if isinstance(module, nn.ModuleList)
            for layer in module
        }
        parts = {
            id(module): (module, name)
            for layer in layers.values()
            for name, module in layer.named_modules()
            if id(module) not in layers and _has_matrix(module)
        }
        self._handles = [layer.register_forward_pre_hook(self._at_layer) for layer in layers.values()]
        self._handles += [module.register_forward_pre_hook(self._at_part(name)) for module, name in parts.values()]
        # Of the last batch; before one has ended: as many as there are.
        self.num_layers_of_batch = max(1, len(layers))
        self._num_parts_of_batch = max(self.num_layers_of_batch, len(parts))
        self._running: Any = None  # the greenlet of the forward under way
        self._clock = clock
        self._num_left: int | None = None
        self._until: float | None = None
        self._part_s: dict[str, float] = {}  # what each part of a layer takes in this batch, as far as it is known
        self._part = ""  # the one under way
        self._is_in_first_part = False  # of a layer, before the first of its weights
        self._part_began_at: float | None = None  # None: not in this slice
        self._num_passed = 0  # layers of the forward
        self._num_parts_passed = 0
        self._num_told = 0.0  # of the layers passed, by slices that have ended

    @property
    def is_under_way(self) -> bool:
        return self._running is not None

    def begin(self, forward: Callable[[], None]) -> None:
        """Take a forward; nothing of it runs before ``go_on``."""
        assert not self.is_under_way, "one forward at a time"
        self._running = self._greenlets.greenlet(forward)
        self._num_passed = self._num_parts_passed = 0
        self._num_told = 0.0
        self._part_s.clear()

    def go_on(self, num_layers: int | None, until: float | None = None) -> Slice:
        """Run up to so many layers, whole ones, and what lies between them; None: to the end.

        What is before the first layer goes with the first slice, what is behind the last layer with the last.

        Args:
            until: by the clock: no part of a layer but the first is begun that would end later, if it takes as long
                as those before it.

        Raises:
            Exception: the forward's own.
        """
        assert self.is_under_way, "nothing has begun"
        assert num_layers is None or num_layers > 0
        num_parts_before, began_at = self._num_parts_passed, self._clock()
        self._num_left = num_layers
        self._until = until
        self._part_began_at = None
        has_ended = True
        try:
            return_here(self._running)
            with torch.inference_mode():
                self._running.switch()
            has_ended = self._running.dead
        finally:
            if has_ended:
                self._running = None
        if has_ended:
            self.num_layers_of_batch = max(1, self._num_passed)
            self._num_parts_of_batch = max(1, self._num_parts_passed)
            passed = self._num_passed - self._num_told
        else:
            num_parts = self._num_parts_passed - num_parts_before
            passed = num_parts * self.num_layers_of_batch / self._num_parts_of_batch
        self._num_told += passed
        return Slice(has_ended, passed, self._clock() - began_at)

    def cancel(self) -> None:
        """Give up the forward under way, if there is one."""
        if self.is_under_way:
            return_here(self._running)
            self._running.throw()  # its own exception for that, which ends here
            assert self._running.dead, "the encoder goes on though it was cancelled"
            self._running = None

    def close(self) -> None:
        """Give up what is under way and take the boundaries out of the towers."""
        self.cancel()
        for handle in self._handles:
            handle.remove()

    @property
    def _is_inside(self) -> bool:
        """Or else it is a forward that nobody slices: vLLM's profiling run."""
        return self._running is not None and self._greenlets.getcurrent() is self._running

    def _at_layer(self, layer: nn.Module, args: object) -> None:
        if not self._is_inside:
            return
        self._begin_part("", is_last=self._num_left == 0)
        self._is_in_first_part = True
        if self._num_left is not None:
            self._num_left -= 1
        self._num_passed += 1

    def _at_part(self, name: str) -> Callable[[nn.Module, object], None]:
        def begin(module: nn.Module, args: object) -> None:
            if not self._is_inside:
                return
            if not self._is_in_first_part:
                self._begin_part(name, is_last=False)
            self._is_in_first_part = False

        return begin

    def _begin_part(self, name: str, is_last: bool) -> None:
        """Stop in front of it, if the grant is over (``is_last``) or the time is."""
        now = self._clock()
        is_late = False
        if self._part_began_at is not None:
            known_s, part_s = self._part_s.get(self._part), now - self._part_began_at
            self._part_s[self._part] = part_s if known_s is None else known_s + (part_s - known_s) * WEIGHT
            expected_s = self._part_s.get(name, max(self._part_s.values()))
            is_late = self._until is not None and now + expected_s > self._until
        if (is_last or is_late) and not is_autocast():
            self._running.parent.switch()
            now = self._clock()
        self._part, self._part_began_at = name, now
        self._num_parts_passed += 1
