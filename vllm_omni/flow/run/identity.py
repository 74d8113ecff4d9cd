"""Which activation a frame belongs to: the same answer in every process, from what the frame carries.

From: Omni-Flow appendix A, Algorithm 2.
"""

import functools
import hashlib
from typing import TypeAlias

from vllm_omni.flow.graph.plan import Edge, Outlets
from vllm_omni.flow.graph.transfer import ENTRY
from vllm_omni.flow.run.frame import NO_BUCKET, Lineage, Root


@functools.lru_cache(maxsize=4096)
def derive_activation_id(source_id: int, source: str, index: int, target: str, group: int) -> int:
    """HASH of a source's activation, its yield, and the group that it feeds; the call is the other half of the key."""
    seed = f"{source_id}:{source}:{index}:{target}:{group}".encode()
    return int.from_bytes(hashlib.blake2b(seed, digest_size=7).digest())  # 56 bits: fits any wire integer


def activation_id(edge: Edge, lineage: Lineage, source_id: int, index: int) -> int:
    """The activation of ``edge.target`` that a frame feeds.

    Rule A: without a bucket, the one of its source (and yield). Rule C: with one, that of the common source of all that
    meets in the bucket, so that what was made from the same frame meets.

    Args:
        lineage: of the frame.
        source_id: activation that sends it.
        index: of its yield, on an edge that is per frame.
    """
    if edge.target == ENTRY:
        return 0
    if edge.root is None:
        return derive_activation_id(source_id, edge.source, index if edge.per_frame else 0, edge.target, edge.group)
    root = find_root(lineage, edge.root)
    assert root is not None, f"{edge}: {edge.root} is above all that comes here"
    return bucket_id(edge, root)


Targets: TypeAlias = dict[str, list[tuple[Edge, int]]]
"""Output field -> the edges that carry it whole, and the activation that each leads to."""


def targets(outlets: Outlets, lineage: Lineage, source_id: int) -> Targets:
    """Where an activation sends its fields."""
    if not outlets.has_joins:
        return _targets(outlets, source_id)
    return {
        name: [(edge, activation_id(edge, lineage, source_id, 0)) for edge in edges]
        for name, edges in outlets.whole.items()
    }


@functools.lru_cache(maxsize=4096)
def _targets(outlets: Outlets, source_id: int) -> Targets:
    """By Rule A alone: that of another call is the same."""
    return {
        name: [(edge, activation_id(edge, Lineage(), source_id, 0)) for edge in edges]
        for name, edges in outlets.whole.items()
    }


def bucket_for(edge: Edge, lineage: Lineage) -> int:
    """The bucket in which a path is known, or NO_BUCKET if it is above all buckets."""
    root = None if edge.root is None else find_root(lineage, edge.root)
    if root is None or len(lineage.path) < root.depth + edge.root_per_frame:
        return NO_BUCKET
    return bucket_id(edge, root)


def bucket_id(edge: Edge, root: Root) -> int:
    index = root.index if edge.root_per_frame else 0
    return derive_activation_id(root.activation_id, root.node, index, edge.target, edge.group)


def find_root(lineage: Lineage, node: str) -> Root | None:
    for root in reversed(lineage.roots):
        if root.node == node:
            return root
    return None


def above(lineage: Lineage, root: Root, *, inclusive: bool = True) -> tuple[Root, ...]:
    """The roots down to this one."""
    end = lineage.roots.index(root) + inclusive
    return lineage.roots[:end]
