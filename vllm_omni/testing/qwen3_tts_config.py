"""Configurations and tokenizer of tiny Qwen3-TTS checkpoints."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import pre_tokenizers

KINDS = ("base", "custom_voice", "voice_design")
SPECIAL_TOKENS = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "assistant", "user", "<tts_pad>", "<tts_text_bos>", "<tts_text_eod>"
)  # fmt: skip
NUM_BYTES = 256
# Order of the codec's own ids, which stand above the codes.
CODEC_IDS = ("pad", "bos", "eos", "think", "nothink", "think_bos", "think_eos")
LANGUAGES = ("english", "german", "chinese", "sichuan_dialect")
SPEAKERS: Mapping[str, str | bool] = {"vivian": False, "ryan": False, "eric": "sichuan_dialect"}  # name -> its dialect


@dataclass(frozen=True)
class TTSShape:
    """Sizes that vary between checkpoints; the rest is in ``make_config``."""

    kind: str = "custom_voice"
    num_codes: int = 64  # a power of 2: Mimi
    hidden_size: int = 64  # of the talker; not heads * head_dim
    num_layers: int = 3
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 32
    predictor_size: int = 48  # other than the talker's: small_to_mtp_projection
    predictor_layers: int = 2
    model_size: str = "1b7"  # "0b6" ignores instructions
    window: int = 5  # of the codec's transformer
    decoder_dim: int = 48  # of the codec's first convolution

    @property
    def vocab_size(self) -> int:
        return self.num_codes + 1024  # as in the real one, whose last 1024 ids but one are never sampled


VARIANTS = {
    "base": TTSShape(),
    "clone": TTSShape(kind="base", hidden_size=96, predictor_size=96, head_dim=32, num_heads=2, num_kv_heads=1),
    "design": TTSShape(kind="voice_design", num_layers=2, num_kv_heads=4, predictor_size=32, window=3),
    "small": TTSShape(model_size="0b6", predictor_size=64, num_codes=32),
    # 37 million parameters, of which a frame reads the talker's 24 once and the predictor's 5 fifteen times.
    "wide": TTSShape(
        hidden_size=512, num_layers=10, num_heads=8, num_kv_heads=4, head_dim=64, predictor_size=480,
        predictor_layers=3, num_codes=512, decoder_dim=192,
    ),
}  # fmt: skip


def token_id(token: str) -> int:
    return NUM_BYTES + SPECIAL_TOKENS.index(token)


def codec_id(shape: TTSShape, name: str) -> int:
    """Id of one of ``CODEC_IDS``, of a language or of a speaker."""
    return shape.num_codes + (*CODEC_IDS, *LANGUAGES, *SPEAKERS).index(name)


def make_config(shape: TTSShape) -> dict[str, Any]:
    """``config.json`` of the model."""
    config = {
        "architectures": ["Qwen3TTSForConditionalGeneration"],
        "model_type": "qwen3_tts",
        "tokenizer_type": "qwen3_tts_tokenizer_12hz",
        "tts_model_size": shape.model_size,
        "tts_model_type": shape.kind,
        "im_start_token_id": token_id("<|im_start|>"),
        "im_end_token_id": token_id("<|im_end|>"),
        "assistant_token_id": token_id("assistant"),
        "tts_pad_token_id": token_id("<tts_pad>"),
        "tts_bos_token_id": token_id("<tts_text_bos>"),
        "tts_eos_token_id": token_id("<tts_text_eod>"),
        "talker_config": _talker_config(shape),
    }
    if shape.kind == "base":
        config["speaker_encoder_config"] = speaker_encoder_config(shape)
    return config


def _talker_config(shape: TTSShape) -> dict[str, Any]:
    has_speakers = shape.kind == "custom_voice"
    return {
        "model_type": "qwen3_tts_talker",
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden_size,
        "intermediate_size": 2 * shape.hidden_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000,
        "rope_scaling": {"interleaved": True, "mrope_section": _sections(shape.head_dim // 2), "rope_type": "default"},
        "attention_bias": False,
        "tie_word_embeddings": False,
        "num_code_groups": 16,
        "text_hidden_size": 40,
        "text_vocab_size": NUM_BYTES + len(SPECIAL_TOKENS) + 8,
        "position_id_per_seconds": 13,
        **{f"codec_{name}_id": codec_id(shape, name) for name in CODEC_IDS if name != "eos"},
        "codec_eos_token_id": codec_id(shape, "eos"),
        "codec_language_id": {name: codec_id(shape, name) for name in LANGUAGES},
        "spk_id": {name: codec_id(shape, name) for name in SPEAKERS} if has_speakers else {},
        "spk_is_dialect": dict(SPEAKERS) if has_speakers else {},
        "code_predictor_config": {
            "model_type": "qwen3_tts_talker_code_predictor",
            "vocab_size": shape.num_codes,
            "hidden_size": shape.predictor_size,
            "intermediate_size": 2 * shape.predictor_size,
            "num_hidden_layers": shape.predictor_layers,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 32,
            "num_code_groups": 16,
            "rope_theta": 1000000,
            "rms_norm_eps": 1e-6,
            "max_position_embeddings": 64,
            "attention_bias": False,
        },
    }


def _sections(size: int) -> list[int]:
    """Three parts of the rotary dimensions, the first the largest."""
    part = size // 3
    return [size - 2 * part, part, part]


def speaker_encoder_config(shape: TTSShape) -> dict[str, Any]:
    return {
        "mel_dim": 128,
        "enc_dim": shape.hidden_size,
        "enc_channels": [16, 16, 16, 32],
        "enc_kernel_sizes": [5, 3, 3, 1],
        "enc_dilations": [1, 2, 3, 1],
        "enc_attention_channels": 8,
        "enc_res2net_scale": 4,
        "enc_se_channels": 8,
        "sample_rate": 24000,
    }


def make_codec_config(shape: TTSShape) -> dict[str, Any]:
    """``speech_tokenizer/config.json``."""
    return {
        "architectures": ["Qwen3TTSTokenizerV2Model"],
        "model_type": "qwen3_tts_tokenizer_12hz",
        "encoder_valid_num_quantizers": 16,
        "input_sample_rate": 24000,
        "output_sample_rate": 24000,
        "decode_upsample_rate": 1920,
        "encode_downsample_rate": 1920,
        "decoder_config": {
            "num_quantizers": 16,
            "codebook_size": shape.num_codes,
            "codebook_dim": 32,
            "latent_dim": 40,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "head_dim": 16,
            "sliding_window": shape.window,
            "rms_norm_eps": 1e-5,
            "rope_theta": 10000,
            "max_position_embeddings": 8000,
            "attention_bias": False,
            "decoder_dim": shape.decoder_dim,
            "upsample_rates": [8, 5, 4, 3],
            "upsampling_ratios": [2, 2],
        },
        "encoder_config": {
            "model_type": "mimi",
            "sampling_rate": 24000,
            "audio_channels": 1,
            "hidden_size": 32,
            "num_filters": 4,
            "num_residual_layers": 1,
            "upsampling_ratios": [8, 6, 5, 4],
            "kernel_size": 7,
            "last_kernel_size": 3,
            "residual_kernel_size": 3,
            "codebook_size": shape.num_codes,
            "codebook_dim": 16,
            "vector_quantization_hidden_dimension": 16,
            "num_quantizers": 20,
            "num_semantic_quantizers": 1,
            "upsample_groups": 32,
            "num_hidden_layers": 2,
            "intermediate_size": 48,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "head_dim": 8,
            "max_position_embeddings": 8000,
            "sliding_window": 250,
            "use_causal_conv": True,
            "frame_rate": 12.5,
        },
    }


def write_tokenizer(path: Path) -> None:
    """Qwen2's files for a tokenizer of bytes: the roles are single tokens, and there are no merges."""
    # Order of the bytes in the byte-level alphabet, as in every byte-level BPE of this family.
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {character: index for index, character in enumerate(alphabet)}
    (path / "vocab.json").write_text(json.dumps(vocabulary, ensure_ascii=False), encoding="utf-8")
    (path / "merges.txt").write_text("#version: 0.2\n", encoding="utf-8")
    added = {
        str(token_id(token)): {
            "content": token, "lstrip": False, "normalized": False, "rstrip": False, "single_word": False,
            "special": token.startswith("<"),
        }
        for token in SPECIAL_TOKENS
    }  # fmt: skip
    settings = {
        "tokenizer_class": "Qwen2Tokenizer",
        "added_tokens_decoder": added,
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "unk_token": None,
        "bos_token": None,
        "add_bos_token": False,
        "add_prefix_space": False,
        "errors": "replace",
        "model_max_length": 131072,
        "split_special_tokens": False,
        "clean_up_tokenization_spaces": False,
    }
    (path / "tokenizer_config.json").write_text(json.dumps(settings, indent=1), encoding="utf-8")
