"""``InstanceRequest``: a request of a stage with several instances, as each of them is sent it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from vllm.sampling_params import SamplingParams

from vllm_omni.engine.transfer_params import without_reply
from vllm_omni.epd.image_store import StoredImage
from vllm_omni.epd.router import RequestState
from vllm_omni.messages.canvas_step import PICTURE
from vllm_omni.messages.outputs import OmniRequestOutput
from vllm_omni.messages.payload import Payload
from vllm_omni.messages.report import Reporter, ignore
from vllm_omni.messages.slo import SLO_ARGS
from vllm_omni.messages.stage_step import stage_args
from vllm_omni.messages.token_step import TOKEN_PICTURE
from vllm_omni.model_executor.pipeline import RequestContext


@dataclass
class InstanceRequest:
    """Prompt, parameters, leases and reply of one request."""

    context: RequestContext
    request_id: str
    prompt: dict[str, Any]  # rendered
    params: SamplingParams
    state: RequestState  # for the router
    report: Reporter = ignore
    images: dict[str, StoredImage] = field(default_factory=dict)  # identifier -> embeddings that exist
    pages: dict[str, Any] | None = None  # from the prefill's KV connector: where the KV cache is
    leases: list[Payload] = field(default_factory=list)  # of the KV cache
    given: list[int] = field(default_factory=list)  # tokens of the reply that the user has
    cumulative_logprob: float = 0.0

    @property
    def task_id(self) -> str:
        """Id of the request to the engine, one for each assignment."""
        number = self.state.num_assignments
        return self.request_id if number == 1 else f"{self.request_id}-t{number}"

    @property
    def prompt_so_far(self) -> dict[str, Any]:
        """The prompt, behind which come the tokens of the reply that the user has."""
        if not self.given:
            return self.prompt
        return {**self.prompt, "prompt_token_ids": [*self.prompt["prompt_token_ids"], *self.given]}

    def without_reply(self, extra_args: dict[str, Any]) -> SamplingParams:
        """Parameters of a task whose token is discarded."""
        return without_reply(self.params, extra_args)

    def with_reply(self, extra_args: dict[str, Any]) -> tuple[dict[str, Any], SamplingParams]:
        """Prompt and parameters of the decode: the tokens that the user already has are the end of the prompt."""
        params = self.params.clone()
        params.extra_args = {**(params.extra_args or {}), **extra_args} or None
        num_given = len(self.given)
        if num_given:
            if params.max_tokens is not None:
                params.max_tokens -= num_given
            params.min_tokens = max(0, params.min_tokens - num_given)
        return self.prompt_so_far, params

    def add_output(self, output: OmniRequestOutput, earlier_logprob: float) -> None:
        """Note what the user is about to get, and present a resumed reply as one.

        Args:
            earlier_logprob: of the tokens from instances before this one.
        """
        output.prompt_token_ids = self.prompt.get("prompt_token_ids")
        for completion in output.outputs:
            self.given += completion.token_ids
            if completion.cumulative_logprob is not None:
                completion.cumulative_logprob += earlier_logprob
                self.cumulative_logprob = completion.cumulative_logprob
        self.state.num_given = len(self.given)
        if output.finished:
            output.kv_transfer_params = output.ec_transfer_params = None  # for instances only


def generates_picture(params: SamplingParams) -> bool:
    """Whether the reply has a picture that the language model makes."""
    return not {PICTURE, TOKEN_PICTURE}.isdisjoint(stage_args(params))


def may_resume(params: SamplingParams) -> bool:
    """Whether another instance can continue a reply, behind the tokens that the user has, without a difference.

    The tokens become the end of the prompt of another request. That gives the same reply where the next token depends
    on the tokens before it alone: not where a seed's random numbers have been drawn, where penalties or stop strings
    distinguish the reply from the prompt, or where a grammar has a state.
    """
    is_seeded = params.temperature > 0 and params.seed is not None
    depends_on_reply = (
        any((params.presence_penalty, params.frequency_penalty, params.bad_words, params.stop))
        or params.thinking_token_budget is not None
        or params.repetition_detection is not None
    )
    has_state = params.structured_outputs is not None or params.prompt_logprobs is not None or params.n > 1
    others = set(params.extra_args or ()) - {SLO_ARGS}
    return not (is_seeded or depends_on_reply or has_state or others)
