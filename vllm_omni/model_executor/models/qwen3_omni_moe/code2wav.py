"""``Qwen3OmniCode2Wav``: frames of codes to a waveform."""

from __future__ import annotations

from transformers import PreTrainedConfig

from vllm_omni.model_executor.codec_model import CodecModel, codec_config
from vllm_omni.model_executor.models.qwen3_omni_moe.talker import MODEL_TYPE


class Qwen3OmniCode2Wav(CodecModel):
    weight_prefix = "code2wav."


def code2wav_hf_config(config: PreTrainedConfig) -> PreTrainedConfig:
    """``hf_overrides`` of the code2wav stage."""
    if config.model_type != MODEL_TYPE:  # vLLM also passes a dummy, to ask whether the model type changes
        return config
    return codec_config("Qwen3OmniCode2Wav", config.code2wav_config.to_dict())
