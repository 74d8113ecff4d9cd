"""Pages of a request are copied out of a layer's cache and back in, whatever the memory layouts."""

import itertools

import pytest
import torch

from vllm_omni.kv import pages
from vllm_omni.kv.pages import GroupFormat, HeadRun, PagedCaches, match_heads

NUM_BLOCKS, NUM_HEADS, BLOCK_SIZE, CONTENT = 12, 4, 8, 6
# Names of vLLM's: how layers (L), blocks (B), heads (H), tokens (N) and content (C) follow each other in memory.
LAYOUTS = {"LBHNC": (0, 1, 2, 3), "LBNHC": (0, 2, 1, 3), "LHBNC": (1, 0, 2, 3)}


def make_layer(layout: str = "LBHNC", num_heads: int = NUM_HEADS, content: int = CONTENT, k: int = 1) -> torch.Tensor:
    """Make a layer [B * k, H, N / k, C] of distinct numbers."""
    sizes = (NUM_BLOCKS * k, num_heads, BLOCK_SIZE // k, content)
    order = LAYOUTS[layout]
    memory = torch.empty([sizes[dim] for dim in order])
    layer = memory.permute([order.index(dim) for dim in range(4)])
    layer.copy_(torch.randperm(layer.numel()).view(sizes))
    return layer


def make_caches(*layers: torch.Tensor, **paged: object) -> PagedCaches:
    named = {f"layer.{number}": layer for number, layer in enumerate(layers)}
    return PagedCaches(named, NUM_BLOCKS, block_size=BLOCK_SIZE, **paged)  # type: ignore[arg-type]


def make_buffers(caches: PagedCaches, num_pages: int) -> list[list[torch.Tensor]]:
    return [
        [torch.empty(shape, dtype=torch.uint8) for shape in group.buffer_shapes(num_pages)]
        for group in caches.format.groups
    ]


def copy_request(
    source: PagedCaches, source_blocks: list[int], target: PagedCaches, target_blocks: list[int], rank: int = 0
) -> None:
    """Copy pages out in two parts, as chunks are computed, and in as a whole."""
    buffers = make_buffers(source, len(source_blocks))
    for first in (0, len(source_blocks) // 2):
        end = len(source_blocks) // 2 if not first else len(source_blocks)
        blocks = torch.tensor(source_blocks[first:end], dtype=torch.int64)
        for name in source.layer_names:
            source.gather(name, blocks, first, buffers)
    for group, of_target in enumerate(target.format.groups):
        (run,) = match_heads(of_target, [source.format.groups[group]], rank)
        for buffer, in_buffer, of_blocks in source.format.groups[group].overlaps(0, len(target_blocks)):
            blocks = torch.tensor(target_blocks[of_blocks], dtype=torch.int64)
            target.scatter(group, buffers[group][buffer][:, in_buffer], blocks, run)


SOURCE_BLOCKS, TARGET_BLOCKS = [7, 2, 9, 3, 11], [1, 10, 0, 5, 6]


@pytest.mark.parametrize("buffer_bytes", [1, 4000, 1 << 20])
def test_pages_arrive_whatever_the_layouts(buffer_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "BUFFER_BYTES", buffer_bytes)
    untouched = [block for block in range(NUM_BLOCKS) if block not in TARGET_BLOCKS]
    dtypes = (torch.float32, torch.bfloat16, torch.float8_e4m3fn)
    for dtype, *layouts in itertools.product(dtypes, LAYOUTS, LAYOUTS):
        source, target = ([make_layer(layout).to(dtype) for _ in range(3)] for layout in layouts)
        before = [layer.clone() for layer in target]
        copy_request(make_caches(*source), SOURCE_BLOCKS, make_caches(*target), TARGET_BLOCKS)
        for theirs, ours, old in zip(source, target, before, strict=True):
            assert torch.equal(ours[TARGET_BLOCKS].float(), theirs[SOURCE_BLOCKS].float()), (layouts, dtype)
            assert torch.equal(ours[untouched].float(), old[untouched].float()), (layouts, dtype)


def test_layers_of_one_allocation_with_blocks_outermost() -> None:
    memory = torch.randperm(NUM_BLOCKS * 2 * NUM_HEADS * BLOCK_SIZE * CONTENT)
    source = memory.view(NUM_BLOCKS, 2, NUM_HEADS, BLOCK_SIZE, CONTENT).float()
    target = torch.zeros_like(source)
    copy_request(make_caches(*source.unbind(1)), SOURCE_BLOCKS, make_caches(*target.unbind(1)), TARGET_BLOCKS)
    assert torch.equal(target[TARGET_BLOCKS], source[SOURCE_BLOCKS])


def test_a_kernels_blocks_may_be_parts_of_the_schedulers() -> None:
    for k in (2, 4):
        source, target = make_layer(k=k), make_layer(k=k)
        copy_request(make_caches(source), SOURCE_BLOCKS, make_caches(target), TARGET_BLOCKS)
        theirs, ours = (layer.unflatten(0, (NUM_BLOCKS, k)) for layer in (source, target))
        assert torch.equal(ours[TARGET_BLOCKS], theirs[SOURCE_BLOCKS]), k


def test_layers_with_other_pages_go_in_groups_of_their_own() -> None:
    shapes = [(NUM_HEADS, CONTENT), (1, 16), (NUM_HEADS, CONTENT), (2, CONTENT)]
    source, target = ([make_layer("LBHNC", *shape) for shape in shapes] for _ in range(2))
    caches = make_caches(*source)
    assert [(group.num_layers, group.num_heads) for group in caches.format.groups] == [(2, 4), (1, 1), (1, 2)]
    copy_request(caches, SOURCE_BLOCKS, make_caches(*target), TARGET_BLOCKS)
    for theirs, ours in zip(source, target, strict=True):
        assert torch.equal(ours[TARGET_BLOCKS], theirs[SOURCE_BLOCKS])


def test_layers_that_share_a_cache_travel_once() -> None:
    first, second = make_layer(), make_layer()
    caches = make_caches(first, second, first)
    assert caches.layer_names == ["layer.0", "layer.1"] and caches.owner("layer.2") == "layer.0"
    assert caches.format.groups[0].num_layers == 2


def test_heads_of_two_ranks_become_one_and_back() -> None:
    whole, halves = make_layer(), [make_layer("LBNHC", 2), make_layer("LHBNC", 2)]
    ranks = [
        make_caches(half, total_heads={"layer.0": NUM_HEADS}, tp_rank=rank, tp_size=2)
        for rank, half in enumerate(halves)
    ]
    for rank, caches in enumerate(ranks):
        copy_request(make_caches(whole, total_heads={"layer.0": NUM_HEADS}), SOURCE_BLOCKS, caches, TARGET_BLOCKS, rank)
        assert torch.equal(halves[rank][TARGET_BLOCKS], whole[SOURCE_BLOCKS][:, 2 * rank : 2 * rank + 2])


def group_of(num_heads: int, first_head: int, total: int | None = 4) -> GroupFormat:
    return GroupFormat(1, num_heads, (8, 16), total, first_head)


def ranks(total: int, tp_size: int) -> list[GroupFormat]:
    num_heads = max(1, total // tp_size)
    return [group_of(num_heads, rank * total // tp_size, total) for rank in range(tp_size)]


def test_each_rank_has_each_of_its_heads_once() -> None:
    for total, *sizes in itertools.product((1, 2, 4, 6), (1, 2, 4, 8), (1, 2, 4, 8)):
        if any(total % size and size % total for size in sizes):
            continue  # vLLM does not shard heads so
        sources, targets = (ranks(total, size) for size in sizes)
        for rank, target in enumerate(targets):
            heads: dict[int, int] = {}
            for run in match_heads(target, sources, rank):
                for number in range(run.num_heads):
                    assert run.target_first + number not in heads, (total, sizes)
                    heads[run.target_first + number] = sources[run.source_rank].first_head + run.source_first + number
            assert heads == {number: target.first_head + number for number in range(target.num_heads)}, (total, sizes)


def test_replicated_heads_are_taken_from_the_rank_of_the_same_place() -> None:
    sources = [group_of(1, 0, 1) for _ in range(4)]
    assert [match_heads(group_of(1, 0, 1), sources, rank)[0].source_rank for rank in range(4)] == [0, 1, 2, 3]


def test_uncounted_heads_go_from_rank_to_rank() -> None:
    unknown = [group_of(2, 0, None), group_of(2, 0, None)]
    assert match_heads(unknown[1], unknown, 1) == [HeadRun(1, 0, 0, 2)]
    with pytest.raises(ValueError, match="heads cannot be matched"):
        match_heads(group_of(4, 0, None), unknown, 0)
    with pytest.raises(ValueError, match=r"count \['2', '4'\] heads"):
        match_heads(group_of(2, 0, 2), [group_of(4, 0, 4)], 0)
    with pytest.raises(ValueError, match=r"no source rank has the heads \[2, 3\]"):
        match_heads(group_of(4, 0), [group_of(2, 0)], 0)


def test_a_cache_without_pages_is_rejected_by_its_shape() -> None:
    with pytest.raises(ValueError, match=r"layer.0: a cache of torch.float32 \[5, 4, 8, 6\]"):
        make_caches(make_layer()[:5])
    with pytest.raises(ValueError, match="must be"):
        make_caches(make_layer()[..., ::2])
    with pytest.raises(ValueError, match="without caches"):
        make_caches()
