"""Build a tiny random BAGEL checkpoint, offline, in the layout of the real one.

python -m vllm_omni.testing.bagel DIRECTORY [--variant deep] [--seed 1]
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

SPECIAL_TOKENS = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>",
)  # fmt: skip
WAVE_SIZE = 256  # of the time's embedding
LATENT_CHANNELS = 16
HEAD_SCALE = 3.0  # margins between the best ids that rounding does not cross
VIEW_SCALE = 8.0  # of what images are seen as, beside their places: answers differ with it
END_SCALE = 1.4  # of the logit that ends a text


@dataclass(frozen=True)
class BagelShape:
    """Sizes that vary between checkpoints."""

    hidden_size: int = 128
    num_layers: int = 2
    num_heads: int = 4
    num_kv_heads: int = 2
    intermediate_size: int = 160
    num_extra_tokens: int = 0
    max_latent_size: int = 8
    vit_size: int = 64
    vit_layers: int = 2
    vit_side: int = 7  # patches of the largest view
    vae_channels: int = 32
    vae_levels: tuple[int, ...] = (1, 1, 1, 1)

    @property
    def vocab_size(self) -> int:
        return NUM_BYTES + self.num_extra_tokens + len(SPECIAL_TOKENS)

    def token_id(self, token: str) -> int:
        return NUM_BYTES + self.num_extra_tokens + SPECIAL_TOKENS.index(token)


VARIANTS = {
    "base": BagelShape(),
    "deep": BagelShape(
        hidden_size=96, num_layers=3, num_heads=3, num_kv_heads=3, intermediate_size=200, num_extra_tokens=7,
        max_latent_size=6, vit_size=48, vit_layers=1, vit_side=5, vae_levels=(1, 2, 1, 1),
    ),
    "wide": BagelShape(
        hidden_size=512, num_layers=10, num_heads=8, num_kv_heads=4, intermediate_size=1408, max_latent_size=16,
        vit_size=128, vit_side=14,
    ),
}  # fmt: skip


def build(path: Path, *, seed: int = 0, variant: str = "base", shape: BagelShape | None = None) -> Path:
    """Write a checkpoint into the directory ``path``; the same arguments give the same bytes.

    Raises:
        ValueError: the variant is unknown.
    """
    shape = shape or find_variant(VARIANTS, variant)
    path.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(seed)
    tensors = {name: _noise(name, one, generator) for name, one in _shapes(shape)}
    head = tensors["language_model.lm_head.weight"].mul_(HEAD_SCALE)
    for token in SPECIAL_TOKENS:
        head[shape.token_id(token)] *= END_SCALE if token == "<|im_end|>" else 0.0
    save_file(tensors, path / "ema.safetensors", {"format": "pt"})
    vae = {name: _noise(name, one, generator) for name, one in _vae_shapes(shape)}
    save_file(vae, path / "ae.safetensors", {"format": "pt"})
    config = make_config(shape)
    (path / "config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
    end = shape.token_id("<|im_end|>")
    generation = {"eos_token_id": end, "pad_token_id": shape.token_id("<|endoftext|>")}
    (path / "generation_config.json").write_text(json.dumps(generation) + "\n", encoding="utf-8")
    alphabet = sorted(ByteLevel.alphabet())
    make_tokenizer(alphabet, SPECIAL_TOKENS, {}, shape.num_extra_tokens).save_pretrained(path)
    return path


def make_config(shape: BagelShape) -> dict[str, Any]:
    """``config.json``, with the sizes of images and the auto-encoder's shape, which the real one has not."""
    longest, view = 16 * (shape.max_latent_size - 1), 14 * shape.vit_side
    return {
        "architectures": ["BagelForConditionalGeneration"],
        "model_type": "bagel",
        "visual_gen": True,
        "visual_und": True,
        "connector_act": "gelu_pytorch_tanh",
        "interpolate_pos": False,
        "latent_patch_size": 2,
        "max_latent_size": shape.max_latent_size,
        "vit_max_num_patch_per_side": shape.vit_side,
        "timestep_shift": 1.0,
        "torch_dtype": "float32",
        "image_sizes": {"latents": [longest, 32, 16], "view": [view, 28, 14]},
        "llm_config": {
            "architectures": ["Qwen2ForCausalLM"],
            "model_type": "qwen2",
            "hidden_act": "silu",
            "hidden_size": shape.hidden_size,
            "num_hidden_layers": shape.num_layers,
            "num_attention_heads": shape.num_heads,
            "num_key_value_heads": shape.num_kv_heads,
            "intermediate_size": shape.intermediate_size,
            "vocab_size": shape.vocab_size,
            "max_position_embeddings": 8192,
            "rms_norm_eps": 1e-6,
            "rope_theta": 1000000.0,
            "tie_word_embeddings": False,
            "use_sliding_window": False,
            "bos_token_id": shape.token_id("<|im_start|>"),
            "eos_token_id": shape.token_id("<|im_end|>"),
            "qk_norm": True,
            "layer_module": "Qwen2MoTDecoderLayer",
        },
        "vit_config": {
            "model_type": "siglip_vision_model",
            "num_channels": 3,
            "hidden_act": "gelu_pytorch_tanh",
            "layer_norm_eps": 1e-6,
            "hidden_size": shape.vit_size,
            "intermediate_size": 2 * shape.vit_size,
            "num_hidden_layers": shape.vit_layers + 1,  # as in the real file, one more than there are
            "num_attention_heads": 2,
            "image_size": view,
            "patch_size": 14,
        },
        "vae_config": {
            "z_channels": LATENT_CHANNELS,
            "downsample": 8,
            "ch": shape.vae_channels,
            "ch_mult": list(shape.vae_levels),
            "num_res_blocks": 1,
        },
    }


