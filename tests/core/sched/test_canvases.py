"""Pictures of requests: which branches a step of the engine computes, and when a picture's next step starts.

``World`` does upstream's half of an iteration, without pages; what it adds and finishes is recorded.
"""

import random
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
import pytest
import torch
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import Request, RequestStatus

from tests.cases import case
from tests.fuzz import seeds
from vllm_omni.core.sched.canvases import Canvases, branch_of, plan_of
from vllm_omni.messages.canvas_step import OWN, PICTURE, CanvasStep
from vllm_omni.messages.stage_step import STAGE_ARGS
from vllm_omni.unified.flow import timesteps
from vllm_omni.unified.plan import WITHOUT_IMAGES, WITHOUT_TEXT, Guidance, ImagePlan
from vllm_omni.unified.spans import Span, spans_of_media

GRID = (2, 2)
CANVAS = 6
NUM_PROMPT = 8
LAST_TEXT = 5  # where the prompt's last text starts
END_OF_TEXT = 99
ALWAYS = Guidance(interval=(0.0, 1.0))
ALL = (OWN, WITHOUT_TEXT, WITHOUT_IMAGES)


def make_plan(**fields: Any) -> ImagePlan:
    """Three guided steps with three branches: the prompt's first tokens are an image."""
    plan: dict[str, Any] = {
        "grid": GRID,
        "num_steps": 3,
        "shift": 1.0,
        "guidance": ALWAYS,
        "without_text": ((0, LAST_TEXT),),
        "without_images": ((LAST_TEXT, NUM_PROMPT),),
    }
    return ImagePlan(**{**plan, **fields})


PLAIN = make_plan(guidance=Guidance(1.0))


def make_image(name: str, offset: int, *sizes: int) -> MultiModalFeatureSpec:
    """An image of spans with so many embeddings between markers each."""
    is_embed = [one for size in sizes for one in (False, *[True] * size, False)]
    position = PlaceholderRange(offset, len(is_embed), torch.tensor(is_embed))
    return MultiModalFeatureSpec(None, "image", name, position)


def make_request(
    request_id: str,
    plan: ImagePlan | None = None,
    num_prompt: int = NUM_PROMPT,
    images: Sequence[MultiModalFeatureSpec] = (),
    **fields: Any,
) -> Request:
    args = {STAGE_ARGS: {PICTURE: msgspec.to_builtins(plan)}} if plan is not None else None
    params = SamplingParams(max_tokens=40, extra_args=args)
    return Request(request_id, list(range(num_prompt)), params, None, mm_features=list(images), **fields)


