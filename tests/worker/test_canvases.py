"""Pictures in a runner's steps: which rows they have, and how their latents advance.

The model adds: a canvas is embedded as its latents beside the time, a context adds a number of its own to every row,
and a velocity is the sum of latents and time.
"""

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

from tests.cases import case
from vllm_omni.messages.canvas_step import OWN, PICTURE, CanvasStep
from vllm_omni.model_executor.stage_model import Denoises, RequestInfo
from vllm_omni.unified.flow import advance, combine, start_noise, timesteps
from vllm_omni.unified.plan import WITHOUT_IMAGES, WITHOUT_TEXT, Guidance, ImagePlan
from vllm_omni.unified.spans import Piece, Span
from vllm_omni.worker.canvases import CanvasRunner, Part, Report, parts_of

GRID = (2, 2)
CANVAS = 6
NUM_CHANNELS = 2
NUM_CONTEXT = 5
START, END = -1.0, -2.0
ALL = (OWN, WITHOUT_TEXT, WITHOUT_IMAGES)
CONTEXTS = {OWN: 0.0, WITHOUT_TEXT: 0.5, WITHOUT_IMAGES: -0.25}
CPU = torch.device("cpu")


class Line:
    num_canvas_channels = NUM_CHANNELS
    end_of_picture = 7

    def embed_canvas(self, latents: Tensor, grid: tuple[int, int], time: Tensor) -> Tensor:
        assert (len(latents), latents.dtype, time.shape) == (grid[0] * grid[1], torch.float32, ())
        start, end = (torch.full((1, NUM_CHANNELS + 1), one) for one in (START, END))
        return torch.cat([start, torch.cat([latents, time.expand(len(latents), 1)], dim=1), end])

    def velocities(self, hidden_states: Tensor, grid: tuple[int, int], time: Tensor) -> Tensor:
        assert (len(hidden_states), time.shape) == (grid[0] * grid[1], ())
        return hidden_states[:, :-1] + hidden_states[:, -1:]


def make_plan(**fields: Any) -> ImagePlan:
    return ImagePlan(**{"grid": GRID, "num_steps": 4, "seed": 1, "guidance": Guidance(interval=(0.0, 1.0)), **fields})


def make_runner(**plans: ImagePlan) -> CanvasRunner:
    """With the pictures of requests by these names."""
    runner = CanvasRunner(Line(), CPU)
    for request_id, plan in plans.items():
        runner.add(make_info(request_id, plan))
    return runner


def make_info(request_id: str, plan: ImagePlan | None) -> RequestInfo:
    return RequestInfo(request_id, NUM_CONTEXT, {PICTURE: msgspec.to_builtins(plan)} if plan is not None else {})


def make_step(
    branch: str = OWN, step: int = 0, together_with: Sequence[str] = ALL, request_id: str = "a"
) -> CanvasStep:
    return CanvasStep(request_id, branch, tuple(together_with), step, NUM_CONTEXT)


def run(runner: CanvasRunner, *steps: CanvasStep, contexts: Mapping[str, float] = CONTEXTS) -> dict[str, Tensor]:
    """One step of the engine: the canvases of some branches, one behind the other.

    Returns:
        The last latents of pictures that are complete.
    """
    ended = {}
    for request_id, report in reports_of(runner, *steps, contexts=contexts).items():
        assert report.is_last and report.latents is not None
        ended[request_id] = report.latents
    return ended


def reports_of(runner: CanvasRunner, *steps: CanvasStep, contexts: Mapping[str, float] = CONTEXTS) -> dict[str, Report]:
    """One step of the engine: the ends of denoise steps that it reports."""
    ids = [f"{step.request_id}#{step.branch}" for step in steps]
    runner.parts = parts_of(
        ids,
        dict.fromkeys(ids, CANVAS),
        [NUM_CONTEXT] * len(ids),
        dict.fromkeys(ids, ()),
        dict(zip(ids, steps, strict=True)),
    )
    hidden = torch.zeros(CANVAS * len(steps), NUM_CHANNELS + 1)
    runner.fill(hidden, torch.arange(len(hidden)))
    for part in runner.parts:
        assert part.step is not None
        hidden[part.canvas] += contexts[part.step.branch]
    return runner.advance(hidden)


