"""A tiny Qwen2-VL with random weights: images of any shape, and positions of three dimensions."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import (
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
    Qwen2VLImageProcessor,
    Qwen2VLProcessor,
    Qwen2VLVideoProcessor,
)

from vllm_omni.testing import llava as llava

SPECIAL_WORDS = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
PATCH_SIZE, MERGE_SIZE = 14, 2
VOCAB_SIZE = 128
IMAGE = "<|vision_start|> <|image_pad|> <|vision_end|>"
"""Placeholder of an image in a prompt."""


def build(directory: Path) -> Path:
    """Write the checkpoint, in the layout of published ones; its words are w0, w1, ..."""
    tokenizer = llava.make_tokenizer(llava.TINY, SPECIAL_WORDS)
    start, end, image, video = tokenizer.convert_tokens_to_ids(SPECIAL_WORDS)
    sizes = {"patch_size": PATCH_SIZE, "merge_size": MERGE_SIZE, "temporal_patch_size": 2}
    limits = {"min_pixels": 28 * 28, "max_pixels": 16 * 28 * 28}
    Qwen2VLProcessor(
        image_processor=Qwen2VLImageProcessor(**sizes, **limits),
        tokenizer=tokenizer,
        video_processor=Qwen2VLVideoProcessor(**sizes, **limits),
    ).save_pretrained(directory)
    config = Qwen2VLConfig(
        vision_config={
            "depth": 3,
            "embed_dim": 32,
            "hidden_size": 64,
            "num_heads": 2,
            "mlp_ratio": 2,
            "patch_size": PATCH_SIZE,
            "spatial_merge_size": MERGE_SIZE,
            "temporal_patch_size": 2,
            "in_channels": 3,
        },
        text_config={
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "vocab_size": VOCAB_SIZE,
            "max_position_embeddings": 512,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6]},
            "bos_token_id": 1,
            "eos_token_id": 2,
            "pad_token_id": 3,
        },
        image_token_id=image,
        video_token_id=video,
        vision_start_token_id=start,
        vision_end_token_id=end,
        tie_word_embeddings=False,
        torch_dtype="float32",
    )
    config.architectures = ["Qwen2VLForConditionalGeneration"]
    torch.manual_seed(0)
    model = Qwen2VLForConditionalGeneration(config).float()
    weights = {_published_name(name): llava.spread(weight) for name, weight in model.state_dict().items()}
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "config.json").write_text(json.dumps(config.to_dict(), default=str))
    return directory


def _published_name(name: str) -> str:
    name = name.replace("model.visual.", "visual.", 1)
    return name.replace("model.language_model.", "model.", 1)
