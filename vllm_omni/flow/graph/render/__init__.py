"""Drawings of a plan for people: text, Mermaid, SVG."""

from vllm_omni.flow.graph.render.mermaid import to_mermaid
from vllm_omni.flow.graph.render.svg import to_svg
from vllm_omni.flow.graph.render.text import to_text

__all__ = ["to_mermaid", "to_svg", "to_text"]