class World:
    """A scheduler with room for all requests, whose iterations have a budget of tokens."""

    def __init__(self, *requests: Request, has_spans: bool = False, max_model_len: int = 1000) -> None:
        self.requests: dict[str, Request] = {}
        self.running: list[Request] = []
        self.waiting: list[Request] = []
        self.added: list[str] = []
        self.finished: list[tuple[str, RequestStatus]] = []
        self.num_scheduled: dict[str, int] = {}  # in the last iteration
        self.canvases = Canvases(self.add, self.finish, has_spans=has_spans, max_model_len=max_model_len)
        for request in requests:
            self.submit(request)

    # -- what the canvases call -----------------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        self.added.append(request.request_id)
        self.requests[request.request_id] = request
        self.waiting.append(request)

    def finish(self, request_ids: Iterable[str], status: RequestStatus) -> None:
        for request_id in request_ids:
            self.finished.append((request_id, status))
            self.requests.pop(request_id).status = status
        # As upstream: new lists, which callers that hold the old ones do not see.
        self.running = [request for request in self.running if not request.is_finished()]
        self.waiting = [request for request in self.waiting if not request.is_finished()]

    # -- a request ------------------------------------------------------------------------------------------------

    def submit(self, request: Request) -> None:
        self.add(request)
        self.canvases.add(request)

    def end(self, request_id: str) -> None:
        """However it does."""
        self.requests.pop(request_id).status = RequestStatus.FINISHED_STOPPED
        self.running = [request for request in self.running if not request.is_finished()]
        self.waiting = [request for request in self.waiting if not request.is_finished()]
        self.canvases.end(self.requests)

    def preempt(self, request_id: str) -> None:
        request = self.requests[request_id]
        self.running.remove(request)
        request.status, request.num_computed_tokens, request.spec_token_ids = RequestStatus.PREEMPTED, 0, []
        self.waiting.insert(0, request)

    def branch(self, name: str, request_id: str = "a") -> Request:
        return self.requests[f"{request_id}#{name}"]

    # -- an iteration ---------------------------------------------------------------------------------------------

    def schedule(self, budget: int = 1000) -> SchedulerOutput:
        self.canvases.prepare()
        self.running = self.canvases.in_order(self.running)
        output = SchedulerOutput.make_empty()
        left = budget
        for request in self.running:
            left -= self.schedule_one(request, left, output)
        for request in list(self.waiting):
            if self.canvases.is_held(request):
                continue
            num_tokens = self.schedule_one(request, left, output)
            if not num_tokens:
                break
            left -= num_tokens
            request.status = RequestStatus.RUNNING
            self.waiting.remove(request)
            self.running.append(request)
        for request_id, num_tokens in output.num_scheduled_tokens.items():
            self.requests[request_id].num_computed_tokens += num_tokens
        return output

    def schedule_one(self, request: Request, left: int, output: SchedulerOutput) -> int:
        wanted = min(request.num_tokens_with_spec - request.num_computed_tokens, left)
        num_tokens = self.canvases.limit(request, request.num_computed_tokens, wanted)
        if num_tokens:
            output.num_scheduled_tokens[request.request_id] = num_tokens
            if (num_drafts := num_tokens + request.num_computed_tokens - request.num_tokens) > 0:
                output.scheduled_spec_decode_tokens[request.request_id] = request.spec_token_ids[:num_drafts]
            request.spec_token_ids = []
        return num_tokens

    def step(self, budget: int = 1000) -> dict[str, CanvasStep]:
        """One iteration."""
        output = self.schedule(budget)
        steps = self.canvases.take(output)
        assert not output.scheduled_spec_decode_tokens
        self.num_scheduled = output.num_scheduled_tokens
        return steps

    def canvas_steps(self, budget: int = 1000) -> list[tuple[str, int]]:
        """One iteration: the branches whose canvases are computed, and in which step of their pictures."""
        steps = self.step(budget).values()
        return [(f"{one.request_id}#{one.branch}", one.step) for one in steps if one.together_with]


def running_world(*requests: Request, **options: Any) -> World:
    """A world behind the iteration that computes the contexts."""
    world = World(*requests, **options)
    assert world.canvas_steps() == []
    return world


# -- start of a picture -----------------------------------------------------------------------------------------------


def test_a_request_without_a_picture_is_left_alone() -> None:
    world = World(make_request("a"))
    assert world.added == ["a"] and not world.canvases
    assert plan_of(world.requests["a"]) is None
    assert world.step() == {} and world.num_scheduled == {"a": NUM_PROMPT}
    assert not world.canvases.is_held(world.requests["a"])
    assert world.canvases.idle() == []


def test_a_picture_and_its_branches_write_no_text() -> None:
    texts = [make_request("c"), make_request("d", make_plan(end_of_text=END_OF_TEXT))]
    world = World(make_request("a", make_plan()), *texts)
    owned = {name for name, request in world.requests.items() if world.canvases.owns(request)}
    assert owned == {"a", "a#text", "a#image"}


def test_a_plan_is_read_from_the_arguments_of_the_stage() -> None:
    plan = make_plan(negative=(7, 8), seed=3)
    assert plan_of(make_request("a", plan)) == plan
    params = SamplingParams(extra_args={STAGE_ARGS: {"publish": True}})
    assert plan_of(Request("a", [0], params, None)) is None


def test_a_guided_picture_adds_a_request_for_each_branch() -> None:
    world = World(make_request("a", make_plan()))
    assert world.added == ["a", "a#image", "a#text"] and world.canvases
    assert world.branch(WITHOUT_TEXT).prompt_token_ids == [0, 1, 2, 3, 4]
    assert world.branch(WITHOUT_IMAGES).prompt_token_ids == [5, 6, 7]


def test_a_picture_without_guidance_adds_none() -> None:
    assert World(make_request("a", PLAIN)).added == ["a"]


def test_a_negative_text_stands_behind_the_context_without_text() -> None:
    world = World(make_request("a", make_plan(negative=(70, 71))))
    assert world.branch(WITHOUT_TEXT).prompt_token_ids == [0, 1, 2, 3, 4, 70, 71]
    assert world.branch(WITHOUT_IMAGES).prompt_token_ids == [5, 6, 7]


