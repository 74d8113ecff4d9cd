"""``vllm-omni tiny NAME DIR``: write a tiny random checkpoint."""

import tempfile
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

from vllm_omni.entrypoints.cli.parser import RejectingParser, reason
from vllm_omni.errors import ConfigError, OmniError
from vllm_omni.testing import diffusion as diffusers_tiny

LLAVA = "llava-1.5"  # a language model that reads images
MODEL_TYPES = (
    "bagel",
    "glm_image",
    "hunyuan_image_3",
    "janus",
    "mimo_audio",
    "qwen2_5_omni",
    "qwen3_omni",
    "qwen3_tts",
)
"""Modules of ``vllm_omni.testing``."""


def tiny(args: Sequence[str]) -> None:
    """Write a tiny checkpoint with random weights, in the layout of a real one, without the network."""
    parser = RejectingParser(
        prog="vllm-omni tiny",
        description="Write a tiny checkpoint with random weights, in the layout of a real one: configuration, weights, "
        "tokenizer and processors. No network is used, and the same arguments give the same bytes.",
    )
    names = [*MODEL_TYPES, LLAVA, *diffusers_tiny.PIPELINES]
    parser.add_argument(
        "name", metavar="NAME", choices=names, help="a model type, a language model or a pipeline: %(choices)s"
    )
    parser.add_argument("directory", metavar="DIR", type=Path, help="output directory; created if needed")
    parser.add_argument("--seed", type=int, default=0, help="seed of the weights (default: %(default)s)")
    parser.add_argument("--variant", default="base", help="a shape of the model type (default: %(default)s)")
    options = parser.parse_args(args)
    directory: Path = options.directory
    is_model_type = options.name in MODEL_TYPES
    _check(directory, options.name, options.variant, is_model_type=is_model_type)
    try:
        _write(directory, options.name, options.seed, options.variant, is_model_type=is_model_type)
    except OmniError:
        raise
    except ValueError as exc:
        raise ConfigError(str(exc)) from exc
    except Exception as exc:  # the libraries that write weights have errors of their own for a full disk
        raise OmniError(f"{directory} cannot be written: {reason(exc)}") from exc
    print(directory)


def _check(directory: Path, name: str, variant: str, *, is_model_type: bool) -> None:
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise ConfigError(f"{directory} exists, and is not an empty directory: choose another")
    if variant != "base" and not is_model_type:
        raise ConfigError(f"no variant {variant!r}: {name} has one shape")


def _write(directory: Path, name: str, seed: int, variant: str, *, is_model_type: bool) -> None:
    """Build the checkpoint in a temporary directory: a failure leaves ``directory`` empty."""
    directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=directory) as unfinished:
        path = Path(unfinished)
        if is_model_type:
            import_module(f"vllm_omni.testing.{name}").build(path, seed=seed, variant=variant)
        elif name == LLAVA:
            # Imported here because it takes seconds, and --help does not need it.
            import_module("vllm_omni.testing.llava").build(path, seed=seed)
        else:
            diffusers_tiny.build(path, name, seed=seed)
        for child in path.iterdir():
            child.replace(directory / child.name)
