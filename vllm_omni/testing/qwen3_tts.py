"""Build a tiny random Qwen3-TTS checkpoint, offline, in the layout of the real one.

It loads with the package ``qwen-tts`` as the real one does. Weights are scaled so that greedy codes vary and come to an
end, every part of the codec shows in the samples, and none is clamped.

    python -m vllm_omni.testing.qwen3_tts DIRECTORY [--variant clone] [--seed 1]
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import EncodecFeatureExtractor, MimiConfig, MimiModel, Qwen3Config, Qwen3Model
from transformers.models.qwen2_5_omni.modeling_qwen2_5_omni import ECAPA_TimeDelayNet

from vllm_omni.speech.code_predictor import CodePredictor, PredictorConfig
from vllm_omni.speech.codec_config import CodecConfig
from vllm_omni.speech.codec_decoder import CodecDecoder
from vllm_omni.testing.qwen3_tts_config import (
    KINDS,
    VARIANTS,
    TTSShape,
    codec_id,
    make_codec_config,
    make_config,
    speaker_encoder_config,
    write_tokenizer,
)
from vllm_omni.testing.variants import find_variant

__all__ = ["KINDS", "VARIANTS", "TTSShape", "build"]

HEAD_SCALE = 4.0  # margins between the best codes that rounding does not cross
END_SCALE = 1.6  # of the end's logit, so that speech ends after some frames
PEAK = 0.35  # of the samples

# Parts of Mimi that the tokenizer leaves out.
UNUSED_MIMI = ("decoder.", "decoder_transformer.", "upsample.")


def build(path: Path, *, seed: int = 0, variant: str = "base", shape: TTSShape | None = None) -> Path:
    """Write a checkpoint into the directory ``path``; the same arguments give the same bytes.

    Raises:
        ValueError: the variant is unknown.
    """
    shape = shape or find_variant(VARIANTS, variant)
    codec_path = path / "speech_tokenizer"
    codec_path.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(seed)
    config, codec = make_config(shape), make_codec_config(shape)
    with torch.random.fork_rng(devices=[]), torch.no_grad():  # constructing consumes the global generator's numbers
        tensors = talker_tensors(shape, config["talker_config"], generator)
        if shape.kind == "base":
            tensors |= speaker_tensors(shape, generator)
        codec_tensors = decoder_tensors(codec["decoder_config"], generator) | encoder_tensors(
            codec["encoder_config"], generator
        )
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    save_file(codec_tensors, codec_path / "model.safetensors", {"format": "pt"})
    write_json(path / "config.json", config)
    write_json(codec_path / "config.json", codec)
    write_json(path / "generation_config.json", GENERATION)
    EncodecFeatureExtractor(feature_size=1, sampling_rate=24000).save_pretrained(codec_path)
    write_tokenizer(path)
    write_json(path / "preprocessor_config.json", {"padding_side": "left", "processor_class": "Qwen3TTSProcessor"})
    return path


GENERATION = {
    "do_sample": True, "repetition_penalty": 1.05, "temperature": 0.9, "top_p": 1.0, "top_k": 50,
    "subtalker_dosample": True, "subtalker_temperature": 0.9, "subtalker_top_p": 1.0, "subtalker_top_k": 50,
    "max_new_tokens": 8192,
}  # fmt: skip


def write_json(path: Path, content: Mapping[str, object]) -> None:
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def randomize(model: nn.Module, generator: torch.Generator, gain: float = 1.0) -> None:
    """Fan-in scaling; norms and scales near 1, biases near 0."""
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if "embedding" in name and parameter.ndim == 2:
            parameter.copy_(noise * 0.5)
        elif parameter.ndim > 1:
            fan_in = math.prod(parameter.shape[1:])
            parameter.copy_(noise * gain / math.sqrt(fan_in))
        elif "norm" in name and name.endswith("weight"):
            parameter.copy_(1 + noise * 0.1)
        else:
            parameter.copy_(noise * 0.1)


def prefixed(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {prefix + name: tensor.detach().clone().contiguous() for name, tensor in tensors.items()}


def talker_tensors(shape: TTSShape, config: Mapping[str, int], generator: torch.Generator) -> dict[str, Tensor]:
    size, text_size = shape.hidden_size, config["text_hidden_size"]
    backbone = Qwen3Model(
        Qwen3Config(
            vocab_size=8,
            hidden_size=size,
            intermediate_size=config["intermediate_size"],
            num_hidden_layers=shape.num_layers,
            num_attention_heads=shape.num_heads,
            num_key_value_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
        )
    )
    del backbone.embed_tokens
    tables = nn.ModuleDict(
        {
            "codec_embedding": nn.Embedding(shape.vocab_size, size),
            "text_embedding": nn.Embedding(config["text_vocab_size"], text_size),
        }
    )
    projection = nn.ModuleDict(
        {"linear_fc1": nn.Linear(text_size, text_size), "linear_fc2": nn.Linear(text_size, size)}
    )
    predictor = CodePredictor(PredictorConfig.of(config["code_predictor_config"]), size)  # type: ignore[arg-type]
    head = nn.Linear(size, shape.vocab_size, bias=False)
    for module in (backbone, tables, projection, predictor, head):
        randomize(module, generator)
    for linear in (head, *predictor.lm_head):
        linear.weight.mul_(HEAD_SCALE)
    head.weight[codec_id(shape, "eos")].mul_(END_SCALE)
    return {
        **prefixed("talker.model.", backbone.state_dict()),
        **prefixed("talker.model.", tables.state_dict()),
        **prefixed("talker.text_projection.", projection.state_dict()),
        **prefixed("talker.codec_head.", head.state_dict()),
        **prefixed("talker.code_predictor.", predictor.state_dict()),
    }


def speaker_tensors(shape: TTSShape, generator: torch.Generator) -> dict[str, Tensor]:
    encoder = ECAPA_TimeDelayNet(SimpleNamespace(**speaker_encoder_config(shape)))
    randomize(encoder, generator)
    return prefixed("speaker_encoder.", encoder.state_dict())


def decoder_tensors(config: Mapping[str, object], generator: torch.Generator) -> dict[str, Tensor]:
    decoder = CodecDecoder(CodecConfig.of(config))
    randomize(decoder, generator, gain=0.8)
    for name, parameter in decoder.named_parameters():
        if name.endswith("layer_scale.scale"):
            parameter.fill_(0.5)  # 0.01 in training's beginning, which would hide the transformer
        elif name.endswith("gamma"):
            parameter.fill_(0.3)
        elif name.endswith("cluster_usage"):
            parameter.copy_(0.5 + torch.rand(parameter.shape, generator=generator))
        elif name.endswith("embedding_sum"):
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    codes = torch.randint(int(config["codebook_size"]), (1, 16, 30), generator=generator)  # type: ignore[call-overload]
    last = decoder.decoder[-1].conv
    last.bias.zero_()
    last.weight.mul_(1e-3)
    states = [torch.zeros(1, *shape) for shape in decoder.state_shapes]
    samples, _ = decoder(codes, torch.zeros(1, dtype=torch.int64), states, is_start=True)
    last.weight.mul_(PEAK / samples.abs().max())
    tensors = prefixed("decoder.", decoder.state_dict())
    dim = int(config["codebook_dim"])  # type: ignore[call-overload]
    for name in ("rvq_first", "rvq_rest"):  # in the checkpoints, and of no use to the decoder
        noise = torch.randn(dim // 2, dim, 1, generator=generator)
        tensors[f"decoder.quantizer.{name}.input_proj.weight"] = noise / math.sqrt(dim)
    return tensors


def encoder_tensors(config: Mapping[str, object], generator: torch.Generator) -> dict[str, Tensor]:
    """Mimi's encoder half; its codebooks are buffers."""
    values = {name: value for name, value in config.items() if name not in ("model_type", "frame_rate")}
    mimi = MimiModel(MimiConfig(**values))
    randomize(mimi, generator)
    for name, buffer in mimi.named_buffers():
        if name.endswith("embed_sum"):
            buffer.copy_(torch.randn(buffer.shape, generator=generator))
        elif name.endswith("cluster_usage"):
            buffer.copy_(0.5 + torch.rand(buffer.shape, generator=generator))
        elif name.endswith("initialized"):
            buffer.fill_(1.0)
    tensors = {name: one for name, one in mimi.state_dict().items() if not name.startswith(UNUSED_MIMI)}
    return prefixed("encoder.", tensors)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Build a tiny random Qwen3-TTS checkpoint.")
    parser.add_argument("path", type=Path)
    parser.add_argument("--variant", choices=sorted(VARIANTS), default="base")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    print(build(arguments.path, seed=arguments.seed, variant=arguments.variant))
