"""Build a tiny random MiMo-Audio checkpoint, offline, in the layout of the real one.

The audio tokenizer, a checkpoint of its own, lies in the directory ``audio_tokenizer``. Weights are scaled so that
greedy replies alternate between text and sound, and that speech comes to an end.

    python -m vllm_omni.testing.mimo_audio DIRECTORY [--variant narrow] [--seed 1]
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from vllm_omni.testing.mimo_audio_config import (
    SPECIAL_TOKENS,
    VARIANTS,
    MiMoShape,
    make_codec_config,
    make_config,
    token_id,
    write_tokenizer,
)
from vllm_omni.testing.variants import find_variant

__all__ = ["VARIANTS", "MiMoShape", "build"]

HEAD_SCALE = 3.0  # margins between the best ids that rounding does not cross
EMPTY_SCALE = 8.0  # of the logit that makes a step one of sound: in about half of the steps it wins
END_SCALE = 1.1  # of the logit that ends speech
SPREAD = 1.0  # of the encoder's features, which then reach most of the codes
LOUDNESS = -2.0  # logarithm of the spectrum's magnitudes


def build(path: Path, *, seed: int = 0, variant: str = "base", shape: MiMoShape | None = None) -> Path:
    """Write a checkpoint into the directory ``path``; the same arguments give the same bytes.

    Raises:
        ValueError: the variant is unknown.
    """
    shape = shape or find_variant(VARIANTS, variant)
    codec_path = path / "audio_tokenizer"
    codec_path.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(seed)
    config, codec = make_config(shape), make_codec_config(shape)
    tensors = _language_tensors(shape, generator)
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    save_file(_codec_tensors(codec, generator), codec_path / "model.safetensors", {"format": "pt"})
    _write_json(path / "config.json", config)
    _write_json(codec_path / "config.json", codec)
    ends = [token_id("<|endoftext|>"), token_id("<|im_end|>")]
    _write_json(path / "generation_config.json", {"eos_token_id": ends, "pad_token_id": ends[0]})
    write_tokenizer(path)
    return path


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def _language_tensors(shape: MiMoShape, generator: torch.Generator) -> dict[str, Tensor]:
    hidden, local, patch = shape.hidden_size, shape.local_dim, shape.encoder_dim
    main = (shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim)
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (shape.vocab_size, hidden),
        **_qwen2_shapes("model", shape.num_layers, hidden, *main, 2 * hidden),
        "lm_head.weight": (shape.vocab_size, hidden),
        **_qwen2_shapes("input_local_transformer", shape.patch_layers, patch, patch, patch, 4 * patch),
        **_qwen2_shapes("local_transformer", shape.local_layers, local, local, local, shape.local_ffn),
        "speech_group_downcast.weight": (hidden, 4 * patch),
        "hidden_states_downcast.weight": (local, hidden),
    }
    for channel, size in enumerate(shape.sizes):
        shapes[f"speech_embeddings.{channel}.weight"] = (size, patch)
        shapes[f"local_transformer_lm_heads.{channel}.weight"] = (size, local)
    if patch != local:
        shapes["speech_embeddings_to_local.weight"] = (local, patch)
    tensors = {name: _noise(name, one, generator) for name, one in shapes.items()}
    for name, tensor in tensors.items():
        if "lm_head" in name:
            tensor.mul_(HEAD_SCALE)
    head = tensors["lm_head.weight"]
    head[token_id(SPECIAL_TOKENS[0]) :] = 0.0  # also the padding rows
    for token, scale in (("<|empty|>", EMPTY_SCALE), ("<|eostm|>", END_SCALE)):
        row = torch.randn(hidden, generator=generator)
        head[token_id(token)] = row * HEAD_SCALE * scale / math.sqrt(hidden)
    return tensors


def _qwen2_shapes(prefix: str, num_layers: int, size: int, q: int, kv: int, ffn: int) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {f"{prefix}.norm.weight": (size,)}
    for index in range(num_layers):
        layer = f"{prefix}.layers.{index}"
        for name, width in (("q", q), ("k", kv), ("v", kv)):
            shapes[f"{layer}.self_attn.{name}_proj.weight"] = (width, size)
            shapes[f"{layer}.self_attn.{name}_proj.bias"] = (width,)
        shapes[f"{layer}.self_attn.o_proj.weight"] = (size, q)
        shapes[f"{layer}.mlp.gate_proj.weight"] = shapes[f"{layer}.mlp.up_proj.weight"] = (ffn, size)
        shapes[f"{layer}.mlp.down_proj.weight"] = (size, ffn)
        shapes[f"{layer}.input_layernorm.weight"] = shapes[f"{layer}.post_attention_layernorm.weight"] = (size,)
    return shapes


def _codec_tensors(config: Mapping[str, Any], generator: torch.Generator) -> dict[str, Tensor]:
    size, mels, wide = config["d_model"], config["n_mels"], config["vocoder_dim"]
    num_bins = config["nfft"] // 2 + 1
    shapes: dict[str, tuple[int, ...]] = {
        **_biased("encoder.conv1", (size, mels, 3)),
        **_biased("encoder.conv2", (size, size, 3)),
        **_stack_shapes("encoder", config["encoder_layers"], size, config["encoder_ffn_dim"]),
        "encoder.down_sample_layer.0.weight": (size, size, 2),
        **_biased("encoder.down_sample_norm", (size,)),
        **_biased("decoder.dconv1.conv", (size, size, 2), size),
        **_biased("decoder.dconv1.norm", (size,)),
        **_stack_shapes("decoder", config["decoder_layers"], size, config["decoder_ffn_dim"]),
        **_biased("decoder.dconv2.conv", (size, mels, 3), mels),
        **_biased("decoder.dconv2.norm", (mels,)),
        "decoder.vocoder.embeddings.weight": (wide, mels),
        **_stack_shapes("decoder.vocoder", config["vocoder_num_layers"], wide, config["vocoder_intermediate_dim"]),
        **_biased("decoder.vocoder.head.out", (2 * num_bins, wide)),
    }
    tensors = {name: _noise(name, one, generator) for name, one in shapes.items()}
    first = tensors["encoder.conv1.weight"]
    first -= first.mean(dim=(1, 2), keepdim=True)  # the mean of logarithms would outweigh how they vary
    tensors["decoder.vocoder.head.out.bias"][:num_bins] += LOUDNESS
    tensors["decoder.vocoder.head.istft.window"] = torch.hann_window(config["window_size"])
    for index, codebook_size in enumerate(config["codebook_size"]):
        name = f"encoder.quantizer.vq.layers.{index}._codebook"
        # Each stage quantizes what the ones before have left.
        table = torch.randn(codebook_size, size, generator=generator) * SPREAD * 0.8**index
        tensors[f"{name}.embed"] = table
        tensors[f"{name}.embed_avg"] = table.clone()
        tensors[f"{name}.cluster_size"] = torch.ones(codebook_size)
        tensors[f"{name}.inited"] = torch.ones(1)
    return tensors


def _stack_shapes(prefix: str, num_layers: int, size: int, ffn: int) -> dict[str, tuple[int, ...]]:
    shapes = _biased(f"{prefix}.layer_norm", (size,))
    for index in range(num_layers):
        layer = f"{prefix}.layers.{index}"
        for name in ("q", "v", "out"):
            shapes |= _biased(f"{layer}.self_attn.{name}_proj", (size, size))
        shapes[f"{layer}.self_attn.k_proj.weight"] = (size, size)
        shapes |= _biased(f"{layer}.self_attn_layer_norm", (size,)) | _biased(f"{layer}.final_layer_norm", (size,))
        shapes |= _biased(f"{layer}.fc1", (ffn, size)) | _biased(f"{layer}.fc2", (size, ffn))
    return shapes


def _biased(name: str, shape: tuple[int, ...], num_outputs: int | None = None) -> dict[str, tuple[int, ...]]:
    return {f"{name}.weight": shape, f"{name}.bias": (num_outputs or shape[0],)}


def _noise(name: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Fan-in scaling; norms near 1, biases near 0. Rows of empty codes are not 0, so that they must be masked."""
    noise = torch.randn(shape, generator=generator)
    if len(shape) == 1:
        return noise * 0.1 + (1.0 if "norm" in name and name.endswith("weight") else 0.0)
    if "embed" in name and "vocoder" not in name:
        return noise if "to_local" not in name else noise / math.sqrt(shape[1])
    return noise / math.sqrt(math.prod(shape[1:]))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Build a tiny random MiMo-Audio checkpoint.")
    parser.add_argument("path", type=Path)
    parser.add_argument("--variant", choices=sorted(VARIANTS), default="base")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    print(build(arguments.path, seed=arguments.seed, variant=arguments.variant))