def latents_of(plan: ImagePlan, branches: Iterable[Sequence[str]], contexts: Mapping[str, float] = CONTEXTS) -> Tensor:
    """A picture's last latents, computed by itself.

    Args:
        branches: those of each step.
    """
    latents = start_noise(plan.num_latents, NUM_CHANNELS, plan.seed)
    times = timesteps(plan.num_steps, plan.shift)
    for names, (now, after) in zip(branches, pairwise(times), strict=True):
        of = {name: latents + now + 2 * contexts[name] for name in names}
        velocity = of[OWN]
        if WITHOUT_TEXT in of:
            without_images = of.get(WITHOUT_IMAGES, of[OWN]) if plan.guidance.image_scale > 1 else None
            velocity = combine(velocity, of[WITHOUT_TEXT], without_images, plan.guidance)
        latents = advance(latents, velocity, now, after)
    return latents


# -- rows of a step ---------------------------------------------------------------------------------------------------

IMAGE = [Span(2, 6, True), Span(6, 9)]  # latents and view
TEXT = Part("text", 10, 0, 12, IMAGE, None)
CONTEXT = Part("a", 10, 0, 12, IMAGE, CanvasStep("a", OWN, (), 0, 12))
BOTH = Part("a", 10, 0, 12 + CANVAS, IMAGE, CanvasStep("a", OWN, ALL, 0, 12))
CANVAS_ALONE = Part("a", 10, 12, CANVAS, IMAGE, CanvasStep("a", OWN, ALL, 1, 12))
END_AND_CANVAS = Part("a", 10, 7, 5 + CANVAS, IMAGE, CanvasStep("a", OWN, ALL, 0, 12))
OF_NOTHING = Part("a#text", 10, 0, CANVAS, [], CanvasStep("a", WITHOUT_TEXT, ALL, 0, 0))


def test_a_part_knows_its_context_and_its_canvas() -> None:
    for part, has_canvas, num_context, canvas in [
        (TEXT, False, 12, slice(22, 22)),
        (CONTEXT, False, 12, slice(22, 22)),
        (BOTH, True, 12, slice(22, 28)),
        (CANVAS_ALONE, True, 0, slice(10, 16)),
        (END_AND_CANVAS, True, 5, slice(15, 21)),
        (OF_NOTHING, True, 0, slice(10, 16)),
    ]:
        with case(part):
            assert (part.has_canvas, part.num_context, part.canvas) == (has_canvas, num_context, canvas)


def test_the_tokens_of_a_canvas_see_each_other() -> None:
    context = [Piece(2, True), Piece(4, False), Piece(3, False), Piece(3, True)]
    canvas = Piece(CANVAS, False)
    for part, pieces in [
        (TEXT, context),
        (CONTEXT, context),
        (BOTH, [*context, canvas]),
        (CANVAS_ALONE, [canvas]),
        (END_AND_CANVAS, [Piece(2, False), Piece(3, True), canvas]),
        (OF_NOTHING, [canvas]),
    ]:
        with case(part):
            assert part.pieces() == pieces
            assert sum(piece.num_tokens for piece in pieces) == part.num_tokens


def test_the_tokens_of_a_canvas_share_the_position_behind_the_context() -> None:
    context = [0, 1, 2, 2, 2, 2, 3, 3, 3, 4, 5, 6]
    for part, positions in [
        (TEXT, context),
        (CONTEXT, context),
        (BOTH, context + [7] * CANVAS),
        (CANVAS_ALONE, [7] * CANVAS),
        (END_AND_CANVAS, context[7:] + [7] * CANVAS),
        (OF_NOTHING, [0] * CANVAS),
    ]:
        with case(part):
            assert part.positions().tolist() == positions


def test_rows_of_latents_are_those_of_the_prompts_images_and_of_the_canvas() -> None:
    for part, rows in [
        (TEXT, [13, 14]),
        (CONTEXT, [13, 14]),
        (BOTH, [13, 14, 23, 24, 25, 26]),
        (CANVAS_ALONE, [11, 12, 13, 14]),
        (END_AND_CANVAS, [16, 17, 18, 19]),
        (OF_NOTHING, [11, 12, 13, 14]),
    ]:
        with case(part):
            assert part.latent_rows() == rows


def test_parts_have_the_order_of_the_batch() -> None:
    step = make_step()
    spans = {"b": [], "a": IMAGE, "c": []}
    parts = parts_of(["b", "a", "c"], {"a": 6, "b": 1, "c": 3}, [40, 12, 0], spans, {"a": step})
    assert parts == [Part("b", 0, 40, 1, [], None), Part("a", 1, 12, 6, IMAGE, step), Part("c", 7, 0, 3, [], None)]
    assert parts_of([], {}, [], {}, {}) == []


# -- inputs of a step -------------------------------------------------------------------------------------------------


