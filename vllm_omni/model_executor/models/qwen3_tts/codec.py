"""``Qwen3TTSCodec``: the decoder of the 12 Hz codec, whose tensors stand in a folder of their own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers import PreTrainedConfig
from vllm.transformers_utils.config import get_hf_file_to_dict

from vllm_omni.errors import ConfigError
from vllm_omni.model_executor.codec_model import CodecModel, codec_config
from vllm_omni.model_executor.models.qwen3_tts.hf_config import MODEL_TYPE

FOLDER = "speech_tokenizer"
TOKENIZER = "qwen3_tts_tokenizer_12hz"


class Qwen3TTSCodec(CodecModel):
    weight_prefix = "decoder."
    allow_patterns_overrides = (f"{FOLDER}/*.safetensors",)  # read by vLLM's loader


def check_tokenizer(model: str, tokenizer_type: str | None) -> None:
    """Raise ``ConfigError`` for a checkpoint with another tokenizer than that of 12 Hz, which has another decoder."""
    if tokenizer_type not in (None, TOKENIZER):
        raise ConfigError(
            f"{model}: tokenizer_type = {tokenizer_type!r}: only {TOKENIZER!r} is supported: use a checkpoint with the "
            "12 Hz tokenizer, Qwen3-TTS-12Hz-..."
        )


def load_codec_config(model: str, revision: str | None) -> dict[str, Any]:
    """The configuration of the codec, beside that of the talker.

    Raises:
        ConfigError: the checkpoint has none.
    """
    config = get_hf_file_to_dict(f"{FOLDER}/config.json", model, revision or "main")
    if not isinstance(config, dict) or "decoder_config" not in config:
        raise ConfigError(f"{model} has no {FOLDER}/config.json with a decoder_config: is the checkpoint complete?")
    return config


def codec_hf_config(config: PreTrainedConfig, *, section: Mapping[str, Any]) -> PreTrainedConfig:
    """``hf_overrides`` of the codec stage.

    Args:
        section: ``decoder_config`` of the codec.
    """
    if config.model_type != MODEL_TYPE:  # vLLM also passes a dummy, to ask whether the model type changes
        return config
    return codec_config("Qwen3TTSCodec", section)
