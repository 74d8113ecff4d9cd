"""``GenerationModel``: a model without token steps, such as a vocoder: it answers a request at once, or by frames."""

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
    """Base of the models that ``GenerationExecutor`` runs.

    vLLM checks that a model class has the three methods of a language model before it starts an engine; an executor
    without workers never calls them.
    """

    is_attention_free = True  # read by vLLM's model registry: no KV cache is planned
    num_state_bytes = 0  # that ``prepare`` allocates for requests, for the memory plan

    @abstractmethod
    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Load the checkpoint's tensors, given with their names there; returns the names of those loaded."""

    def prepare(self) -> None:
        """Allocate what is kept for requests; called once, when the weights are on their device."""
        return

    @abstractmethod
    def read(self, args: Mapping[str, Any]) -> Any:
        """Parse one request into the form that ``generate`` takes, which is kept until the request has ended.

        Args:
            args: the request's stage arguments (``STAGE_ARGS``); ``payloads`` are what earlier stages have published,
                with read-only tensors that are valid during this call.

        Raises:
            Exception: the arguments are wrong; the request fails with this text, and the engine continues.
        """

    def extend(self, request: Any, frames: torch.Tensor) -> None:
        """Give a request the frames that ``generate`` decodes next, for a model whose requests read a stream of them.

        Args:
            frames: [n, num_groups] int64, host, n > 0.

        Raises:
            Exception: the frames are wrong; the request fails with this text.
        """
        raise ValueError("this model reads no stream")

    @abstractmethod
    def generate(self, batch: Sequence[Any]) -> list[dict[str, torch.Tensor]]:
        """Answer requests that ``read`` has parsed; for each its tensors by name, on any device.

        If it raises with several, each is tried alone, and those that raise again fail; so it must then have changed
        the state of none.
        """

    def release(self, request: Any) -> None:
        """Free what ``read`` has reserved: the request has ended, was aborted, or failed."""
        return

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        raise AssertionError("a generation stage has no token steps")

    embed_input_ids = compute_logits = forward
