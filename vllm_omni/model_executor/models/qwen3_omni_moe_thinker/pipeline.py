"""``ThinkerPipeline``: a Qwen3-Omni checkpoint without a talker."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers import PreTrainedConfig

from vllm_omni.errors import InvalidRequest
from vllm_omni.model_executor.models.qwen3_omni_moe.pipeline import thinker_spec
from vllm_omni.model_executor.models.qwen3_omni_moe_thinker.graph import graph_of
from vllm_omni.model_executor.pipeline import Pipeline


class ThinkerPipeline(Pipeline):
    """Text, images, audio and video in; text out."""

    modalities = {"text": "text"}

    def __init__(self, model: str, hf_config: PreTrainedConfig, revision: str | None = None) -> None:
        self.graph = graph_of(model)
        self.stages = (thinker_spec(hf_config, has_talker=False),)

    def validate(self, options: Mapping[str, Any]) -> dict[str, Any]:
        for name in options:
            raise InvalidRequest(f"unknown option {name!r}: a checkpoint without a talker has none")
        return {}
