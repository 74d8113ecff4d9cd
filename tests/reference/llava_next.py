"""A tiny LLaVA-NeXT with random weights: an image becomes its tiles and a whole view, as many as its shape needs."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from transformers import (
    LlavaNextConfig,
    LlavaNextForConditionalGeneration,
    LlavaNextImageProcessor,
    LlavaNextProcessor,
)

from vllm_omni.testing import llava as llava
from vllm_omni.testing.llava import TINY

PINPOINTS = [[TINY.image_size, 2 * TINY.image_size], [2 * TINY.image_size, TINY.image_size]]


def build(directory: Path) -> Path:
    """Write the checkpoint, in the layout of published ones; its words are those of the tiny LLaVA-1.5."""
    LlavaNextProcessor(
        image_processor=LlavaNextImageProcessor(
            size={"shortest_edge": TINY.image_size},
            crop_size={"height": TINY.image_size, "width": TINY.image_size},
            image_grid_pinpoints=PINPOINTS,
        ),
        tokenizer=llava.make_tokenizer(TINY),
        patch_size=TINY.patch_size,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
    ).save_pretrained(directory)
    config = LlavaNextConfig(
        vision_config=llava.make_vision_config(TINY),
        text_config=llava.make_text_config(TINY),
        image_token_index=llava.IMAGE_TOKEN,
        vision_feature_layer=-2,
        vision_feature_select_strategy="default",
        image_grid_pinpoints=PINPOINTS,
        image_seq_length=TINY.num_image_tokens,
        torch_dtype="float32",
    )
    config.architectures = ["LlavaNextForConditionalGeneration"]
    torch.manual_seed(0)
    llava.write_weights(LlavaNextForConditionalGeneration(config), directory)
    (directory / "config.json").write_text(json.dumps(config.to_dict(), default=str))
    return directory