Shapes = Iterator[tuple[str, tuple[int, ...]]]


def _shapes(shape: BagelShape) -> Shapes:
    size, head = shape.hidden_size, shape.hidden_size // shape.num_heads
    yield "language_model.model.embed_tokens.weight", (shape.vocab_size, size)
    yield "language_model.lm_head.weight", (shape.vocab_size, size)
    for end in ("", "_moe_gen"):
        yield f"language_model.model.norm{end}.weight", (size,)
        for index in range(shape.num_layers):
            layer = f"language_model.model.layers.{index}"
            for name, heads in (("q", shape.num_heads), ("k", shape.num_kv_heads), ("v", shape.num_kv_heads)):
                yield from _biased(f"{layer}.self_attn.{name}_proj{end}", (heads * head, size))
            yield f"{layer}.self_attn.o_proj{end}.weight", (size, size)
            for name in ("q_norm", "k_norm"):
                yield f"{layer}.self_attn.{name}{end}.weight", (head,)
            for name in ("gate_proj", "up_proj"):
                yield f"{layer}.mlp{end}.{name}.weight", (shape.intermediate_size, size)
            yield f"{layer}.mlp{end}.down_proj.weight", (size, shape.intermediate_size)
            for name in ("input_layernorm", "post_attention_layernorm"):
                yield f"{layer}.{name}{end}.weight", (size,)
    yield from _biased("vae2llm", (size, 4 * LATENT_CHANNELS))
    yield from _biased("llm2vae", (4 * LATENT_CHANNELS, size))
    yield from _biased("time_embedder.mlp.0", (size, WAVE_SIZE))
    yield from _biased("time_embedder.mlp.2", (size, size))
    yield "latent_pos_embed.pos_embed", (shape.max_latent_size**2, size)
    yield "vit_pos_embed.pos_embed", (shape.vit_side**2, size)
    yield from _biased("connector.fc1", (size, shape.vit_size))
    yield from _biased("connector.fc2", (size, size))
    yield from _vit_shapes("vit_model.vision_model", shape)


