"""``SlicedEncoder``: an encoder's forward that pauses between two layers, or within one, and is resumed later.
``ThreadedEncoder``: one in a thread, beside the caller's own computation.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, NamedTuple

import torch
from torch import nn

from vllm_omni.diffusion.greenlets import import_greenlet, is_autocast, return_here

WEIGHT = 0.25
"""Weight of the latest layer in the expected duration of a part of a layer."""


class Slice(NamedTuple):
    """What one call of ``resume`` did."""

    has_ended: bool
    num_layers: float  # the parts of a layer count alike
    seconds: float


def _has_matrix(module: nn.Module) -> bool:
    """Whether the module itself has a matrix, unlike a norm; vLLM's CPU backend packs them and leaves empty tensors."""
    return any(weight.dim() > 1 or not weight.numel() for weight in module.parameters(recurse=False))


class SlicedEncoder:
    """Runs a forward in a greenlet, which keeps its stack while it is paused; models need no change.

    A thread would keep the stack, too, but its forward would use another core than the language model's, with its own
    kernel threads: on two cores of a virtual machine both took a tenth longer. torch's state per thread is shared with
    the caller, so the forward never pauses within an autocast.

    Args:
        towers: modules that encode. Their layers are the children of each ``ModuleList`` in them. A layer is divided
            before each of its modules with weights but the first: where a gap between tokens leaves room for one or two
            layers, half of it would be lost by whole ones.
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
        # In the last batch; before one has ended, the number of layers in the towers.
        self.num_layers_of_batch = max(1, len(layers))
        self._num_parts_of_batch = max(self.num_layers_of_batch, len(parts))
        self._running: Any = None  # the greenlet of the current forward
        self._clock = clock
        self._num_left: int | None = None
        self._until: float | None = None
        self._part_s: dict[str, float] = {}  # duration of each part of a layer in this batch, once measured
        self._part = ""  # the current one
        self._is_in_first_part = False  # of a layer, before its first module with weights
        self._part_started_at: float | None = None  # None: not in this slice
        self._num_passed = 0  # layers of the forward
        self._num_parts_passed = 0
        self._num_reported = 0.0  # layers passed in slices that have ended

    @property
    def is_running(self) -> bool:
        return self._running is not None

    def start(self, forward: Callable[[], None]) -> None:
        """Take a forward, which runs with the first ``resume``."""
        assert not self.is_running, "one forward at a time"
        self._running = self._greenlets.greenlet(forward)
        self._num_passed = self._num_parts_passed = 0
        self._num_reported = 0.0
        self._part_s.clear()

    def resume(self, num_layers: int | None, until: float | None = None) -> Slice:
        """Run up to ``num_layers`` layers and the code between them; None: to the end.

        The code before the first layer runs in the first slice, the code behind the last layer in the last.

        Args:
            until: time by the clock. A part of a layer is not started, unless it is the first of the slice, if it would
                end later, judged by the parts before it.

        Raises:
            Exception: raised by the forward.
        """
        assert self.is_running, "no forward has started"
        assert num_layers is None or num_layers > 0
        num_parts_before, started_at = self._num_parts_passed, self._clock()
        self._num_left = num_layers
        self._until = until
        self._part_started_at = None
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
            passed = self._num_passed - self._num_reported
        else:
            num_parts = self._num_parts_passed - num_parts_before
            passed = num_parts * self.num_layers_of_batch / self._num_parts_of_batch
        self._num_reported += passed
        return Slice(has_ended, passed, self._clock() - started_at)

    def cancel(self) -> None:
        """Abandon the current forward, if there is one."""
        if self.is_running:
            return_here(self._running)
            self._running.throw()  # GreenletExit, which ends there
            assert self._running.dead, "the encoder continues though it was cancelled"
            self._running = None

    def close(self) -> None:
        """Abandon the current forward and remove the hooks from the towers."""
        self.cancel()
        for handle in self._handles:
            handle.remove()

    @property
    def _is_inside(self) -> bool:
        """Whether the caller is the sliced forward, not another one such as vLLM's profiling run."""
        return self._running is not None and self._greenlets.getcurrent() is self._running

    def _at_layer(self, layer: nn.Module, args: object) -> None:
        if not self._is_inside:
            return
        self._start_part("", is_last=self._num_left == 0)
        self._is_in_first_part = True
        if self._num_left is not None:
            self._num_left -= 1
        self._num_passed += 1

    def _at_part(self, name: str) -> Callable[[nn.Module, object], None]:
        def start(module: nn.Module, args: object) -> None:
            if not self._is_inside:
                return
            if not self._is_in_first_part:
                self._start_part(name, is_last=False)
            self._is_in_first_part = False

        return start

    def _start_part(self, name: str, is_last: bool) -> None:
        """Pause before this part if the layers of the slice are complete (``is_last``), or its time is over."""
        now = self._clock()
        is_late = False
        if self._part_started_at is not None:
            known_s, part_s = self._part_s.get(self._part), now - self._part_started_at
            self._part_s[self._part] = part_s if known_s is None else known_s + (part_s - known_s) * WEIGHT
            expected_s = self._part_s.get(name, max(self._part_s.values()))
            is_late = self._until is not None and now + expected_s > self._until
        if (is_last or is_late) and not is_autocast():
            self._running.parent.switch()
            now = self._clock()
        self._part, self._part_started_at = name, now
        self._num_parts_passed += 1


class ThreadedEncoder:
    """For encoders whose kernels share nothing with the caller's; vLLM's kernels for CPUs share scratch memory."""

    num_layers_of_batch = 1  # it is not sliced

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(1, "encoder")
        self._future: Future[None] | None = None

    @property
    def is_running(self) -> bool:
        return self._future is not None

    def start(self, forward: Callable[[], None]) -> None:
        assert not self.is_running, "one forward at a time"
        self._future = self._threads.submit(torch.inference_mode()(forward))  # the mode is per thread

    def poll(self) -> Slice:
        """Whether the forward has ended; raises its exception. No layers are counted."""
        assert self._future is not None, "no forward has started"
        if not self._future.done():
            return Slice(has_ended=False, num_layers=0.0, seconds=0.0)
        future, self._future = self._future, None
        future.result()
        return Slice(has_ended=True, num_layers=0.0, seconds=0.0)

    def cancel(self) -> None:
        """Wait for the end of the current forward, if there is one, and drop its result."""
        if self._future is not None:
            wait([self._future])
            self._future = None

    def close(self) -> None:
        self.cancel()
        self._threads.shutdown()
