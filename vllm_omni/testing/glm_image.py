"""Build a tiny random GLM-Image checkpoint, offline, in the layout of the real one.

python -m vllm_omni.testing.glm_image DIRECTORY [--variant deep] [--seed 1]
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

import torch
from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, GlmImagePipeline, GlmImageTransformer2DModel
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    ByT5Tokenizer,
    GenerationConfig,
    GlmImageConfig,
    GlmImageForConditionalGeneration,
    GlmImageImageProcessor,
    GlmImageProcessor,
    PreTrainedTokenizerFast,
    T5Config,
    T5EncoderModel,
)

from vllm_omni.diffusion.loading import no_progress_bars
from vllm_omni.testing.byte_tokenizer import NUM_BYTES
from vllm_omni.testing.diffusion import randomize
from vllm_omni.testing.variants import find_variant

TEXT_TOKENS = ("<|endoftext|>", "<|image|>", "<sop>", "<eop>")
NUM_RESERVED = 8  # of the head, behind the codes: the start and the end of an image, and unused ones
HEAD_SCALE = 3.0  # margins between the best codes that rounding does not cross
CHAT_TEMPLATE = """\
{%- for message in messages -%}
{%- if message.content is string -%}
{{- message.content -}}
{%- else -%}
{%- for part in message.content -%}
{%- if part.type == 'image' -%}
{{- 'START<|image|>END' -}}
{%- elif part.type == 'text' -%}
{{- part.text -}}
{%- endif -%}
{%- endfor -%}
{%- endif -%}
{%- endfor -%}
"""


@dataclass(frozen=True)
class GlmImageShape:
    """Sizes that vary between checkpoints."""

    num_codes: int = 64
    hidden_size: int = 128
    num_layers: int = 2
    num_heads: int = 4
    num_kv_heads: int = 2
    intermediate_size: int = 160
    mrope_section: tuple[int, ...] = (2, 3, 3)
    vit_size: int = 64
    vit_layers: int = 2
    vit_heads: int = 2
    vit_side: int = 8  # patches of the largest image
    dit_layers: int = 2
    dit_heads: int = 4
    glyph_size: int = 32
    vae_channels: tuple[int, ...] = (8, 8, 16, 16)

    @property
    def num_head_tokens(self) -> int:
        return self.num_codes + NUM_RESERVED

    @property
    def vocab_size(self) -> int:
        return self.num_head_tokens + NUM_BYTES + len(TEXT_TOKENS)

    def token_id(self, token: str) -> int:
        return self.num_head_tokens + NUM_BYTES + TEXT_TOKENS.index(token)


VARIANTS = {
    "base": GlmImageShape(),
    "deep": GlmImageShape(
        num_codes=96, hidden_size=96, num_layers=3, num_heads=3, num_kv_heads=1, intermediate_size=200,
        mrope_section=(4, 2, 2), vit_size=48, vit_layers=3, vit_heads=3, vit_side=12, dit_layers=3, dit_heads=2,
        glyph_size=48,
    ),
}  # fmt: skip


def build(path: Path, *, seed: int = 0, variant: str = "base", shape: GlmImageShape | None = None) -> Path:
    """Write a checkpoint in float32 into the directory ``path``; the same arguments give the same bytes.

    Raises:
        ValueError: the variant is unknown.
    """
    shape = shape or find_variant(VARIANTS, variant)
    with torch.random.fork_rng(devices=[]):  # constructing consumes random numbers of the global generator
        pipeline = make_pipeline(shape)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name in ("vision_language_encoder", "text_encoder", "transformer", "vae"):
            randomize(getattr(pipeline, name), generator)
        head = pipeline.vision_language_encoder.lm_head.weight.mul_(HEAD_SCALE)
        head[shape.num_codes :] = 0.0  # an image consists of codes
    with no_progress_bars():
        pipeline.save_pretrained(path)
    return path


def make_pipeline(shape: GlmImageShape) -> GlmImagePipeline:
    """Construct the pipeline, with the weights of construction."""
    return GlmImagePipeline(
        tokenizer=ByT5Tokenizer(extra_ids=0, model_max_length=512),
        processor=make_processor(shape),
        text_encoder=T5EncoderModel(
            T5Config(
                vocab_size=384, d_model=shape.glyph_size, d_kv=16, d_ff=64, num_layers=2, num_heads=2,
                feed_forward_proj="gated-gelu", pad_token_id=0, eos_token_id=1,
            )
        ),
        vision_language_encoder=make_language_model(shape),
        vae=AutoencoderKL(
            down_block_types=("DownEncoderBlock2D",) * 4,
            up_block_types=("UpDecoderBlock2D",) * 4,
            block_out_channels=shape.vae_channels,
            layers_per_block=1,
            latent_channels=16,
            norm_num_groups=4,
            use_quant_conv=False,
            use_post_quant_conv=False,
            latents_mean=[0.1 * (index - 8) for index in range(16)],
            latents_std=[1.0 + 0.05 * index for index in range(16)],
        ),
        transformer=GlmImageTransformer2DModel(
            num_layers=shape.dit_layers,
            attention_head_dim=16,
            num_attention_heads=shape.dit_heads,
            text_embed_dim=shape.glyph_size,
            time_embed_dim=32,
            condition_dim=16,
            prior_vq_quantizer_codebook_size=shape.num_codes,
        ),
        scheduler=FlowMatchEulerDiscreteScheduler(
            use_dynamic_shifting=True, base_shift=0.25, max_shift=0.75, time_shift_type="linear"
        ),
    )  # fmt: skip


def make_language_model(shape: GlmImageShape) -> GlmImageForConditionalGeneration:
    start, end = shape.num_codes, shape.num_codes + 1
    ids = {"eos_token_id": end, "pad_token_id": shape.token_id("<|endoftext|>")}
    config = GlmImageConfig(
        text_config={
            "vocab_size": shape.vocab_size,
            "vision_vocab_size": shape.num_head_tokens,
            "hidden_size": shape.hidden_size,
            "intermediate_size": shape.intermediate_size,
            "num_hidden_layers": shape.num_layers,
            "num_attention_heads": shape.num_heads,
            "num_key_value_heads": shape.num_kv_heads,
            "max_position_embeddings": 32768,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "partial_rotary_factor": 0.5,
                "mrope_section": list(shape.mrope_section),
            },
            **ids,
        },
        vision_config={
            "depth": shape.vit_layers,
            "hidden_size": shape.vit_size,
            "intermediate_size": 2 * shape.vit_size,
            "num_heads": shape.vit_heads,
            "image_size": 16 * shape.vit_side,
        },
        vq_config={"embed_dim": 32, "num_embeddings": shape.num_codes, "latent_channels": shape.vit_size},
        image_token_id=shape.token_id("<|image|>"),
        image_start_token_id=start,
        image_end_token_id=end,
    )
    model = GlmImageForConditionalGeneration(config)
    model.generation_config = GenerationConfig(do_sample=True, temperature=0.9, top_p=0.75, **ids)
    return model


def make_processor(shape: GlmImageShape) -> GlmImageProcessor:
    """The published processor; images have less pixels."""
    start, end = (f"<|dit_token_{index}|>" for index in (shape.num_codes, shape.num_codes + 1))
    image_tokens = [f"<|dit_token_{index}|>" for index in range(shape.num_head_tokens)]
    texts = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *TEXT_TOKENS]
    vocabulary = {token: index for index, token in enumerate([*image_tokens, *texts])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special_tokens = [*image_tokens, *TEXT_TOKENS]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special_tokens])
    side = 16 * shape.vit_side
    return GlmImageProcessor(
        image_processor=GlmImageImageProcessor(
            patch_size=16,
            merge_size=1,
            temporal_patch_size=1,
            size={"shortest_edge": 64 * 64, "longest_edge": side * side},
        ),
        tokenizer=PreTrainedTokenizerFast(
            tokenizer_object=tokenizer,
            bos_token=start,
            eos_token=end,
            pad_token="<|endoftext|>",
            extra_special_tokens={"image_token": "<|image|>", "grid_bos_token": "<sop>", "grid_eos_token": "<eop>"},
            model_max_length=8192,
        ),
        chat_template=CHAT_TEMPLATE.replace("START", start).replace("END", end),
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Build a tiny random GLM-Image checkpoint.")
    parser.add_argument("path", type=Path)
    parser.add_argument("--variant", choices=sorted(VARIANTS), default="base")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    print(build(arguments.path, seed=arguments.seed, variant=arguments.variant))
