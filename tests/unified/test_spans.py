"""Spans of random layouts against loops over their tokens, and of recorded contexts of the original."""

import random
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange

from tests.cases import case
from tests.fuzz import seeds
from tests.reference.test_bagel import FLOWS, GOLDEN, PICTURES, golden
from vllm_omni.unified.spans import (
    Piece,
    Span,
    latents_of,
    pieces_of,
    position_of,
    positions_of,
    ranges_without,
    spans_of_media,
    spans_of_placeholder,
    whole_spans,
)

needs_golden = pytest.mark.skipif(not FLOWS, reason=f"no outputs of the original at {GOLDEN}")


class Layout(NamedTuple):
    """A sequence, token by token."""

    spans: list[Span]
    owners: list[int | None]  # the span of each token

    @classmethod
    def random(cls, rng: random.Random) -> "Layout":
        spans: list[Span] = []
        at = rng.randrange(4)
        for _ in range(rng.randrange(5)):
            spans.append(Span(at, at + rng.randint(3, 9), rng.random() < 0.5))
            at = spans[-1].end + rng.choice([0, 0, 1, 2, 5])
        num_tokens = at + rng.randrange(4)
        owners = [
            next((index for index, span in enumerate(spans) if span.start <= token < span.end), None)
            for token in range(num_tokens)
        ]
        return cls(spans, owners)

    @property
    def num_tokens(self) -> int:
        return len(self.owners)

    def parts(self) -> Iterator[tuple[int, int]]:
        """Consecutive tokens of every kind that the sequence has: (start, number)."""
        for start in range(self.num_tokens):
            for number in range(1, self.num_tokens - start + 1):
                yield start, number

    def positions(self) -> list[int]:
        """Of each token, and of one behind them."""
        made, position = [], 0
        for token, owner in enumerate(self.owners):
            made.append(position)
            is_inside = owner is not None and token + 1 < self.spans[owner].end
            position += not is_inside
        return [*made, position]

    def is_latent(self, token: int) -> bool:
        owner = self.owners[token]
        return owner is not None and self.spans[owner].is_latent and token not in self.markers(owner)

    def markers(self, owner: int) -> tuple[int, int]:
        return self.spans[owner].start, self.spans[owner].end - 1

    def is_cut(self, token: int) -> bool:
        """Whether an end in front of the token cuts a span."""
        return any(span.start < token < span.end for span in self.spans)


def layouts(full_size: int) -> Iterator[tuple[int, Layout]]:
    for seed in seeds(full_size):
        yield seed, Layout.random(random.Random(seed))


def runs(tokens: Sequence[int]) -> list[tuple[int, int]]:
    """Ascending numbers as ranges, (first, end)."""
    groups = [list(group) for _, group in groupby(enumerate(tokens), lambda pair: pair[1] - pair[0])]
    return [(group[0][1], group[-1][1] + 1) for group in groups]


# -- layouts ----------------------------------------------------------------------------------------------------------


@pytest.mark.fuzz
def test_tokens_of_a_span_share_a_position_and_others_have_their_own() -> None:
    for seed, layout in layouts(300):
        expected = layout.positions()
        with case(seed, layout.spans):
            assert [position_of(token, layout.spans) for token in range(layout.num_tokens + 1)] == expected
            for start, number in layout.parts():
                positions = positions_of(start, number, layout.spans)
                assert positions.tolist() == expected[start : start + number]
                assert positions.dtype == torch.int64


@pytest.mark.fuzz
def test_pieces_are_runs_of_tokens_of_one_span_or_of_none() -> None:
    for seed, layout in layouts(300):
        for start, number in layout.parts():
            groups = groupby(layout.owners[start : start + number])
            expected = [Piece(len(list(group)), owner is None) for owner, group in groups]
            with case(seed, layout.spans, start, number):
                assert list(pieces_of(start, number, layout.spans)) == expected


@pytest.mark.fuzz
def test_latents_stand_between_the_markers_of_their_spans() -> None:
    for seed, layout in layouts(300):
        for start, number in layout.parts():
            expected = runs([index for index in range(number) if layout.is_latent(start + index)])
            with case(seed, layout.spans, start, number):
                assert list(latents_of(start, number, layout.spans)) == expected


@pytest.mark.fuzz
def test_a_step_has_the_most_tokens_that_cut_no_span() -> None:
    for seed, layout in layouts(300):
        for start, number in layout.parts():
            whole = (count for count in range(number, -1, -1) if not layout.is_cut(start + count))
            with case(seed, layout.spans, start, number):
                assert whole_spans(start, number, layout.spans) == next(whole, 0)


