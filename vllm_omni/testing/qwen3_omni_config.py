"""Sizes, ids, configuration and processor of tiny Qwen3-Omni checkpoints."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tokenizers import pre_tokenizers
from transformers import (
    Qwen2VLImageProcessor,
    Qwen2VLVideoProcessor,
    Qwen3OmniMoeConfig,
    Qwen3OmniMoeProcessor,
    WhisperFeatureExtractor,
)

from vllm_omni.testing.byte_tokenizer import NUM_BYTES, chat_template, make_tokenizer

SPECIAL_TOKENS = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|audio_pad|>", "<|audio_start|>", "<|audio_end|>",
    "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>", "<tts_pad>", "<tts_text_bos>",
    "<tts_text_eod>", "system", "user", "assistant",
)  # fmt: skip
NAMED_TOKENS = {
    "image_token": "<|image_pad|>",
    "audio_token": "<|audio_pad|>",
    "video_token": "<|video_pad|>",
    "vision_bos_token": "<|vision_start|>",
    "vision_eos_token": "<|vision_end|>",
    "audio_bos_token": "<|audio_start|>",
    "audio_eos_token": "<|audio_end|>",
}
CODEC_IDS = ("pad", "bos", "eos", "nothink", "think_bos", "think_eos")
SPEAKERS = ("ethan", "chelsie", "aiden")


@dataclass(frozen=True)
class OmniShape:
    """Sizes that vary between checkpoints; the rest is in ``make_config``."""

    head_dim: int = 32  # vLLM's CPU attention takes 32 and more
    thinker_layers: int = 4
    thinker_size: int = 64
    thinker_heads: int = 2
    thinker_kv_heads: int = 1
    accept_layer: int = 3  # that the talker reads at media: behind those to which pictures are added, and not the last
    num_experts: int = 4
    talker_layers: int = 2
    talker_size: int = 96  # not heads * head_dim
    talker_heads: int = 4
    talker_kv_heads: int = 2
    predictor_layers: int = 2
    num_codes: int = 64
    num_groups: int = 16
    window: int = 5  # of the vocoder's transformer
    num_extra_tokens: int = 0  # between the bytes and the special tokens
    has_talker: bool = True

    @property
    def vocab_size(self) -> int:
        return NUM_BYTES + self.num_extra_tokens + len(SPECIAL_TOKENS)

    def token_id(self, token: str) -> int:
        return NUM_BYTES + self.num_extra_tokens + SPECIAL_TOKENS.index(token)

    def codec_id(self, name: str) -> int:
        """Id of one of ``CODEC_IDS`` or ``SPEAKERS``, above the codes."""
        return self.num_codes + (*CODEC_IDS, *SPEAKERS).index(name)


VARIANTS = {
    "base": OmniShape(),
    "apart": OmniShape(  # ids that do not overlap those of "base"; other ratios of heads and layers
        num_extra_tokens=100, thinker_layers=5, accept_layer=4, thinker_size=96, thinker_heads=4, thinker_kv_heads=2,
        talker_layers=3, talker_size=64, talker_kv_heads=4, num_codes=96, window=3,
    ),
    "eight": OmniShape(num_groups=8, num_experts=6, predictor_layers=1),
    "thinker": OmniShape(has_talker=False),  # as of Thinking and Captioner
}  # fmt: skip


def make_config(shape: OmniShape) -> Qwen3OmniMoeConfig:
    """The configuration of the whole model.

    Some fields are not declared by transformers' classes, and read from the real files by it or by vLLM.
    """
    media = {
        "audio_token_id": shape.token_id("<|audio_pad|>"),
        "image_token_id": shape.token_id("<|image_pad|>"),
        "video_token_id": shape.token_id("<|video_pad|>"),
        "audio_start_token_id": shape.token_id("<|audio_start|>"),
        "audio_end_token_id": shape.token_id("<|audio_end|>"),
        "vision_start_token_id": shape.token_id("<|vision_start|>"),
        "vision_end_token_id": shape.token_id("<|vision_end|>"),
        "position_id_per_seconds": 13,
        "seconds_per_chunk": 2,
    }
    return Qwen3OmniMoeConfig(
        thinker_config={
            "text_config": _text_config(shape),
            "audio_config": _audio_config(shape),
            "vision_config": _vision_config(shape),
            "user_token_id": shape.token_id("user"),
            "system_token_id": shape.token_id("system"),
            "assistant_token_id": shape.token_id("assistant"),
            **media,
        },
        talker_config=_talker_config(shape) | media,
        code2wav_config=_code2wav_config(shape),
        im_start_token_id=shape.token_id("<|im_start|>"),
        im_end_token_id=shape.token_id("<|im_end|>"),
        tts_pad_token_id=shape.token_id("<tts_pad>"),
        tts_bos_token_id=shape.token_id("<tts_text_bos>"),
        tts_eos_token_id=shape.token_id("<tts_text_eod>"),
        system_token_id=shape.token_id("system"),
        user_token_id=shape.token_id("user"),
        assistant_token_id=shape.token_id("assistant"),
        enable_audio_output=shape.has_talker,
    )


def _rope() -> dict[str, Any]:
    return {
        "rope_type": "default",
        "rope_theta": 1000000.0,
        "mrope_section": [6, 5, 5],
        "interleaved": True,
        "mrope_interleaved": True,
    }


def _text_config(shape: OmniShape) -> dict[str, Any]:
    return {
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.thinker_size,
        "intermediate_size": 2 * shape.thinker_size,
        "num_hidden_layers": shape.thinker_layers,
        "num_attention_heads": shape.thinker_heads,
        "num_key_value_heads": shape.thinker_kv_heads,
        "head_dim": shape.head_dim,
        "max_position_embeddings": 32768,
        "rope_parameters": _rope(),
        "num_experts": shape.num_experts,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 48,
        "norm_topk_prob": True,
        "eos_token_id": shape.token_id("<|im_end|>"),
        "pad_token_id": shape.token_id("<|endoftext|>"),
        "tie_word_embeddings": False,
    }


def _audio_config(shape: OmniShape) -> dict[str, Any]:
    return {
        "d_model": 64,
        "encoder_layers": 2,
        "encoder_attention_heads": 2,
        "encoder_ffn_dim": 128,
        "num_mel_bins": 128,
        "n_window": 50,  # a constant of the length formula
        "n_window_infer": 800,
        "downsample_hidden_size": 16,
        "output_dim": shape.thinker_size,
    }


def _vision_config(shape: OmniShape) -> dict[str, Any]:
    return {
        "depth": 3,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_heads": 2,
        "patch_size": 16,
        "out_hidden_size": shape.thinker_size,
        "num_position_embeddings": 64,
        "deepstack_visual_indexes": [0, 1],
        "image_size": 128,
        "apply_vit_abs_pos_embed": True,
    }


def _talker_config(shape: OmniShape) -> dict[str, Any]:
    return {
        "text_config": {
            "vocab_size": shape.num_codes + 1024,  # the last 1024 ids but the end's are never sampled
            "hidden_size": shape.talker_size,
            "intermediate_size": 2 * shape.talker_size,
            "num_hidden_layers": shape.talker_layers,
            "num_attention_heads": shape.talker_heads,
            "num_key_value_heads": shape.talker_kv_heads,
            "head_dim": shape.head_dim,
            "max_position_embeddings": 32768,
            "rope_parameters": _rope(),
            "num_experts": shape.num_experts,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 48,
            "shared_expert_intermediate_size": 64,
            "norm_topk_prob": False,
        },
        "code_predictor_config": {
            "vocab_size": shape.num_codes,
            "hidden_size": shape.talker_size,
            "intermediate_size": 2 * shape.talker_size,
            "num_hidden_layers": shape.predictor_layers,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 32,
            "num_code_groups": shape.num_groups,
            "max_position_embeddings": 64,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
        },
        "num_code_groups": shape.num_groups,
        "thinker_hidden_size": shape.thinker_size,
        "accept_hidden_layer": shape.accept_layer,
        "spatial_merge_size": 2,
        "codec_eos_token_id": shape.codec_id("eos"),
        **{f"codec_{name}_id": shape.codec_id(name) for name in CODEC_IDS if name != "eos"},
        "speaker_id": {name: shape.codec_id(name) for name in SPEAKERS},
    }


def _code2wav_config(shape: OmniShape) -> dict[str, Any]:
    return {
        "codebook_size": shape.num_codes,
        "num_quantizers": shape.num_groups,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "sliding_window": shape.window,
        "decoder_dim": 48,
        "upsample_rates": [8, 5, 4, 3],
        "upsampling_ratios": [2, 2],
        "max_position_embeddings": 8000,
    }


def make_processor(shape: OmniShape) -> Qwen3OmniMoeProcessor:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    pixels = {"patch_size": 16, "size": {"shortest_edge": 64 * 64, "longest_edge": 1280 * 32 * 32}}
    return Qwen3OmniMoeProcessor(
        image_processor=Qwen2VLImageProcessor(**pixels),
        video_processor=Qwen2VLVideoProcessor(cap_pixels_per_frame=False, **pixels),
        feature_extractor=WhisperFeatureExtractor(feature_size=128, chunk_length=30, return_attention_mask=True),
        tokenizer=make_tokenizer(alphabet, SPECIAL_TOKENS, NAMED_TOKENS, shape.num_extra_tokens),
        chat_template=chat_template(NAMED_TOKENS),
    )