def test_the_model_is_one_that_denoises() -> None:
    assert isinstance(Line(), Denoises)


def test_a_step_of_texts_is_left_as_it_is() -> None:
    runner = make_runner(a=make_plan())
    runner.parts = [Part("b", 0, 3, 2, [], None), Part("a", 2, 0, 3, [], make_step(together_with=()))]
    embeds, positions = torch.ones(5, NUM_CHANNELS + 1), torch.arange(5)
    assert not runner.needs_pieces
    filled, more = runner.fill(embeds, positions)
    assert filled is positions and more == {}
    assert torch.equal(embeds, torch.ones(5, NUM_CHANNELS + 1))


def test_a_canvas_takes_its_rows_of_the_embeddings() -> None:
    runner = make_runner(a=make_plan())
    runner.parts = [Part("b", 0, 3, 2, [], None), Part("a", 2, 4, 1 + CANVAS, [], make_step(step=1))]
    embeds = torch.full((9, NUM_CHANNELS + 1), 8.0)
    assert runner.needs_pieces
    runner.fill(embeds, torch.arange(9))
    assert (embeds[:3] == 8).all()
    latents = start_noise(4, NUM_CHANNELS, 1)
    assert torch.equal(embeds[3:], Line().embed_canvas(latents, GRID, timesteps(4, 3.0)[1]))


def test_a_canvas_has_the_type_of_the_embeddings() -> None:
    runner = make_runner(a=make_plan())
    runner.parts = [Part("a", 0, NUM_CONTEXT, CANVAS, [], make_step())]
    embeds = torch.zeros(CANVAS, NUM_CHANNELS + 1, dtype=torch.bfloat16)
    runner.fill(embeds, torch.arange(CANVAS))
    assert torch.equal(embeds[1:-1, :-1], start_noise(4, NUM_CHANNELS, 1).bfloat16())


def test_positions_are_the_ropes_and_those_of_the_slots_stay() -> None:
    runner = make_runner(a=make_plan())
    runner.parts = [Part("b", 0, 30, 2, [], None), BOTH._replace(row=2)]
    slots = torch.tensor([30, 31, *range(12 + CANVAS), 77, 77])  # the last are padding
    before = slots.clone()
    filled, more = runner.fill(torch.zeros(20, NUM_CHANNELS + 1), slots)
    assert filled.tolist() == [30, 31, 0, 1, 2, 2, 2, 2, 3, 3, 3, 4, 5, 6, *[7] * CANVAS, 77, 77]
    assert torch.equal(slots, before)
    assert more["latent_rows"].tolist() == [5, 6, 15, 16, 17, 18]


def test_an_image_that_is_only_seen_has_no_rows_of_latents() -> None:
    runner = make_runner()
    runner.parts = [Part("b", 0, 0, 6, [Span(1, 5)], None)]
    filled, more = runner.fill(torch.zeros(6, NUM_CHANNELS + 1), torch.arange(6))
    assert runner.needs_pieces
    assert filled.tolist() == [0, 1, 1, 1, 1, 2] and more == {}


# -- steps of pictures ------------------------------------------------------------------------------------------------


def test_a_picture_advances_by_the_velocity_of_all_branches() -> None:
    for renorm in ("global", "channel", "text_channel"):
        plan = make_plan(guidance=Guidance(4.0, 2.0, (0.0, 1.0), renorm, 0.1))
        runner = make_runner(a=plan)
        for step in range(3):
            assert run(runner, *(make_step(name, step) for name in ALL)) == {}
        ended = run(runner, *(make_step(name, 3) for name in ALL))
        with case(renorm):
            assert ended.keys() == {"a"}
            torch.testing.assert_close(ended["a"], latents_of(plan, [ALL] * 4))
            assert ended["a"].dtype == torch.float32


def test_branches_of_a_step_may_arrive_in_any_order_and_in_several_steps_of_the_engine() -> None:
    plan = make_plan()
    expected = latents_of(plan, [ALL] * 4)
    arrivals = [
        [[OWN], [WITHOUT_TEXT], [WITHOUT_IMAGES]],
        [[WITHOUT_IMAGES, WITHOUT_TEXT], [OWN]],
        [[WITHOUT_TEXT], [WITHOUT_IMAGES, OWN]],
        [[WITHOUT_IMAGES], [], [OWN, WITHOUT_TEXT]],
    ]
    runner = make_runner(a=plan)
    ended: list[dict[str, Tensor]] = []
    for step, groups in enumerate(arrivals):
        ended += [run(runner, *(make_step(name, step) for name in names)) for names in groups]
    assert all(one == {} for one in ended[:-1])
    torch.testing.assert_close(ended[-1]["a"], expected)


