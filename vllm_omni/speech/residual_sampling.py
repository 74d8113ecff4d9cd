"""Sample codes of many requests at once, each with parameters and a seed of its own.

A request's seed drives its noise through a generator of its own; the noise of a batch is one tensor, so that sampling
stays one operation for all rows (a loop over rows costs more than the predictor).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

MAX_CANDIDATES = 512  # for more of some 2,000 codes, sorting all is faster


@dataclass(frozen=True)
class CodeSampling:
    """How a request samples its residual codes.

    Attributes:
        temperature: 0: the most likely code.
        top_k: 0: all codes.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0


class SamplingBatch:
    """The sampling parameters of a batch's rows, as tensors.

    Args:
        params: of each row.
        generators: of each row that is sampled, on the device of the logits; None: the process's generator.
        device: where the logits are.
    """

    def __init__(
        self,
        params: Sequence[CodeSampling],
        generators: Sequence[torch.Generator | None],
        device: torch.device | str = "cpu",
    ) -> None:
        self.is_greedy = all(one.temperature == 0 for one in params)
        self._generators = generators
        self._params = params
        if self.is_greedy:
            return
        rows = [(one.temperature or 1.0, one.temperature == 0, one.top_k, one.top_p) for one in params]
        # [B, 4] float32, in one tensor: each copy to a GPU costs as much as a sample.
        self._table = torch.tensor(rows, dtype=torch.float32).to(device)
        if self._table.is_cuda:  # whose kernel reads nothing else
            return
        self._temperature, self._greedy, self._top_k, self._top_p = self._table.split(1, dim=1)
        self._truncates = any(one.top_k or one.top_p < 1 for one in params)
        few = [row for row, one in enumerate(params) if one.temperature == 0 or 0 < one.top_k <= MAX_CANDIDATES]
        all_codes = sorted(set(range(len(params))) - set(few))
        num_candidates = max((params[row].top_k for row in few if params[row].temperature), default=1)
        self._parts = [_Part(None, self._top_k, self._top_p, num_candidates if few else None)]
        if few and all_codes:
            parts = ((torch.tensor(few, device=device), num_candidates), (torch.tensor(all_codes, device=device), None))
            self._parts = [_Part(rows, self._top_k[rows], self._top_p[rows], num) for rows, num in parts]

    def replace(self, other: SamplingBatch) -> None:
        """Put the parameters of ``other`` into the first rows of this batch's tensors; neither is greedy."""
        self._table[: len(other._params)] = other._table

    def noise(self, num_draws: int, size: int, device: torch.device) -> Tensor:
        """Exponential noise for ``num_draws`` samples of each row, [num_draws, B, size] float32."""
        rows = torch.ones(len(self._params), num_draws, size, device=device)
        self.draw_noise(rows)
        return rows.transpose(0, 1)

    def draw_noise(self, rows: Tensor) -> None:
        """Put the noise into the first of ``rows``, [B or more, num_draws, size]; rows that are not sampled stay.

        Drawn row by row, so that a row's noise does not depend on the rest of the batch.
        """
        for row, (params, generator) in enumerate(zip(self._params, self._generators, strict=True)):
            if params.temperature:
                rows[row].exponential_(generator=generator)

    def sample(self, logits: Tensor, noise: Tensor | None) -> Tensor:
        """One code for each row.

        The code with the largest probability / noise is a sample of the distribution, as in vLLM's sampler.

        Args:
            logits: [B, size].
            noise: [B, size] of ``noise``; None where all rows are greedy.

        Returns:
            [B] int64.
        """
        if self.is_greedy:
            return logits.argmax(-1)
        assert noise is not None
        if self._table.is_cuda:
            from vllm_omni.speech.frame_kernels import sample  # Triton, which torch has for CUDA alone

            return sample(logits, noise, self._table)
        scaled = logits.float() / self._temperature
        if not self._truncates:
            sampled = (scaled.softmax(-1) / noise).argmax(-1)
        elif len(self._parts) == 1:
            sampled = self._parts[0].sample(scaled, noise)
        else:
            sampled = torch.empty(len(scaled), dtype=torch.int64, device=scaled.device)
            for part in self._parts:
                sampled[part.rows] = part.sample(scaled[part.rows], noise[part.rows])
        return torch.where(self._greedy[:, 0] > 0, logits.argmax(-1), sampled)


class _Part(NamedTuple):
    """Rows that are sampled from few candidates, or from all codes, which depends on their own parameters alone."""

    rows: Tensor | None  # [n] int64; None: the whole batch
    top_k: Tensor  # [n, 1]
    top_p: Tensor  # the same
    num_candidates: int | None  # the largest top k; None: all codes

    def sample(self, logits: Tensor, noise: Tensor) -> Tensor:
        """Sample from the top k codes, and of these from the fewest whose probabilities reach top p: [n] int64."""
        if self.num_candidates is None:
            values, order = logits.sort(dim=-1, descending=True)
        else:
            values, order = most_likely(logits, self.num_candidates)
        ranks = torch.arange(values.shape[-1], device=logits.device)
        values = values.masked_fill((self.top_k > 0) & (ranks >= self.top_k), float("-inf"))
        probabilities = values.softmax(-1)
        before = probabilities.cumsum(-1) - probabilities  # the first code is always kept
        probabilities = probabilities.masked_fill(before >= self.top_p, 0.0)
        rank = (probabilities / noise.gather(-1, order)).argmax(-1, keepdim=True)
        return order.gather(-1, rank)[:, 0]


def most_likely(logits: Tensor, num: int) -> tuple[Tensor, Tensor]:
    """The first ``num`` values and codes of a stable sort, at a fraction of its time.

    ``topk`` leaves open which of equal logits it takes; a row's code would then depend on the largest top k of its
    batch. So it orders integers that are all different: each made of a logit, and then of its place.

    Args:
        logits: [B, size] float32.
    """
    size = logits.shape[-1]
    bits = (logits + 0.0).view(torch.int32)  # -0.0 becomes 0.0
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # as floats are ordered: of negative ones all bits but the sign turn
    places = torch.arange(size - 1, -1, -1, device=logits.device)
    order = size - 1 - (ordered.long() * size + places).topk(min(num, size), dim=-1).values % size
    return logits.gather(-1, order), order
