"""Check that an edge can honour its settings, before any engine starts.

What depends on where its stages run is checked by ``relay_options.py``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TypeAlias

from vllm_omni.config import EdgeConfig, OmniConfig
from vllm_omni.errors import ConfigError
from vllm_omni.relay.select import STREAMING

Edges: TypeAlias = set[tuple[str, str]]
"""(Source, target), both stages."""

WholeEdges: TypeAlias = Mapping[tuple[str, str], str]
"""Edge -> why its graphs let nothing be streamed on it."""


def check_edge(
    edge: EdgeConfig,
    edges: Edges,
    publishing: Edges,
    whole: WholeEdges,
    config: OmniConfig,
    *,
    carries_frames: bool = False,
) -> None:
    """Check the settings of one edge.

    Args:
        edges: those of the graphs.
        publishing: those of them on which tensors travel.
        whole: those of the latter on which nothing can be streamed.
        carries_frames: whether the source publishes frames of codes.

    Raises:
        ConfigError: the graph has no such edge, or the edge cannot honour a setting; the message names both.
    """
    where, key = f"edge {edge.source}->{edge.target}", (edge.source, edge.target)
    if key not in edges:
        raise ConfigError(f"{where}: the graph has no such edge; it has {listed(edges)}")
    default = EdgeConfig(source=edge.source, target=edge.target)
    for name in ("transport", "stream", "credits"):
        value = getattr(edge, name)
        if value != getattr(default, name) and key not in publishing:
            raise ConfigError(
                f"{where}: {name} = {value!r} has no effect: its requests are made in the front end, and no tensors "
                f"travel on it; tensors travel on {listed(publishing) or 'no edge'}"
            )
    why_not = why_not_streamed(edge, whole, config, carries_frames=carries_frames)
    if why_not and edge.stream is True:
        raise ConfigError(f"{where}: stream = True: {why_not}; leave it out, or give stream: false")
    if edge.credits != default.credits and (why_not or not edge.stream):
        raise ConfigError(
            f"{where}: credits = {edge.credits} has no effect: {why_not or 'stream is false'}, and only a stream has "
            "credits"
        )


def why_not_streamed(edge: EdgeConfig, whole: WholeEdges, config: OmniConfig, *, carries_frames: bool = False) -> str:
    """Why rows, or frames, cannot go to the target while the source computes them; empty: they can."""
    source, target = config.stage(edge.source), config.stage(edge.target)
    is_decoder = carries_frames and target.engine_type == "generation"
    for stage in (source,) if is_decoder else (source, target):
        if not stage.is_autoregressive:
            return f"rows are streamed between two ar stages, and {stage.name} is {stage.engine_type!r}"
    if edge.transport != "auto" and edge.transport not in STREAMING:
        return f"the transport {edge.transport!r} has no streams (those with streams: {', '.join(STREAMING)})"
    return whole.get((edge.source, edge.target), "")


def listed(edges: Iterable[tuple[str, str]]) -> str:
    """The edges, for messages."""
    return ", ".join(f"{source}->{target}" for source, target in sorted(edges))