def test_latents_stay_until_all_branches_have_been_computed() -> None:
    runner = make_runner(a=make_plan())
    for names in ([WITHOUT_TEXT], [WITHOUT_IMAGES]):
        run(runner, *(make_step(name) for name in names))
        runner.parts = [Part("a", 0, NUM_CONTEXT, CANVAS, [], make_step())]
        embeds = torch.zeros(CANVAS, NUM_CHANNELS + 1)
        runner.fill(embeds, torch.arange(CANVAS))
        assert torch.equal(embeds[1:-1, :-1], start_noise(4, NUM_CHANNELS, 1))


def test_a_step_without_guidance_has_the_velocity_of_its_own_context() -> None:
    plan = make_plan(guidance=Guidance(1.0))
    runner = make_runner(a=plan)
    ended = [run(runner, make_step(step=step, together_with=[OWN])) for step in range(4)]
    torch.testing.assert_close(ended[-1]["a"], latents_of(plan, [[OWN]] * 4))


def test_guidance_may_end_before_the_picture() -> None:
    branches = [ALL, ALL, (OWN,), (OWN,)]
    runner = make_runner(a=make_plan())
    for step, names in enumerate(branches):
        ended = run(runner, *(make_step(name, step, names) for name in names))
    torch.testing.assert_close(ended["a"], latents_of(make_plan(), branches))


@pytest.mark.parametrize("image_scale", [1.0, 2.0])
def test_a_context_without_images_is_that_of_its_branch(image_scale: float) -> None:
    """With an image scale above 1, the velocity of the branch that is left out is the picture's own."""
    plan = make_plan(guidance=Guidance(4.0, image_scale, (0.0, 1.0)))
    names = (OWN, WITHOUT_TEXT)
    runner, whole = make_runner(a=plan), make_runner(a=plan)
    same = {**CONTEXTS, WITHOUT_IMAGES: CONTEXTS[OWN]}
    for step in range(4):
        ended = run(runner, *(make_step(name, step, names) for name in names))
        expected = run(whole, *(make_step(name, step) for name in ALL), contexts=same)
    torch.testing.assert_close(ended["a"], latents_of(plan, [names] * 4))
    torch.testing.assert_close(ended["a"], expected["a"])


def test_pictures_of_one_step_do_not_mix() -> None:
    plans = {"a": make_plan(), "b": make_plan(seed=2, num_steps=3, shift=1.0), "c": make_plan(guidance=Guidance(1.0))}
    runner = make_runner(**plans)
    ended: dict[str, Tensor] = {}
    for step in range(4):
        steps = [make_step(name, step, request_id="a") for name in ALL]
        steps += [make_step(name, step, request_id="b") for name in reversed(ALL)] if step < 3 else []
        steps.insert(2, make_step(OWN, step, [OWN], request_id="c"))
        ended |= run(runner, *steps)
        assert ended.keys() == {2: {"b"}, 3: {"a", "b", "c"}}.get(step, set())
    for name, branches in (("a", ALL), ("b", ALL), ("c", (OWN,))):
        torch.testing.assert_close(ended[name], latents_of(plans[name], [branches] * plans[name].num_steps))


def test_contexts_and_texts_of_a_step_advance_no_picture() -> None:
    runner = make_runner(a=make_plan())
    runner.parts = [
        Part("b", 0, 3, 1, [], None),
        Part("a", 1, 0, NUM_CONTEXT, [], make_step(together_with=())),
        Part("a#text", 1 + NUM_CONTEXT, 0, 2, [], make_step(WITHOUT_TEXT, together_with=())),
    ]
    assert runner.advance(torch.ones(8, NUM_CHANNELS + 1)) == {}
    for step in range(4):
        ended = run(runner, *(make_step(name, step) for name in ALL))
    torch.testing.assert_close(ended["a"], latents_of(make_plan(), [ALL] * 4))


def test_latents_survive_steps_without_their_request() -> None:
    """As when it is preempted: the batch has other requests, and then its context again."""
    runner = make_runner(a=make_plan(), b=make_plan(seed=2))
    run(runner, *(make_step(name, 0) for name in ALL))
    run(runner, make_step(WITHOUT_TEXT, 1))
    run(runner, make_step(OWN, 0, [OWN], request_id="b"))
    runner.add(make_info("a", make_plan()))  # new to the batch
    runner.parts = [Part("a", 0, 0, NUM_CONTEXT, [], make_step(together_with=()))]
    assert runner.advance(torch.ones(NUM_CONTEXT, NUM_CHANNELS + 1)) == {}
    run(runner, make_step(OWN, 1), make_step(WITHOUT_IMAGES, 1))
    for step in (2, 3):
        ended = run(runner, *(make_step(name, step) for name in ALL))
    torch.testing.assert_close(ended["a"], latents_of(make_plan(), [ALL] * 4))


