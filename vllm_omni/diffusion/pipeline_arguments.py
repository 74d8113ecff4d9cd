"""``pipeline_arguments``: convert a request into the keyword arguments of a diffusers pipeline's call."""

from __future__ import annotations

import inspect
import re
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from PIL import Image

from vllm_omni.config.diffusion_params import DiffusionParams
from vllm_omni.diffusion.extra_arguments import extra_arguments
from vllm_omni.diffusion.request import DiffusionRequest
from vllm_omni.errors import InvalidRequest
from vllm_omni.names import suggest

Accepted = Mapping[str, inspect.Parameter]  # the parameters of a pipeline's ``__call__``

# Fields of DiffusionParams that are passed under the same name.
SAME_NAME = (
    "negative_prompt",
    "height",
    "width",
    "num_inference_steps",
    "guidance_scale",
    "guidance_scale_2",
    "true_cfg_scale",
    "num_frames",
)
# Names that pipelines give to input images and to the frame rate.
IMAGES = ("image", "input_images")
FRAME_RATES = ("frame_rate", "fps")
# Pipelines that need an image although ``image`` has a default in their signatures.
NEEDS_IMAGE = re.compile(r"Edit|ImageToVideo|Img2Img|Inpaint")
# Pipelines in which a list of images is references for one output; in others it is a batch.
TAKES_SEVERAL_IMAGES = re.compile(r"EditPlus|Flux2|Omni|Flux3|Kandinsky6|HunyuanVideo15")
TAKES_LIST = re.compile(r"GlmImage")  # also of one image
OUTPUT_TYPES = {"media": "pt", "float": "pt", "latents": "latent"}


def parameters_of(pipeline: Any) -> Accepted:
    """The parameters of a pipeline's ``__call__``, without ``self``."""
    return dict(list(inspect.signature(type(pipeline).__call__).parameters.items())[1:])


def image_parameter(pipeline: Any) -> str | None:
    """Name of the parameter for input images; None: the pipeline takes none."""
    return next((name for name in IMAGES if name in parameters_of(pipeline)), None)


def needs_image(pipeline: Any) -> bool:
    """Whether a pipeline cannot run without an input image."""
    name = image_parameter(pipeline)
    if name is None:
        return False
    default = parameters_of(pipeline)[name].default
    return bool(NEEDS_IMAGE.search(type(pipeline).__name__)) or default is inspect.Parameter.empty


def pipeline_arguments(pipeline: Any, request: DiffusionRequest, output_index: int = 0) -> dict[str, Any]:
    """Keyword arguments for the ``__call__`` of ``pipeline`` that makes one of the request's outputs.

    The noise is that of ``seed + output_index``; without a seed, one is chosen at random.

    Raises:
        InvalidRequest: the pipeline does not accept an argument, a value or this number of images.
    """
    params = request.params
    accepted = parameters_of(pipeline)
    name = type(pipeline).__name__
    arguments = _value_arguments(name, accepted, request)
    _check_size(pipeline, arguments)
    arguments |= _image_arguments(pipeline, accepted, request.images)
    if "generator" in accepted:
        import torch

        seed = secrets.randbits(63) if params.seed is None else params.seed + output_index
        arguments["generator"] = torch.Generator().manual_seed(seed)  # on the CPU: the same noise for every device
    if "output_type" in accepted:
        arguments["output_type"] = OUTPUT_TYPES[params.output_type]
    arguments |= _tensor_arguments(pipeline, accepted, request.tensors)
    return arguments | extra_arguments(type(pipeline), params.extra_args, arguments)


def _tensor_arguments(pipeline: Any, accepted: Accepted, tensors: Mapping[str, Any]) -> dict[str, Any]:
    """What earlier stages made, in the form that the pipeline takes: [1, n, size], or a list of [n, size].

    Raises:
        TypeError: the pipeline has no such argument.
    """
    arguments: dict[str, Any] = {}
    for name, tensor in tensors.items():
        if name not in accepted:
            raise TypeError(f"{type(pipeline).__name__} takes no {name!r}: {suggest(name, accepted)}")
        value = tensor.to(pipeline.device, pipeline.dtype if tensor.is_floating_point() else None)
        takes_list = "list[" in str(accepted[name].annotation).lower()
        arguments[name] = [value] if takes_list else value[None] if name.endswith("embeds") else value
    return arguments


