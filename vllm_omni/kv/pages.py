"""Copy pages of a request out of the paged caches of all layers into buffers of the relay, and back in.

vLLM gives every layer's cache as a logical [B, H, N, C]: blocks, heads of this rank, tokens of a block, and the content
that one head keeps of one token; strides say how it lies in memory. The attention backend defines the meaning of [N, C]
(the CPU's packs keys so that a token is not a row), so the page of a head is never cut: a page travels whole, also the
last one of a prompt, which is partly filled.

Pages lie in a buffer as bytes [L, pages, H, ...], in this logical order: two caches that differ in their strides, or
in how heads are spread over tensor-parallel ranks, can read each other's.

From: HydraInfer, section 4.3 (paged caches of images, keys and values, and their migration).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import NamedTuple

import msgspec
import torch
from torch import Tensor

from vllm_omni.ops.block_copy import gather_pages, scatter_pages

BUFFER_BYTES = 16 << 20  # a buffer is not larger, unless it holds a single page of all layers


class GroupFormat(msgspec.Struct, frozen=True, array_like=True):
    """Layers whose pages have the same shape."""

    num_layers: int
    num_heads: int  # of this rank
    head_page: tuple[int, ...]  # shape of one head's page, the last in bytes
    total_heads: int | None = None  # of the whole model; None: not known, and ranks cannot be matched by heads
    first_head: int = 0  # index in the model of this rank's first head

    @property
    def page_bytes(self) -> int:
        """Bytes of one page of all these layers."""
        return self.num_layers * self.num_heads * prod(self.head_page)

    @property
    def pages_per_buffer(self) -> int:
        return max(1, BUFFER_BYTES // self.page_bytes)

    def buffer_shapes(self, num_pages: int) -> list[tuple[int, ...]]:
        """Return the shapes of the buffers for a number of pages; all but the last are full."""
        per_buffer = self.pages_per_buffer
        return [
            (self.num_layers, min(per_buffer, num_pages - first), self.num_heads, *self.head_page)
            for first in range(0, num_pages, per_buffer)
        ]

    def overlaps(self, first_page: int, num_pages: int) -> Iterator[tuple[int, slice, slice]]:
        """Yield the buffers that hold a run of pages: index, the pages in the buffer, and their places in the run."""
        page, end = first_page, first_page + num_pages
        while page < end:
            buffer, offset = divmod(page, self.pages_per_buffer)
            num = min(self.pages_per_buffer - offset, end - page)
            yield buffer, slice(offset, offset + num), slice(page - first_page, page - first_page + num)
            page += num


class CacheFormat(msgspec.Struct, frozen=True, array_like=True):
    """The layout of one rank's caches."""

    content: str  # everything else that must be equal: backend, dtype, names of the layers
    block_size: int  # tokens
    groups: tuple[GroupFormat, ...]


class HeadRun(NamedTuple):
    """Heads that one rank takes from another, in the indices of both."""

    source_rank: int
    source_first: int
    target_first: int
    num_heads: int


def match_heads(target: GroupFormat, sources: Sequence[GroupFormat], rank: int) -> list[HeadRun]:
    """Assign each head of a target rank to one source rank.

    Args:
        rank: the target's own, which spreads reads of replicated heads over the ranks that have them.

    Raises:
        ValueError: the ranks' heads are not known and their numbers differ, or no source has some of them.
    """
    if target.total_heads is None or any(one.total_heads != target.total_heads for one in sources):
        totals = {one.total_heads for one in (target, *sources)}
        if len(totals) == 1 and rank < len(sources) and sources[rank].num_heads == target.num_heads:
            return [HeadRun(rank, 0, 0, target.num_heads)]
        raise ValueError(f"heads cannot be matched: the ranks count {sorted(map(str, totals))} heads in all")
    runs = []
    missing = list(range(target.first_head, target.first_head + target.num_heads))
    for source_rank in sorted(range(len(sources)), key=lambda one: one != rank % len(sources)):
        source = sources[source_rank]
        theirs = range(source.first_head, source.first_head + source.num_heads)
        shared = [head for head in missing if head in theirs]  # contiguous, since both sides are
        if shared:
            first = shared[0]
            runs.append(HeadRun(source_rank, first - source.first_head, first - target.first_head, len(shared)))
            missing = [head for head in missing if head not in theirs]
    if missing:
        raise ValueError(f"no source rank has the heads {missing}")
    return runs


