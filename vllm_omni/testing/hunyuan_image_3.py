"""Build a tiny random HunyuanImage-3 checkpoint, offline, in the layout of the real one.

python -m vllm_omni.testing.hunyuan_image_3 DIRECTORY [--variant deep] [--seed 1]
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers.pre_tokenizers import ByteLevel
from torch import Tensor

from vllm_omni.testing.byte_tokenizer import NUM_BYTES, make_tokenizer
from vllm_omni.testing.variants import find_variant

NUM_RATIOS = 33
MARKS = (
    "<|startoftext|>", "<|endoftext|>", "<pad>", "<boi>", "<eoi>", "<img>", "<cfg>", "<timestep>", "<guidance>",
    "<joint_img_sep>", "<think>", "</think>", "<recaption>", "</recaption>", "<answer>", "</answer>",
)  # fmt: skip
ENDS = ("<|endoftext|>", "</recaption>")
PATCH_SIZE = 16  # pixels of a patch of a view
WAVE_SIZE = 256  # of a time's embedding
HEAD_SCALE = 3.0  # margins between the best ids that rounding does not cross
RATIO_SCALE = 1.2  # of the logits of sizes
ROUTER_SCALE = 2.0  # margins between the best experts, likewise


@dataclass(frozen=True)
class HunyuanImage3Shape:
    """Sizes that vary between checkpoints."""

    hidden_size: int = 128
    num_layers: int = 2
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 32
    num_experts: int = 4
    top_k: int = 2
    expert_size: int = 64
    num_shared_experts: int = 1
    num_extra_tokens: int = 0
    image_base_size: int = 64  # pixels
    inner_size: int = 32  # channels between latents and the language model
    vit_size: int = 64
    vit_layers: int = 2
    vit_places: int = 16
    latent_channels: int = 16
    vae_channels: tuple[int, ...] = (32, 32, 32, 32, 32)
    end_scale: float = 1.4  # of the logits that end a text

    @property
    def special_tokens(self) -> tuple[str, ...]:
        ratios = (f"<img_ratio_{index}>" for index in range(NUM_RATIOS))
        return (*MARKS, f"<img_size_{self.image_base_size}>", *ratios)

    @property
    def vocab_size(self) -> int:
        return NUM_BYTES + self.num_extra_tokens + len(self.special_tokens)

    def token_id(self, token: str) -> int:
        return NUM_BYTES + self.num_extra_tokens + self.special_tokens.index(token)


VARIANTS = {
    "base": HunyuanImage3Shape(),
    "deep": HunyuanImage3Shape(
        hidden_size=96, num_layers=3, num_heads=3, num_kv_heads=3, num_experts=6, top_k=3, expert_size=96,
        num_shared_experts=2, num_extra_tokens=7, image_base_size=80, inner_size=64, vit_size=48, vit_layers=1,
        vit_places=9, latent_channels=32, vae_channels=(32, 64, 64, 64, 64), end_scale=1.7,
    ),
    "wide": HunyuanImage3Shape(
        hidden_size=512, num_layers=8, num_heads=8, num_kv_heads=4, head_dim=64, num_experts=8, expert_size=512,
        image_base_size=256, inner_size=128, vit_size=128, vit_places=64,
    ),
}  # fmt: skip


def build(path: Path, *, seed: int = 0, variant: str = "base", shape: HunyuanImage3Shape | None = None) -> Path:
    """Write a checkpoint into the directory ``path``; the same arguments give the same bytes.

    Raises:
        ValueError: the variant is unknown.
    """
    shape = shape or find_variant(VARIANTS, variant)
    path.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(seed)
    config = make_config(shape)
    tensors = {name: _noise(name, one, generator) for name, one in _shapes(shape)}
    head = tensors["lm_head.weight"].mul_(HEAD_SCALE)
    for token in MARKS:
        head[shape.token_id(token)] *= shape.end_scale if token in ENDS else 0.0
    head[shape.token_id(f"<img_size_{shape.image_base_size}>")] = 0.0
    head[shape.token_id("<img_ratio_0>") :] *= RATIO_SCALE
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    (path / "config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
    generation = {
        **{name: config[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")},
        "sequence_template": "instruct",
        "flow_shift": 3.0,
        "diff_infer_steps": 4,
        "diff_guidance_scale": 2.5,
    }
    (path / "generation_config.json").write_text(json.dumps(generation) + "\n", encoding="utf-8")
    alphabet = sorted(ByteLevel.alphabet())
    names = {"eos_token": "<|endoftext|>", "pad_token": "<pad>"}
    tokenizer = make_tokenizer(alphabet, shape.special_tokens, {}, shape.num_extra_tokens, **names)
    tokenizer.bos_token = "<|startoftext|>"
    tokenizer.save_pretrained(path)
    return path


def make_config(shape: HunyuanImage3Shape) -> dict[str, Any]:
    """``config.json``, as the real one with fewer fields."""
    layers = range(shape.num_layers)
    return {
        "architectures": ["HunyuanImage3ForCausalMM"],
        "model_type": "hunyuan_image_3_moe",
        "torch_dtype": "float32",
        "hidden_size": shape.hidden_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "attention_head_dim": shape.head_dim,
        "attention_bias": False,
        "intermediate_size": shape.expert_size,
        "moe_intermediate_size": [shape.expert_size for _ in layers],
        "num_experts": shape.num_experts,
        "num_shared_expert": [shape.num_shared_experts for _ in layers],
        "moe_topk": [shape.top_k for _ in layers],
        "norm_topk_prob": True,
        "vocab_size": shape.vocab_size,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "rope_scaling": {"type": "custom"},
        "tie_word_embeddings": False,
        "bos_token_id": shape.token_id("<|startoftext|>"),
        "eos_token_id": shape.token_id("<|endoftext|>"),
        "pad_token_id": shape.token_id("<pad>"),
        "image_base_size": shape.image_base_size,
        "img_proj_type": "unet",
        "patch_size": 1,
        "patch_embed_hidden_dim": shape.inner_size,
        "vit": {
            "hidden_size": shape.vit_size,
            "intermediate_size": 2 * shape.vit_size,
            "num_hidden_layers": shape.vit_layers,
            "num_attention_heads": 2,
            "num_channels": 3,
            "patch_size": PATCH_SIZE,
            "num_patches": shape.vit_places,
            "hidden_act": "gelu_pytorch_tanh",
            "layer_norm_eps": 1e-6,
            "attention_dropout": 0.0,
            "vision_use_head": False,
        },
        "vit_processor": {
            "image_mean": [0.5, 0.5, 0.5],
            "image_std": [0.5, 0.5, 0.5],
            "patch_size": PATCH_SIZE,
            "max_num_patches": shape.vit_places,
            "resample": 2,
        },
        "vit_aligner": {"projector_type": "mlp_gelu", "input_dim": shape.vit_size, "n_embed": shape.hidden_size},
        "vae": {
            "in_channels": 3,
            "out_channels": 3,
            "latent_channels": shape.latent_channels,
            "block_out_channels": list(shape.vae_channels),
            "layers_per_block": 1,
            "ffactor_spatial": 16,
            "ffactor_temporal": 4,
            "scaling_factor": 0.5627,
            "downsample_match_channel": True,
            "upsample_match_channel": True,
        },
    }


Shapes = Iterator[tuple[str, tuple[int, ...]]]


def _shapes(shape: HunyuanImage3Shape) -> Shapes:
    size, head = shape.hidden_size, shape.head_dim
    yield "model.wte.weight", (shape.vocab_size, size)
    yield "lm_head.weight", (shape.vocab_size, size)
    yield "model.ln_f.weight", (size,)
    for index in range(shape.num_layers):
        layer = f"model.layers.{index}"
        for name in ("input_layernorm", "post_attention_layernorm"):
            yield f"{layer}.{name}.weight", (size,)
        yield f"{layer}.self_attn.qkv_proj.weight", ((shape.num_heads + 2 * shape.num_kv_heads) * head, size)
        yield f"{layer}.self_attn.o_proj.weight", (size, shape.num_heads * head)
        for name in ("query_layernorm", "key_layernorm"):
            yield f"{layer}.self_attn.{name}.weight", (head,)
        yield f"{layer}.mlp.gate.wg.weight", (shape.num_experts, size)
        experts = {f"experts.{one}": shape.expert_size for one in range(shape.num_experts)}
        for name, inner in {**experts, "shared_mlp": shape.expert_size * shape.num_shared_experts}.items():
            yield f"{layer}.mlp.{name}.gate_and_up_proj.weight", (2 * inner, size)
            yield f"{layer}.mlp.{name}.down_proj.weight", (size, inner)
    yield from _latent_shapes(shape)
    yield from _vit_shapes(shape)
    yield from _vae_shapes(shape)


def _latent_shapes(shape: HunyuanImage3Shape) -> Shapes:
    size, inner, num_channels = shape.hidden_size, shape.inner_size, shape.latent_channels
    yield from _biased("patch_embed.model.0", (inner, num_channels, 3, 3))
    yield from _timed_shapes("patch_embed.model.1", inner, size, size)
    yield from _timed_shapes("final_layer.model.0", size, inner, size)
    yield from _biased("final_layer.model.1.0", (inner,))
    yield from _biased("final_layer.model.1.2", (num_channels, inner, 3, 3))
    for name in ("time_embed", "timestep_emb", "time_embed_2"):
        yield from _biased(f"{name}.mlp.0", (size, WAVE_SIZE))
        yield from _biased(f"{name}.mlp.2", (size, size))


def _timed_shapes(prefix: str, before: int, size: int, time_size: int) -> Shapes:
    yield from _biased(f"{prefix}.in_layers.0", (before,))
    yield from _biased(f"{prefix}.in_layers.2", (size, before, 3, 3))
    yield from _biased(f"{prefix}.emb_layers.1", (2 * size, time_size))
    yield from _biased(f"{prefix}.out_layers.0", (size,))
    yield from _biased(f"{prefix}.out_layers.3", (size, size, 3, 3))
    yield from _biased(f"{prefix}.skip_connection", (size, before, 1, 1))


def _vit_shapes(shape: HunyuanImage3Shape) -> Shapes:
    size = shape.vit_size
    yield from _biased("vision_model.embeddings.patch_embedding", (size, 3 * PATCH_SIZE**2))
    yield "vision_model.embeddings.position_embedding.weight", (shape.vit_places, size)
    for index in range(shape.vit_layers):
        layer = f"vision_model.encoder.layers.{index}"
        for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
            yield from _biased(f"{layer}.self_attn.{name}", (size, size))
        yield from _biased(f"{layer}.mlp.fc1", (2 * size, size))
        yield from _biased(f"{layer}.mlp.fc2", (size, 2 * size))
        for name in ("layer_norm1", "layer_norm2"):
            yield from _biased(f"{layer}.{name}", (size,))
    yield from _biased("vision_model.post_layernorm", (size,))
    yield from _biased("vision_aligner.layers.0", (shape.hidden_size, size))
    yield from _biased("vision_aligner.layers.2", (shape.hidden_size, shape.hidden_size))


def _vae_shapes(shape: HunyuanImage3Shape) -> Shapes:
    sizes, num_moves = shape.vae_channels, 4  # the last level neither halves nor doubles
    yield from _biased("vae.encoder.conv_in", (sizes[0], 3, 3, 3, 3))
    for index, size in enumerate(sizes):
        level = f"vae.encoder.down.{index}"
        yield from _block_shapes(f"{level}.block.0", size)
        if index < num_moves:
            parts = 4 if index < num_moves // 2 else 8  # of a pixel, or of a pixel of two frames
            yield from _biased(f"{level}.downsample.conv", (sizes[index + 1] // parts, size, 3, 3, 3))
    yield from _middle_shapes("vae.encoder", sizes[-1], sizes[-1], 2 * shape.latent_channels)
    yield from _biased("vae.decoder.conv_in", (sizes[-1], shape.latent_channels, 3, 3, 3))
    for index, size in enumerate(reversed(sizes)):
        level = f"vae.decoder.up.{index}"
        for block in range(2):
            yield from _block_shapes(f"{level}.block.{block}", size)
        if index < num_moves:
            parts = 8 if index < num_moves // 2 else 4
            yield from _biased(f"{level}.upsample.conv", (sizes[-index - 2] * parts, size, 3, 3, 3))
    yield from _middle_shapes("vae.decoder", sizes[-1], sizes[0], 3)


def _middle_shapes(prefix: str, size: int, last_size: int, num_outputs: int) -> Shapes:
    for name in ("block_1", "block_2"):
        yield from _block_shapes(f"{prefix}.mid.{name}", size)
    yield from _biased(f"{prefix}.mid.attn_1.norm", (size,))
    for name in ("q", "k", "v", "proj_out"):
        yield from _biased(f"{prefix}.mid.attn_1.{name}", (size, size, 1, 1, 1))
    yield from _biased(f"{prefix}.norm_out", (last_size,))
    yield from _biased(f"{prefix}.conv_out", (num_outputs, last_size, 3, 3, 3))


def _block_shapes(prefix: str, size: int) -> Shapes:
    for name in ("1", "2"):
        yield from _biased(f"{prefix}.norm{name}", (size,))
        yield from _biased(f"{prefix}.conv{name}", (size, size, 3, 3, 3))


def _biased(name: str, shape: tuple[int, ...]) -> Shapes:
    yield f"{name}.weight", shape
    yield f"{name}.bias", shape[:1]


def _noise(name: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Fan-in scaling; norms near 1, biases near 0."""
    noise = torch.randn(shape, generator=generator)
    if len(shape) == 1:
        return noise * 0.1 + (1.0 if name.endswith("weight") else 0.0)
    if name.endswith(("wte.weight", "position_embedding.weight")):
        return noise
    return noise * (ROUTER_SCALE if ".gate.wg." in name else 1.0) / math.sqrt(math.prod(shape[1:]))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Build a tiny random HunyuanImage-3 checkpoint.")
    parser.add_argument("path", type=Path)
    parser.add_argument("--variant", choices=sorted(VARIANTS), default="base")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    print(build(arguments.path, seed=arguments.seed, variant=arguments.variant))
