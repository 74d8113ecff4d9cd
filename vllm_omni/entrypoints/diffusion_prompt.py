"""What a user gives a diffusion pipeline to work from, and with which parameters, as one request."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from PIL import Image

from vllm_omni.diffusion_params import DiffusionLimits, DiffusionParams
from vllm_omni.errors import InvalidRequest
from vllm_omni.model_executor.diffusion.request import DiffusionRequest
from vllm_omni.names import suggest

KEYS = ("prompt", "negative_prompt", "multi_modal_data")
"""What a prompt as a dictionary may have."""


def read_params(stage: str, given: Any, defaults: Mapping[str, Any], over: Mapping[str, Any]) -> DiffusionParams:
    """Parameters of one request, complete.

    Args:
        given: the request's; ``DiffusionParams`` or their fields by name.
        defaults: fields that stand where it says nothing.
        over: fields that stand in any case.

    Raises:
        InvalidRequest: an unknown field or a wrong type; parameters for sampling text.
    """
    if given is not None and not isinstance(given, DiffusionParams | Mapping):
        raise InvalidRequest(
            f"parameters of stage {stage!r} are {type(given).__name__}: it is a diffusion pipeline; give DiffusionParams"
        )
    try:
        fields = said(given) if isinstance(given, DiffusionParams) else dict(given or {})
        return DiffusionParams.of({**defaults, **fields, **over})
    except InvalidRequest as exc:
        raise InvalidRequest(f"parameters of stage {stage!r}: {exc}", param=exc.param) from exc


def said(params: DiffusionParams) -> dict[str, Any]:
    """The fields that are not left at their defaults."""
    return {
        field.name: value
        for field in msgspec.structs.fields(params)
        if (value := getattr(params, field.name)) != (field.default if field.default is not msgspec.NODEFAULT else {})
    }


def read_prompt(prompt: Any, params: DiffusionParams, limits: DiffusionLimits) -> DiffusionRequest:
    """A prompt and its parameters, checked.

    Args:
        prompt: text, or a dictionary with ``KEYS``: ``{"prompt": str, "negative_prompt": str, "multi_modal_data":
            {"image": PIL.Image | [PIL.Image, ...]}}``. A negative prompt there wins over that of the parameters.

    Raises:
        InvalidRequest: naming the key or field at fault.
    """
    if isinstance(prompt, str):
        prompt = {"prompt": prompt}
    if not isinstance(prompt, Mapping):
        raise InvalidRequest(
            f"prompt: must be a text or a dictionary, not {type(prompt).__name__}; a diffusion pipeline reads no tokens",
            param="prompt",
        )
    for key in prompt:
        if key not in KEYS:
            raise InvalidRequest(f"prompt: unknown key {key!r}: {suggest(str(key), KEYS)}", param=str(key))
    text = prompt.get("prompt", "")
    if not isinstance(text, str):
        raise InvalidRequest(f"prompt: must be a text, not {type(text).__name__}", param="prompt")
    try:
        text.encode()
    except UnicodeEncodeError as exc:
        raise InvalidRequest(f"prompt: is no text: {exc}", param="prompt") from exc
    if (negative_prompt := prompt.get("negative_prompt")) is not None:
        params = msgspec.structs.replace(params, negative_prompt=negative_prompt)
    params.validate(limits)
    return DiffusionRequest(prompt=text, images=_read_images(prompt.get("multi_modal_data")), params=params)


def _read_images(media: Any) -> list[Image.Image]:
    if media is None:
        return []
    if not isinstance(media, Mapping):
        raise InvalidRequest(
            f"multi_modal_data: must be a dictionary, not {type(media).__name__}", param="multi_modal_data"
        )
    for kind in media:
        if kind != "image":
            raise InvalidRequest(
                f"multi_modal_data: unknown kind {kind!r}: a diffusion pipeline takes 'image'", param="multi_modal_data"
            )
    images = media.get("image")
    images = [] if images is None else images if isinstance(images, list | tuple) else [images]
    for index, image in enumerate(images):
        if not isinstance(image, Image.Image):
            raise InvalidRequest(
                f"multi_modal_data: image {index} is a {type(image).__name__}: give a PIL.Image",
                param="multi_modal_data",
            )
    return list(images)