class PagedCaches:
    """All layers' caches of one rank.

    Args:
        caches: by the layer's name, [B * k, H, N, C] with any strides: where an attention kernel has smaller blocks
            than the scheduler, ``k`` of them make a block. Layers that share a cache are one.
        num_blocks: B.
        block_size: tokens of a block.
        content: see ``CacheFormat``.
        total_heads: heads of the whole model by layer; a layer that is missing in it has the same heads on every rank.
        tp_rank, tp_size: of this rank.

    Raises:
        ValueError: no layers, or one that is not like this.
    """

    def __init__(
        self,
        caches: Mapping[str, Tensor],
        num_blocks: int,
        *,
        block_size: int,
        content: str = "",
        total_heads: Mapping[str, int] | None = None,
        tp_rank: int = 0,
        tp_size: int = 1,
    ):
        if not caches:
            raise ValueError("a model without caches has no pages to move")
        by_shape: dict[tuple[int | None, tuple[int, ...]], list[str]] = {}
        pages: dict[str, Tensor] = {}
        seen: dict[tuple[int, ...], str] = {}
        self._owner: dict[str, str] = {}
        for name, cache in caches.items():
            layer = _as_pages(name, cache, num_blocks)
            self._owner[name] = seen.setdefault((layer.data_ptr(), *layer.shape, *layer.stride()), name)
            if self._owner[name] == name:
                pages[name] = layer
                total = None if total_heads is None else total_heads.get(name, layer.shape[1])
                by_shape.setdefault((total, tuple(layer.shape[1:])), []).append(name)
        self.num_blocks = num_blocks
        self.device = next(iter(pages.values())).device
        self._layers: list[list[Tensor]] = []  # by group; each [B, H, *head_page], uint8
        groups: list[GroupFormat] = []
        self._place: dict[str, tuple[int, int]] = {}  # layer -> its group and its index there
        for (total, (num_heads, *head_page)), names in by_shape.items():
            first_head = 0 if total is None or total == num_heads else tp_rank * total // tp_size
            self._place |= {name: (len(groups), index) for index, name in enumerate(names)}
            self._layers.append([pages[name] for name in names])
            groups.append(GroupFormat(len(names), num_heads, tuple(head_page), total, first_head))
        self.format = CacheFormat(content, block_size, tuple(groups))

    @property
    def layer_names(self) -> list[str]:
        """One name for each cache; layers may share one."""
        return list(self._place)

    def owner(self, name: str) -> str:
        """Return the name in ``layer_names`` of a layer's cache."""
        return self._owner[name]

    def gather(self, name: str, blocks: Tensor, first_page: int, buffers: Sequence[Sequence[Tensor]]) -> None:
        """Copy a layer's blocks out.

        Args:
            blocks: [num], int64, on the CPU; they become page ``first_page`` of the request and the following ones.
            buffers: by group, those of ``GroupFormat.buffer_shapes`` for the whole request; written in place.
        """
        group, layer = self._place[name]
        rows = self._layers[group][layer]
        for buffer, pages, of_blocks in self.format.groups[group].overlaps(first_page, len(blocks)):
            part = buffers[group][buffer][layer, pages]
            if part.device == rows.device and rows[:1].is_contiguous():
                gather_pages(rows, blocks[of_blocks], part)
            else:
                part.copy_(rows.index_select(0, blocks[of_blocks].to(rows.device)))

    def scatter(self, group: int, buffer: Tensor, blocks: Tensor, run: HeadRun) -> None:
        """Copy pages of all layers of a group in.

        Args:
            buffer: [L, num, heads of the source rank, ...], uint8.
            blocks: [num], int64, on the CPU: the destination.
            run: the source's heads and the heads here that they become.
        """
        source_heads = slice(run.source_first, run.source_first + run.num_heads)
        target_heads = slice(run.target_first, run.target_first + run.num_heads)
        for layer, pages in zip(self._layers[group], buffer[:, :, source_heads], strict=True):
            rows = layer[:, target_heads]
            if pages.device == rows.device and rows[:1].is_contiguous():
                scatter_pages(pages.contiguous(), blocks, rows)
            else:
                rows.index_copy_(0, blocks.to(rows.device), pages.to(rows.device))


def _as_pages(name: str, cache: Tensor, num_blocks: int) -> Tensor:
    """Return a layer's cache as a view [B, H, ..., bytes]."""
    if cache.dim() != 4 or not num_blocks or cache.shape[0] % num_blocks or cache.stride(-1) != 1:
        raise ValueError(
            f"layer {name}: a cache of {cache.dtype} {list(cache.shape)}, strides {cache.stride()}, has no pages of "
            f"{num_blocks} blocks: must be [blocks, heads, tokens, content]"
        )
    if cache.shape[0] != num_blocks:
        cache = cache.unflatten(0, (num_blocks, -1)).transpose(1, 2)
    return cache.view(torch.uint8)
