"""``Prefaces``: texts that requests write in front of their pictures, and sizes that they choose for them.

A text ends in the engine: fixed tokens are put behind it, and computed with the next step, as part of the sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable

import msgspec
from vllm.v1.request import Request, RequestStatus

from vllm_omni.messages.canvas_step import Tail
from vllm_omni.unified.plan import ImagePlan
from vllm_omni.unified.preface import Preface


class Prefaces:
    """The prefaces of a scheduler's requests.

    Args:
        start: starts a request's picture.
        max_model_len: the engine's; a text ends where a longer one would leave no room for its picture.
    """

    def __init__(self, start: Callable[[Request, ImagePlan], None], max_model_len: int) -> None:
        self._start = start
        self._max_model_len = max_model_len
        self._plans: dict[str, ImagePlan] = {}  # by request, until its picture starts
        self._choosing: set[str] = set()  # those whose next token is the size
        self._tails: dict[str, Tail] = {}  # that the runner does not have

    def __bool__(self) -> bool:
        """Whether a step may have tails."""
        return bool(self._tails)

    def add(self, request: Request, plan: ImagePlan) -> None:
        preface = _preface_of(plan)
        self._plans[request.request_id] = plan
        if not preface.stops:
            self._choosing.add(request.request_id)
        # Upstream keeps one token of a sequence for what it samples.
        more = preface.num_more_tokens + plan.num_canvas_tokens + 1
        request.max_tokens = min(request.max_tokens, self._max_model_len - request.num_prompt_tokens - more)

    def note_tokens(self, request: Request, token_ids: list[int], *, has_stopped: bool) -> tuple[list[int], bool]:
        """Take the tokens of a step.

        Returns:
            those that are the request's answer, and whether it has ended.
        """
        plan = self._plans.get(request.request_id)
        if plan is None or not token_ids:
            return token_ids, has_stopped
        preface, last = _preface_of(plan), token_ids[-1]
        if request.request_id in self._choosing:
            index = preface.size_of(last)
            plan = msgspec.structs.replace(plan, grid=preface.grids[index])
            self._replace_last(request, (preface.first_size + index,), plan.grid)
            self._end_of(request, plan)
            return [], False
        if not (has_stopped or preface.ends_with(last)):
            return token_ids, False
        is_cut = request.status == RequestStatus.FINISHED_LENGTH_CAPPED and not preface.ends_with(last)
        own, behind = preface.tail(last, is_cut=is_cut)
        assert own or behind, "a text is followed by tokens of the picture"
        text = request.num_prompt_tokens, request.num_tokens - 1 + len(own)
        plan = msgspec.structs.replace(plan, masked=(*plan.masked, text))
        self._replace_last(request, (*own, *behind))
        answer = [*token_ids[:-1], *(own or behind[:1])]
        if preface.grids:
            self._plans[request.request_id] = plan
            self._choosing.add(request.request_id)
            _resume(request)
        else:
            self._end_of(request, plan)
        return answer, False

    def _replace_last(self, request: Request, ids: tuple[int, ...], grid: tuple[int, int] | None = None) -> None:
        self._tails[request.request_id] = Tail(request.num_tokens - 1, ids, grid)
        replace_last(request, ids)

    def _end_of(self, request: Request, plan: ImagePlan) -> None:
        del self._plans[request.request_id]
        self._choosing.discard(request.request_id)
        _resume(request)
        self._start(request, plan)

    def take(self, request_ids: Iterable[str]) -> dict[str, Tail]:
        """The tails of a step's requests, which the runner gets with the step."""
        return {one: self._tails.pop(one) for one in request_ids if one in self._tails}

    def end(self, alive: Container[str]) -> None:
        """Forget requests that have ended, however they did."""
        for request_id in [one for one in self._plans if one not in alive]:
            del self._plans[request_id]
            self._choosing.discard(request_id)
        for request_id in [one for one in self._tails if one not in alive]:
            del self._tails[request_id]


def replace_last(request: Request, ids: tuple[int, ...]) -> None:
    """Put tokens in the place of a sequence's last one, which is not computed yet."""
    if request._all_token_ids[-1:] == list(ids):
        return
    request._output_token_ids[-1:] = ids
    request._all_token_ids[-1:] = ids
    # Upstream has hashed the page that the last token completes, with the token that it was.
    request.block_hashes.clear()
    request.update_block_hashes()


def _resume(request: Request) -> None:
    request.status, request.stop_reason = RequestStatus.RUNNING, None


def _preface_of(plan: ImagePlan) -> Preface:
    assert plan.preface is not None, "a plan without a preface starts at once"
    return plan.preface