@pytest.mark.fuzz
def test_ranges_are_the_tokens_outside_the_spans_that_are_left_out() -> None:
    for seed, layout in layouts(300):
        for num_tokens in range(layout.num_tokens + 1):
            with case(seed, layout.spans, num_tokens):
                outside = [token for token in range(num_tokens) if layout.owners[token] is None]
                assert ranges_without(num_tokens, layout.spans) == runs(outside)
                assert ranges_without(num_tokens, []) == runs(range(num_tokens))


# -- images of prompts ------------------------------------------------------------------------------------------------


def make_position(offset: int, *sizes: int) -> PlaceholderRange:
    """An image of spans with so many embeddings between markers each."""
    is_embed = [one for size in sizes for one in (False, *[True] * size, False)]
    return PlaceholderRange(offset, len(is_embed), torch.tensor(is_embed))


def test_an_image_that_is_only_seen_is_one_span() -> None:
    assert spans_of_placeholder(make_position(5, 6)) == [Span(5, 13)]
    assert spans_of_placeholder(make_position(0, 1)) == [Span(0, 3)]


def test_the_latents_of_an_image_are_a_span_before_its_view() -> None:
    assert spans_of_placeholder(make_position(5, 4, 6)) == [Span(5, 11, True), Span(11, 19)]


def test_spans_of_a_prompts_images_are_in_their_order() -> None:
    features = [
        MultiModalFeatureSpec(None, "image", str(offset), make_position(offset, *sizes))
        for offset, sizes in ((2, (4, 6)), (16, (3,)), (30, (1, 1)))
    ]
    assert spans_of_media(features) == [
        Span(2, 8, True),
        Span(8, 16),
        Span(16, 21),
        Span(30, 33, True),
        Span(33, 36),
    ]
    assert spans_of_media([]) == []


# -- contexts of the original -----------------------------------------------------------------------------------------


def segments(name: str, branch: str) -> list[tuple[str, dict[str, Tensor]]]:
    """Kinds and recorded tensors of a context's segments."""
    made = []
    for number, kind in enumerate(FLOWS[name]["segments"][branch]):
        prefix = f"{branch}.{number}.{kind}."
        tensors = {key.removeprefix(prefix): one for key, one in golden(name).items() if key.startswith(prefix)}
        made.append((kind, tensors))
    return made


class Recorded(NamedTuple):
    """A context as the original has processed it."""

    spans: list[Span]
    positions: list[int]
    latents: list[int]  # the tokens that are

    @classmethod
    def of(cls, given: list[tuple[str, dict[str, Tensor]]]) -> "Recorded":
        spans: list[Span] = []
        positions: list[int] = []
        latents: list[int] = []
        for kind, tensors in given:
            start = len(positions)
            name = "packed_text_position_ids" if kind == "text" else "packed_position_ids"
            positions += tensors[name].tolist()
            assert tensors["key_values_lens"].tolist() == [start]
            if kind != "text":
                spans.append(Span(start, len(positions), kind == "vae"))
            if kind == "vae":
                latents += [start + token for token in tensors["packed_vae_token_indexes"].tolist()]
        return cls(spans, positions, latents)


@needs_golden
@pytest.mark.parametrize("name", FLOWS)
def test_positions_and_latents_of_contexts_are_the_originals(name: str) -> None:
    for branch in FLOWS[name]["segments"]:
        recorded = Recorded.of(segments(name, branch))
        number = len(recorded.positions)
        assert positions_of(0, number, recorded.spans).tolist() == recorded.positions
        latents = latents_of(0, number, recorded.spans)
        assert [token for first, end in latents for token in range(first, end)] == recorded.latents


@needs_golden
@pytest.mark.parametrize("name", PICTURES)
def test_the_canvas_has_the_position_behind_each_branchs_context(name: str) -> None:
    flow: dict[str, Any] = FLOWS[name]
    contexts = {branch: segments(name, branch) for branch in ("gen", "img")}
    contexts["text"] = contexts["gen"][: flow["branches"]["text"]["gen_segments_shared"]]
    for branch, given in contexts.items():
        recorded = Recorded.of(given)
        sizes = flow["branches"][branch]
        assert len(recorded.positions) == sizes["kv_len"]
        assert position_of(sizes["kv_len"], recorded.spans) == sizes["rope"]
        if branch in flow["denoise"]["branches_when_guided"]:
            positions = golden(name)[f"denoise.{branch}.packed_position_ids"]
            assert set(positions.tolist()) == {sizes["rope"]}
