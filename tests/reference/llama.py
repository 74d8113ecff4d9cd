"""A tiny Llama with random weights whose answers depend on all of the prompt; it has no tokenizer: prompts are ids."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

VOCAB_SIZE = 128
NUM_HEADS = 4


def build(directory: Path, num_key_value_heads: int = 2) -> Path:
    """Write the checkpoint."""
    config = LlamaConfig(
        hidden_size=128,
        intermediate_size=128,
        num_hidden_layers=3,
        num_attention_heads=NUM_HEADS,
        num_key_value_heads=num_key_value_heads,
        vocab_size=VOCAB_SIZE,
        max_position_embeddings=1024,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=3,
        tie_word_embeddings=False,
        torch_dtype="float32",
    )
    config.architectures = ["LlamaForCausalLM"]
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).float()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                # With transformers' own small spread, the outputs of all prompts would be equal.
                weight.copy_(torch.randn_like(weight) / weight[0].numel() ** 0.5)
    model.save_pretrained(directory)
    return directory
