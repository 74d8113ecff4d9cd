"""``CostModel``: how long an iteration lasts, fitted to measured batches.

From: HydraInfer, section 4.2 (profiling at start) and tables 1 and 2 (what the costs of the stages depend on).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from vllm_omni.config.budgets import Costs


class LanguageLoad(NamedTuple):
    """The properties of a language batch that its duration depends on."""

    num_decodes: int = 0
    decode_context: int = 0  # summed over the decodes: tokens that each attends to
    num_prefill_tokens: int = 0
    prefill_pairs: int = 0  # summed over the chunks: pairs of a token and one that it attends to

    def with_prefill(self, num_tokens: int, context: int) -> LanguageLoad:
        """Add a chunk of ``num_tokens`` behind ``context`` computed ones."""
        pairs = num_tokens * context + num_tokens * (num_tokens + 1) // 2
        return self._replace(
            num_prefill_tokens=self.num_prefill_tokens + num_tokens, prefill_pairs=self.prefill_pairs + pairs
        )

    def with_decode(self, num_tokens: int, context: int) -> LanguageLoad:
        """Add ``num_tokens`` that are decoded behind ``context`` computed ones."""
        return self._replace(
            num_decodes=self.num_decodes + num_tokens, decode_context=self.decode_context + num_tokens * context
        )


class Sample(NamedTuple):
    """One measured iteration: a language batch, or (with ``num_embeds``) a whole batch of images."""

    seconds: float
    load: LanguageLoad = LanguageLoad()
    num_embeds: int = 0


class SampleLog:
    """Measured iterations of an engine; the slices of an encode become one sample of the whole batch."""

    def __init__(self) -> None:
        self.samples: list[Sample] = []
        self.num_layers_of_batch = 1  # unknown before the first encode, when a batch counts as indivisible
        self._encode_s = 0.0  # of the batch of images in flight
        self._num_layers_done = 0.0

    def add_language(self, load: LanguageLoad, seconds: float) -> None:
        self.samples.append(Sample(seconds, load))

    def add_encode(self, num_embeds: int, num_layers: float, num_layers_of_batch: int, seconds: float) -> None:
        self.num_layers_of_batch = num_layers_of_batch
        self._encode_s += seconds
        self._num_layers_done += num_layers
        if self._num_layers_done > num_layers_of_batch - 1e-6:
            self.samples.append(Sample(self._encode_s, num_embeds=num_embeds))
            self._encode_s, self._num_layers_done = 0.0, 0.0


def medians(samples: Iterable[Sample]) -> list[Sample]:
    """Reduce samples that differ only a little to their median, which drops interrupted iterations."""
    alike: dict[tuple[int, int, int, int], list[Sample]] = {}
    for one in samples:
        # Contexts count as alike within a factor of two; the costs differ by a part of that.
        context = (one.load.decode_context + one.load.prefill_pairs).bit_length()
        alike.setdefault((one.load.num_decodes, one.load.num_prefill_tokens, one.num_embeds, context), []).append(one)
    return [sorted(group)[len(group) // 2] for group in alike.values()]


@dataclass(frozen=True)
class CostModel(Costs):
    """The duration of an iteration as a sum of parts, none negative: a larger batch never costs less.

    Without the pairs of a prefill, the mean error on a CPU was 10% instead of 1%.
    """

    @classmethod
    def of(cls, costs: Mapping[str, float] | None) -> CostModel | None:
        """Compute with configured costs, if there are any."""
        return cls(**costs) if costs is not None else None

    def language_s(self, load: LanguageLoad) -> float:
        if not load.num_decodes and not load.num_prefill_tokens:
            return 0.0
        return (
            self.step_s
            + self.decode_s * load.num_decodes
            + self.decode_context_s * load.decode_context
            + self.prefill_token_s * load.num_prefill_tokens
            + self.prefill_pair_s * load.prefill_pairs
        )

    def images_s(self, num_embeds: int) -> float:
        return self.encode_s + self.embed_s * num_embeds if num_embeds else 0.0

    @classmethod
    def free(cls) -> CostModel:
        """The model of a machine without measurements."""
        return cls(0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)

    @classmethod
    def fit(cls, samples: Iterable[Sample]) -> CostModel:
        """Fit by least squares of the relative errors, with parts that are not negative.

        Relative errors give weight to the short iterations, which decide whether tokens are in time.

        Raises:
            ValueError: nothing was measured.
        """
        language, images = [], []
        samples = list(samples)
        # Batches of one size do not determine the fixed part: it is taken as zero, as measured on a CPU.
        has_fixed_part = len({sample.num_embeds for sample in samples if sample.num_embeds}) > 1
        for sample in samples:
            if sample.num_embeds:
                images.append(([float(has_fixed_part), sample.num_embeds], sample.seconds))
            else:
                language.append(([1.0, *map(float, sample.load)], sample.seconds))
        if not language and not images:
            raise ValueError("a cost model needs at least one measured batch")
        return cls(*(_fit(language) if language else (0.0,) * 5), *(_fit(images) if images else (0.0, 0.0)))


def _fit(rows: Sequence[tuple[list[float], float]]) -> list[float]:
    """Least squares without negative coefficients: while there is one, the most negative is removed."""
    seconds = np.array([row[1] for row in rows])
    features = np.array([row[0] for row in rows]) / seconds[:, None]
    scale = np.abs(features).max(axis=0)
    scale[scale == 0] = 1.0  # not measured: its part is 0
    kept = list(range(features.shape[1]))
    solution = np.zeros(features.shape[1])
    while kept:
        part = np.linalg.lstsq(features[:, kept] / scale[kept], np.ones(len(rows)), rcond=None)[0]
        if part.min() >= 0:
            solution[kept] = part / scale[kept]
            break
        kept.pop(int(part.argmin()))
    return [float(one) for one in solution]
