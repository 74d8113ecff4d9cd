"""Processor, tokenizer and chat template of tiny Qwen2.5-Omni checkpoints."""

from __future__ import annotations

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    PreTrainedTokenizerFast,
    Qwen2_5OmniProcessor,
    Qwen2VLImageProcessor,
    Qwen2VLVideoProcessor,
    WhisperFeatureExtractor,
)

from vllm_omni.testing.qwen2_5_omni_shape import NUM_BYTES, SPECIAL_TOKENS, TinyShape

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
CHAT_TEMPLATE = """\
{%- if messages[0]['role'] != 'system' -%}
{{- '<|im_start|>system\\nSYSTEM_PROMPT<|im_end|>\\n' -}}
{%- endif -%}
{%- for message in messages -%}
{{- '<|im_start|>' + message['role'] + '\\n' -}}
{%- if message['content'] is string -%}
{{- message['content'] -}}
{%- else -%}
{%- for part in message['content'] -%}
{%- set type = part.get('type') -%}
{%- if type in ('image', 'image_url') or 'image' in part or 'image_url' in part -%}
{{- '<|vision_bos|><|IMAGE|><|vision_eos|>' -}}
{%- elif type in ('audio', 'audio_url', 'input_audio') or 'audio' in part or 'audio_url' in part -%}
{{- '<|audio_bos|><|AUDIO|><|audio_eos|>' -}}
{%- elif type in ('video', 'video_url') or 'video' in part or 'video_url' in part -%}
{{- '<|vision_bos|><|VIDEO|><|vision_eos|>' -}}
{%- elif 'text' in part -%}
{{- part['text'] -}}
{%- endif -%}
{%- endfor -%}
{%- endif -%}
{{- '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|im_start|>assistant\\n' -}}
{%- endif -%}
""".replace("SYSTEM_PROMPT", SYSTEM_PROMPT)


def make_processor(shape: TinyShape) -> Qwen2_5OmniProcessor:
    return Qwen2_5OmniProcessor(
        image_processor=Qwen2VLImageProcessor(size={"shortest_edge": 56 * 56, "longest_edge": 1280 * 28 * 28}),
        video_processor=Qwen2VLVideoProcessor(cap_pixels_per_frame=False),
        feature_extractor=WhisperFeatureExtractor(feature_size=128, chunk_length=300, return_attention_mask=True),
        tokenizer=make_tokenizer(shape),
        chat_template=CHAT_TEMPLATE,
    )


def make_tokenizer(shape: TinyShape) -> PreTrainedTokenizerFast:
    """One token per byte, with the byte as its id, and the special tokens."""
    vocab = {character: byte for byte, character in _byte_characters().items()}
    vocab |= {f"<|extra_{index}|>": NUM_BYTES + index for index in range(shape.num_extra_tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        extra_special_tokens=NAMED_TOKENS,
        model_max_length=32768,
    )


def _byte_characters() -> dict[int, str]:
    """The byte-level alphabet: a byte that is a visible Latin-1 character is itself, the others start at U+0100."""
    visible = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = (byte for byte in range(NUM_BYTES) if byte not in visible)
    return {byte: chr(byte) for byte in visible} | {byte: chr(0x100 + index) for index, byte in enumerate(hidden)}
