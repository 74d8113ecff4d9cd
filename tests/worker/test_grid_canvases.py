"""Canvases of a model whose positions have two axes: what ``test_canvases.py`` has for images between markers."""

from typing import Any

import msgspec
import torch
from torch import Tensor

from vllm_omni.messages.canvas_step import OWN, PICTURE, CanvasStep, Tail
from vllm_omni.model_executor.stage_model import RequestInfo
from vllm_omni.unified.layout import GRID, Piece
from vllm_omni.unified.plan import Guidance, ImagePlan
from vllm_omni.unified.spans import Span
from vllm_omni.worker.canvases import CanvasRunner, Part, parts_of

NUM_CHANNELS, SIZE, TIME = 4, 6, 50.0
NUM_CONTEXT = 10


class Model:
    """Embeds latents as they are, behind a row of the time."""

    num_canvas_channels, end_of_picture = NUM_CHANNELS, 7

    def embed_canvas(self, latents: Tensor, grid: tuple[int, int], time: Tensor) -> Tensor:
        rows = torch.cat([latents, torch.full((len(latents), SIZE - NUM_CHANNELS), float(time))], dim=1)
        return torch.cat([torch.full((1, SIZE), TIME), rows])

    def velocities(self, hidden_states: Tensor, grid: tuple[int, int], time: Tensor) -> Tensor:
        assert len(hidden_states) == grid[0] * grid[1]
        return hidden_states[:, :NUM_CHANNELS] * time


def make_runner(grid: tuple[int, int], **fields: Any) -> CanvasRunner:
    runner = CanvasRunner(Model(), torch.device("cpu"), GRID)
    plan = ImagePlan(grid, num_steps=2, seed=3, guidance=Guidance(1.0, 1.0), num_markers=1, **fields)
    runner.add(RequestInfo("a", NUM_CONTEXT, {PICTURE: msgspec.to_builtins(plan)}))
    return runner


def make_part(num_latents: int, step: int = 0, *, start: int = 0) -> Part:
    """The rest of a context with an image, and the canvas behind it."""
    steps = {"a": CanvasStep("a", OWN, (OWN,), step, NUM_CONTEXT)}
    num_tokens = NUM_CONTEXT - start + 1 + num_latents
    (part,) = parts_of(["a"], {"a": num_tokens}, [start], {"a": [Span(2, 6)]}, steps, GRID)
    return part


def test_the_token_of_the_time_sees_what_is_before_it_and_latents_each_other() -> None:
    assert make_part(6).pieces() == [Piece(2, True), Piece(4, False), Piece(4, True), Piece(1, True), Piece(6, False)]
    assert make_part(6, start=NUM_CONTEXT).pieces() == [Piece(1, True), Piece(6, False)]


def test_latents_stand_on_a_grid_and_all_else_where_the_model_says() -> None:
    runner = make_runner((2, 3))
    runner.parts = [make_part(6)]
    slots = torch.arange(100, 117).expand(3, -1)
    embeds = torch.zeros(17, SIZE)
    positions, _ = runner.fill(embeds, slots)
    assert torch.equal(positions[:, : NUM_CONTEXT + 1], slots[:, : NUM_CONTEXT + 1])
    assert torch.equal(positions[0], slots[0])
    first = NUM_CONTEXT + 1
    assert positions[1, first:].tolist() == [first + 2] * 3 + [first + 3] * 3
    assert positions[2, first:].tolist() == [first + 1, first + 2, first + 3] * 2
    assert embeds[NUM_CONTEXT].tolist() == [TIME] * SIZE and not embeds[:NUM_CONTEXT].any()


def test_noise_is_drawn_channel_by_channel() -> None:
    runner = make_runner((2, 3))
    runner.parts = [make_part(6)]
    embeds = torch.zeros(17, SIZE)
    runner.fill(embeds, torch.zeros(3, 17, dtype=torch.int64))
    noise = torch.randn(NUM_CHANNELS, 2, 3, generator=torch.Generator().manual_seed(3))
    assert torch.equal(embeds[NUM_CONTEXT + 1 :, :NUM_CHANNELS], noise.flatten(1).T)


def test_a_size_that_is_chosen_later_is_that_of_the_picture() -> None:
    runner, at_once = make_runner((4, 4)), make_runner((1, 5))
    runner.note_tail("a", Tail(NUM_CONTEXT - 1, (30,), (1, 5)))
    assert runner.plan_of("a").grid == (1, 5)
    made = []
    for one in (runner, at_once):
        for step in range(2):
            one.parts = [make_part(5, step)]
            embeds = torch.zeros(NUM_CONTEXT + 6, SIZE)
            one.fill(embeds, torch.zeros(3, NUM_CONTEXT + 6, dtype=torch.int64))
            reports = one.advance(embeds)
        latents = reports["a"].latents
        assert reports["a"].is_last and latents is not None
        made.append(latents)
    assert torch.equal(made[0], made[1]) and made[0].shape == (5, NUM_CHANNELS)


def test_a_tail_without_a_size_changes_no_picture() -> None:
    runner = make_runner((2, 3))
    runner.note_tail("a", Tail(NUM_CONTEXT - 1, (30, 31)))
    assert runner.plan_of("a").grid == (2, 3)
