"""``LanguagePipeline``: any language model of vLLM as one stage, from a prompt and its media to a text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers import PreTrainedConfig

from vllm_omni.config import LANGUAGE
from vllm_omni.errors import InvalidRequest
from vllm_omni.model_executor.models.language.graph import graph_of
from vllm_omni.model_executor.pipeline import Pipeline, StageSpec


class LanguagePipeline(Pipeline):
    """One stage that runs the checkpoint as vLLM itself does."""

    modalities = {"text": "text"}

    def __init__(self, model: str, hf_config: PreTrainedConfig, revision: str | None = None) -> None:
        self.graph = graph_of(model)
        # vLLM rejects a model that can only pool.
        self.stages = (StageSpec(LANGUAGE, architecture="", output_type="text", engine_args={"runner": "generate"}),)

    def validate(self, options: Mapping[str, Any]) -> dict[str, Any]:
        for name in options:
            raise InvalidRequest(f"unknown option {name!r}: a language model has none")
        return {}