def _vit_shapes(prefix: str, shape: BagelShape) -> Shapes:
    size = shape.vit_size
    yield from _biased(f"{prefix}.embeddings.patch_embedding", (size, 3 * 14 * 14))
    yield f"{prefix}.embeddings.position_embedding.weight", (shape.vit_side**2, size)
    for index in range(shape.vit_layers):
        layer = f"{prefix}.encoder.layers.{index}"
        for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
            yield from _biased(f"{layer}.self_attn.{name}", (size, size))
        yield from _biased(f"{layer}.mlp.fc1", (2 * size, size))
        yield from _biased(f"{layer}.mlp.fc2", (size, 2 * size))
        for name in ("layer_norm1", "layer_norm2"):
            yield from _biased(f"{layer}.{name}", (size,))
    yield from _biased(f"{prefix}.post_layernorm", (size,))


def _vae_shapes(shape: BagelShape) -> Shapes:
    sizes = [shape.vae_channels * level for level in shape.vae_levels]
    yield from _biased("encoder.conv_in", (sizes[0], 3, 3, 3))
    before = sizes[0]
    for index, size in enumerate(sizes):
        yield from _block_shapes(f"encoder.down.{index}.block.0", before, size)
        before = size
        if index + 1 < len(sizes):
            yield from _biased(f"encoder.down.{index}.downsample.conv", (size, size, 3, 3))
    yield from _middle_shapes("encoder", sizes[-1], 2 * LATENT_CHANNELS)
    yield from _biased("decoder.conv_in", (sizes[-1], LATENT_CHANNELS, 3, 3))
    for index, size in reversed(list(enumerate(sizes))):
        for block in range(2):
            yield from _block_shapes(f"decoder.up.{index}.block.{block}", before, size)
            before = size
        if index:
            yield from _biased(f"decoder.up.{index}.upsample.conv", (size, size, 3, 3))
    yield from _middle_shapes("decoder", sizes[-1], 3, sizes[0])


def _middle_shapes(prefix: str, size: int, num_outputs: int, last_size: int | None = None) -> Shapes:
    for name in ("block_1", "block_2"):
        yield from _block_shapes(f"{prefix}.mid.{name}", size, size)
    yield from _biased(f"{prefix}.mid.attn_1.norm", (size,))
    for name in ("q", "k", "v", "proj_out"):
        yield from _biased(f"{prefix}.mid.attn_1.{name}", (size, size, 1, 1))
    yield from _biased(f"{prefix}.norm_out", (last_size or size,))
    yield from _biased(f"{prefix}.conv_out", (num_outputs, last_size or size, 3, 3))


def _block_shapes(prefix: str, before: int, size: int) -> Shapes:
    yield from _biased(f"{prefix}.norm1", (before,))
    yield from _biased(f"{prefix}.conv1", (size, before, 3, 3))
    yield from _biased(f"{prefix}.norm2", (size,))
    yield from _biased(f"{prefix}.conv2", (size, size, 3, 3))
    if before != size:
        yield from _biased(f"{prefix}.nin_shortcut", (size, before, 1, 1))


def _biased(name: str, shape: tuple[int, ...]) -> Shapes:
    yield f"{name}.weight", shape
    yield f"{name}.bias", shape[:1]


def _noise(name: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Fan-in scaling; norms near 1, biases near 0."""
    noise = torch.randn(shape, generator=generator)
    if len(shape) == 1:
        return noise * 0.1 + (1.0 if "norm" in name and name.endswith("weight") else 0.0)
    if name == "connector.fc2.weight":
        noise *= VIEW_SCALE
    if "embed_tokens" in name or "pos_embed" in name or "position_embedding" in name:
        return noise
    return noise / math.sqrt(math.prod(shape[1:]))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Build a tiny random BAGEL checkpoint.")
    parser.add_argument("path", type=Path)
    parser.add_argument("--variant", choices=sorted(VARIANTS), default="base")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    print(build(arguments.path, seed=arguments.seed, variant=arguments.variant))
