"""``Canvases``: schedules denoise steps as tokens behind a request's context, in the steps of all other requests.

A canvas is every token of a picture between its markers. Each denoise step computes it again behind the same context,
so it never advances the request, and its pages are written again: vLLM hashes pages of a request's own tokens alone.
The branches of a picture's guidance are requests of this scheduler's own, with parts of the same prompt; what they
share with it comes from the prefix cache. The branches of a step may be computed in different steps of the engine,
and the step ends when all have been (a rendezvous): none waits for room for all.

From: Omni-Flow, section 5.3.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
from transformers import PreTrainedConfig
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import Request, RequestStatus

from vllm_omni.core.sched.prefaces import Prefaces, replace_last
from vllm_omni.messages.canvas_step import DENOISES, OWN, PICTURE, CanvasStep
from vllm_omni.messages.stage_step import STAGE_ARGS
from vllm_omni.unified.flow import timesteps
from vllm_omni.unified.layout import MARKED, Layout
from vllm_omni.unified.plan import ImagePlan
from vllm_omni.unified.spans import Ranges, spans_of_media, whole_spans

SEPARATOR = "#"
"""Between a request's id and the name of its branch."""


@dataclass
class Picture:
    """The picture of one request: which step it is at, and which branches have been computed for that."""

    request: Request
    plan: ImagePlan
    times: Sequence[float]
    branches: dict[str, Request] = field(default_factory=dict)  # OWN: the request itself
    step: int = 0
    computed: set[str] = field(default_factory=set)

    @property
    def has_ended(self) -> bool:
        return self.step >= self.plan.num_steps

    @property
    def has_started(self) -> bool:
        """Whether the request itself has been scheduled."""
        return self.request.status in (RequestStatus.RUNNING, RequestStatus.PREEMPTED)

    def needed(self) -> tuple[str, ...]:
        """The branches that the current step is computed with."""
        if self.has_ended:
            return ()
        return (OWN, *self.plan.branches(self.times[self.step], self.request.num_prompt_tokens))

    def is_due(self, name: str) -> bool:
        """Whether the current step waits for the branch."""
        return name in self.needed() and name not in self.computed

    def continue_if_computed(self) -> None:
        """Start the next step, if all branches of the current one have been computed."""
        if not self.has_ended and self.computed >= set(self.needed()):
            self.step += 1
            self.computed.clear()

    def later(self) -> set[str]:
        """The branches that this step or a later one is computed with."""
        left = self.times[self.step : self.plan.num_steps]
        return {OWN, *(one for time in left for one in self.plan.branches(time, self.request.num_prompt_tokens))}


def denoises(hf_config: PreTrainedConfig) -> bool:
    """Whether a model denoises pictures, and its images see each other."""
    return bool(getattr(hf_config, DENOISES, False))


def plan_of(request: Request) -> ImagePlan | None:
    """The picture that a request asks for."""
    params = request.sampling_params
    args: Any = (params.extra_args or {}).get(STAGE_ARGS) if params is not None else None
    return msgspec.convert(args[PICTURE], ImagePlan) if args and PICTURE in args else None


