"""``PipelineWeights``: offload or drop a pipeline's weights while its stage sleeps, and restore them."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

logger = logging.getLogger(__name__)


class PipelineWeights:
    """Offloads the weights of a pipeline and restores them in place.

    In place, because running requests refer to the networks and resume after ``restore``.

    Args:
        pipeline: of diffusers, on its device.
        reload: loads the same pipeline again, onto the device.
    """

    def __init__(self, pipeline: Any, device: torch.device, reload: Callable[[], Any]) -> None:
        self._networks = _find_networks(pipeline)
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
        for name, source in _find_networks(self._reload()).items():
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


def _find_networks(pipeline: Any) -> dict[str, nn.Module]:
    return {name: part for name, part in pipeline.components.items() if isinstance(part, nn.Module)}
