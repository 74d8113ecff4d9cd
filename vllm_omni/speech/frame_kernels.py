"""Triton kernels of a frame's passes, on CUDA: one in place of each chain of small operations that no compiler fuses.

There, a pass of few rows is bound by how many kernels it starts: each takes some two microseconds, even to add a row.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor, nn


def attend(
    projected: Tensor,
    kept: Tensor,
    norms: tuple[nn.RMSNorm, nn.RMSNorm] | None,
    position: Tensor,
    cos: Tensor,
    sin: Tensor,
    mask: Tensor,
) -> tuple[Tensor, Tensor]:
    """Attend from one new row of each request: norms of heads, rotary embeddings and attention.

    Args:
        projected: [B, (heads + 2 * num_kv_heads) * head_dim], queries, keys and values.
        kept: [B, 2, num_kv_heads, length, head_dim]; only its first dimension may be strided.
        norms: of each head's queries and keys; None: there are none.
        position: [1] int64.
        cos, sin: of all positions, [length, head_dim] float32.
        mask: of all positions, [length, length] bool.

    Returns:
        [B, heads * head_dim]; the new keys and values, [B, 2, num_kv_heads, 1, head_dim].
    """
    num_rows = projected.shape[0]
    _, _, num_kv_heads, length, head_dim = kept.shape
    num_heads = projected.shape[1] // head_dim - 2 * num_kv_heads
    attended = projected.new_empty(num_rows, num_heads * head_dim)
    new = projected.new_empty(num_rows, 2, num_kv_heads, 1, head_dim)
    query_norm, key_norm = (projected, projected) if norms is None else (norms[0].weight, norms[1].weight)
    _attend[(num_rows, num_kv_heads)](
        projected,
        kept,
        query_norm,
        key_norm,
        cos,
        sin,
        position,
        mask,
        attended,
        new,
        projected.stride(0),
        kept.stride(0),
        0.0 if norms is None else norms[0].eps,
        head_dim**-0.5,
        HEADS_OF_EACH=num_heads // num_kv_heads,
        NUM_KV_HEADS=num_kv_heads,
        LENGTH=length,
        PADDED=1 << (length - 1).bit_length(),
        DIM=head_dim,
        HAS_NORMS=norms is not None,
        num_warps=4,
    )
    return attended, new


@triton.jit
def _normed_and_rotated(x, norm, cos, sin, eps, DIM: tl.constexpr, HAS_NORMS: tl.constexpr):
    dims = tl.arange(0, DIM)
    other = (dims + DIM // 2) % DIM
    head, turned = tl.load(x + dims).to(tl.float32), tl.load(x + other).to(tl.float32)
    if HAS_NORMS:
        scale = tl.rsqrt(tl.sum(head * head, 0) / DIM + eps)
        head = head * scale * tl.load(norm + dims).to(tl.float32)
        turned = turned * scale * tl.load(norm + other).to(tl.float32)
    turned = tl.where(dims < DIM // 2, -turned, turned)
    return head * cos + turned * sin


@triton.jit
def _attend(
    projected,
    kept,
    query_norm,
    key_norm,
    cos,
    sin,
    position,
    mask,
    attended,
    new,
    row_stride,
    kept_stride,
    eps,
    scale,
    HEADS_OF_EACH: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    LENGTH: tl.constexpr,
    PADDED: tl.constexpr,
    DIM: tl.constexpr,
    HAS_NORMS: tl.constexpr,
):
    row, kv_head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    dims, positions = tl.arange(0, DIM), tl.arange(0, PADDED)
    num_heads: tl.constexpr = HEADS_OF_EACH * NUM_KV_HEADS
    queries = projected + row * row_stride
    dtype = new.dtype.element_ty
    place = tl.load(position)
    # Rounded, as the passes without this kernel have them.
    cos = tl.load(cos + place * DIM + dims).to(dtype).to(tl.float32)
    sin = tl.load(sin + place * DIM + dims).to(dtype).to(tl.float32)
    key_at = queries + (num_heads + kv_head) * DIM
    key = _normed_and_rotated(key_at, key_norm, cos, sin, eps, DIM, HAS_NORMS).to(dtype)
    value = tl.load(key_at + NUM_KV_HEADS * DIM + dims)
    new_at = new + (row * 2 * NUM_KV_HEADS + kv_head) * DIM + dims
    tl.store(new_at, key)
    tl.store(new_at + NUM_KV_HEADS * DIM, value)

    is_new = (positions == place)[:, None]
    is_real = positions < LENGTH
    kept_at = kept + row * kept_stride + kv_head * LENGTH * DIM + positions[:, None] * DIM + dims[None, :]
    keys = tl.load(kept_at, mask=is_real[:, None], other=0.0)
    values = tl.load(kept_at + NUM_KV_HEADS * LENGTH * DIM, mask=is_real[:, None], other=0.0)
    keys = tl.where(is_new, key[None, :], keys).to(tl.float32)
    values = tl.where(is_new, value[None, :], values).to(tl.float32)
    is_seen = tl.load(mask + place * LENGTH + positions, mask=is_real, other=0) != 0
    for index in tl.static_range(HEADS_OF_EACH):
        head = kv_head * HEADS_OF_EACH + index
        query = _normed_and_rotated(queries + head * DIM, query_norm, cos, sin, eps, DIM, HAS_NORMS).to(dtype)
        scores = tl.sum(keys * (query.to(tl.float32) * scale)[None, :], 1)
        scores = tl.where(is_seen, scores, float("-inf"))
        weights = tl.exp(scores - tl.max(scores, 0))
        y = tl.sum(weights[:, None] * values, 0) / tl.sum(weights, 0)
        tl.store(attended + (row * num_heads + head) * DIM + dims, y.to(dtype))


def sample(logits: Tensor, noise: Tensor, table: Tensor) -> Tensor:
    """Sample one code for each row; the same as ``SamplingBatch.sample`` without this kernel.

    The k-th largest logit is found bit by bit, and so is the least one within top p: there is no sort.

    Args:
        logits: [B, size].
        noise: [B, size] float32.
        table: temperature, whether the row is greedy, top k and top p, [B, 4] float32.

    Returns:
        [B] int64.
    """
    num_rows, size = logits.shape
    codes = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    lowest_bit = 16 if logits.dtype == torch.bfloat16 else 0  # whose numbers have no bits below, as float32
    _sample[(num_rows,)](
        logits,
        noise,
        table,
        codes,
        logits.stride(0),
        noise.stride(0),
        size,
        PADDED=1 << (size - 1).bit_length(),
        LOWEST_BIT=lowest_bit,
        num_warps=4,
    )
    return codes


@triton.jit
def _sample(
    logits,
    noise,
    table,
    codes,
    logits_stride,
    noise_stride,
    size,
    PADDED: tl.constexpr,
    LOWEST_BIT: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    indices = tl.arange(0, PADDED)
    is_code = indices < size
    x = tl.load(logits + row * logits_stride + indices, mask=is_code, other=float("-inf")).to(tl.float32)
    best = tl.argmax(x, 0, tie_break_left=True)
    if tl.load(table + row * 4 + 1) != 0:
        tl.store(codes + row, best.to(tl.int64))
    else:
        x = tl.where(x == 0, 0.0, x)  # -0.0 and 0.0 tie
        bits = x.to(tl.int32, bitcast=True)
        # Unsigned numbers in the order of the logits; places behind the last code have the least.
        keys = tl.where(bits < 0, ~bits, bits ^ -2147483648).to(tl.uint32, bitcast=True)
        keys = tl.where(is_code, keys >> LOWEST_BIT, 0)
        scaled = (x - tl.max(x, 0)) / tl.load(table + row * 4)
        weights = tl.exp(scaled)
        k = tl.load(table + row * 4 + 2).to(tl.int32)
        if (k > 0) & (k < size):
            # The largest key that at least k keys reach.
            least = tl.zeros((), tl.uint32)
            for step in tl.static_range(32 - LOWEST_BIT):
                candidate = least | (1 << (31 - LOWEST_BIT - step))
                least = tl.where(tl.sum((keys >= candidate).to(tl.int32), 0) >= k, candidate, least)
            above = tl.sum((keys > least).to(tl.int32), 0)
            is_tie = (keys == least) & is_code
            rank = tl.cumsum(is_tie.to(tl.int32), 0)  # of those that tie with the k-th, the first are kept
            weights = tl.where((keys > least) | (is_tie & (rank <= k - above)), weights, 0.0)
        p = tl.load(table + row * 4 + 3)
        if p < 1:
            # The largest key such that it and those above reach top p.
            reached = p * tl.sum(weights, 0)
            least = tl.zeros((), tl.uint32)
            for step in tl.static_range(32 - LOWEST_BIT):
                candidate = least | (1 << (31 - LOWEST_BIT - step))
                least = tl.where(tl.sum(tl.where(keys >= candidate, weights, 0.0), 0) >= reached, candidate, least)
            above = tl.sum(tl.where(keys > least, weights, 0.0), 0)
            is_tie = (keys == least) & (weights > 0)
            before = tl.cumsum(is_tie.to(tl.float32), 0) - 1.0
            is_kept = (keys > least) | (is_tie & ((above + before * weights < reached) | (indices == best)))
            weights = tl.where(is_kept, weights, 0.0)
        drawn = tl.load(noise + row * noise_stride + indices, mask=is_code, other=1.0)
        code = tl.argmax(tl.where(is_code, weights / drawn, -1.0), 0, tie_break_left=True)
        tl.store(codes + row, code.to(tl.int64))
