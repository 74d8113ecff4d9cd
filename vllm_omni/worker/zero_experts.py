"""Routing to experts that compute nothing (LongCat-Flash), on the CPU, where vLLM has no kernels for them.

From: LongCat-Flash technical report, section 2.1.1 (zero-computation experts).
"""

from __future__ import annotations

import torch
from torch import Tensor


def choose_experts(
    hidden_states: Tensor,
    gating_output: Tensor,
    e_score_correction_bias: Tensor,
    topk: int,
    renormalize: bool,
    scoring_func: str = "softmax",
    indices_type: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Choose the experts of each token by their biased scores; the scores without the bias are their weights.

    The arguments are those of vLLM's ``fused_topk_bias``.

    Args:
        gating_output: [num_tokens, num_experts]; those that compute nothing come last.
        e_score_correction_bias: [num_experts].

    Returns:
        Weights, [num_tokens, topk] float32, and experts, [num_tokens, topk] int32 or ``indices_type``.
    """
    assert scoring_func == "softmax" and not renormalize, "LongCat-Flash is the one model with such experts"
    scores = gating_output.float().softmax(dim=-1)
    experts = (scores + e_score_correction_bias).topk(topk, dim=-1, sorted=False).indices
    return scores.gather(1, experts), experts.to(torch.int32 if indices_type is None else indices_type)


def scale_by_zero_experts(
    expert_indices: Tensor,
    expert_scales: Tensor,
    num_experts: int,
    zero_expert_type: str,
    hidden_states: Tensor,
) -> Tensor:
    """Compute what the experts that compute nothing add: each token's input, times the sum of their weights.

    The arguments are those of vLLM's ``zero_experts_compute_triton``.

    Args:
        expert_indices, expert_scales: [num_tokens, topk].
        num_experts: those that compute; the others have higher indices.
        hidden_states: [num_tokens, hidden_size].
    """
    assert zero_expert_type == "identity", f"zero experts of type {zero_expert_type!r}"
    weights = expert_scales.masked_fill(expert_indices < num_experts, 0.0).sum(dim=-1, keepdim=True)
    return hidden_states * weights.to(hidden_states.dtype)