# -- the steps of a picture -------------------------------------------------------------------------------------------


def test_a_waiting_request_gets_its_context_before_its_canvas() -> None:
    world = World(make_request("a", PLAIN))
    assert world.step() == {"a": CanvasStep("a", OWN, (), 0, NUM_PROMPT)}
    assert world.num_scheduled == {"a": NUM_PROMPT}
    assert world.step() == {"a": CanvasStep("a", OWN, (OWN,), 0, NUM_PROMPT)}
    assert world.num_scheduled == {"a": CANVAS}


def test_the_end_of_a_context_and_the_canvas_fit_one_iteration() -> None:
    world = World(make_request("a", PLAIN))
    assert world.step(budget=3) == {"a": CanvasStep("a", OWN, (), 0, NUM_PROMPT)}
    assert world.step() == {"a": CanvasStep("a", OWN, (OWN,), 0, NUM_PROMPT)}
    assert world.num_scheduled == {"a": NUM_PROMPT - 3 + CANVAS}


def test_a_step_of_all_branches_is_one_iteration_where_they_fit() -> None:
    world = running_world(make_request("a", make_plan()))
    for step in range(3):
        steps = world.step()
        assert {one.branch: (one.together_with, one.step) for one in steps.values()} == dict.fromkeys(ALL, (ALL, step))
        assert {one.branch: one.num_context for one in steps.values()} == {
            OWN: NUM_PROMPT,
            WITHOUT_TEXT: LAST_TEXT,
            WITHOUT_IMAGES: NUM_PROMPT - LAST_TEXT,
        }
    assert world.step() == {}


def test_a_step_ends_when_branches_of_several_iterations_have_been_computed() -> None:
    world = running_world(make_request("a", make_plan()))
    seen = [world.canvas_steps(budget=CANVAS) for _ in range(9)]
    assert all(len(one) == 1 for one in seen)
    by_step = [{name for one in seen[at : at + 3] for name, _ in one} for at in range(0, 9, 3)]
    assert by_step == [{"a#own", "a#text", "a#image"}] * 3
    assert [step for one in seen for _, step in one] == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    assert world.canvas_steps() == []


def test_branches_of_two_pictures_share_iterations() -> None:
    world = running_world(make_request("a", make_plan()), make_request("b", PLAIN))
    seen = [world.canvas_steps(budget=2 * CANVAS) for _ in range(6)]
    assert [len(one) for one in seen] == [2, 2, 2, 2, 2, 2]
    for name, expected in (("a#own", [0, 1, 2]), ("a#text", [0, 1, 2]), ("a#image", [0, 1, 2]), ("b#own", [0, 1, 2])):
        assert [step for one in seen for branch, step in one if branch == name] == expected


def test_a_canvas_does_not_advance_its_request() -> None:
    world = running_world(make_request("a", make_plan()))
    before = {one: request.num_computed_tokens for one, request in world.requests.items()}
    for _ in range(3):
        world.step()
        assert {one: request.num_computed_tokens for one, request in world.requests.items()} == before
        assert {one: request.num_tokens for one, request in world.requests.items()} == before


def test_a_branch_that_has_been_computed_waits_for_the_others() -> None:
    world = running_world(make_request("a", make_plan()))
    (first,) = world.canvas_steps(budget=CANVAS)
    for _ in range(2):
        assert world.step(budget=CANVAS - 1) == {}
    assert first not in world.canvas_steps() + world.canvas_steps()


def test_a_canvas_that_found_no_room_comes_first() -> None:
    world = running_world(make_request("a", PLAIN), make_request("b", PLAIN), make_request("c"))
    seen = [world.canvas_steps(budget=CANVAS) for _ in range(6)]
    assert seen == [[(f"{name}#own", step)] for step in range(3) for name in "ab"]


def test_a_text_behind_a_canvas_that_found_no_room_is_computed_beside_it() -> None:
    world = running_world(make_request("a", PLAIN), make_request("c"))
    world.requests["c"].append_output_token_ids(5)
    world.step(budget=CANVAS - 1)
    assert world.num_scheduled == {"c": 1}
    world.requests["c"].append_output_token_ids(5)
    world.step(budget=CANVAS)
    assert world.num_scheduled == {"a": CANVAS}


