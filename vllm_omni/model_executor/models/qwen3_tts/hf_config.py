"""``Qwen3TTSConfig``: the checkpoints' config.json, which transformers does not know."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedConfig, Qwen3Config

MODEL_TYPE = "qwen3_tts"


class Qwen3TTSConfig(PreTrainedConfig):
    """Sections are kept as they stand in the file, and each stage reads its own."""

    model_type = MODEL_TYPE

    def __init__(self, talker_config: dict[str, Any] | None = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.talker_config = talker_config or {}


def talker_hf_config(config: PreTrainedConfig) -> PreTrainedConfig:
    """``hf_overrides`` of the talker stage: Qwen3's configuration, with the fields that only the talker reads.

    The three axes of its positions are always equal, so that they are those of a text model.
    """
    if config.model_type != MODEL_TYPE:  # vLLM also passes a dummy, to ask whether the model type changes
        return config
    talker = dict(config.talker_config)
    rope = {"rope_type": "default", "rope_theta": float(talker.pop("rope_theta"))}
    talker.pop("rope_scaling", None)
    talker.pop("model_type", None)
    made = Qwen3Config(**talker, rope_parameters=rope, architectures=["Qwen3TTSTalker"])
    for name in ("tts_pad_token_id", "tts_bos_token_id", "tts_eos_token_id"):
        setattr(made, name, getattr(config, name))
    return made
