"""``PipelineCopies``: give each request a copy of a pipeline whose networks are proxies."""

from __future__ import annotations

import copy
import functools
import inspect
import re
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

# Components whose calls are the steps of a request. Text encoders and decoders are called between two steps.
DENOISER_NAME = re.compile(r"(transformer|unet|prior|decoder|denoiser|dit)(_\d+)?$")
CODERS = ("vae", "audio_vae", "video_vae", "vqvae")  # pipelines call their methods encode and decode
DENOISER_CLASS = re.compile(r"Transformer|UNet|Unet|DiT")


class PipelineCopies:
    """Makes a shallow copy of a pipeline for each request.

    A copy shares weights and tokenizers with the pipeline and owns everything that a call changes: scheduler, guiders,
    plain containers.
    """

    def __init__(self, pipeline: Any):
        self._pipeline = pipeline
        self.denoisers = find_denoisers(pipeline)
        self.modules = networks_of(pipeline)
        # Excluded from deep copies: the networks and their parts.
        self._shared = {id(part): part for module in self.modules.values() for part in module.modules()}
        self._signatures: dict[tuple[str, str], inspect.Signature] = {}

    def signature(self, component: str, method: str) -> inspect.Signature:
        """The signature of a component's method, looked up once."""
        key = (component, method)
        if key not in self._signatures:
            self._signatures[key] = inspect.signature(getattr(self.modules[component], method))
        return self._signatures[key]

    def make(self, make_proxy: Callable[[str], Any], progress_bar: Callable[..., Any], generator: Any) -> Any:
        """Copy the pipeline for one request.

        Args:
            make_proxy: name of a network -> what stands in its place.
            progress_bar: replaces the pipeline's own.
            generator: source of the scheduler's noise where the pipeline passes none; None: torch's global one.
        """
        pipeline = copy.copy(self._pipeline)
        memo: dict[int, Any] = {**self._shared, id(self._pipeline): pipeline}
        own = vars(pipeline)
        for name, value in vars(self._pipeline).items():
            if name in self.modules:
                own[name] = make_proxy(name)
            elif is_mutable(value):
                own[name] = copy.deepcopy(value, memo)
        if "scheduler" in own and generator is not None:
            own["scheduler"].step = with_generator(own["scheduler"].step, generator)
        own["progress_bar"] = progress_bar
        # At the end of a call this method would reset the state of all requests and move offloaded weights.
        own["maybe_free_model_hooks"] = lambda: None
        return pipeline


def networks_of(pipeline: Any) -> dict[str, nn.Module]:
    """The components of a pipeline that have weights, by name."""
    return {name: part for name, part in pipeline.components.items() if isinstance(part, nn.Module)}


def find_denoisers(pipeline: Any) -> set[str]:
    """Names of the components whose calls are denoise steps, found by component name or, in diffusers, by class."""
    return {
        name
        for name, module in networks_of(pipeline).items()
        if not type(module).__module__.startswith("transformers.")
        and (DENOISER_NAME.match(name) or DENOISER_CLASS.search(type(module).__name__))
    }


def is_mutable(value: Any) -> bool:
    """Whether a request needs its own copy: schedulers, guiders, plain containers; not weights or tokenizers."""
    if isinstance(value, nn.Module | torch.Tensor | torch.device | torch.dtype | type | types.FunctionType):
        return False
    if isinstance(value, str | bytes | int | float | complex | tuple | frozenset | None):
        return False
    return type(value).__module__.partition(".")[0] not in ("transformers", "tokenizers")


def with_generator(step: Callable[..., Any], generator: Any) -> Callable[..., Any]:
    """Wrap a scheduler's ``step`` so that its noise comes from ``generator`` where the pipeline passes none."""
    signature = inspect.signature(step)
    if "generator" not in signature.parameters:
        return step

    @functools.wraps(step)
    def own_step(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind_partial(*args, **kwargs).arguments
        if "generator" not in given:
            kwargs["generator"] = generator
        return step(*args, **kwargs)

    return own_step