class Canvases:
    """The pictures of a scheduler's requests, oldest first.

    Args:
        add: the scheduler's ``add_request``, for branches.
        finish: likewise ``finish_requests``.
        has_spans: whether the tokens of an image of a prompt see each other (``unified/spans.py``).
        layout: of the model's images.
        max_model_len: the engine's; a text ends where a longer one would leave no room for its picture.
    """

    def __init__(
        self,
        add: Callable[[Request], None],
        finish: Callable[[Iterable[str], RequestStatus], object],
        *,
        has_spans: bool,
        max_model_len: int,
        layout: Layout = MARKED,
    ) -> None:
        self._has_spans = has_spans
        self._layout = layout
        self.prefaces = Prefaces(self._start, max_model_len)
        self._max_model_len = max_model_len
        self._add = add
        self._finish = finish
        self._writing: dict[str, ImagePlan] = {}  # of requests that write a text before their picture
        self._pictures: dict[str, Picture] = {}  # by request
        self._places: dict[str, tuple[Picture, str]] = {}  # branch's request -> its picture and name
        self._unserved: set[str] = set()  # branches whose canvas found no room in the last iteration

    def __bool__(self) -> bool:
        return bool(self._pictures or self.prefaces)

    # -- start and end of a request -----------------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Note the picture that a request asks for, and add the requests of its branches."""
        plan = plan_of(request)
        if plan is not None and plan.preface is not None:
            self.prefaces.add(request, plan)
        elif plan is not None and plan.end_of_text is None:
            self._start(request, plan)
        elif plan is not None:
            self._writing[request.request_id] = plan
            # Upstream keeps one token of a sequence for what it samples.
            room = self._max_model_len - request.num_prompt_tokens - plan.num_canvas_tokens - 1
            request.max_tokens = min(request.max_tokens, room)

    def start_behind_text(self, request: Request) -> bool:
        """Start the picture of a request whose text has just ended; False: it ends with its text.

        A text that was cut off ends as a whole one does, in the place of its last token.
        """
        plan = self._writing.pop(request.request_id, None)
        if plan is None or plan.end_of_text is None:
            return False
        replace_last(request, (plan.end_of_text,))
        request.status, request.stop_reason = RequestStatus.RUNNING, None
        self._start(request, plan)
        return True

    def _start(self, request: Request, plan: ImagePlan) -> None:
        times = timesteps(plan.num_steps, plan.shift).tolist()
        picture = Picture(request, plan, times, {OWN: request})
        self._pictures[request.request_id] = picture
        self._places[request.request_id] = picture, OWN
        for name in sorted(picture.later() - {OWN}):
            branch = branch_of(
                request, name, plan.ranges(name), plan.added(name), plan.ids_without_text(request.all_token_ids)
            )
            picture.branches[name] = branch
            self._places[branch.request_id] = picture, name
            self._add(branch)

    def end(self, alive: Container[str]) -> None:
        """Finish the branches of requests that have ended, however they did.

        Args:
            alive: the requests that have not.
        """
        self.prefaces.end(alive)
        for request_id in [one for one in self._writing if one not in alive]:
            del self._writing[request_id]
        for request_id in [one for one in self._pictures if one not in alive]:
            picture = self._pictures.pop(request_id)
            del self._places[request_id]
            self._drop(picture, [one for one in picture.branches if one != OWN])

    def _drop(self, picture: Picture, names: Iterable[str]) -> None:
        ids = [picture.branches.pop(name).request_id for name in names]
        for request_id in ids:
            del self._places[request_id]
        if ids:
            self._finish(ids, RequestStatus.FINISHED_ABORTED)

    # -- one iteration ------------------------------------------------------------------------------------------------

    def prepare(self) -> None:
        """Let each branch whose context is computed, and which the current step needs, be scheduled with its canvas."""
        for picture in self._pictures.values():
            later = picture.later()
            self._drop(picture, [one for one in picture.branches if one not in later])
            for name, request in picture.branches.items():
                request.spec_token_ids = []
                if request.status == RequestStatus.RUNNING and picture.is_due(name):
                    num_context = self._num_context(picture, name)
                    request.num_computed_tokens = min(request.num_computed_tokens, num_context)
                    request.spec_token_ids = [0] * (num_context + picture.plan.num_canvas_tokens - request.num_tokens)

    def in_order(self, requests: Sequence[Request]) -> list[Request]:
        """Requests in the order in which they are scheduled: a canvas that found no room in the last iteration comes
        first, as it needs its tokens of one iteration together.
        """
        first = [request for request in requests if request.request_id in self._unserved]
        return first + [request for request in requests if request.request_id not in self._unserved]

    def owns(self, request: Request) -> bool:
        """Whether the request is a picture, or a branch of one, and generates no text now."""
        return request.request_id in self._places

    def num_together(self, request: Request) -> int:
        """How many of the request's next tokens only one iteration can compute: a canvas, or an image of the prompt; 1:
        any number.
        """
        num_computed = request.num_computed_tokens
        if num_canvas := len(request.spec_token_ids):
            return request.num_tokens + num_canvas - num_computed
        if self._has_spans and request.mm_features:
            for span in spans_of_media(request.mm_features, self._layout):
                if span.start <= num_computed < span.end:
                    return span.end - num_computed
        return 1

    def limit(self, request: Request, num_computed_tokens: int, num_new_tokens: int) -> int:
        """How many of the next tokens a step may compute: no part of an image of the prompt, or of a canvas."""
        place = self._places.get(request.request_id)
        if place is not None:
            picture, name = place
            end = num_computed_tokens + num_new_tokens
            if end > request.num_tokens and end < self._num_context(picture, name) + picture.plan.num_canvas_tokens:
                num_new_tokens = max(self._num_context(picture, name) - num_computed_tokens, 0)
        if self._has_spans and request.mm_features:
            return whole_spans(num_computed_tokens, num_new_tokens, spans_of_media(request.mm_features, self._layout))
        return num_new_tokens

    def is_held(self, request: Request) -> bool:
        """Whether a waiting branch is not needed now, or an older picture's must be admitted first.

        The request itself is computed first, as the worker reads the picture's plan from it: where it waits for a KV
        cache or embeddings of another engine, its branches wait with it.
        """
        place = self._places.get(request.request_id)
        if place is None:
            return False
        picture, name = place
        if not picture.is_due(name) or (name != OWN and not picture.has_started):
            return True
        for older in self._pictures.values():
            if older is picture:
                break
            if any(_waits(one) for name, one in older.branches.items() if older.is_due(name)):
                return True
        return False

    def idle(self) -> list[Request]:
        """Running branches that wait for others of their step, those of the youngest picture first."""
        return [
            request
            for picture in reversed(self._pictures.values())
            for name, request in picture.branches.items()
            if request.status == RequestStatus.RUNNING and not picture.is_due(name)
        ]

    def take(self, output: SchedulerOutput) -> dict[str, CanvasStep]:
        """Note what was scheduled, and take back the progress of canvases: they are computed again in the next step.

        Returns:
            For each branch in the step, what the runner computes of it.
        """
        steps: dict[str, CanvasStep] = {}
        for request_id in output.num_scheduled_tokens:
            if (place := self._places.get(request_id)) is None:
                continue
            picture, name = place
            request = picture.branches[name]
            output.scheduled_spec_decode_tokens.pop(request_id, None)
            num_context = self._num_context(picture, name)
            # Upstream has counted the step's tokens as computed.
            has_canvas = request.num_computed_tokens == num_context + picture.plan.num_canvas_tokens
            if has_canvas:
                request.num_computed_tokens = request.num_tokens
            steps[request_id] = CanvasStep(
                picture.request.request_id, name, picture.needed() if has_canvas else (), picture.step, num_context
            )
            if has_canvas:
                picture.computed.add(name)
        self._unserved = {
            request.request_id
            for picture in self._pictures.values()
            for request in picture.branches.values()
            if request.spec_token_ids and request.request_id not in output.num_scheduled_tokens
        }
        for picture in self._pictures.values():
            picture.continue_if_computed()
        return steps

    def _num_context(self, picture: Picture, name: str) -> int:
        """Tokens in front of the canvas. A branch of nothing has a token, as upstream needs one: the canvas's first."""
        if name != OWN and not picture.plan.ranges(name) and not picture.plan.added(name):
            return 0
        return picture.branches[name].num_tokens


def branch_of(
    request: Request, name: str, ranges: Ranges, added: Sequence[int] = (), whole: list[int] | None = None
) -> Request:
    """A request with parts of another's prompt, and tokens behind them; or with other tokens in the places of all."""
    assert request.prompt_token_ids is not None, "a picture's context has ids"
    ids = whole or [token for start, end in ranges for token in request.prompt_token_ids[start:end]]
    features, offset = [], 0
    for start, end in ranges:
        for feature in request.mm_features:
            position = feature.mm_position
            if start <= position.offset < end:
                moved = replace(position, offset=position.offset - start + offset)
                features.append(replace(feature, mm_position=moved))
        offset += end - start
    return Request(
        request_id=f"{request.request_id}{SEPARATOR}{name}",
        prompt_token_ids=[*ids, *added] or request.prompt_token_ids[:1],
        sampling_params=SamplingParams(temperature=0.0, max_tokens=1),
        pooling_params=None,
        client_index=request.client_index,
        arrival_time=request.arrival_time,
        mm_features=features,
        lora_request=request.lora_request,
        cache_salt=request.cache_salt,
        priority=request.priority,
        block_hasher=request._block_hasher,
    )


def _waits(request: Request) -> bool:
    return request.status != RequestStatus.RUNNING
