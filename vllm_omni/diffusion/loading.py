"""Load a diffusers pipeline for inference, and offload or drop its weights while its stage sleeps."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import torch
from torch import nn

from vllm_omni.diffusion.pipeline_copy import CODERS, find_denoisers, networks_of
from vllm_omni.errors import ConfigError, MissingDependency, how_to_install
from vllm_omni.names import suggest

logger = logging.getLogger(__name__)

DTYPES = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "half": torch.float16,
    "float": torch.float32,
}
# Published for float32, which avoids banding; they use a small part of the time and memory.
FLOAT32_DECODERS = {"AutoencoderKLWan"}


def load_diffusers_pipeline(
    model: str,
    dtype: str | torch.dtype = "auto",
    device: str | torch.device = "cpu",
    attention_backend: str | None = None,
    vae_tiling: bool = False,
    vae_slicing: bool = False,
    hub: Mapping[str, Any] | None = None,
    index: Mapping[str, Any] | None = None,
) -> Any:
    """Load the pipeline class that ``model_index.json`` names, in evaluation mode, on ``device``.

    Args:
        model: a directory in the layout of diffusers, or a name on the Hugging Face hub.
        dtype: "auto" is bfloat16 on a GPU and float32 on a CPU.
        attention_backend: for the denoisers, by diffusers' name ("native", "flash", "sage", "xformers"); None:
            diffusers' default.
        vae_tiling, vae_slicing: reduce the memory of decoding; see ``DiffusionConfig``.
        hub: arguments of diffusers' ``from_pretrained`` for a model on the hub: revision, cache_dir, token,
            trust_remote_code.
        index: ``model_index.json``, if it differs from the file: its ``_class_name`` may be "package.module:Class", and
            a component of ``[None, None]`` is not loaded.

    Raises:
        MissingDependency: diffusers, or a library that the pipeline needs, is not installed.
        ConfigError: ``model`` is not a pipeline; the dtype is unknown; the attention backend is unknown or cannot run
            on this device; no VAE of the pipeline supports tiling or slicing.
    """
    device = torch.device(device)
    resolved = resolve_dtype(dtype, device)
    pipeline = _read_pipeline(model, resolved, hub or {}, index or {}, keeps_float32=dtype == "auto")
    for module in networks_of(pipeline).values():
        module.eval().requires_grad_(False)
    pipeline.set_progress_bar_config(disable=True)
    pipeline.to(device)
    for option, is_wanted in (("tiling", vae_tiling), ("slicing", vae_slicing)):
        if is_wanted:
            _enable_in_vae(pipeline, option)
    if attention_backend is not None:
        set_attention_backend(pipeline, attention_backend, resolved, device)
    return pipeline


def _read_pipeline(
    model: str, dtype: torch.dtype, hub: Mapping[str, Any], index: Mapping[str, Any], *, keeps_float32: bool
) -> Any:
    """Read the weights. ``keeps_float32``: of some decoders, whatever the dtype of the others."""
    try:
        from diffusers import DiffusionPipeline
    except ImportError as exc:
        raise MissingDependency(f"a diffusion stage needs diffusers; {how_to_install('cpu', 'cuda')} ({exc})") from exc
    if Path(model).is_dir() and not (Path(model) / "model_index.json").is_file():
        raise ConfigError(f"{model} is not a diffusers pipeline: it has no model_index.json")
    try:
        dtypes: dict[str, torch.dtype] = {"default": dtype}
        if keeps_float32:
            components = DiffusionPipeline.load_config(model, **hub)
            dtypes |= {name: torch.float32 for name, value in components.items() if _is_float32(value)}
        name = str(index.get("_class_name", ""))
        pipeline_cls = resolve_name(name) if ":" in name else DiffusionPipeline
        absent = {name: None for name, value in index.items() if value == [None, None]}
        with no_progress_bars():
            return pipeline_cls.from_pretrained(model, dtype=dtypes, **absent, **hub)
    except ImportError as exc:
        raise MissingDependency(f"{model}: {exc}") from exc
    except (OSError, ValueError, AttributeError) as exc:
        raise ConfigError(f"{model} cannot be loaded as a diffusers pipeline: {exc}") from exc


@contextmanager
def no_progress_bars() -> Iterator[None]:
    """Turn off the libraries' progress bars, which in a log of several stages would overwrite one another."""
    import diffusers
    import transformers

    shown = [one.utils.logging for one in (diffusers, transformers) if one.utils.logging.is_progress_bar_enabled()]
    for logging_of in shown:
        logging_of.disable_progress_bar()
    try:
        yield
    finally:
        for logging_of in shown:
            logging_of.enable_progress_bar()


