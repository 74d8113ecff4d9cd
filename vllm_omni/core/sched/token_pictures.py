"""``TokenPictures``: schedules pictures that a language model writes as tokens, each with an unconditional partner.

The partner is a request of this scheduler's own, of which nothing is reported. The two get each token together, as its
logits are those of both: what reaches its last token without the other gets none, and computes that token again. A
request whose partner does not run is held before its last token, so that a step is rarely lost.

Two requests were chosen over two sequences of one, so that paged attention, prefix caching and preemption are vLLM's.
The cost is that one may be preempted and the other hold its pages until it is back; where such requests hold what all
others wait for, the scheduler preempts them (``held``).

From: Janus (arXiv:2410.13848): classifier-free guidance.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable
from typing import NamedTuple

import msgspec
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import Request, RequestStatus

from vllm_omni.core.sched.canvases import SEPARATOR
from vllm_omni.messages.stage_step import stage_args
from vllm_omni.messages.token_step import TOKEN_PICTURE, TokenStep
from vllm_omni.unified.tokens import TokenPlan


class Picture(NamedTuple):
    """The picture of one request."""

    request: Request
    partner: Request | None

    @property
    def requests(self) -> list[Request]:
        return [self.request] if self.partner is None else [self.request, self.partner]


def plan_of(request: Request) -> TokenPlan | None:
    """The picture that a request asks for."""
    args = stage_args(request.sampling_params)
    return msgspec.convert(args[TOKEN_PICTURE], TokenPlan) if TOKEN_PICTURE in args else None


class TokenPictures:
    """The pictures of a scheduler's requests.

    Args:
        add: the scheduler's ``add_request``, for partners.
        finish: likewise ``finish_requests``.
    """

    def __init__(
        self, add: Callable[[Request], None], finish: Callable[[Iterable[str], RequestStatus], object]
    ) -> None:
        self._add = add
        self._finish = finish
        self._pictures: dict[str, Picture] = {}  # by request
        self._partners: dict[str, Request] = {}  # the other one, by either's request

    def __bool__(self) -> bool:
        return bool(self._pictures)

    # -- start and end of a request -----------------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Note the picture that a request asks for, and add its partner."""
        plan = plan_of(request)
        if plan is None:
            return
        assert request.sampling_params is not None
        request.max_tokens = plan.num_tokens
        if plan.seed is not None:
            request.sampling_params = msgspec.structs.replace(request.sampling_params, seed=plan.seed)
        partner = partner_of(request, plan) if plan.is_guided else None
        self._pictures[request.request_id] = Picture(request, partner)
        if partner is not None:
            self._partners |= {request.request_id: partner, partner.request_id: request}
            self._add(partner)

    def end(self, alive: Container[str]) -> None:
        """Finish the partners of requests that have ended, however they did.

        Args:
            alive: the requests that have not.
        """
        for request_id in [one for one in self._pictures if one not in alive]:
            partner = self._pictures.pop(request_id).partner
            if partner is not None:
                del self._partners[request_id], self._partners[partner.request_id]
                self._finish([partner.request_id], RequestStatus.FINISHED_ABORTED)

    def reported(self, request: Request, new_token_ids: list[int]) -> list[int]:
        """The new tokens of a request that are reported: none of a partner.

        A picture that has ended with its last token is not reported as one that was cut off.
        """
        if request.request_id in self._pictures:
            if request.status == RequestStatus.FINISHED_LENGTH_CAPPED:
                request.status = RequestStatus.FINISHED_STOPPED
        elif request.request_id in self._partners:
            return []
        return new_token_ids

    # -- one iteration ------------------------------------------------------------------------------------------------

    def limit(self, request: Request, num_computed_tokens: int, num_new_tokens: int) -> int:
        """How many of a request's next tokens a step may compute: not the last one, if its partner does not run.

        One that is admitted in this iteration may: upstream admits no request behind one that computes nothing.
        """
        partner = self._partners.get(request.request_id)
        if partner is None or _runs(partner) or not _runs(request):
            return num_new_tokens
        return min(num_new_tokens, request.num_tokens - 1 - num_computed_tokens)

    def held(self) -> list[Request]:
        """The running requests whose partners do not run, in the order in which they are preempted."""
        held = [one for one in self._partners.values() if _runs(one) and not _runs(self._partners[one.request_id])]
        return sorted(held, key=lambda one: (one.priority, one.arrival_time), reverse=True)

    def take(self, output: SchedulerOutput) -> TokenStep:
        """Note which requests get a token in the step, and take back the progress of those that should and cannot."""
        sampled: dict[str, str | None] = {}
        alone: list[str] = []
        for request_id, picture in self._pictures.items():
            # Upstream has counted the step's tokens as computed.
            complete = [
                one
                for one in picture.requests
                if one.request_id in output.num_scheduled_tokens and one.num_computed_tokens == one.num_tokens
            ]
            if len(complete) == len(picture.requests):
                sampled[request_id] = picture.partner.request_id if picture.partner is not None else None
                continue
            for one in complete:
                one.num_computed_tokens -= 1
                alone.append(one.request_id)
        return TokenStep(sampled, alone)


def partner_of(request: Request, plan: TokenPlan) -> Request:
    """A request with the unconditional prompt, which never ends by itself."""
    return Request(
        request_id=f"{request.request_id}{SEPARATOR}unconditional",
        prompt_token_ids=list(plan.unconditional),
        sampling_params=SamplingParams(temperature=0.0, max_tokens=plan.num_tokens + 1),
        pooling_params=None,
        client_index=request.client_index,
        arrival_time=request.arrival_time,
        lora_request=request.lora_request,
        cache_salt=request.cache_salt,
        priority=request.priority,
        block_hasher=request._block_hasher,
    )


def _runs(request: Request) -> bool:
    return bool(request.status == RequestStatus.RUNNING)
