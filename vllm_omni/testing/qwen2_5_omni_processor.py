"""Processor, tokenizer and chat template of tiny Qwen2.5-Omni checkpoints."""

from __future__ import annotations

from transformers import Qwen2_5OmniProcessor, Qwen2VLImageProcessor, Qwen2VLVideoProcessor, WhisperFeatureExtractor

from vllm_omni.testing.byte_tokenizer import NUM_BYTES, chat_template, make_tokenizer
from vllm_omni.testing.qwen2_5_omni_shape import SPECIAL_TOKENS, TinyShape

# Attribute of the tokenizer that Qwen2_5OmniProcessor reads -> special token.
NAMED_TOKENS = {
    "image_token": "<|IMAGE|>",
    "audio_token": "<|AUDIO|>",
    "video_token": "<|VIDEO|>",
    "vision_bos_token": "<|vision_bos|>",
    "vision_eos_token": "<|vision_eos|>",
    "audio_bos_token": "<|audio_bos|>",
    "audio_eos_token": "<|audio_eos|>",
}

SYSTEM_PROMPT = (
    "You are Qwen, a virtual human developed by the Qwen Team, Alibaba Group, capable of perceiving auditory and "
    "visual inputs, as well as generating text and speech."
)

# A conversation without a system turn gets the default one, with which the talker was trained.
CHAT_TEMPLATE = (
    """\
{%- if messages[0]['role'] != 'system' -%}
{{- '<|im_start|>system\\nSYSTEM_PROMPT<|im_end|>\\n' -}}
{%- endif -%}
""".replace("SYSTEM_PROMPT", SYSTEM_PROMPT)
    + chat_template(NAMED_TOKENS)
)


def make_processor(shape: TinyShape) -> Qwen2_5OmniProcessor:
    return Qwen2_5OmniProcessor(
        image_processor=Qwen2VLImageProcessor(size={"shortest_edge": 56 * 56, "longest_edge": 1280 * 28 * 28}),
        video_processor=Qwen2VLVideoProcessor(cap_pixels_per_frame=False),
        feature_extractor=WhisperFeatureExtractor(feature_size=128, chunk_length=300, return_attention_mask=True),
        tokenizer=make_tokenizer(_alphabet(), SPECIAL_TOKENS, NAMED_TOKENS, shape.num_extra_tokens),
        chat_template=CHAT_TEMPLATE,
    )


def _alphabet() -> list[str]:
    """A byte that is a visible Latin-1 character is itself, the others start at U+0100."""
    visible = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = (byte for byte in range(NUM_BYTES) if byte not in visible)
    characters = {byte: chr(byte) for byte in visible} | {byte: chr(0x100 + index) for index, byte in enumerate(hidden)}
    return [characters[byte] for byte in range(NUM_BYTES)]
