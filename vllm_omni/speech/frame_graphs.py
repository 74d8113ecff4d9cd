"""``FrameGraphs``: runs the prediction of frames, on CUDA as one graph for each size of a batch.

A frame is hundreds of small operations, one code after another; on a GPU starting them takes longer than their
arithmetic. A graph starts them all at once. It reads and writes fixed tensors, so a batch is copied into those of the
next larger size; rows do not depend on each other, so what stands in the rows behind it changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from vllm_omni.speech.residual_sampling import CodeSampling, SamplingBatch

MAX_ROWS = 64  # a larger batch has enough arithmetic to hide what starting it costs

Predict = Callable[[Sequence[Tensor], SamplingBatch, Tensor | None], Tensor]


@dataclass(frozen=True)
class _Captured:
    graph: torch.cuda.CUDAGraph
    inputs: Sequence[Tensor]  # [num_rows, size] each
    sampling: SamplingBatch
    noise: Tensor | None  # [num_rows, num_draws, vocab_size] float32; None: greedy
    codes: Tensor  # [num_rows, ...] int64


class FrameGraphs:
    """Calls ``predict``, or replays it.

    Args:
        predict: (inputs, each [B, size]; sampling; its noise) -> codes of B frames, [B, ...] int64.
        num_draws: samples of a frame.
        vocab_size: of the largest codebook.
    """

    def __init__(self, predict: Predict, num_draws: int, vocab_size: int) -> None:
        self._predict = predict
        self._num_draws = num_draws
        self._vocab_size = vocab_size
        self._captured: dict[tuple[int, bool], _Captured] = {}  # by rows, and whether all are greedy

    def __call__(self, inputs: Sequence[Tensor], sampling: SamplingBatch) -> Tensor:
        """Predict a frame of each row.

        Args:
            inputs: [B, size] each.
        """
        num_rows = len(inputs[0])
        captured = self._captured.get((_padded(num_rows), sampling.is_greedy))
        if captured is None:
            size = (self._num_draws, self._vocab_size)
            noise = None if sampling.is_greedy else sampling.noise(*size, inputs[0].device)
            return self._predict(inputs, sampling, noise)
        for fixed, given in zip(captured.inputs, inputs, strict=True):
            fixed[:num_rows] = given
        if captured.noise is not None:
            sampling.draw_noise(captured.noise)
            captured.sampling.replace(sampling)
        captured.graph.replay()
        return captured.codes[:num_rows].clone()

    def prepare(self, row: Sequence[Tensor], max_rows: int) -> None:
        """Predict a frame of one row and of two, so that what compiles at a first call is compiled; on CUDA, make the
        graphs of batches of up to ``max_rows`` and ``MAX_ROWS`` requests.

        Args:
            row: one row of each input, [1, size].
        """
        for num_rows in range(1, min(max_rows, 2) + 1):
            rows = [one.repeat(num_rows, 1) for one in row]
            self(rows, SamplingBatch([CodeSampling()] * num_rows, [None] * num_rows, row[0].device))
        if row[0].is_cuda:
            self._capture_all(row, max_rows)

    def _capture_all(self, row: Sequence[Tensor], max_rows: int) -> None:
        pool = torch.cuda.graph_pool_handle()
        sizes = [1 << power for power in range(_padded(min(max_rows, MAX_ROWS)).bit_length())]
        for num_rows in reversed(sizes):  # the largest first: smaller ones find its memory in the pool
            for is_greedy in (True, False):
                self._captured[num_rows, is_greedy] = self._capture(row, num_rows, is_greedy, pool)

    def _capture(self, row: Sequence[Tensor], num_rows: int, is_greedy: bool, pool: tuple[int, int]) -> _Captured:
        inputs = [one.repeat(num_rows, 1) for one in row]
        params = CodeSampling() if is_greedy else CodeSampling(1.0)  # replaced before each replay
        sampling = SamplingBatch([params] * num_rows, [None] * num_rows, row[0].device)
        noise = None if is_greedy else sampling.noise(self._num_draws, self._vocab_size, row[0].device)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):  # what libraries allocate at a first call must not be captured
            self._predict(inputs, sampling, noise)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool, stream=stream):
            codes = self._predict(inputs, sampling, noise)
        return _Captured(graph, inputs, sampling, None if noise is None else noise.transpose(0, 1), codes)


def _padded(num_rows: int) -> int:
    """The next power of two."""
    return 1 << (num_rows - 1).bit_length()