def frame_rate(pipeline: Any, params: DiffusionParams) -> int | None:
    """Frames per second of a request's video; None: set neither by the request nor by the pipeline."""
    if params.fps is not None:
        return params.fps
    accepted = parameters_of(pipeline)
    defaults = [accepted[name].default for name in FRAME_RATES if name in accepted]
    return next((round(rate) for rate in defaults if isinstance(rate, int | float)), None)


def _value_arguments(name: str, accepted: Accepted, request: DiffusionRequest) -> dict[str, Any]:
    """The prompt, and the parameters that the request sets."""
    params = request.params
    arguments: dict[str, Any] = {}
    if "prompt_embeds" in request.tensors:
        pass  # they stand for the prompt
    elif "prompt" in accepted:
        arguments["prompt"] = request.prompt
    elif request.prompt:
        raise InvalidRequest(f"{name} takes no prompt; give an empty one")
    for parameter in SAME_NAME:
        if (value := getattr(params, parameter)) is not None:
            if parameter not in accepted:
                raise InvalidRequest(f"{name} takes no {parameter}")
            arguments[parameter] = value
    if params.fps is not None:  # for other pipelines, the frame rate is a property of the file only
        arguments |= {parameter: params.fps for parameter in FRAME_RATES if parameter in accepted}
    if name.startswith("QwenImage") and params.true_cfg_scale is None and params.negative_prompt is None:
        arguments["true_cfg_scale"] = 1.0  # same result as diffusers' default, without its warning in the server's log
    return arguments


def _check_size(pipeline: Any, arguments: Mapping[str, Any]) -> None:
    """Reject sizes that the pipeline would silently round down, and step counts for which it would divide by zero."""
    processor = getattr(pipeline, "image_processor", None) or getattr(pipeline, "video_processor", None)
    grid = getattr(getattr(processor, "config", None), "vae_scale_factor", 1)
    patch = getattr(getattr(getattr(pipeline, "transformer", None), "config", None), "patch_size", 1)
    if isinstance(patch, list | tuple):  # frames, height, width of a video; an image processor's grid has the patch
        grid *= patch[-1]
    for name in ("height", "width"):
        pixels = arguments.get(name, grid)
        if pixels % grid:
            below = pixels // grid * grid
            nearest = f"{below} or {below + grid}" if below else f"{grid}"
            said = f"{name} = {pixels}: must be a multiple of {grid} for {type(pipeline).__name__}: {nearest}"
            raise InvalidRequest(said, param=name)
    scheduler = getattr(pipeline, "scheduler", None)
    if arguments.get("num_inference_steps") == 1 and getattr(scheduler, "config", {}).get("shift_terminal"):
        said = f"num_inference_steps = 1: the scheduler of {type(pipeline).__name__} needs at least 2"
        raise InvalidRequest(said, param="num_inference_steps")


def _image_arguments(pipeline: Any, accepted: Accepted, images: Sequence[Image.Image]) -> dict[str, Any]:
    name = type(pipeline).__name__
    if not images:
        if needs_image(pipeline):
            raise InvalidRequest(f"{name} needs an input image, got none")
        return {}
    parameter = image_parameter(pipeline)
    if parameter is None:
        raise InvalidRequest(f"{name} takes no input image, got {len(images)}")
    takes_list = parameter == "input_images" or TAKES_LIST.search(name)
    if takes_list or (len(images) > 1 and TAKES_SEVERAL_IMAGES.search(name)):
        return {parameter: list(images)}
    if len(images) == 1:
        return {parameter: images[0]}
    if len(images) == 2 and "last_image" in accepted:
        return {parameter: images[0], "last_image": images[1]}
    raise InvalidRequest(f"{name} takes one input image, got {len(images)}")
