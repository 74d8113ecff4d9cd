"""``GenerationModel``: a model that answers a request in one call, without token steps: a vocoder."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig


class GenerationConfig(PreTrainedConfig):
    """The fields that vLLM reads from any model's configuration, for a model without vLLM's layers."""

    model_type = "vllm_omni_generation"
    # Shape fields of a language model, read by vLLM's ModelConfig; nothing is allocated from them.
    hidden_size: int = 1
    num_hidden_layers: int = 0
    num_attention_heads: int = 1
    vocab_size: int = 2
    max_position_embeddings: int = 1 << 20
    model_config: dict[str, Any] | None = None  # the checkpoint's own section of this model


class GenerationModel(nn.Module):
    """Base of the models that ``OneShotExecutor`` runs.

    vLLM checks that a model class has the three methods of a language model before it starts an engine; an executor
    without workers never calls them.
    """

    is_attention_free = True  # read by vLLM's model registry: no KV cache is planned

    @abstractmethod
    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Load the checkpoint's tensors, given with their names there; returns the names of those loaded."""

    @abstractmethod
    def read(self, args: Mapping[str, Any]) -> Any:
        """Parse one request into the form that ``generate`` takes.

        Args:
            args: the request's stage arguments (``STAGE_ARGS``); ``payloads`` are what earlier stages have published,
                with read-only tensors that are valid during this call.

        Raises:
            Exception: the arguments are wrong; the request fails with this text, and the engine continues.
        """

    @abstractmethod
    def generate(self, batch: Sequence[Any]) -> list[dict[str, torch.Tensor]]:
        """Answer requests that ``read`` has parsed; for each its tensors by name, on any device.

        If it raises with several, each is tried alone, and those that raise again fail.
        """

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        raise AssertionError("a generation stage has no token steps")

    embed_input_ids = compute_logits = forward
