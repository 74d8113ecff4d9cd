"""``check_stage_params``: whether a stage's engine can honour a user's sampling parameters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from vllm.exceptions import VLLMClientError
from vllm.sampling_params import SamplingParams

from vllm_omni.engine.rejection import rejection
from vllm_omni.engine.request_caches import check_given
from vllm_omni.errors import InvalidRequest

if TYPE_CHECKING:
    from vllm_omni.engine.stage import StageEngine

_TEXT_PARAMS = ("stop", "bad_words", "structured_outputs")  # need a tokenizer; upstream ignores two of them without


def check_stage_params(engine: StageEngine, params: SamplingParams, given: Mapping[str, Any]) -> None:
    """Check a user's parameters: what the model needs, the vocabulary, limits, and whether tokens are text.

    Args:
        given: those fields of the parameters that are not defaults.

    Raises:
        InvalidRequest: the engine cannot honour one.
    """
    check_given(engine.config.name, engine.cache_source, given)
    engine.spec.check_sampling_params(params, given)
    if not engine.kind.generates_tokens:
        return
    config = engine.vllm_config
    for name in _TEXT_PARAMS if config.model_config.skip_tokenizer_init else ():
        if getattr(params, name):
            said = f"stage {engine.name!r}: {name}: its tokens are not text, so it has no effect"
            raise InvalidRequest(said, param=name)
    try:
        # Without a grammar, which needs the tokenizer: the engine's client checks it.
        params.verify(config.model_config, config.speculative_config, None, None)
    except (ValueError, VLLMClientError) as exc:
        raise rejection(exc, engine.name) from exc
