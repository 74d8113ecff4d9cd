"""``DiffusersPipeline``: a diffusers pipeline as one stage, from a prompt and images to images, a video or a sound."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from transformers import PreTrainedConfig

from vllm_omni.config import DIFFUSERS
from vllm_omni.errors import InvalidRequest
from vllm_omni.flow import Field, Graph, Role, interface
from vllm_omni.model_executor.models.diffusers.hf_config import ARCHITECTURE
from vllm_omni.model_executor.pipeline import Pipeline, StageSpec

# Class names of the pipelines for videos and for sounds; all others are for images. Names, because the front end needs
# diffusers for nothing else, and importing it takes seconds.
_VIDEO = re.compile(
    r"Video|^(Wan|LTX|CogVideo|SkyReels|HunyuanSkyreels|Cosmos|Mochi|Allegro|Latte|AnimateDiff|AnyFlow|Helios|EasyAnimate"
    r"|Kandinsky5[TI]2V|Kandinsky6|ConsisID|LucyEdit|ChronoEdit|SanaWM)"
)
_AUDIO = re.compile(r"Audio|^(AceStep|MusicLDM|DanceDiffusion)")
_TO_IMAGE = re.compile(r"ToImage|Text2Image")


def modality_of(class_name: str) -> str:
    """Output modality of a diffusers pipeline: "image", "video" or "audio"."""
    if _AUDIO.search(class_name):
        return "audio"
    return "video" if _VIDEO.search(class_name) and not _TO_IMAGE.search(class_name) else "image"


class Diffusion(Role):
    generate = interface(inputs_or=[["prompt"]], outputs={"media": Field("media", streamed=True)})


class DiffusersPipeline(Pipeline):
    """One stage that runs the pipeline named in ``model_index.json``."""

    def __init__(self, model: str, hf_config: PreTrainedConfig, revision: str | None = None) -> None:
        self.class_name: str = hf_config.model_config["_class_name"]
        modality = modality_of(self.class_name)
        self.modalities = {modality: modality}
        self.graph = Graph(DIFFUSERS)
        prompt = self.graph.placeholder("prompt")
        made = self.graph.role(Diffusion, "diffusion").generate(prompt=prompt)
        self.graph.output(**{modality: made.media})
        self.stages = (
            StageSpec(
                "diffusion",
                architecture=ARCHITECTURE,
                output_type=modality,
                engine_args={
                    "config_format": DIFFUSERS,
                    "skip_tokenizer_init": True,
                    "async_scheduling": False,
                    "tensor_parallel_size": 1,
                    "pipeline_parallel_size": 1,
                },
            ),
        )

    def validate(self, options: Mapping[str, Any]) -> dict[str, Any]:
        for name in options:
            raise InvalidRequest(f"unknown option {name!r}: {self.class_name} has none")
        return {}