def test_other_requests_keep_their_order() -> None:
    world = running_world(make_request("a", make_plan()), make_request("b", PLAIN), make_request("c"))
    assert world.canvas_steps(budget=CANVAS) == [("a#own", 0)]
    order = [one.request_id for one in world.canvases.in_order([world.requests[one] for one in "cba"])]
    assert order == ["b", "c", "a"]


def test_a_preempted_branch_continues_with_its_step() -> None:
    world = running_world(make_request("a", make_plan()))
    assert len(world.canvas_steps()) == 3
    world.preempt("a#text")
    assert {name for name, _ in world.canvas_steps()} == {"a#own", "a#image"}
    assert world.num_scheduled["a#text"] == LAST_TEXT
    assert world.canvas_steps() == [("a#text", 1)]
    assert {step for _, step in world.canvas_steps()} == {2}


def test_a_branch_that_was_preempted_behind_its_canvas_is_not_computed_again_in_the_step() -> None:
    world = running_world(make_request("a", make_plan()))
    ((name, _),) = world.canvas_steps(budget=CANVAS)
    assert name == "a#own"
    world.preempt("a")
    assert world.canvases.is_held(world.requests["a"])
    assert {name for name, _ in world.canvas_steps()} == {"a#text", "a#image"}
    assert "a" not in world.num_scheduled
    assert {name for name, _ in world.canvas_steps()} == {"a#text", "a#image"}
    assert world.num_scheduled["a"] == NUM_PROMPT
    assert world.canvas_steps() == [("a#own", 1)]


# -- branches without context -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "fields"), [(WITHOUT_TEXT, {"without_text": ()}), (WITHOUT_IMAGES, {"without_images": ()})]
)
def test_a_branch_of_nothing_has_its_canvas_alone(name: str, fields: dict[str, Any]) -> None:
    world = running_world(make_request("a", make_plan(**fields)))
    request_id = f"a#{name}"
    assert world.requests[request_id].num_tokens == 1  # upstream needs one
    for step in range(3):
        steps = world.step()
        assert steps[request_id] == CanvasStep("a", name, ALL, step, 0)
        assert world.num_scheduled[request_id] == CANVAS


def test_the_canvas_of_a_branch_of_nothing_is_whole_or_left() -> None:
    world = running_world(make_request("a", make_plan(without_text=(), guidance=Guidance(4.0, 1.0, (0.0, 1.0)))))
    assert world.canvas_steps(budget=CANVAS) == [("a#own", 0)]
    for budget in range(CANVAS):
        assert world.canvas_steps(budget) == []
    assert world.canvas_steps(budget=CANVAS) == [("a#text", 0)]


def test_a_negative_text_is_context() -> None:
    world = running_world(make_request("a", make_plan(without_text=(), negative=(70, 71))))
    assert world.step()["a#text"].num_context == 2


# -- branches that only some steps need -------------------------------------------------------------------------------


def test_branches_that_no_later_step_needs_are_finished() -> None:
    plan = make_plan(num_steps=4, guidance=Guidance(interval=(0.5, 1.0)))  # steps at 1, 0.75, 0.5 and 0.25
    world = running_world(make_request("a", plan))
    assert [len(world.canvas_steps()) for _ in range(2)] == [3, 3]
    assert world.finished == []
    assert world.canvas_steps() == [("a#own", 2)]
    assert sorted(world.finished) == [
        ("a#image", RequestStatus.FINISHED_ABORTED),
        ("a#text", RequestStatus.FINISHED_ABORTED),
    ]
    assert world.running == [world.requests["a"]]
    assert world.canvas_steps() == [("a#own", 3)]
    assert world.step() == {}


def test_the_last_guided_step_of_all_is_followed_by_none() -> None:
    world = running_world(make_request("a", make_plan(num_steps=1)))
    assert len(world.canvas_steps()) == 3
    assert world.step() == {}
    assert len(world.finished) == 2 and world.requests.keys() == {"a"}


