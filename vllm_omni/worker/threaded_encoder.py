"""``ThreadedEncoder``: a forward of an encoder in a thread of its own, beside whatever its caller computes."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait

import torch

from vllm_omni.worker.sliced_encoder import Slice


class ThreadedEncoder:
    """Only where the encoder's kernels share nothing with the caller's: vLLM's for CPUs share scratch memory."""

    num_layers_of_batch = 1  # it is not cut

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(1, "encoder")
        self._future: Future[None] | None = None

    @property
    def is_under_way(self) -> bool:
        return self._future is not None

    def begin(self, forward: Callable[[], None]) -> None:
        assert not self.is_under_way, "one forward at a time"
        self._future = self._threads.submit(torch.inference_mode()(forward))  # a thread's own mode

    def poll(self) -> Slice:
        """Whether the forward has ended; no layers are counted. Raises what it raised."""
        assert self._future is not None, "nothing has begun"
        if not self._future.done():
            return Slice(has_ended=False, num_layers=0.0, seconds=0.0)
        future, self._future = self._future, None
        future.result()
        return Slice(has_ended=True, num_layers=0.0, seconds=0.0)

    def cancel(self) -> None:
        """Wait for the end of the forward under way, if there is one, and forget it."""
        if self._future is not None:
            wait([self._future])
            self._future = None

    def close(self) -> None:
        self.cancel()
        self._threads.shutdown()
