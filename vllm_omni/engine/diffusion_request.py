"""Admit a user's request to a diffusion stage: read its prompt and images, and validate its parameters."""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from msgspec import structs
from PIL import Image
from vllm.inputs import tokens_input
from vllm.sampling_params import RequestOutputKind, SamplingParams

from vllm_omni.config.diffusion import DIFFUSION, DiffusionConfig
from vllm_omni.config.diffusion_params import DiffusionParams, check_text
from vllm_omni.diffusion.request import IMAGE_MODES, DiffusionRequest
from vllm_omni.errors import InvalidRequest
from vllm_omni.messages.stage_step import STAGE_ARGS
from vllm_omni.names import suggest

ENGINE_PROMPT = tokens_input([0])
"""Placeholder for vLLM, which requires tokens; the text travels with the parameters, and the pipeline reads it."""

_PROMPT_KEYS = ("prompt", "negative_prompt", "multi_modal_data")


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


def read_request(prompt: Any, params: DiffusionParams) -> DiffusionRequest:
    """Read a text, or a dictionary with a text and with images in ``multi_modal_data``.

    Raises:
        InvalidRequest: the prompt is neither.
    """
    if isinstance(prompt, str):
        return DiffusionRequest(prompt, [], params)
    if not isinstance(prompt, Mapping):
        said = f"prompt = {prompt!r}: must be a text, or a dictionary with the key 'prompt'"
        raise InvalidRequest(said, param="prompt")
    if "prompt_token_ids" in prompt or "prompt_embeds" in prompt:
        said = "prompt: the pipeline encodes the text itself: give a text, not ids or embeddings"
        raise InvalidRequest(said, param="prompt")
    for key, value in prompt.items():
        if key not in _PROMPT_KEYS and value is not None:
            raise InvalidRequest(f"prompt: unknown key {key!r}: {suggest(str(key), _PROMPT_KEYS)}", param="prompt")
    text = prompt.get("prompt")
    if not isinstance(text, str):
        raise InvalidRequest(f"prompt = {text!r}: must be a text", param="prompt")
    negative_prompt = prompt.get("negative_prompt")
    if negative_prompt is not None and params.negative_prompt is None:
        params = structs.replace(params, negative_prompt=negative_prompt)
    return DiffusionRequest(text, _read_images(prompt.get("multi_modal_data") or {}), params)


def _read_images(media: Mapping[str, Any]) -> list[Image.Image]:
    for modality in media:
        if modality != "image":
            raise InvalidRequest(f"multi_modal_data: {modality!r}: this model reads images", param="multi_modal_data")
    given = media.get("image")
    if given is None:
        return []
    items = given if isinstance(given, list | tuple) else [given]
    return [_read_image(item, index) for index, item in enumerate(items)]


def _read_image(item: Any, index: int) -> Image.Image:
    try:
        if isinstance(item, bytes):
            item = Image.open(io.BytesIO(item))
        elif isinstance(item, torch.Tensor | np.ndarray):
            item = Image.fromarray(np.asarray(item))
        if not isinstance(item, Image.Image):
            raise TypeError("must be a PIL image, the bytes of an image file, or uint8 pixels [H, W, 3]")
        item.load()
        if item.mode in IMAGE_MODES:
            return item
        return item.convert("RGBA" if item.has_transparency_data else "RGB")
    except (TypeError, ValueError, OSError, SyntaxError, Image.DecompressionBombError) as exc:
        raise InvalidRequest(f"multi_modal_data: image {index}: {exc}", param="multi_modal_data") from exc
