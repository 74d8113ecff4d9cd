"""``DiffusionRequest``: what a request asks of a pipeline, and how that is said in the words of the pipeline's call."""

from __future__ import annotations

import inspect
import io
import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec

from vllm_omni.config.diffusion_params import DiffusionParams
from vllm_omni.errors import InvalidRequest
from vllm_omni.names import suggest

if TYPE_CHECKING:
    from PIL import Image

# What pipelines call the number of their outputs.
NUM_OUTPUTS = ("num_images_per_prompt", "num_videos_per_prompt", "num_waveforms_per_prompt", "num_designs_per_prompt")
IMAGES = ("image", "input_images")
FRAME_RATES = ("frame_rate", "fps")
# ``image`` has a default in their signatures, and yet they cannot do without.
NEEDS_IMAGE = re.compile(r"Edit|ImageToVideo|Img2Img|Inpaint")
# Several input images are references for one output; a list means a batch elsewhere.
TAKES_SEVERAL_IMAGES = re.compile(r"EditPlus|Flux2|Omni|Flux3|Kandinsky6|HunyuanVideo15")
OUTPUT_TYPES = {"media": "pt", "float": "pt", "latents": "latent"}


@dataclass
class DiffusionRequest:
    """One request to a diffusion pipeline."""

    prompt: str
    images: list[Image.Image] = field(default_factory=list)  # input images, in order
    params: DiffusionParams = field(default_factory=DiffusionParams)

    def to_args(self) -> dict[str, Any]:
        """Of msgpack types; the images as PNG, whose pixels are the same again."""
        return {
            "prompt": self.prompt,
            "images": [_encode_png(image) for image in self.images],
            "params": msgspec.to_builtins(self.params),
        }

    @classmethod
    def from_args(cls, args: Mapping[str, Any]) -> DiffusionRequest:
        """Of what ``to_args`` gave.

        Raises:
            InvalidRequest: a parameter of a wrong type, or bytes that are no image.
        """
        try:
            params = msgspec.convert(args.get("params", {}), DiffusionParams)
        except msgspec.ValidationError as exc:
            raise InvalidRequest(f"diffusion parameters: {exc}") from exc
        images = [_decode_image(data, index) for index, data in enumerate(args.get("images", ()))]
        return cls(prompt=args["prompt"], images=images, params=params)


def pipeline_arguments(pipeline: Any, request: DiffusionRequest) -> dict[str, Any]:
    """The keyword arguments for the ``__call__`` of ``pipeline``; without a seed one is drawn.

    Raises:
        InvalidRequest: the pipeline takes no such argument or not so many images; a value that none could take.
    """
    params = request.params
    params.validate()
    accepted = inspect.signature(type(pipeline).__call__).parameters
    name = type(pipeline).__name__
    arguments: dict[str, Any] = {}
    if "prompt" in accepted:
        arguments["prompt"] = request.prompt
    elif request.prompt:
        raise InvalidRequest(f"{name} takes no prompt; give an empty one")
    for parameter in (
        "negative_prompt",
        "height",
        "width",
        "num_inference_steps",
        "guidance_scale",
        "guidance_scale_2",
        "true_cfg_scale",
        "num_frames",
    ):
        value = getattr(params, parameter)
        if value is None:
            continue
        if parameter not in accepted:
            raise InvalidRequest(f"{name} takes no {parameter}")
        arguments[parameter] = value
    is_guided = params.negative_prompt is not None or "negative_prompt_embeds" in params.extra_args
    if name.startswith("QwenImage") and params.true_cfg_scale is None and not is_guided:
        arguments["true_cfg_scale"] = 1.0  # the same; of its own default, diffusers would warn in the server's log
    _check_size(pipeline, arguments)
    if params.fps is not None:  # where the model does not know of it, it is a property of the file alone
        for parameter in FRAME_RATES:
            if parameter in accepted:
                arguments[parameter] = params.fps
    _add_images(arguments, accepted, name, request.images)
    _add_outputs(arguments, accepted, name, params)
    for parameter, value in params.extra_args.items():
        if parameter not in accepted or parameter in ("self", *arguments):
            known = [other for other in accepted if other not in ("self", *arguments)]
            raise InvalidRequest(f"{name} takes no extra argument {parameter!r}: {suggest(parameter, known)}")
        arguments[parameter] = value
    return arguments


def _check_size(pipeline: Any, arguments: Mapping[str, Any]) -> None:
    """What a pipeline would round down without a word to the user; or what would become no number, where it divides."""
    processor = getattr(pipeline, "image_processor", None) or getattr(pipeline, "video_processor", None)
    grid = getattr(getattr(processor, "config", None), "vae_scale_factor", 1)
    patch = getattr(getattr(getattr(pipeline, "transformer", None), "config", None), "patch_size", 1)
    if isinstance(patch, list | tuple):  # of a video: frames, height, width; the processor knows of images' patches
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


def frame_rate(pipeline: Any, params: DiffusionParams) -> int | None:
    """Frames per second of the video of a request; None: neither the request nor the pipeline says."""
    if params.fps is not None:
        return params.fps
    accepted = inspect.signature(type(pipeline).__call__).parameters
    defaults = [accepted[name].default for name in FRAME_RATES if name in accepted]
    return next((round(rate) for rate in defaults if isinstance(rate, int | float)), None)


def _add_images(
    arguments: dict[str, Any], accepted: Mapping[str, inspect.Parameter], name: str, images: list[Image.Image]
) -> None:
    parameter = next((image for image in IMAGES if image in accepted), None)
    if not images:
        if parameter and (NEEDS_IMAGE.search(name) or accepted[parameter].default is inspect.Parameter.empty):
            raise InvalidRequest(f"{name} needs an input image, got none")
        return
    if parameter is None:
        raise InvalidRequest(f"{name} takes no input image, got {len(images)}")
    if parameter == "input_images" or (len(images) > 1 and TAKES_SEVERAL_IMAGES.search(name)):
        arguments[parameter] = images
    elif len(images) == 1:
        arguments[parameter] = images[0]
    elif len(images) == 2 and "last_image" in accepted:
        arguments[parameter], arguments["last_image"] = images
    else:
        raise InvalidRequest(f"{name} takes one input image, got {len(images)}")


def _add_outputs(
    arguments: dict[str, Any], accepted: Mapping[str, inspect.Parameter], name: str, params: DiffusionParams
) -> None:
    num_outputs = params.num_outputs_per_prompt
    if num_outputs > 1:
        parameter = next((count for count in NUM_OUTPUTS if count in accepted), None)
        if parameter is None:
            raise InvalidRequest(f"{name} makes one output for a prompt, not {num_outputs}")
        arguments[parameter] = num_outputs
    if "generator" in accepted:
        import torch

        seed = secrets.randbits(63) if params.seed is None else params.seed
        # On the CPU: the same noise whatever the device. Not every pipeline takes a list of one.
        generators = [torch.Generator().manual_seed(seed + index) for index in range(num_outputs)]
        arguments["generator"] = generators if num_outputs > 1 else generators[0]
    if "output_type" in accepted:
        arguments["output_type"] = OUTPUT_TYPES[params.output_type]


def _encode_png(image: Image.Image) -> bytes:
    file = io.BytesIO()
    image.save(file, "PNG", compress_level=1)
    return file.getvalue()


def _decode_image(data: bytes, index: int) -> Image.Image:
    from PIL import Image

    try:
        image = Image.open(io.BytesIO(data))
        image.load()
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as exc:
        raise InvalidRequest(f"input image {index}: {exc}") from exc
    return image