def _is_float32(value: Any) -> bool:
    """Whether an entry of ``model_index.json`` is a component, ``[library, class]``, of such a class."""
    return isinstance(value, list) and any(name in value for name in FLOAT32_DECODERS)


def resolve_dtype(dtype: str | torch.dtype, device: torch.device) -> torch.dtype:
    """Find a dtype by name; "auto" depends on the device.

    Raises:
        ConfigError: the name is unknown.
    """
    if isinstance(dtype, torch.dtype):
        return dtype
    if dtype == "auto":
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    if dtype not in DTYPES:
        raise ConfigError(f"unknown dtype {dtype!r} of a diffusion pipeline: {suggest(dtype, ['auto', *DTYPES])}")
    return DTYPES[dtype]


def _enable_in_vae(pipeline: Any, option: str) -> None:
    """Switch an option of diffusers' VAEs on, "tiling" or "slicing", in each that has it."""
    vaes = [network for name, network in networks_of(pipeline).items() if name in CODERS]
    supported = [vae for vae in vaes if hasattr(vae, f"use_{option}")]
    if not supported:
        classes = ", ".join(type(vae).__name__ for vae in vaes) or "none"
        raise ConfigError(f"vae_{option}: {type(pipeline).__name__} has no VAE with {option} (its VAE: {classes})")
    for vae in supported:
        getattr(vae, f"enable_{option}")()


def set_attention_backend(pipeline: Any, name: str, dtype: torch.dtype, device: torch.device) -> None:
    """Set the attention backend of all denoisers, after computing one small attention with it.

    Raises:
        ConfigError: the backend is unknown, or cannot run on this device; with the reason.
    """
    from diffusers.models.attention_dispatch import AttentionBackendName, attention_backend, dispatch_attention_fn

    names = [backend.value for backend in AttentionBackendName]
    if name not in names:
        raise ConfigError(f"unknown attention backend {name!r}: {suggest(name, names)}")
    query = torch.zeros(1, 16, 2, 64, dtype=dtype, device=device)  # [batch, tokens, heads, width of a head]
    try:
        with torch.no_grad(), attention_backend(name):
            dispatch_attention_fn(query, query, query)
        _set_in_denoisers(pipeline, name)
    except Exception as exc:
        reason = (str(exc).strip().splitlines() or [type(exc).__name__])[0]
        raise ConfigError(f"attention backend {name!r} cannot run on {device} in {dtype}: {reason}") from exc


def _set_in_denoisers(pipeline: Any, attention_backend: str) -> None:
    for component in sorted(find_denoisers(pipeline)):
        denoiser = getattr(pipeline, component)
        if hasattr(denoiser, "set_attention_backend"):
            denoiser.set_attention_backend(attention_backend)
        else:
            logger.warning("%s (%s) has no selectable attention backend", type(denoiser).__name__, component)


class PipelineWeights:
    """Offloads the weights of a pipeline and restores them in place.

    In place, because running requests refer to the networks and resume after ``restore``.

    Args:
        pipeline: of diffusers, on its device.
        reload: loads the same pipeline again, onto the device.
    """

    def __init__(self, pipeline: Any, device: torch.device, reload: Callable[[], Any]) -> None:
        self._networks = networks_of(pipeline)
        self._device = device
        self._reload = reload
        self._are_discarded = False

    def offload(self) -> None:
        """Move the weights into the CPU's memory; does nothing on a CPU."""
        if self._device.type == "cpu":
            logger.warning("sleep, level 1, frees nothing on a CPU: the weights stay in memory; level 2 drops them")
            return
        self._move(torch.device("cpu"))

    def discard(self) -> None:
        """Drop the weights; ``restore`` reads the files again."""
        self._move(torch.device("meta"))
        self._are_discarded = True

    def restore(self) -> None:
        """Put the weights back on the device."""
        if not self._are_discarded:
            self._move(self._device)
            return
        for name, source in networks_of(self._reload()).items():
            for path, module in self._networks[name].named_modules():
                part = source.get_submodule(path)
                module._parameters.update(part._parameters)
                module._buffers.update(part._buffers)
        self._are_discarded = False

    def _move(self, device: torch.device) -> None:
        for network in self._networks.values():
            nn.Module.to(network, device)  # not the pipeline's `to`: diffusers and transformers reject some devices
        gc.collect()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
