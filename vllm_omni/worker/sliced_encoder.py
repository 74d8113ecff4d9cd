"""``SlicedEncoder``: a forward of an encoder that stops between two layers, or within one, and goes on later."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch import nn

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


class _Cancelled(BaseException):
    """Unwinds a forward that nobody wants any more."""


class SlicedEncoder:
    """Runs a forward in a thread of its own, and only while the caller waits in ``go_on``; or else ``run_beside``.

    Of the two there is one that computes at any time: vLLM's CPU kernels share scratch memory between threads, and two
    forwards at once end in wrong numbers or a crash. The thread is there for its stack alone, which keeps the place in
    the tower's code; no model has to be written for it.

    Args:
        towers: modules that encode. Their layers are the children of each ``ModuleList`` in them, and a layer's parts
            begin with each module in it that has weights, but for the first, with which it begins itself. Where a gap
            between tokens leaves room for one or two layers, by whole ones half of it would be lost.
        clock: in seconds.
    """

    def __init__(self, towers: Iterable[nn.Module], clock: Callable[[], float] = time.perf_counter) -> None:
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
        self._thread: threading.Thread | None = None
        self._forward: Callable[[], None] | None = None
        self._error: BaseException | None = None
        self._is_cancelled = False
        self._clock = clock
        self._num_left: int | None = None
        self._until: float | None = None
        self._part_s: dict[str, float] = {}  # what each part of a layer takes in this batch, as far as it is known
        self._part = ""  # the one under way
        self._is_in_first_part = False  # of a layer, before the first of its weights
        self._part_began_at: float | None = None  # None: not in this slice
        self._is_beside = False  # of the forward under way, until its end is known
        self._num_passed = 0  # layers of the forward
        self._num_parts_passed = 0
        self._num_told = 0.0  # of the layers passed, by slices that have ended
        self._to_encoder = threading.Semaphore(0)
        self._to_caller = threading.Semaphore(0)

    @property
    def is_under_way(self) -> bool:
        return self._forward is not None or self._is_beside

    def begin(self, forward: Callable[[], None]) -> None:
        """Take a forward; nothing of it runs before ``go_on``."""
        assert not self.is_under_way, "one forward at a time"
        self._forward = forward
        self._num_passed = self._num_parts_passed = 0
        self._num_told = 0.0
        self._part_s.clear()
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="sliced-encoder", daemon=True)
            self._thread.start()

    def go_on(self, num_layers: int | None, until: float | None = None) -> Slice:
        """Run up to so many layers, whole ones, and what lies between them; None: to the end.

        What is before the first layer goes with the first slice, what is behind the last layer with the last.

        Args:
            until: by the clock: no part of a layer but the first is begun that would end later, if it takes as long
                as those before it.

        Raises:
            Exception: the forward's own.
        """
        assert self._forward is not None, "nothing has begun"
        assert num_layers is None or num_layers > 0
        num_parts_before, began_at = self._num_parts_passed, self._clock()
        self._num_left = num_layers
        self._until = until
        self._part_began_at = None
        self._to_encoder.release()
        self._to_caller.acquire()
        self._raise_error()
        has_ended = self._forward is None
        if has_ended:
            self.num_layers_of_batch = max(1, self._num_passed)
            self._num_parts_of_batch = max(1, self._num_parts_passed)
            passed = self._num_passed - self._num_told
        else:
            num_parts = self._num_parts_passed - num_parts_before
            passed = num_parts * self.num_layers_of_batch / self._num_parts_of_batch
        self._num_told += passed
        return Slice(has_ended, passed, self._clock() - began_at)

    def run_beside(self) -> None:
        """Let the forward run to its end by itself, whatever the caller computes meanwhile; ``poll`` tells of the end.

        Only where the encoder's kernels share nothing with the caller's.
        """
        assert self._forward is not None, "nothing has begun"
        self._num_left = self._until = None
        self._is_beside = True
        self._to_encoder.release()

    def poll(self) -> bool:
        """Whether the forward that runs beside the caller has ended. Raises what it raised."""
        assert self._is_beside, "nothing runs beside the caller"
        if not self._to_caller.acquire(blocking=False):
            return False
        self._is_beside = False
        self._raise_error()
        return True

    def cancel(self) -> None:
        """Give up the forward under way, if there is one."""
        if not self.is_under_way:
            return
        self._is_cancelled = True
        if not self._is_beside:
            self._to_encoder.release()
        self._to_caller.acquire()
        self._is_cancelled = self._is_beside = False
        self._error = None

    def close(self) -> None:
        """Give up what is under way, end the thread and take the boundaries out of the towers."""
        self.cancel()
        for handle in self._handles:
            handle.remove()
        if self._thread is not None:
            self._is_cancelled = True  # with no forward: the thread's end
            self._to_encoder.release()
            self._thread.join()
            self._thread = None

    def _raise_error(self) -> None:
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def _run(self) -> None:
        while True:
            self._to_encoder.acquire()
            if self._forward is None:
                return
            try:
                if not self._is_cancelled:
                    with torch.inference_mode():  # of the thread, as the caller's is of its own
                        self._forward()
            except _Cancelled:
                pass
            except BaseException as exc:
                self._error = exc
            self._forward = None
            self._to_caller.release()

    def _at_layer(self, layer: nn.Module, args: object) -> None:
        if threading.current_thread() is not self._thread:
            return  # a forward that nobody slices: vLLM's profiling run
        self._begin_part("", is_last=self._num_left == 0)
        self._is_in_first_part = True
        if self._num_left is not None:
            self._num_left -= 1
        self._num_passed += 1

    def _at_part(self, name: str) -> Callable[[nn.Module, object], None]:
        def begin(module: nn.Module, args: object) -> None:
            if threading.current_thread() is not self._thread:
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
        if is_last or is_late:
            self._to_caller.release()
            self._to_encoder.acquire()
            now = self._clock()
        if self._is_cancelled:
            raise _Cancelled
        self._part, self._part_began_at = name, now
        self._num_parts_passed += 1
