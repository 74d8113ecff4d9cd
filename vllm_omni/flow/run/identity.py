"""Compute the activation that a frame belongs to; from the frame alone, so every process agrees.

From: Omni-Flow appendix A, Algorithm 2.
"""

import functools
import hashlib
from typing import TypeAlias

from vllm_omni.flow.graph.plan import Edge, Outlets
from vllm_omni.flow.graph.transfer import ENTRY
from vllm_omni.flow.run.frame import NO_BUCKET, Root, Trace

NO_TRACE = Trace()


@functools.lru_cache(maxsize=4096)
def derive_activation_id(source_id: int, source: str, index: int, target: str, group: int) -> int:
    """Hash a source's activation, its yield, and the group that it feeds; with the call id this is the key."""
    seed = f"{source_id}:{source}:{index}:{target}:{group}".encode()
    return int.from_bytes(hashlib.blake2b(seed, digest_size=7).digest())  # 56 bits: fits any wire integer


def activation_id(edge: Edge, trace: Trace, source_id: int, index: int) -> int:
    """The activation of ``edge.target`` that a frame feeds.

    Rule A: without a bucket, the id derives from its source (and yield). Rule C: with one, from the common source of
    all frames that meet in the bucket, so frames made from the same one meet.

    Args:
        trace: trace of the frame.
        source_id: the activation that sends it.
        index: index of its yield, on a per-frame edge.
    """
    if edge.target == ENTRY:
        return 0
    if edge.root is None:
        return derive_activation_id(source_id, edge.source, index if edge.per_frame else 0, edge.target, edge.group)
    root = find_root(trace, edge.root)
    assert root is not None, f"{edge}: {edge.root} is above every source of it"
    return bucket_id(edge, root)


Targets: TypeAlias = dict[str, list[tuple[Edge, int]]]
"""Output field -> the edges that carry it whole, each with the activation that it feeds."""


def targets(outlets: Outlets, trace: Trace, source_id: int) -> Targets:
    """The edges of an activation's fields and the activations that they feed."""
    return _targets(outlets, source_id, trace) if outlets.has_joins else _traceless_targets(outlets, source_id)


def _targets(outlets: Outlets, source_id: int, trace: Trace = NO_TRACE) -> Targets:
    return {
        name: [(edge, activation_id(edge, trace, source_id, 0)) for edge in edges]
        for name, edges in outlets.whole.items()
    }


_traceless_targets = functools.lru_cache(maxsize=4096)(_targets)  # by Rule A alone: the same in every call


def bucket_for(edge: Edge, trace: Trace) -> int:
    """The bucket that a path belongs to, or NO_BUCKET if it is above all buckets."""
    root = None if edge.root is None else find_root(trace, edge.root)
    if root is None or len(trace.path) < root.depth + edge.root_per_frame:
        return NO_BUCKET
    return bucket_id(edge, root)


def bucket_id(edge: Edge, root: Root) -> int:
    index = root.index if edge.root_per_frame else 0
    return derive_activation_id(root.activation_id, root.node, index, edge.target, edge.group)


def find_root(trace: Trace, node: str) -> Root | None:
    for root in reversed(trace.roots):
        if root.node == node:
            return root
    return None


def above(trace: Trace, root: Root, *, inclusive: bool = True) -> tuple[Root, ...]:
    """The roots from the entry down to this one."""
    end = trace.roots.index(root) + inclusive
    return trace.roots[:end]
