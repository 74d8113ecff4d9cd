"""Build a tiny random DeepSeek-V2 checkpoint, offline: multi-head latent attention in its real sizes, and experts."""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers.pre_tokenizers import ByteLevel
from transformers import DeepseekV2Config, DeepseekV2ForCausalLM

from vllm_omni.testing.byte_tokenizer import NUM_BYTES, make_tokenizer

SPECIAL_TOKENS = ("<|end|>", "<|pad|>")
SCALE = 1.5  # of weights, by their fan-in
HEAD_SCALE = 3.0  # margins between the best ids that rounding does not cross


def build(path: Path, *, seed: int = 0) -> Path:
    """Write a checkpoint into the directory ``path``; the same arguments give the same bytes."""
    config = DeepseekV2Config(
        vocab_size=NUM_BYTES + len(SPECIAL_TOKENS),
        hidden_size=64,
        intermediate_size=128,
        moe_intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=4,
        n_shared_experts=1,
        n_routed_experts=4,
        num_experts_per_tok=2,
        first_k_dense_replace=1,
        topk_method="greedy",
        n_group=1,
        topk_group=1,
        routed_scaling_factor=1.0,
        kv_lora_rank=512,  # these two as in the published model: vLLM's kernels have no other
        qk_rope_head_dim=64,
        qk_nope_head_dim=128,
        v_head_dim=128,
        q_lora_rank=None,
        max_position_embeddings=1024,
    )
    generator = torch.Generator().manual_seed(seed)
    model = DeepseekV2ForCausalLM(config).float()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                noise = torch.randn(parameter.shape, generator=generator)
                parameter.copy_(noise * SCALE / parameter.shape[-1] ** 0.5)
        model.lm_head.weight.mul_(HEAD_SCALE)
    model.save_pretrained(path)
    make_tokenizer(sorted(ByteLevel.alphabet()), SPECIAL_TOKENS, {}, 0).save_pretrained(path)
    return path
