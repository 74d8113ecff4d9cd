"""``check_stage_params``: whether a stage's engine can honour a user's sampling parameters; ``own_params``: those that
it receives."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from vllm.exceptions import VLLMClientError
from vllm.sampling_params import SamplingParams

from vllm_omni.engine.decodable import check_params
from vllm_omni.engine.rejection import rejection
from vllm_omni.engine.request_caches import check_given
from vllm_omni.errors import InvalidRequest

if TYPE_CHECKING:
    from vllm_omni.engine.stage import StageEngine

_TEXT_PARAMS = ("stop", "bad_words", "structured_outputs")  # need a tokenizer; upstream ignores two of them without
_TOKEN_PARAMS = (*_TEXT_PARAMS, "logprobs", "prompt_logprobs", "logit_bias", "allowed_token_ids", "min_tokens")


def check_stage_params(engine: StageEngine, params: SamplingParams, given: Mapping[str, Any]) -> None:
    """Check a user's parameters: what the model needs, the vocabulary, limits, and whether there are tokens, and text.

    Args:
        given: those fields of the parameters that are not defaults.

    Raises:
        InvalidRequest: the engine cannot honour one.
    """
    check_given(engine.config.name, engine.cache_source, given)
    engine.spec.check_sampling_params(params, given)
    if not engine.kind.generates_tokens:
        _reject(engine, params, _TOKEN_PARAMS, "it generates no tokens")
        return
    config = engine.vllm_config
    if config.model_config.skip_tokenizer_init:
        _reject(engine, params, _TEXT_PARAMS, "its tokens are not text")
    if fixed := engine.spec.sampling_params:  # also checked for the request itself, when earlier stages have run
        own_params(engine.config.name, params, fixed)
    try:
        # Without a grammar, which needs the tokenizer: the engine's client checks it.
        params.verify(config.model_config, config.speculative_config, None, None)
    except (ValueError, VLLMClientError) as exc:
        raise rejection(exc, engine.name) from exc


def _reject(engine: StageEngine, params: SamplingParams, names: Sequence[str], reason: str) -> None:
    for name in names:
        if getattr(params, name):
            raise InvalidRequest(f"stage {engine.name!r}: {name}: {reason}, so it has no effect", param=name)


def own_params(stage: str, given: SamplingParams, fixed: Mapping[str, Any]) -> SamplingParams:
    """A request's own parameters: the user's, with the fields that its stage sets; stop tokens of both end the answer.

    Raises:
        InvalidRequest: those fields contradict the user's, or are wrong.
    """
    params = given.clone()
    params.skip_clone = True  # it is this request's own: vLLM need not copy it once more
    own_stop_ids = params.stop_token_ids or []
    for name, value in fixed.items():
        setattr(params, name, value)
    if fixed:
        check_params(stage, params)
    params.stop_token_ids = list(dict.fromkeys([*(params.stop_token_ids or ()), *own_stop_ids]))
    params.all_stop_token_ids.update(params.stop_token_ids)  # min_tokens must suppress these, too
    return params
