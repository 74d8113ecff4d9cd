"""Sample codes of many requests at once, each with parameters and a seed of its own.

A request's seed drives its noise through a generator of its own; the noise of a batch is one tensor, so that sampling
stays one operation for all rows (a loop over rows costs more than the predictor).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


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
        self._temperature = torch.tensor([one.temperature or 1.0 for one in params], device=device)[:, None]
        self._greedy = torch.tensor([one.temperature == 0 for one in params], device=device)
        self._top_k = torch.tensor([one.top_k for one in params], device=device)[:, None]
        self._top_p = torch.tensor([one.top_p for one in params], device=device)[:, None]
        self._truncates = any(one.top_k or one.top_p < 1 for one in params)

    def replace(self, other: SamplingBatch) -> None:
        """Put the parameters of ``other`` into the first rows of this batch's tensors; neither is greedy."""
        num_rows = len(other._params)
        for name in ("_temperature", "_greedy", "_top_k", "_top_p"):
            getattr(self, name)[:num_rows] = getattr(other, name)

    def noise(self, num_draws: int, size: int, device: torch.device) -> Tensor:
        """Exponential noise for ``num_draws`` samples of each row, [num_draws, B, size] float32.

        Drawn row by row, so that a row's noise does not depend on the rest of the batch.
        """
        rows = torch.ones(len(self._params), num_draws, size, device=device)
        for row, (params, generator) in enumerate(zip(self._params, self._generators, strict=True)):
            if params.temperature:
                rows[row].exponential_(generator=generator)
        return rows.transpose(0, 1)

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
        scaled = logits.float() / self._temperature
        probabilities = self._truncated(scaled) if self._truncates else scaled.softmax(-1)
        return torch.where(self._greedy, logits.argmax(-1), (probabilities / noise).argmax(-1))

    def _truncated(self, logits: Tensor) -> Tensor:
        """Probabilities of the top k codes, and of the fewest of these whose probabilities reach top p."""
        values, order = logits.sort(dim=-1, descending=True)
        ranks = torch.arange(logits.shape[-1], device=logits.device)
        values = values.masked_fill((self._top_k > 0) & (ranks >= self._top_k), float("-inf"))
        probabilities = values.softmax(-1)
        before = probabilities.cumsum(-1) - probabilities  # the first code is always kept
        probabilities = probabilities.masked_fill(before >= self._top_p, 0.0)
        return torch.zeros_like(probabilities).scatter_(-1, order, probabilities)