def test_branches_wait_for_the_first_step_that_needs_them() -> None:
    plan = make_plan(num_steps=4, guidance=Guidance(interval=(0.0, 0.5)))
    world = World(make_request("a", plan))
    held = [world.branch(name) for name in (WITHOUT_TEXT, WITHOUT_IMAGES)]
    world.step()
    for step in range(2):
        assert all(world.canvases.is_held(one) for one in held)
        assert world.canvas_steps() == [("a#own", step)]
    assert not any(world.canvases.is_held(one) for one in held)
    assert world.canvas_steps() == [("a#own", 2)]
    assert world.num_scheduled.keys() == {"a", "a#text", "a#image"}
    assert sorted(world.canvas_steps()) == [("a#image", 2), ("a#text", 2)]
    assert len(world.canvas_steps()) == 3


# -- how many tokens a step may have ----------------------------------------------------------------------------------


def test_no_canvas_is_cut() -> None:
    world = running_world(make_request("a", PLAIN))
    request = world.requests["a"]
    for start in range(NUM_PROMPT + 1):
        for number in range(NUM_PROMPT + CANVAS - start + 1):
            end = start + world.canvases.limit(request, start, number)
            whole = end if end == NUM_PROMPT + CANVAS else min(start + number, NUM_PROMPT)
            with case(start, number):
                assert end == whole
                assert (end == NUM_PROMPT + CANVAS) == (start + number == NUM_PROMPT + CANVAS)


def test_a_request_without_a_picture_is_cut_anywhere() -> None:
    world = World(make_request("a"), has_spans=True)
    assert [world.canvases.limit(world.requests["a"], 3, number) for number in range(6)] == list(range(6))


def test_no_image_of_a_prompt_is_cut() -> None:
    images = [make_image("one", 2, 2, 3), make_image("two", 12, 1)]
    spans = [Span(2, 6, True), Span(6, 11), Span(12, 15)]
    assert spans_of_media(images) == spans
    for plan in (None, make_plan(without_text=((0, 15),), without_images=())):
        world = World(make_request("a", plan, num_prompt=20, images=images), has_spans=True)
        request = world.requests["a"]
        for start in range(20):
            for number in range(20 - start + 1):
                end = start + world.canvases.limit(request, start, number)
                with case(plan is None, start, number):
                    assert start <= end <= start + number
                    assert end == start or not any(span.start < end < span.end for span in spans)


def test_images_may_be_cut_where_their_tokens_do_not_see_each_other() -> None:
    world = World(make_request("a", images=[make_image("one", 2, 3)]))
    assert [world.canvases.limit(world.requests["a"], 0, number) for number in range(8)] == list(range(8))


def test_images_of_a_branch_are_not_cut_either() -> None:
    world = World(make_request("a", make_plan(), images=[make_image("one", 0, 3)]), has_spans=True)
    branch = world.branch(WITHOUT_TEXT)
    assert [world.canvases.limit(branch, 0, number) for number in range(6)] == [0, 0, 0, 0, 0, 5]


def test_a_canvas_is_computed_together() -> None:
    world = World(make_request("a", make_plan(without_text=())), make_request("c"))
    requests = [world.requests[one] for one in ("a", "a#image", "a#text", "c")]
    world.canvases.prepare()
    assert [world.canvases.num_together(one) for one in requests] == [1, 1, 1, 1]
    world.step()
    world.canvases.prepare()
    assert [world.canvases.num_together(one) for one in requests] == [CANVAS, CANVAS, CANVAS, 1]


def test_an_image_of_a_prompt_is_computed_together() -> None:
    images = [make_image("one", 2, 2, 3), make_image("two", 12, 1)]
    request = make_request("a", num_prompt=20, images=images)
    for has_spans, expected in (
        (True, [1, 1, 4, 3, 2, 1, 5, 4, 3, 2, 1, 1, 3, 2, 1, 1, 1, 1, 1, 1]),
        (False, [1] * 20),
    ):
        world = World(request, has_spans=has_spans)
        made = []
        for request.num_computed_tokens in range(20):
            made.append(world.canvases.num_together(request))
        assert made == expected


# -- order of admission -----------------------------------------------------------------------------------------------


def test_branches_of_a_younger_picture_wait_until_the_older_ones_are_admitted() -> None:
    world = World(make_request("a", make_plan()), make_request("b", make_plan()), make_request("c"))
    younger = [world.requests["b"], world.branch(WITHOUT_TEXT, "b"), world.branch(WITHOUT_IMAGES, "b")]
    assert all(world.canvases.is_held(one) for one in younger)
    assert not any(world.canvases.is_held(world.requests[one]) for one in ("a", "c"))
    world.step(budget=NUM_PROMPT)  # the older picture's other branches are left
    assert not any(world.canvases.is_held(world.requests[one]) for one in ("a#text", "a#image"))
    assert all(world.canvases.is_held(one) for one in younger)
    world.step()
    assert not any(world.canvases.is_held(one) for one in younger)


