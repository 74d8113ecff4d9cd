"""Attention of a step in which some tokens of a request see those behind them, and others do not.

vLLM's metadata have a row for each request and, on some backends, a flag for each row. A request whose tokens attend in
several ways gets several rows with the same pages: one behind the other, each as long as the sequence up to its end.
Keys and values of a step are written before it attends, so that the order is right.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

import torch
from vllm.v1.attention.backend import CommonAttentionMetadata

from vllm_omni.unified.spans import Piece


def build_by_pieces(runner: Any, metadata: Mapping[str, Any], pieces: Sequence[Sequence[Piece]]) -> dict[str, Any]:
    """Build a step's attention metadata again, with a row for each piece.

    Args:
        runner: vLLM's V1 runner, behind its own ``_build_attention_metadata``.
        metadata: what that has built, by layer.
        pieces: of each request of the batch.
    """
    device, num_reqs = runner.device, len(pieces)
    requests = [index for index, several in enumerate(pieces) for _ in several]
    lengths = [piece.num_tokens for several in pieces for piece in several]
    ends: list[int] = []
    for index, several in enumerate(pieces):
        start = int(runner.input_batch.num_computed_tokens_cpu[index])
        ends += list(accumulate((piece.num_tokens for piece in several), initial=start))[1:]
    query_start_loc = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
    seq_lens = torch.tensor(ends, dtype=torch.int32)
    is_causal = [piece.is_causal for several in pieces for piece in several]
    computed = runner.input_batch.num_computed_tokens_cpu_tensor[:num_reqs]
    is_prefilling = computed < runner.input_batch.num_prompt_tokens_cpu_tensor[:num_reqs]
    made = dict(metadata)
    for group_id, groups in enumerate(runner.attn_groups):
        block_table = runner.input_batch.block_table[group_id].get_device_tensor(num_reqs)
        for group in groups:
            common = CommonAttentionMetadata(
                query_start_loc=query_start_loc.to(device),
                query_start_loc_cpu=query_start_loc,
                seq_lens=seq_lens.to(device),
                seq_lens_cpu_upper_bound=seq_lens,
                num_reqs=len(requests),
                num_actual_tokens=int(query_start_loc[-1]),
                max_query_len=max(lengths),
                max_seq_len=max(ends),
                block_table_tensor=block_table[torch.tensor(requests, device=device)],
                slot_mapping=metadata[group.layer_names[0]].slot_mapping,
                causal=torch.tensor(is_causal, dtype=torch.int32, device=device),
                positions=runner.positions[: int(query_start_loc[-1])],
                is_prefilling=is_prefilling[torch.tensor(requests)],
            )
            built = group.build_metadata(common)
            made |= dict.fromkeys(group.layer_names, built)
    return made