def test_a_picture_that_is_aborted_during_a_step_is_ignored() -> None:
    runner = make_runner(a=make_plan(num_steps=1), b=make_plan(num_steps=1))
    steps = [make_step(name, request_id=request_id) for request_id in "ab" for name in ALL]
    ids = [f"{step.request_id}#{step.branch}" for step in steps]
    runner.parts = [Part(one, CANVAS * row, NUM_CONTEXT, CANVAS, [], steps[row]) for row, one in enumerate(ids)]
    embeds = torch.zeros(CANVAS * len(ids), NUM_CHANNELS + 1)
    runner.fill(embeds, torch.arange(len(embeds)))
    runner.remove(["a", "a#text", "unknown"])
    assert runner.advance(embeds).keys() == {"b"}


def test_a_request_that_uses_an_id_again_starts_anew() -> None:
    runner = make_runner(a=make_plan())
    run(runner, make_step(WITHOUT_TEXT), make_step(OWN))
    runner.remove(["a"])
    runner.add(make_info("a", make_plan(seed=2)))
    for step in range(4):
        ended = run(runner, *(make_step(name, step) for name in ALL))
    torch.testing.assert_close(ended["a"], latents_of(make_plan(seed=2), [ALL] * 4))


def test_a_request_without_a_picture_has_none() -> None:
    runner = make_runner()
    runner.add(make_info("b", None))
    with pytest.raises(KeyError):
        runner.plan_of("b")


def test_a_picture_has_the_plan_of_its_request() -> None:
    plan = make_plan(grid=(3, 5), without_text=((0, 2),))
    assert make_runner(a=plan, b=make_plan()).plan_of("a") == plan


# -- reports of steps -------------------------------------------------------------------------------------------------


def reported(**fields: Any) -> list[tuple[int, bool, bool]]:
    """Of a picture of four steps, each report: the steps that are done, whether it has latents, and is the last."""
    runner = make_runner(a=make_plan(**fields))
    made = [reports_of(runner, *(make_step(name, step) for name in ALL)) for step in range(4)]
    return [(one["a"].num_done, one["a"].latents is not None, one["a"].is_last) for one in made if one]


def test_the_last_step_alone_is_reported_where_nothing_else_is_asked_for() -> None:
    assert reported() == [(4, True, True)]


def test_each_step_is_reported_where_progress_is_asked_for() -> None:
    assert reported(progress=True) == [(1, False, False), (2, False, False), (3, False, False), (4, True, True)]


def test_previews_are_reported_in_their_steps() -> None:
    assert reported(preview_every=2) == [(2, True, False), (4, True, True)]
    assert reported(preview_every=2, progress=True) == [
        (1, False, False),
        (2, True, False),
        (3, False, False),
        (4, True, True),
    ]


def test_a_preview_is_where_the_flow_would_end_at_once() -> None:
    plan = make_plan(guidance=Guidance(1.0), preview_every=1)
    report = reports_of(make_runner(a=plan), make_step(together_with=[OWN]))["a"]
    noise = start_noise(plan.num_latents, NUM_CHANNELS, plan.seed)
    assert report.latents is not None
    torch.testing.assert_close(report.latents, noise - (noise + 1))  # from time 1, by a velocity of noise and time


def test_reports_change_no_picture() -> None:
    runner = make_runner(a=make_plan(progress=True, preview_every=1))
    for step in range(4):
        reports = reports_of(runner, *(make_step(name, step) for name in ALL))
    assert reports["a"].latents is not None
    torch.testing.assert_close(reports["a"].latents, latents_of(make_plan(), [ALL] * 4))


def test_only_requests_that_wrote_a_text_have_a_token_that_ends_it() -> None:
    runner = make_runner(a=make_plan(end_of_text=9), b=make_plan())
    steps = {
        "a": make_step(),
        "a#text": make_step(WITHOUT_TEXT),
        "b": make_step(request_id="b"),
        "b#image": make_step(WITHOUT_IMAGES, request_id="b"),
    }
    assert list(runner.ends_of_texts(steps)) == [("a", 9)]
