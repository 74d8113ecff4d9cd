"""``make_config``: the configuration of a tiny Qwen2.5-Omni checkpoint."""

from __future__ import annotations

from typing import Any

from transformers import Qwen2_5OmniConfig

from vllm_omni.testing.qwen2_5_omni_shape import TinyShape


def make_config(shape: TinyShape) -> Qwen2_5OmniConfig:
    return Qwen2_5OmniConfig(
        thinker_config=_thinker_config(shape),
        talker_config=_talker_config(shape),
        token2wav_config={"dit_config": _dit_config(shape), "bigvgan_config": _bigvgan_config(shape)},
    )


def _thinker_config(shape: TinyShape) -> dict[str, Any]:
    return {
        "text_config": _text_config(shape),
        "audio_config": _audio_config(shape),
        "vision_config": _vision_config(shape),
        "tie_word_embeddings": shape.tie_word_embeddings,
        "user_token_id": ord("u"),
        **_media_ids(shape),
    }


def _text_config(shape: TinyShape) -> dict[str, Any]:
    return {
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.thinker_intermediate_size,
        "num_hidden_layers": shape.thinker_layers,
        "num_attention_heads": shape.thinker_heads,
        "num_key_value_heads": shape.thinker_kv_heads,
        "max_position_embeddings": 32768,
        "rope_parameters": _rope(shape),
        "tie_word_embeddings": shape.tie_word_embeddings,
        "eos_token_id": shape.token_id("<|im_end|>"),
        "pad_token_id": shape.token_id("<|endoftext|>"),
    }


def _audio_config(shape: TinyShape) -> dict[str, Any]:
    return {
        "d_model": shape.audio_heads * shape.audio_head_dim,
        "encoder_layers": shape.audio_layers,
        "encoder_attention_heads": shape.audio_heads,
        "encoder_ffn_dim": 2 * shape.audio_heads * shape.audio_head_dim,
        "num_mel_bins": 128,
        "n_window": 100,
        "output_dim": shape.hidden_size,
    }


def _vision_config(shape: TinyShape) -> dict[str, Any]:
    return {
        "depth": shape.vision_depth,
        "hidden_size": shape.vision_heads * shape.vision_head_dim,
        "intermediate_size": 2 * shape.vision_heads * shape.vision_head_dim,
        "num_heads": shape.vision_heads,
        "out_hidden_size": shape.hidden_size,
        "fullatt_block_indexes": list(shape.vision_full_attention),
    }


def _talker_config(shape: TinyShape) -> dict[str, Any]:
    tts_pad, tts_start, tts_end = shape.tts_text_ids
    codec_pad, codec_start, codec_end, codec_mask = (shape.num_codes + offset for offset in shape.codec_special_offsets)
    return {
        "vocab_size": shape.codec_vocab_size,
        "embedding_size": shape.hidden_size,
        "hidden_size": shape.talker_hidden_size,
        "intermediate_size": shape.talker_intermediate_size,
        "num_hidden_layers": shape.talker_layers,
        "num_attention_heads": shape.talker_heads,
        "num_key_value_heads": shape.talker_kv_heads,
        "head_dim": shape.head_dim,
        "rope_parameters": _rope(shape),
        "tts_text_pad_token_id": tts_pad,
        "tts_text_start_token_id": tts_start,
        "tts_text_end_token_id": tts_end,
        "tts_codec_pad_token_id": codec_pad,
        "tts_codec_start_token_id": codec_start,
        "tts_codec_end_token_id": codec_end,
        "tts_codec_mask_token_id": codec_mask,
        **_media_ids(shape),
    }


def _dit_config(shape: TinyShape) -> dict[str, Any]:
    return {
        "hidden_size": shape.dit_hidden_size,
        "num_hidden_layers": shape.dit_layers,
        "num_attention_heads": shape.dit_heads,
        "head_dim": shape.dit_head_dim,
        "emb_dim": 32,
        "num_embeds": shape.codec_vocab_size,
        "look_ahead_layers": list(shape.dit_look_ahead_layers),
        "look_backward_layers": list(shape.dit_look_backward_layers),
        "mel_dim": shape.mel_dim,
        "enc_emb_dim": shape.speaker_dim,
        "enc_dim": 16,
        "enc_channels": [32, 32, 32, 32, 96],
        "enc_attention_channels": 16,
        "enc_se_channels": 16,
        "dropout": 0.0,
    }


def _bigvgan_config(shape: TinyShape) -> dict[str, Any]:
    return {
        "mel_dim": shape.mel_dim,
        "upsample_initial_channel": shape.vocoder_channels,
        "upsample_rates": list(shape.upsample_rates),
        "upsample_kernel_sizes": list(shape.upsample_kernel_sizes),
        "resblock_kernel_sizes": list(shape.resblock_kernel_sizes),
        "resblock_dilation_sizes": [[1, 3, 5] for _ in shape.resblock_kernel_sizes],
    }


def _media_ids(shape: TinyShape) -> dict[str, Any]:
    """Token ids and times of media, which thinker and talker share."""
    return {
        "audio_token_index": shape.token_id("<|AUDIO|>"),
        "image_token_index": shape.token_id("<|IMAGE|>"),
        "video_token_index": shape.token_id("<|VIDEO|>"),
        "audio_start_token_id": shape.token_id("<|audio_bos|>"),
        "audio_end_token_id": shape.token_id("<|audio_eos|>"),
        "vision_start_token_id": shape.token_id("<|vision_bos|>"),
        "vision_end_token_id": shape.token_id("<|vision_eos|>"),
        "position_id_per_seconds": 25,
        "seconds_per_chunk": 2,
    }


def _rope(shape: TinyShape) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": 1e6, "mrope_section": list(shape.mrope_section)}