def test_branches_wait_while_the_request_waits_for_another_engine() -> None:
    world = World(make_request("a", make_plan()))
    own = world.requests["a"]
    own.status = RequestStatus.WAITING_FOR_REMOTE_KVS
    world.waiting.remove(own)
    assert world.canvas_steps() == [] and not world.num_scheduled
    own.status = RequestStatus.WAITING
    world.waiting.insert(0, own)
    assert world.canvas_steps() == [] and set(world.num_scheduled) == {"a", "a#text", "a#image"}


def test_a_younger_picture_does_not_wait_for_branches_that_the_older_step_does_not_need() -> None:
    plan = make_plan(num_steps=4, guidance=Guidance(interval=(0.0, 0.5)))
    world = World(make_request("a", plan), make_request("b", PLAIN))
    assert world.canvases.is_held(world.requests["b"])
    world.step(budget=NUM_PROMPT)
    assert world.canvases.is_held(world.branch(WITHOUT_TEXT))
    assert not world.canvases.is_held(world.requests["b"])


def test_a_text_is_never_held() -> None:
    world = World(make_request("a", make_plan()), make_request("c"))
    assert not world.canvases.is_held(world.requests["c"])
    assert not world.canvases.is_held(make_request("unknown"))


def test_idle_branches_are_those_that_wait_for_others_the_youngest_picture_first() -> None:
    world = running_world(make_request("a", make_plan()), make_request("b", make_plan()), make_request("c"))
    assert world.canvases.idle() == []
    for request_id in ("b#text", "a#text"):
        world.preempt(request_id)
    assert {name for name, _ in world.canvas_steps()} == {"a#own", "a#image", "b#own", "b#image"}
    assert [one.request_id for one in world.canvases.idle()] == ["b", "b#image", "a", "a#image"]
    assert {name for name, _ in world.canvas_steps()} == {"a#text", "b#text"}
    assert world.canvases.idle() == []


def test_waiting_branches_are_not_idle() -> None:
    world = running_world(make_request("a", make_plan()))
    world.canvas_steps(budget=CANVAS)
    assert world.canvases.idle() == [world.requests["a"]]
    world.preempt("a")
    assert world.canvases.idle() == []


# -- end of a picture -------------------------------------------------------------------------------------------------


def test_branches_end_with_their_request() -> None:
    for num_iterations in range(6):
        world = World(make_request("a", make_plan()), make_request("b", make_plan()))
        for _ in range(num_iterations):
            world.step(budget=12)
        world.end("a")
        with case(num_iterations):
            assert sorted(world.finished) == [
                ("a#image", RequestStatus.FINISHED_ABORTED),
                ("a#text", RequestStatus.FINISHED_ABORTED),
            ]
            assert world.requests.keys() == {"b", "b#text", "b#image"}
            world.end("b")
            assert not world.canvases and not world.requests


def test_a_request_that_ends_before_its_picture_starts_leaves_nothing() -> None:
    world = World(make_request("a", make_plan(end_of_text=END_OF_TEXT)))
    request = world.requests["a"]
    world.end("a")
    request.append_output_token_ids(7)
    assert not world.canvases.start_behind_text(request)
    assert world.finished == [] and not world.canvases


def test_an_id_may_be_used_again() -> None:
    world = running_world(make_request("a", make_plan()))
    world.step()
    world.end("a")
    world.submit(make_request("a", make_plan()))
    world.step()
    assert [len(world.canvas_steps()) for _ in range(4)] == [3, 3, 3, 0]


def test_the_end_of_other_requests_ends_no_picture() -> None:
    world = running_world(make_request("a", make_plan()), make_request("c"))
    world.end("c")
    assert world.finished == [] and len(world.canvas_steps()) == 3


# -- a picture behind a text ------------------------------------------------------------------------------------------


def write(world: World, *tokens: int, status: RequestStatus = RequestStatus.FINISHED_STOPPED) -> Request:
    """Let the request write a text, which has just ended."""
    request = world.requests["a"]
    world.step()
    request.append_output_token_ids(list(tokens))
    request.num_computed_tokens = request.num_tokens - 1
    request.status, request.stop_reason = status, END_OF_TEXT
    return request


