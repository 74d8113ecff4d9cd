"""``vllm-omni generate`` with a diffusion pipeline: a prompt and images in, image, video or sound files out."""

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from vllm_omni.config import OmniConfig
from vllm_omni.config.diffusion_params import DiffusionParams
from vllm_omni.entrypoints.cli.deployment import json_object
from vllm_omni.entrypoints.cli.output import (
    answer_path,
    check_writable,
    print_start,
    print_times,
    save_files,
    stage_seconds,
)
from vllm_omni.entrypoints.cli.prompt import read_image
from vllm_omni.entrypoints.omni_llm import OmniLLM
from vllm_omni.errors import ConfigError, InvalidRequest
from vllm_omni.messages.outputs import OmniRequestOutput

TEXT_OPTIONS = ("system", "speaker", "ref_audio", "ref_text", "max_tokens", "use_audio_in_video")
"""Options, by attribute, that have no effect on a diffusion pipeline."""


def _size(text: str) -> tuple[int, int]:
    width, _, height = text.lower().partition("x")
    try:
        return int(width), int(height)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: must be WIDTHxHEIGHT, for example 1024x768") from None


DIFFUSION_OPTIONS: Mapping[str, tuple[str, str, Callable[[str], object], str]] = {
    "negative_prompt": ("--negative-prompt", "TEXT", str, "What the result must not show."),
    "size": ("--size", "WxH", _size, "Pixels, for example 1024x768."),
    "num_inference_steps": ("--steps", "N", int, "Denoise steps."),
    "num_outputs_per_prompt": ("-n --num-outputs", "N", int, "How many outputs; output i has the seed + i."),
    "guidance_scale": ("--guidance-scale", "X", float, "How closely to follow the prompt."),
    "true_cfg_scale": ("--true-cfg-scale", "X", float, "Likewise, by a second pass with the negative prompt."),
    "num_frames": ("--num-frames", "N", int, "Frames of a video."),
    "fps": ("--fps", "N", int, "Frames per second of a video."),
    "extra_args": ("--extra-args", "JSON", json_object, "Further arguments of the pipeline's call, by name."),
}
"""Options for a diffusion pipeline only: field of ``DiffusionParams`` (or the size) -> flags, metavar, type, help."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "Diffusion", "Options of a diffusion pipeline; the defaults are the pipeline's own."
    )
    for name, (flags, metavar, parse, text) in DIFFUSION_OPTIONS.items():
        group.add_argument(*flags.split(), dest=name, metavar=metavar, type=parse, help=text)


def reject_diffusion_options(options: argparse.Namespace) -> None:
    """Raise ``ConfigError`` if an option is given for a model that is not a diffusion pipeline."""
    for name, (flags, *_) in DIFFUSION_OPTIONS.items():
        if getattr(options, name) is not None:
            raise ConfigError(f"{flags.split()[-1]}: this model is not a diffusion pipeline")


def generate_media(config: OmniConfig, modality: str, options: argparse.Namespace, prompt: str, stdout: TextIO) -> None:
    """Check the arguments, start the pipeline, generate, write the files, stop the pipeline.

    Args:
        modality: of the pipeline's output: "image", "video" or "audio".

    Raises:
        ConfigError: an argument is wrong.
        InvalidRequest: the pipeline rejected the request.
        StageFailed: the pipeline did not start, or failed.
    """
    _reject_others(options, modality)
    path = answer_path(options.output, modality)
    check_writable(path)
    params = _read_params(config, options)
    images = [read_image(named) for _, named in options.media]
    media = {"multi_modal_data": {"image": images}} if images else {}
    print_start(config)
    with OmniLLM(config=config) as omni:
        (output,) = omni.generate({"prompt": prompt, **media}, params, use_tqdm=sys.stderr.isatty())
    write_answer(output, config, modality, path, as_json=options.json, stdout=stdout)


def write_answer(
    output: OmniRequestOutput, config: OmniConfig, modality: str, path: Path, *, as_json: bool, stdout: TextIO
) -> None:
    """Write the files, and print their paths, or everything as JSON, to ``stdout``.

    Raises:
        OmniError: a file cannot be written.
    """
    paths = save_files(path, output.save, "the answer")
    if as_json:
        print(json.dumps(_as_data(output, config, modality, paths), ensure_ascii=False), file=stdout)
        return
    for one in paths:
        print(one, file=stdout, flush=True)
    print_times(output)


def _reject_others(options: argparse.Namespace, modality: str) -> None:
    for name in TEXT_OPTIONS:
        if getattr(options, name):
            raise ConfigError(f"--{name.replace('_', '-')}: not for a diffusion pipeline, as this model is")
    for kind, _ in options.media:
        if kind != "image":
            raise ConfigError(f"--{kind}: a diffusion pipeline reads images alone")
    for wanted in options.modalities or ():
        if wanted != modality:
            raise ConfigError(f"--modalities {wanted}: this model answers in {modality}")


def _read_params(config: OmniConfig, options: argparse.Namespace) -> DiffusionParams:
    given = {name: getattr(options, name) for name in DIFFUSION_OPTIONS} | {"seed": options.sampling_seed}
    given["width"], given["height"] = given.pop("size") or (None, None)
    try:
        params = DiffusionParams.of({name: value for name, value in given.items() if value is not None})
        params.validate(config.stages[0].diffusion_config.limits)
    except InvalidRequest as exc:
        raise ConfigError(str(exc)) from exc
    return params


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
    return {"model": config.model, modality: files, "stage_seconds": stage_seconds(output)}
