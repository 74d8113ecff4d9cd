"""What is left to do of a request, who may do it, and how much work it is.

From: HydraInfer, sections 4.1 (instances of encode, prefill, decode and of any mix) and 4.4 (a request's tasks).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from vllm.sampling_params import SamplingParams

from vllm_omni.epd.cost import CostModel, LanguageLoad
from vllm_omni.messages.slo import SLO_ARGS

NUM_TOKENS_UNKNOWN = 256
"""How many tokens a reply is taken to have for which the request sets no limit, or a far one."""


class Offer(NamedTuple):
    """An instance, and what of a request it would do next."""

    name: str
    does: str  # letters of E, P, D; what follows is another's


def find_offers(todo: str, kinds: Mapping[str, str], *, is_whole: bool = False) -> list[Offer]:
    """Who may go on with a request: whoever was made for its next task; if there is nobody, whoever can do it, too.

    An instance that has the language model computes whatever it was not given: a decode instance prefills, a prefill
    instance encodes.

    Args:
        todo: "EPD", "PD" (a text, or images whose embeddings are there) or "D" (the KV cache is there).
        kinds: instance -> kind, of those alive.
        is_whole: prefill and decode stay together.
    """
    offers = [Offer(name, does) for name, kind in kinds.items() if (does := _does(kind, todo, is_whole))]
    if offers:
        return offers
    if len(todo) > 1:
        return [Offer(name, todo[0] + does) for name, does in find_offers(todo[1:], kinds, is_whole=is_whole)]
    return [Offer(name, todo) for name, kind in kinds.items() if kind != "E"]


def _does(kind: str, todo: str, is_whole: bool) -> str:
    if todo[0] not in kind:
        return ""
    if todo[0] == "E" and "P" not in kind:
        return "E"
    num = next((number for number, letter in enumerate(todo) if letter not in kind), len(todo))
    does = todo[:num]
    return "" if is_whole and "P" in does and "D" not in does else does


class Load(NamedTuple):
    """What a request costs, as far as it is known before it runs."""

    num_embeds: int  # of its images
    num_prompt_tokens: int
    num_reply_tokens: int

    @classmethod
    def of(cls, prompt: Mapping[str, Any], params: SamplingParams) -> Load:
        """Of a rendered prompt."""
        num_reply_tokens = min(params.max_tokens or NUM_TOKENS_UNKNOWN, NUM_TOKENS_UNKNOWN) * params.n
        num_embeds = sum(
            place.get_num_embeds() for places in prompt.get("mm_placeholders", {}).values() for place in places
        )
        return cls(num_embeds, len(prompt.get("prompt_token_ids") or ()), num_reply_tokens)

    def work(self, does: str, cost: CostModel | None) -> float:
        """Of these tasks: seconds by a cost model; without one, tokens and embeddings alike."""
        encode = self.num_embeds if "E" in does else 0
        prefill = self.num_prompt_tokens if "P" in does else 0
        decode = self.num_reply_tokens if "D" in does else 0
        if cost is None:
            return float(encode + prefill + decode)
        work = cost.images_s(encode)
        if prefill:
            work += cost.language_s(LanguageLoad().with_prefill(prefill, 0))
        context = self.num_prompt_tokens + decode // 2
        return work + decode * (cost.decode_s + cost.decode_context_s * context)


def may_resume(params: SamplingParams) -> bool:
    """Whether a reply that broke off can go on behind the tokens that the user has, as if nothing had happened.

    They become the end of the prompt of another request. That gives the same reply where the next token follows from
    the tokens before it alone: not where a seed's random numbers have been drawn, where penalties or stop strings tell
    the reply from the prompt, or where a grammar has a state.
    """
    is_seeded = params.temperature > 0 and params.seed is not None
    tells_reply = (
        params.presence_penalty
        or params.frequency_penalty
        or params.bad_words
        or params.stop
        or params.thinking_token_budget is not None
        or params.repetition_detection is not None
    )
    has_state = params.structured_outputs is not None or params.prompt_logprobs is not None or params.n > 1
    others = set(params.extra_args or ()) - {SLO_ARGS}
    return not (is_seeded or tells_reply or has_state or others)
