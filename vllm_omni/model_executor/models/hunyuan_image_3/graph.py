"""The graph of HunyuanImage-3, which is BAGEL's; without torch and vLLM."""

from __future__ import annotations

from vllm_omni.flow import Graph, TransferFunction, printable_transfer
from vllm_omni.model_executor.models.bagel import graph


def build_graph(latents_to_decoder: TransferFunction) -> Graph:
    return graph.build_graph(latents_to_decoder, "hunyuan_image_3")


def graph_of(model: str) -> Graph:
    """The graph of a checkpoint with the name of its transfer function, which is that of the pipeline."""
    return build_graph(printable_transfer("latents_to_decoder"))
