"""Build a tiny random Janus-Pro checkpoint, offline, in the layout of the published ones.

It loads with transformers' model and processor. Its weights are scaled so that greedy replies and greedy pictures vary,
and a wrong hidden state or position changes them.

python -m vllm_omni.testing.janus DIRECTORY [--variant deep] [--seed 1]
"""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.processors import TemplateProcessing
from torch import Tensor, nn
from transformers import (
    GenerationConfig,
    JanusConfig,
    JanusForConditionalGeneration,
    JanusImageProcessor,
    JanusProcessor,
    JanusVisionConfig,
    JanusVQVAEConfig,
    LlamaConfig,
    PreTrainedTokenizerFast,
)

from vllm_omni.testing.byte_tokenizer import NUM_BYTES, make_tokenizer
from vllm_omni.testing.variants import find_variant

BOS, EOS, PAD = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜▁pad▁｜>"
NAMED_TOKENS = {"image_token": "<image_placeholder>", "boi_token": "<begin_of_image>", "eoi_token": "<end_of_image>"}
SPECIAL_TOKENS = (BOS, EOS, PAD, *NAMED_TOKENS.values(), "<|User|>", "<|Assistant|>")
HEAD_SCALE = 3.0  # margins between the best ids that rounding does not cross
END_SCALE = 1.4  # of the logit that ends a text
QUERY_GAIN = 4.0  # sharp attention, so that a token depends on more than the one before


@dataclass(frozen=True)
class JanusShape:
    """Sizes that vary between checkpoints."""

    hidden_size: int = 128
    num_layers: int = 2
    num_heads: int = 4
    num_kv_heads: int = 4
    intermediate_size: int = 160
    num_extra_tokens: int = 0
    side: int = 4  # of an image, in patches and in tokens
    patch_size: int = 16
    vision_size: int = 64
    vision_layers: int = 2
    num_codes: int = 300  # more ids than texts have
    code_size: int = 8
    vq_channels: int = 32

    @property
    def vocab_size(self) -> int:
        return NUM_BYTES + self.num_extra_tokens + len(SPECIAL_TOKENS)

    @property
    def num_image_tokens(self) -> int:
        return self.side**2

    def token_id(self, token: str) -> int:
        return NUM_BYTES + self.num_extra_tokens + SPECIAL_TOKENS.index(token)


VARIANTS = {
    "base": JanusShape(),
    "deep": JanusShape(
        hidden_size=96, num_layers=3, num_heads=3, num_kv_heads=1, intermediate_size=200, num_extra_tokens=7, side=5,
        patch_size=8, vision_size=48, vision_layers=1, num_codes=90,
    ),
}  # fmt: skip


def build(path: Path, *, seed: int = 0, variant: str = "base", shape: JanusShape | None = None) -> Path:
    """Write a checkpoint into the directory ``path``; the same arguments give the same bytes.

    Raises:
        ValueError: the variant is unknown.
    """
    shape = shape or find_variant(VARIANTS, variant)
    path.mkdir(parents=True, exist_ok=True)
    with torch.random.fork_rng(devices=[]):  # constructing consumes random numbers of the global generator
        model = JanusForConditionalGeneration(make_config(shape))
    _randomize(model, shape, torch.Generator().manual_seed(seed))
    model.generation_config = GenerationConfig(
        bos_token_id=shape.token_id(BOS),
        eos_token_id=shape.token_id(EOS),
        pad_token_id=shape.token_id(PAD),
        guidance_scale=5,
        generation_kwargs={"boi_token_id": shape.token_id(NAMED_TOKENS["boi_token"])},
    )
    model.save_pretrained(path)
    make_processor(shape).save_pretrained(path)
    return path


def make_config(shape: JanusShape) -> JanusConfig:
    side = shape.side * shape.patch_size
    return JanusConfig(
        text_config=LlamaConfig(
            vocab_size=shape.vocab_size,
            hidden_size=shape.hidden_size,
            intermediate_size=shape.intermediate_size,
            num_hidden_layers=shape.num_layers,
            num_attention_heads=shape.num_heads,
            num_key_value_heads=shape.num_kv_heads,
            max_position_embeddings=8192,
            bos_token_id=shape.token_id(BOS),
            eos_token_id=shape.token_id(EOS),
            pad_token_id=shape.token_id(PAD),
        ),
        vision_config=JanusVisionConfig(
            hidden_size=shape.vision_size,
            num_hidden_layers=shape.vision_layers,
            num_attention_heads=2,
            image_size=side,
            patch_size=shape.patch_size,
            projection_dim=shape.hidden_size,
            num_image_tokens=shape.num_image_tokens,
        ),
        vq_config=JanusVQVAEConfig(
            embed_dim=shape.code_size,
            num_embeddings=shape.num_codes,
            latent_channels=32,
            base_channels=shape.vq_channels,
            channel_multiplier=[1] * (shape.patch_size.bit_length()),  # each level but one doubles the side
            num_res_blocks=1,
            projection_dim=shape.hidden_size,
            image_token_embed_dim=shape.hidden_size,
        ),
        image_token_id=shape.token_id(NAMED_TOKENS["image_token"]),
        tie_word_embeddings=False,
        dtype="float32",
    )


def make_processor(shape: JanusShape) -> JanusProcessor:
    side = shape.side * shape.patch_size
    image_processor = JanusImageProcessor(
        size={"height": side, "width": side}, image_mean=[0.5] * 3, image_std=[0.5] * 3, min_size=14
    )
    return JanusProcessor(
        image_processor,
        _make_tokenizer(shape),
        use_default_system_prompt=True,
        num_image_tokens=shape.num_image_tokens,
    )


def _make_tokenizer(shape: JanusShape) -> PreTrainedTokenizerFast:
    alphabet = sorted(ByteLevel.alphabet())
    tokenizer = make_tokenizer(alphabet, SPECIAL_TOKENS, NAMED_TOKENS, shape.num_extra_tokens)
    begin = TemplateProcessing(single=f"{BOS} $A", special_tokens=[(BOS, shape.token_id(BOS))])
    tokenizer.backend_tokenizer.post_processor = begin
    tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token = BOS, EOS, PAD
    return tokenizer


@torch.no_grad()
def _randomize(model: nn.Module, shape: JanusShape, generator: torch.Generator) -> None:
    for name, parameter in model.named_parameters():
        gain = QUERY_GAIN if "language_model" in name and "q_proj" in name else 1.0
        parameter.copy_(_noise(name, tuple(parameter.shape), generator) * gain)
    head = model.get_parameter("lm_head.weight").mul_(HEAD_SCALE)
    for token in SPECIAL_TOKENS:
        head[shape.token_id(token)] *= END_SCALE if token == EOS else 0.0
    model.get_parameter("model.generation_head.vision_head.weight").mul_(HEAD_SCALE)


def _noise(name: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Fan-in scaling; norms near 1, biases near 0."""
    noise = torch.randn(shape, generator=generator)
    if len(shape) == 1:
        return noise * 0.1 + (1.0 if "norm" in name and name.endswith("weight") else 0.0)
    if "embed" in name and "patch" not in name:
        return noise
    return noise / math.sqrt(math.prod(shape[1:]))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Build a tiny random Janus-Pro checkpoint.")
    parser.add_argument("path", type=Path)
    parser.add_argument("--variant", choices=sorted(VARIANTS), default="base")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    print(build(arguments.path, seed=arguments.seed, variant=arguments.variant))