def test_the_branches_of_a_picture_behind_a_text_start_with_it() -> None:
    world = World(make_request("a", make_plan(end_of_text=END_OF_TEXT)))
    assert world.added == ["a"] and not world.canvases
    request = write(world, 50, 51, END_OF_TEXT)
    assert world.canvases.start_behind_text(request)
    assert world.added == ["a", "a#image", "a#text"] and world.canvases
    assert (request.status, request.stop_reason) == (RequestStatus.RUNNING, None)
    assert not world.canvases.start_behind_text(request)  # its picture is no text


def test_the_token_that_ends_a_text_takes_the_place_of_the_last_one() -> None:
    for status in (RequestStatus.FINISHED_STOPPED, RequestStatus.FINISHED_LENGTH_CAPPED):
        world = World(make_request("a", make_plan(end_of_text=END_OF_TEXT)))
        request = write(world, 50, 51, 52, status=status)
        assert world.canvases.start_behind_text(request)
        assert list(request.output_token_ids) == [50, 51, END_OF_TEXT]
        assert list(request.all_token_ids) == [*range(NUM_PROMPT), 50, 51, END_OF_TEXT]


def test_a_picture_behind_a_text_reads_it_and_its_branches_do_not() -> None:
    world = World(make_request("a", make_plan(end_of_text=END_OF_TEXT, without_images=((0, NUM_PROMPT),))))
    world.canvases.start_behind_text(write(world, 50, 51, END_OF_TEXT))
    assert world.step()["a"] == CanvasStep("a", OWN, ALL, 0, NUM_PROMPT + 3)
    assert world.num_scheduled == {"a": 1 + CANVAS, "a#text": LAST_TEXT, "a#image": NUM_PROMPT}
    assert dict(world.canvas_steps()) == {"a#text": 0, "a#image": 0}
    assert [len(world.canvas_steps()) for _ in range(3)] == [3, 3, 0]


def test_a_text_leaves_room_for_its_picture() -> None:
    plan = make_plan(end_of_text=END_OF_TEXT)
    for max_model_len, max_tokens in ((1000, 40), (NUM_PROMPT + 40 + CANVAS + 1, 40), (NUM_PROMPT + 40 + CANVAS, 39)):
        world = World(make_request("a", plan), make_request("b", PLAIN), make_request("c"), max_model_len=max_model_len)
        with case(max_model_len):
            assert [world.requests[one].max_tokens for one in "abc"] == [max_tokens, 40, 40]
    plan.check_fits(NUM_PROMPT, CANVAS, NUM_PROMPT + 1 + CANVAS + 1)
    world = World(make_request("a", plan), max_model_len=NUM_PROMPT + 1 + CANVAS + 1)
    assert world.requests["a"].max_tokens == 1


def test_a_text_without_a_picture_ends_as_a_text() -> None:
    world = World(make_request("a"))
    request = write(world, 50, 51)
    assert not world.canvases.start_behind_text(request)
    assert list(request.output_token_ids) == [50, 51] and request.is_finished()


# -- requests of branches ---------------------------------------------------------------------------------------------


def test_a_branch_has_the_tokens_and_images_of_its_ranges() -> None:
    images = [make_image("one", 2, 2, 3), make_image("two", 12, 1), make_image("three", 17, 1)]
    request = make_request("a", num_prompt=22, images=images)
    for ranges, tokens, places in [
        ([(0, 22)], [*range(22)], {"one": 2, "two": 12, "three": 17}),
        ([(0, 12)], [*range(12)], {"one": 2}),
        ([(1, 11), (15, 22)], [*range(1, 11), *range(15, 22)], {"one": 1, "three": 12}),
        ([(11, 16)], [*range(11, 16)], {"two": 1}),
        ([(0, 2), (11, 12), (15, 17), (20, 22)], [0, 1, 11, 15, 16, 20, 21], {}),
    ]:
        branch = branch_of(request, "some", ranges)
        with case(ranges):
            assert branch.prompt_token_ids == tokens
            assert {one.identifier: one.mm_position.offset for one in branch.mm_features} == places
            for feature in branch.mm_features:
                (given,) = (one for one in images if one.identifier == feature.identifier)
                position = feature.mm_position
                assert (position.length, position.is_embed) == (given.mm_position.length, given.mm_position.is_embed)
                ids = request.prompt_token_ids
                assert ids is not None
                offset = given.mm_position.offset
                assert tokens[position.offset : position.offset + position.length] == ids[offset:][: position.length]
    assert [one.mm_position.offset for one in request.mm_features] == [2, 12, 17]


