"""``ThreadedEncoder``: an encoder's forward in a thread, beside the caller's own computation."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait

import torch

from vllm_omni.worker.sliced_encoder import Slice


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
