"""Build a tiny random LongCat-Flash checkpoint, offline: latent attention in its real sizes, and zero experts.

Its vocabulary may go on with ids of discrete sound and pictures, as LongCat-Next's does; the tokenizer knows them as
special tokens.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tokenizers.pre_tokenizers import ByteLevel
from transformers import LongcatFlashConfig, LongcatFlashForCausalLM

from vllm_omni.testing.byte_tokenizer import NUM_BYTES, make_tokenizer

SPECIAL_TOKENS = ("<|im_end|>", "<|endoftext|>")
NUM_TEXT_IDS = NUM_BYTES + len(SPECIAL_TOKENS)
NUM_EXPERTS, NUM_ZERO_EXPERTS = 4, 2
SCALE = 1.5  # of weights, by their fan-in
HEAD_SCALE = 3.0  # margins between the best ids that rounding does not cross
BIAS = 0.1  # of the router's choice


def make_model(*, seed: int = 0, num_audio_ids: int = 0, num_image_ids: int = 0) -> LongcatFlashForCausalLM:
    """The model of transformers, which cannot read the published layout: it wants weights of zero experts, too."""
    config = LongcatFlashConfig(
        vocab_size=NUM_TEXT_IDS + num_audio_ids + num_image_ids,
        hidden_size=64,
        num_layers=2,  # of two attention layers each
        num_attention_heads=4,
        ffn_hidden_size=96,
        expert_ffn_hidden_size=48,
        n_routed_experts=NUM_EXPERTS,
        zero_expert_num=NUM_ZERO_EXPERTS,
        moe_topk=2,
        routed_scaling_factor=1.5,
        q_lora_rank=32,
        kv_lora_rank=512,  # these two as in the published model: vLLM's kernels have no other
        qk_rope_head_dim=64,
        qk_nope_head_dim=128,
        v_head_dim=128,
        max_position_embeddings=1024,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
        # vLLM reads these, which the published configuration has; transformers computes as if they were so.
        mla_scale_q_lora=True,
        mla_scale_kv_lora=True,
        zero_expert_type="identity",
    )
    generator = torch.Generator().manual_seed(seed)
    model = LongcatFlashForCausalLM(config).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                noise = torch.randn(parameter.shape, generator=generator)
                parameter.copy_(noise * SCALE / parameter.shape[-1] ** 0.5)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(BIAS * torch.randn(buffer.shape, generator=generator))
        model.lm_head.weight.mul_(HEAD_SCALE)
    return model


def build(path: Path, *, seed: int = 0, num_audio_ids: int = 0, num_image_ids: int = 0) -> Path:
    """Write a checkpoint into the directory ``path``; the same arguments give the same bytes."""
    make_model(seed=seed, num_audio_ids=num_audio_ids, num_image_ids=num_image_ids).save_pretrained(path)
    # transformers writes weights of zero experts, which compute nothing; no published checkpoint has them.
    tensors = load_file(path / "model.safetensors")
    kept = {name: tensor for name, tensor in tensors.items() if not _is_of_zero_expert(name)}
    save_file(kept, path / "model.safetensors", {"format": "pt"})
    codes = [f"<|audio_{code}|>" for code in range(num_audio_ids)] + [
        f"<|image_{code}|>" for code in range(num_image_ids)
    ]
    make_tokenizer(sorted(ByteLevel.alphabet()), [*SPECIAL_TOKENS, *codes], {}).save_pretrained(path)
    if codes:
        config = json.loads((path / "config.json").read_text(encoding="utf-8"))
        # Names as in LongCat-Next's configuration.
        config |= {"audio_offset": NUM_TEXT_IDS, "visual_offset": NUM_TEXT_IDS + num_audio_ids}
        (path / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    return path


def _is_of_zero_expert(name: str) -> bool:
    expert = re.search(r"\.experts\.(\d+)\.", name)
    return expert is not None and int(expert[1]) >= NUM_EXPERTS
