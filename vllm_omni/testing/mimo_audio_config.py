"""Configurations and tokenizer of tiny MiMo-Audio checkpoints."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

# In the order of the real ids, which follow those of Qwen2.5.
SPECIAL_TOKENS = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|sosp|>", "<|eosp|>", "<|empty|>", "<|Human|>", "<|SpeechLM|>",
    "<|sostm|>", "<|eostm|>", "<|eot|>",
)  # fmt: skip
MERGES = (
    ("Ġ", "t"), ("i", "s"), ("Ġt", "h"), ("e", "r"), ("a", "s"), ("a", "t"), ("i", "n"), ("Ġ", "s"), ("Ġ", "is"),
    ("Ġt", "o"), ("Ġth", "is"), ("a", "i"), (".", "Ċ"), ("Ċ", "Ċ"),
)  # fmt: skip
FIRST_SPECIAL = 256 + len(MERGES)
# Qwen2's.
SPLITS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True)
class MiMoShape:
    """Sizes that vary between checkpoints; the rest is in ``make_config`` and ``make_tokenizer_config``."""

    architecture: str = "MiMoAudioModel"
    hidden_size: int = 64
    num_layers: int = 3
    num_heads: int = 2
    num_kv_heads: int = 1
    head_dim: int = 32
    delays: str = "0-1-2-3-4-5-6-7"
    vocab_sizes: str = "65-65-17-17-17-17-17-17"  # one number: of all channels
    local_dim: int = 32
    local_layers: int = 3
    local_heads: int = 4
    local_ffn: int = 80
    patch_dim: int | None = None  # None: as local_dim, and absent from the configuration
    patch_layers: int = 2
    is_patch_full: bool = True
    codec_dim: int = 32
    codec_heads: int = 2
    encoder_layers: int = 3
    encoder_skip: int = 2
    decoder_layers: int = 2
    num_mels: int = 16
    vocoder_dim: int = 32
    vocoder_window: tuple[int, int] = (12, 4)
    num_quantizers: int = 10

    @property
    def num_text_ids(self) -> int:
        return FIRST_SPECIAL + len(SPECIAL_TOKENS)

    @property
    def vocab_size(self) -> int:
        return self.num_text_ids + 5  # with padding rows, as the real one

    @property
    def sizes(self) -> list[int]:
        """Codes of each channel, its empty id included."""
        sizes = [int(one) for one in self.vocab_sizes.split("-")]
        return sizes if len(sizes) > 1 else sizes * 8

    @property
    def encoder_dim(self) -> int:
        """Width of the patch encoder."""
        return self.patch_dim or self.local_dim


VARIANTS = {
    "base": MiMoShape(),
    # A patch encoder of another width, which does not look ahead, channels that share delays, one size for all of them.
    "narrow": MiMoShape(
        hidden_size=96, num_layers=2, num_heads=3, num_kv_heads=3, delays="0-1-1-2-2-3-3-4", vocab_sizes="33",
        local_dim=24, local_layers=2, local_ffn=56, patch_dim=40, is_patch_full=False, codec_dim=48, codec_heads=3,
        encoder_layers=2, encoder_skip=1, decoder_layers=3, num_mels=20, vocoder_dim=24, vocoder_window=(5, 2),
        num_quantizers=8,
    ),
    "asr": MiMoShape(
        architecture="MiMoV2ASRForCausalLM", hidden_size=128, num_layers=2, num_heads=4, num_kv_heads=2,
        local_layers=2, patch_layers=3, vocoder_window=(7, 3), decoder_layers=1,
    ),
    "wide": MiMoShape(
        hidden_size=512, num_layers=8, num_heads=8, num_kv_heads=4, head_dim=64, local_dim=256, local_layers=4,
        local_heads=16, local_ffn=1024, patch_layers=2, vocab_sizes="257-257-129-129-129-129-129-129", codec_dim=128,
        codec_heads=4, num_mels=64, vocoder_dim=128, vocoder_window=(40, 10), num_quantizers=20,
    ),
}  # fmt: skip


def token_id(token: str) -> int:
    return FIRST_SPECIAL + SPECIAL_TOKENS.index(token)


def make_config(shape: MiMoShape) -> dict[str, Any]:
    """``config.json`` of the language model."""
    empty = [str(size - 1) for size in shape.sizes]
    config = {
        "architectures": [shape.architecture],
        "model_type": "qwen2",
        "hidden_size": shape.hidden_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "intermediate_size": 2 * shape.hidden_size,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 640000,
        "rope_scaling": None,
        "tie_word_embeddings": False,
        "attention_bias": True,
        "attention_dropout": 0.0,
        "max_position_embeddings": 8192,
        "max_window_layers": 28,
        "use_sliding_window": False,
        "sliding_window": None,
        "use_cache": True,
        "torch_dtype": "float32",
        "vocab_size": shape.vocab_size,
        "bos_token_id": token_id("<|endoftext|>"),
        "eos_token_id": token_id("<|im_end|>"),
        "group_size": 4,
        "audio_channels": 8,
        "delay_pattern": shape.delays,
        "speech_vocab_size": shape.vocab_sizes,
        "speech_zeroemb_idx": "-".join(empty) if "-" in shape.vocab_sizes else empty[0],
        "local_dim": shape.local_dim,
        "local_layers": shape.local_layers,
        "local_attn_heads": shape.local_heads,
        "local_ffn_dim": shape.local_ffn,
        "local_attn_dropout": 0.1,
        "input_local_layers": shape.patch_layers,
        "add_input_local_transformer": True,
        "add_speech_sosp_eosp": False,
        "n_rvq": shape.num_quantizers,
    }
    if shape.patch_dim is not None:
        config["input_local_dim"] = shape.patch_dim
    if shape.is_patch_full:
        config["input_full_attention"] = True
    return config


def make_codec_config(shape: MiMoShape) -> dict[str, Any]:
    """``config.json`` of the audio tokenizer."""
    codebooks = [size - 1 for size in shape.sizes]
    return {
        "architectures": ["MiMoAudioTokenizer"],
        "model_type": "mimo_audio_tokenizer",
        "torch_dtype": "float32",
        "max_audio_seconds": 1800,
        "sampling_rate": 24000,
        "n_mels": shape.num_mels,
        "nfft": 960,
        "window_size": 960,
        "hop_length": 240,
        "fmin": 0,
        "fmax": None,
        "kernel_size": 3,
        "stride_size": 2,
        "avg_pooler": 2,
        "d_model": shape.codec_dim,
        "scale_embedding": False,
        "activation_function": "gelu",
        "ln_type": "LayerNorm",
        "position_embedding_type": "rope",
        "rope_theta": 10000,
        "rope_type": "default",
        "encoder_layers": shape.encoder_layers,
        "encoder_skip_layer_id": shape.encoder_skip,
        "encoder_attention_heads": shape.codec_heads,
        "encoder_ffn_dim": 2 * shape.codec_dim,
        "encoder_causal": False,
        "encoder_attn_window_size": [-1, -1],
        "decoder_layers": shape.decoder_layers,
        "decoder_attention_heads": shape.codec_heads,
        "decoder_ffn_dim": 2 * shape.codec_dim,
        "decoder_kernel_size": 3,
        "decoder_stride_size": 2,
        "decoder_causal": True,
        "decoder_attn_window_size": [-1, -1],
        "vocoder_dim": shape.vocoder_dim,
        "vocoder_intermediate_dim": 2 * shape.vocoder_dim,
        "vocoder_num_layers": 2,
        "vocoder_attention_heads": 4,
        "vocoder_attn_window_size": list(shape.vocoder_window),
        "vocoder_padding": "same",
        "num_quantizers": shape.num_quantizers,
        "codebook_size": [*codebooks, *[codebooks[-1]] * (shape.num_quantizers - len(codebooks))],
        "threshold_ema_dead_code": 2,
    }


def write_tokenizer(path: Path) -> None:
    """Qwen2's splits and a tokenizer of bytes with a few merges."""
    tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *("".join(pair) for pair in MERGES)]
    vocabulary: Mapping[str, int] = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(dict(vocabulary), list(MERGES)))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(SPLITS), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    tokenizer.save(str(path / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "bos_token": None,
        "unk_token": None,
        "model_max_length": 8192,
        "clean_up_tokenization_spaces": False,
        "add_prefix_space": False,
    }
    (path / "tokenizer_config.json").write_text(json.dumps(settings, indent=1), encoding="utf-8")
