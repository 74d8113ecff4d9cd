"""Read what a user sends to a diffusion pipeline: a text, with or without images."""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from msgspec import structs
from PIL import Image

from vllm_omni.config.diffusion_params import DiffusionParams
from vllm_omni.diffusion.request import IMAGE_MODES, DiffusionRequest
from vllm_omni.errors import InvalidRequest
from vllm_omni.names import suggest

_PROMPT_KEYS = ("prompt", "negative_prompt", "multi_modal_data")


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
