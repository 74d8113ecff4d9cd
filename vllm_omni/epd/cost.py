"""``CostModel``: how long an iteration lasts, fitted to batches that were measured.

From: HydraInfer, section 4.2 (profiling at start) and tables 1 and 2 (what the stages cost grows with).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, fields
from typing import Any, NamedTuple

import numpy as np

from vllm_omni.errors import ConfigError


class LanguageLoad(NamedTuple):
    """A batch of the language model, as far as its duration goes."""

    num_decodes: int = 0
    decode_context: int = 0  # summed over the decodes: tokens that each attends to
    num_prefill_tokens: int = 0
    prefill_pairs: int = 0  # summed over the chunks: pairs of a token and one that it attends to

    def with_prefill(self, num_tokens: int, context: int) -> LanguageLoad:
        """With a chunk of so many tokens behind ``context`` that are computed."""
        pairs = num_tokens * context + num_tokens * (num_tokens + 1) // 2
        return self._replace(
            num_prefill_tokens=self.num_prefill_tokens + num_tokens, prefill_pairs=self.prefill_pairs + pairs
        )

    def with_decode(self, num_tokens: int, context: int) -> LanguageLoad:
        return self._replace(
            num_decodes=self.num_decodes + num_tokens, decode_context=self.decode_context + num_tokens * context
        )


class Sample(NamedTuple):
    """One measured iteration: a language batch, or (with ``num_embeds``) a whole batch of images."""

    seconds: float
    load: LanguageLoad = LanguageLoad()
    num_embeds: int = 0


class SampleLog:
    """Samples of what an engine does; slices of an encode become one of the whole batch."""

    def __init__(self) -> None:
        self.samples: list[Sample] = []
        self.num_layers_of_batch = 1  # not known before the first encode: then a batch is indivisible
        self._encode_s = 0.0  # of the batch of images under way
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
    """One of all samples that differ in nothing but the context: an iteration that stood still is not seen any more."""
    alike: dict[tuple[int, int, int, int], list[Sample]] = {}
    for one in samples:
        # Contexts differ where they differ by half: so do their costs, by a part of that.
        context = (one.load.decode_context + one.load.prefill_pairs).bit_length()
        alike.setdefault((one.load.num_decodes, one.load.num_prefill_tokens, one.num_embeds, context), []).append(one)
    return [sorted(group)[len(group) // 2] for group in alike.values()]


@dataclass(frozen=True)
class CostModel:
    """Seconds of an iteration as a sum of shares, each of them never negative: a larger batch never costs less.

    The pairs of a prefill are needed: without them the error on the CPU was 10% on average rather than 1%.
    """

    step_s: float  # of any language batch
    decode_s: float  # per decoding token
    decode_context_s: float  # per token that a decode attends to
    prefill_token_s: float
    prefill_pair_s: float
    encode_s: float  # of any batch of images
    embed_s: float  # per embedding of an image

    @classmethod
    def parse(cls, values: Any, name: str) -> CostModel:
        """From a configuration, where it is called ``name``. Raises ``ConfigError``."""
        known = [one.name for one in fields(cls)]
        if not isinstance(values, Mapping) or set(values) != set(known):
            raise ConfigError(f"{name} = {values!r}: must be a mapping with {', '.join(known)}, as the log gives it")
        for key, value in values.items():
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
                raise ConfigError(f"{name}.{key} = {value!r}: must be a number of seconds, not negative")
        return cls(**values)

    def __post_init__(self) -> None:
        assert min(astuple(self)) >= 0, "binary search needs a cost that never falls"

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

    def scaled(self, factor: float) -> CostModel:
        """Of a machine on which everything takes so many times as long."""
        return CostModel(*(factor * share for share in astuple(self)))

    @classmethod
    def free(cls) -> CostModel:
        """Of a machine of which nothing is known."""
        return cls(0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)

    @classmethod
    def fit(cls, samples: Iterable[Sample]) -> CostModel:
        """The model whose relative errors are least in the square, over shares that are not negative.

        Relative, so that the short iterations count, which are those that a token's deadline is about.

        Raises:
            ValueError: nothing was measured.
        """
        language, images = [], []
        samples = list(samples)
        # Of batches of one size nobody knows which part is fixed: none, as was measured on the CPU.
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
    """Least squares without negative coefficients: while there is one, the most negative is taken out."""
    seconds = np.array([row[1] for row in rows])
    features = np.array([row[0] for row in rows]) / seconds[:, None]
    scale = np.abs(features).max(axis=0)
    scale[scale == 0] = 1.0  # never seen: its share is 0
    kept = list(range(features.shape[1]))
    solution = np.zeros(features.shape[1])
    while kept:
        part = np.linalg.lstsq(features[:, kept] / scale[kept], np.ones(len(rows)), rcond=None)[0]
        if part.min() >= 0:
            solution[kept] = part / scale[kept]
            break
        kept.pop(int(part.argmin()))
    return [float(one) for one in solution]
