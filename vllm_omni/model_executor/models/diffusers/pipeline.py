"""``DiffusersPipeline``: a diffusers pipeline as one stage, from a prompt and images to images, a video or a sound."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers import PreTrainedConfig

from vllm_omni.config import DIFFUSERS
from vllm_omni.errors import InvalidRequest
from vllm_omni.model_executor.models.diffusers.graph import build_graph, modality_of
from vllm_omni.model_executor.models.diffusers.hf_config import ARCHITECTURE
from vllm_omni.model_executor.pipeline import Pipeline, StageSpec


class DiffusersPipeline(Pipeline):
    """One stage that runs the pipeline named in ``model_index.json``."""

    def __init__(self, model: str, hf_config: PreTrainedConfig, revision: str | None = None) -> None:
        self.class_name: str = hf_config.model_config["_class_name"]
        modality = modality_of(self.class_name)
        self.modalities = {modality: modality}
        self.graph = build_graph(modality)
        self.stages = (diffusers_stage("diffusion", modality),)

    def validate(self, options: Mapping[str, Any]) -> dict[str, Any]:
        for name in options:
            raise InvalidRequest(f"unknown option {name!r}: {self.class_name} has none")
        return {}


def diffusers_stage(name: str, modality: str, **settings: Any) -> StageSpec:
    """A stage that runs a pipeline of diffusers; its ``model`` in the deployment is a checkpoint in diffusers' layout.

    Args:
        modality: of its output: "image", "video" or "audio".
        settings: further fields of ``StageSpec``.
    """
    engine_args = {
        "config_format": DIFFUSERS,
        "skip_tokenizer_init": True,
        "async_scheduling": False,
    }
    return StageSpec(name, architecture=ARCHITECTURE, output_type=modality, engine_args=engine_args, **settings)
