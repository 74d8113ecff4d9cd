"""The graph of a diffusers pipeline, and the modality of its output; without torch, vLLM and diffusers."""

from __future__ import annotations

import re

from vllm_omni.config import DIFFUSERS, read_model_index
from vllm_omni.flow import Field, Graph, Role, interface

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


def build_graph(modality: str) -> Graph:
    graph = Graph(DIFFUSERS)
    prompt = graph.placeholder("prompt")
    made = graph.role(Diffusion, "diffusion").generate(prompt=prompt)
    graph.output(**{modality: made.media})
    return graph


def graph_of(model: str) -> Graph:
    """The graph of a checkpoint."""
    return build_graph(modality_of(read_model_index(model)["_class_name"]))
