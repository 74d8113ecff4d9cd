"""Spans: the runs of a context's tokens that are an image. They see each other both ways, and share one position."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch

from vllm_omni.unified.layout import MARKED, Layout, Piece

Ranges: TypeAlias = Sequence[tuple[int, int]]
"""Tokens of a prompt that a branch reads, as (start, end) in order. No range cuts a span."""


class Span(NamedTuple):
    """Tokens of a sequence, the markers of the image included. Spans are in order and share no tokens."""

    start: int
    end: int
    is_latent: bool = False  # the image is its latents, rather than what a vision encoder sees


def spans_of_media(features: Iterable[Any], layout: Layout = MARKED) -> list[Span]:
    """The spans of a prompt's images.

    Args:
        features: vLLM's ``MultiModalFeatureSpec``, in order. Each has embeddings between markers: those of what a
            vision encoder sees, and before them, between markers of their own, maybe its latents.
    """
    return [span for feature in features for span in spans_of_placeholder(feature.mm_position, layout)]


def spans_of_placeholder(position: Any, layout: Layout = MARKED) -> list[Span]:
    """Those of one image, from its ``PlaceholderRange``."""
    if layout.is_led_causally:  # its embeddings are one of the time, latents and a view, with a token before the view
        (start, _), *_, (_, last) = position.extract_embeds_range()
        return [Span(start + 1, last + 1)]
    *latents, (first, last) = position.extract_embeds_range()  # inclusive, without the markers
    return [*(Span(start - 1, end + 2, True) for start, end in latents), Span(first - 1, last + 2)]


def position_of(token: int, spans: Iterable[Span]) -> int:
    """The rope position of a token, which may stand behind all others."""
    return token - sum(max(min(token, span.end - 1) - span.start, 0) for span in spans)


def positions_of(start: int, num_tokens: int, spans: Iterable[Span]) -> torch.Tensor:
    """Rope positions of consecutive tokens: [num_tokens] int64."""
    tokens = torch.arange(start, start + num_tokens)
    positions = tokens.clone()
    for span in spans:
        positions -= (tokens.clamp(max=span.end - 1) - span.start).clamp(min=0)
    return positions


def grid_positions(start: int, grid: tuple[int, int]) -> torch.Tensor:
    """Rope positions of an image whose first token has the position ``start``: rows and columns, [2, N] int64.

    The grid's middle is that of a line of as many tokens, behind which texts continue.

    From: HunyuanImage 3.0 (arXiv:2509.23951), section 3.2 (generalized 2D RoPE).
    """
    rows, columns = grid
    corners = [start + (rows * columns - side) / 2 for side in grid]
    cells = torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij")
    return torch.stack([(corner + cell).long().flatten() for corner, cell in zip(corners, cells, strict=True)])


def pieces_of(start: int, num_tokens: int, spans: Iterable[Span]) -> Iterator[Piece]:
    """Cut consecutive tokens where they begin to attend in another way."""
    at, end = start, start + num_tokens
    for span in spans:
        if span.end <= at or span.start >= end:
            continue
        if span.start > at:
            yield Piece(span.start - at, True)
            at = span.start
        yield Piece(min(span.end, end) - at, False)
        at = min(span.end, end)
    if at < end:
        yield Piece(end - at, True)


def latents_of(start: int, num_tokens: int, spans: Iterable[Span]) -> Iterator[tuple[int, int]]:
    """The latents among consecutive tokens, without markers, as (first, end) counted from ``start``."""
    for span in spans:
        first, end = max(span.start + 1 - start, 0), min(span.end - 1 - start, num_tokens)
        if span.is_latent and first < end:
            yield first, end


def whole_spans(start: int, num_tokens: int, spans: Iterable[Span]) -> int:
    """How many of the next tokens a step may have, so that it cuts no span: tokens of a span see those behind them."""
    end = start + num_tokens
    for span in spans:
        if span.start < end < span.end:
            return max(span.start - start, 0)
    return num_tokens


def ranges_without(num_tokens: int, left_out: Iterable[Span]) -> list[tuple[int, int]]:
    """The ranges of the first ``num_tokens`` tokens outside some spans."""
    ranges, at = [], 0
    for span in left_out:
        if at < min(span.start, num_tokens):
            ranges.append((at, min(span.start, num_tokens)))
        at = max(at, span.end)
    if at < num_tokens:
        ranges.append((at, num_tokens))
    return ranges


def tokens_of_a_step(scheduler_config: Any) -> int:
    """The most tokens that one request has in a step of an engine, from its ``SchedulerConfig``: no span is longer."""
    most: int = scheduler_config.max_num_batched_tokens
    return min(most, scheduler_config.long_prefill_token_threshold or most)
