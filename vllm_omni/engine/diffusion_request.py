"""Admit a user's request to a diffusion stage: read it, and validate its parameters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec import structs
from vllm.inputs import tokens_input
from vllm.sampling_params import RequestOutputKind, SamplingParams

from vllm_omni.config.diffusion import DIFFUSION, DiffusionConfig
from vllm_omni.config.diffusion_params import DiffusionParams, check_text
from vllm_omni.diffusion.reading import read_request as read_request
from vllm_omni.errors import InvalidRequest
from vllm_omni.messages.stage_step import STAGE_ARGS

ENGINE_PROMPT = tokens_input([0])
"""Placeholder for vLLM, which requires tokens; the text travels with the parameters, and the pipeline reads it."""


def make_sampling_params(
    prompt: Any, params: DiffusionParams, config: DiffusionConfig, args: Mapping[str, Any] | None = None
) -> SamplingParams:
    """Validate a request and put it into the form in which it reaches the scheduler and the runner.

    Its only token is returned by the step in which it ends.

    Args:
        args: of the stage request: ``payloads`` and ``inputs`` (see ``DiffusionRequest``), and what the engine's client
            reads.

    Raises:
        InvalidRequest: the prompt is not a text with or without images; a parameter is invalid, or exceeds the
            deployment's limits.
    """
    args = dict(args or {})
    inputs = {name: args.pop(name) for name in ("payloads", "inputs") if name in args}
    request = structs.replace(read_request(prompt, params), **inputs)
    check_text("prompt", request.prompt)
    request.params.validate(config.limits)
    threshold = request.params.cache_threshold
    if threshold and not config.cache_threshold:
        said = f"cache_threshold = {threshold}: this deployment has no cache (its own cache_threshold is 0)"
        raise InvalidRequest(said, param="cache_threshold")
    return SamplingParams(
        max_tokens=1,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
        extra_args={STAGE_ARGS: {**args, DIFFUSION: request.to_args()}},
    )