def test_a_branch_of_no_ranges_has_one_token_and_no_images() -> None:
    branch = branch_of(make_request("a", images=[make_image("one", 0, 3)]), "some", ())
    assert branch.prompt_token_ids == [0] and branch.mm_features == []


def test_a_branch_is_treated_as_its_request() -> None:
    hashed: list[str] = []

    def note(hashed_request: Request) -> list[Any]:
        hashed.append(hashed_request.request_id)
        return []

    request = make_request(
        "a",
        client_index=2,
        arrival_time=7.0,
        priority=3,
        cache_salt="salt",
        lora_request=LoRARequest("adapter", 1, "nowhere"),
        block_hasher=note,
    )
    branch = branch_of(request, WITHOUT_TEXT, [(0, 4)])
    assert branch.request_id == "a#text" and hashed == ["a", "a#text"]
    for name in ("client_index", "arrival_time", "priority", "cache_salt", "lora_request"):
        assert getattr(branch, name) == getattr(request, name) is not None
    assert branch.sampling_params is not None and branch.sampling_params.extra_args is None


# -- random pictures --------------------------------------------------------------------------------------------------


def random_plan(rng: random.Random) -> ImagePlan:
    low, high = sorted(rng.choices((0.0, 0.2, 0.5, 0.8, 1.0), k=2))
    return make_plan(
        grid=(rng.randint(1, 3), rng.randint(1, 3)),
        num_steps=rng.randint(1, 6),
        shift=rng.choice((1.0, 3.0)),
        guidance=Guidance(rng.choice((1.0, 4.0)), rng.choice((1.0, 2.0)), (low, high)),
        without_text=rng.choice(((), ((0, LAST_TEXT),))),
        without_images=rng.choice(((), ((LAST_TEXT, NUM_PROMPT),), ((0, NUM_PROMPT),))),
        negative=rng.choice(((), (70, 71))),
    )


def expected_steps(plan: ImagePlan) -> list[tuple[int, str]]:
    steps = []
    for step, time in enumerate(timesteps(plan.num_steps, plan.shift)[:-1].tolist()):
        steps += [(step, name) for name in sorted((OWN, *plan.branches(time, NUM_PROMPT)))]
    return steps


def run_random(rng: random.Random, plans: dict[str, ImagePlan]) -> dict[str, list[tuple[int, str]]]:
    """The canvases that are computed of each picture, in order, with preemptions and a budget that changes."""
    world, arriving = World(has_spans=True), list(plans)
    seen: dict[str, list[tuple[int, str]]] = {name: [] for name in plans}
    least = max(plan.num_canvas_tokens for plan in plans.values())
    for _ in range(500):
        if arriving and rng.random() < 0.5:
            name = arriving.pop(0)
            images = [make_image(name, 0, LAST_TEXT - 2)] * rng.randrange(2)
            world.submit(make_request(name, plans[name], images=images))
        if world.running and rng.random() < 0.1:
            world.preempt(rng.choice(world.running).request_id)
        for step in world.step(budget=rng.randint(least, 3 * least)).values():
            if step.together_with:
                seen[step.request_id].append((step.step, step.branch))
        for name in [one for one in plans if len(seen[one]) >= len(expected_steps(plans[one]))]:
            if name in world.requests and rng.random() < 0.5:
                world.end(name)
        if not arriving and not world.requests:
            assert not world.canvases and not world.running and not world.waiting
            return seen
    raise AssertionError(f"left: {world.requests.keys()}")


@pytest.mark.fuzz
def test_each_branch_of_each_step_is_computed_once_whatever_the_budget() -> None:
    for seed in seeds(300):
        rng = random.Random(seed)
        plans = {name: random_plan(rng) for name in "abcd"[: rng.randint(1, 4)]}
        with case(f"FUZZ_SEED={seed}", plans):
            for name, seen in run_random(rng, plans).items():
                assert sorted(seen) == expected_steps(plans[name])
                assert [step for step, _ in seen] == [step for step, _ in expected_steps(plans[name])]
