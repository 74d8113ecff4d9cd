"""``PipelineWeights``: a pipeline's weights off the device, and back, for a stage that sleeps."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

logger = logging.getLogger(__name__)


class PipelineWeights:
    """Takes away what a pipeline's networks hold, and gives it back to the same objects.

    The same objects, because requests that were kept refer to them: they go on where they were.

    Args:
        pipeline: of diffusers, on its device.
        reload: loads it anew from where it came from, onto the device.
    """

    def __init__(self, pipeline: Any, device: torch.device, reload: Callable[[], Any]) -> None:
        self._networks = _networks_of(pipeline)
        self._device = device
        self._reload = reload
        self._are_discarded = False

    def offload(self) -> None:
        """Into the CPU's memory. On a CPU they are there, and stay: nothing is gained."""
        if self._device.type == "cpu":
            logger.warning(
                "sleep, level 1, frees nothing on a CPU: the weights stay where they are; level 2 drops them"
            )
            return
        self._move(torch.device("cpu"))

    def discard(self) -> None:
        """Nowhere: ``restore`` reads the files again."""
        self._move(torch.device("meta"))
        self._are_discarded = True

    def restore(self) -> None:
        """As they were before."""
        if not self._are_discarded:
            self._move(self._device)
            return
        for name, source in _networks_of(self._reload()).items():
            for path, module in self._networks[name].named_modules():
                part = source.get_submodule(path)
                module._parameters.update(part._parameters)
                module._buffers.update(part._buffers)
        self._are_discarded = False

    def _move(self, device: torch.device) -> None:
        for network in self._networks.values():
            nn.Module.to(network, device)  # not the pipeline's: diffusers and transformers refuse some devices
        gc.collect()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()


def _networks_of(pipeline: Any) -> dict[str, nn.Module]:
    return {name: part for name, part in pipeline.components.items() if isinstance(part, nn.Module)}
