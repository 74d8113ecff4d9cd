"""``vllm-omni generate`` of a diffusion pipeline: a prompt and its images in, image, video or sound files out."""

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TextIO

from PIL import Image, UnidentifiedImageError

from vllm_omni.config import OmniConfig
from vllm_omni.config.diffusion_params import DiffusionParams
from vllm_omni.entrypoints.cli.output import answer_path, check_writable, reason
from vllm_omni.entrypoints.omni_llm import OmniLLM
from vllm_omni.errors import ConfigError, InvalidRequest, OmniError
from vllm_omni.messages.outputs import OmniRequestOutput

OF_TEXT = ("system", "speaker", "max_tokens", "use_audio_in_video")
"""Options, by their attribute, that a diffusion pipeline has no use for."""
OF_DIFFUSION = {
    "negative_prompt": "--negative-prompt",
    "size": "--size",
    "steps": "--steps",
    "num_outputs": "--num-outputs",
    "guidance_scale": "--guidance-scale",
    "true_cfg_scale": "--true-cfg-scale",
    "num_frames": "--num-frames",
    "fps": "--fps",
    "extra_args": "--extra-args",
}
"""Options that only a diffusion pipeline has a use for: attribute -> flag."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "Diffusion", "Of a diffusion pipeline; what is not given is the pipeline's own default."
    )
    group.add_argument("--negative-prompt", metavar="TEXT", help="What it is not to look like.")
    group.add_argument("--size", metavar="WxH", type=_size, help="Pixels, for example 1024x768.")
    group.add_argument("--steps", metavar="N", type=int, help="Denoise steps.")
    group.add_argument("-n", "--num-outputs", metavar="N", type=int, help="How many; output i has the seed + i.")
    group.add_argument("--guidance-scale", metavar="X", type=float, help="How closely to follow the prompt.")
    group.add_argument(
        "--true-cfg-scale", metavar="X", type=float, help="The same, by a second run with the negative prompt."
    )
    group.add_argument("--num-frames", metavar="N", type=int, help="Of a video.")
    group.add_argument("--fps", metavar="N", type=int, help="Frames per second of a video.")
    group.add_argument(
        "--extra-args", metavar="JSON", type=_mapping, help="Further arguments of the pipeline's call, by name."
    )


def refuse_diffusion_options(options: argparse.Namespace) -> None:
    """Raises ``ConfigError`` if one is given for a model that is no diffusion pipeline."""
    for name, flag in OF_DIFFUSION.items():
        if getattr(options, name) is not None:
            raise ConfigError(f"{flag}: this model is no diffusion pipeline")


def draw(config: OmniConfig, modality: str, options: argparse.Namespace, prompt: str, stdout: TextIO) -> None:
    """Check everything that can be known before, start the pipeline, answer, end it.

    Args:
        modality: what the pipeline makes: "image", "video" or "audio".

    Raises:
        ConfigError: an argument is wrong.
        InvalidRequest: the pipeline refused the request.
        StageFailed: it did not start, or failed.
    """
    _refuse_others(options, modality)
    path = answer_path(options.output, modality)
    check_writable(path)
    params = _read_params(config, options)
    images = [_read_image(named) for _, named in options.media]
    media = {"multi_modal_data": {"image": images}} if images else {}
    print(f"starting {', '.join(config.stage_names)} of {config.model} ...", file=sys.stderr, flush=True)
    with OmniLLM(config=config) as omni:
        (output,) = omni.generate({"prompt": prompt, **media}, params, use_tqdm=sys.stderr.isatty())
    tell(output, config, modality, path, as_json=options.json, stdout=stdout)


def tell(
    output: OmniRequestOutput, config: OmniConfig, modality: str, path: Path, *, as_json: bool, stdout: TextIO
) -> None:
    """Write the files, and say where they are: on ``stdout`` the paths, or everything as JSON.

    Raises:
        OmniError: a file cannot be written.
    """
    paths = _save(output, path)
    if as_json:
        print(json.dumps(_as_data(output, config, modality, paths), ensure_ascii=False), file=stdout)
        return
    for one in paths:
        print(one, file=stdout, flush=True)
    times = ", ".join(f"{stage} {seconds:.2f} s" for stage, seconds in output.stage_durations.items())
    print(f"time    {times}", file=sys.stderr)


def _refuse_others(options: argparse.Namespace, modality: str) -> None:
    for name in OF_TEXT:
        if getattr(options, name):
            raise ConfigError(f"--{name.replace('_', '-')}: this model is a diffusion pipeline, which has none")
    for kind, _ in options.media:
        if kind != "image":
            raise ConfigError(f"--{kind}: a diffusion pipeline reads images alone")
    for wanted in options.modalities or ():
        if wanted != modality:
            raise ConfigError(f"--modalities {wanted}: this model answers in {modality}")


def _read_params(config: OmniConfig, options: argparse.Namespace) -> DiffusionParams:
    given = {
        "negative_prompt": options.negative_prompt,
        "num_inference_steps": options.steps,
        "num_outputs_per_prompt": options.num_outputs,
        "seed": options.sampling_seed,
        "guidance_scale": options.guidance_scale,
        "true_cfg_scale": options.true_cfg_scale,
        "num_frames": options.num_frames,
        "fps": options.fps,
        "extra_args": options.extra_args,
    }
    if options.size is not None:
        given["width"], given["height"] = options.size
    try:
        params = DiffusionParams.of({name: value for name, value in given.items() if value is not None})
        params.validate(config.stages[0].diffusion_config.limits)
    except InvalidRequest as exc:
        raise ConfigError(str(exc)) from exc
    return params


def _read_image(named: str) -> Image.Image:
    try:
        with Image.open(named) as image:
            return image.convert("RGB")
    except UnidentifiedImageError:
        raise ConfigError(f"--image {named}: no image that can be read") from None
    except (OSError, ValueError, Image.DecompressionBombError) as exc:
        raise ConfigError(f"--image {named}: {reason(exc)}") from exc


def _save(output: OmniRequestOutput, path: Path) -> list[Path]:
    """Write the files beside their place and move them there whole; what fails or is interrupted leaves nothing."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{path.name}-", dir=path.parent) as directory:
            saved = output.save(Path(directory) / path.name)
            return [one.replace(path.parent / one.name).resolve() for one in saved]
    except OSError as exc:
        raise OmniError(f"the answer cannot be written to {path}: {reason(exc)}") from exc


def _as_data(output: OmniRequestOutput, config: OmniConfig, modality: str, paths: Sequence[Path]) -> dict[str, Any]:
    media = output.multimodal_output
    files: list[dict[str, Any]] = [{"path": str(path)} for path in paths]
    for index, file in enumerate(files):
        if modality == "image":
            file["height"], file["width"] = media["images"][index].shape[:2]
        elif modality == "video":
            file["num_frames"], file["height"], file["width"] = media["frames"][index].shape[:3]
            file["fps"] = output.fps
        else:
            file["num_channels"], file["num_samples"] = media["audio"][index].shape
            file["sample_rate"] = media["sample_rate"]
    seconds = {stage: round(duration, 4) for stage, duration in output.stage_durations.items()}
    return {"model": config.model, modality: files, "stage_seconds": seconds}


def _size(text: str) -> tuple[int, int]:
    width, _, height = text.lower().partition("x")
    try:
        return int(width), int(height)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: must be WIDTHxHEIGHT, for example 1024x768") from None


def _mapping(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as exc:
        raise argparse.ArgumentTypeError(f"not JSON: {exc}") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError("must be a JSON object")
    return value
