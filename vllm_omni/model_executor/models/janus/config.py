"""Names of Janus-Pro's tokens, and the ids of a picture's."""

from __future__ import annotations

from transformers import PreTrainedConfig

BOS = "<｜begin▁of▁sentence｜>"
IMAGE, IMAGE_START = "<image_placeholder>", "<begin_of_image>"
ARCHITECTURE = "JanusLanguageModel"

FIRST_PICTURE_ID = "first_picture_id"
"""Field of the language model's configuration: ids below it are those of texts."""


def language_hf_config(config: PreTrainedConfig) -> PreTrainedConfig:
    """``hf_overrides`` of the language model's stage: the tokens of pictures have ids behind those of texts."""
    # vLLM also passes a dummy, to ask whether the model type changes.
    if hasattr(config, "vq_config") and not hasattr(config, FIRST_PICTURE_ID):
        config.architectures = [ARCHITECTURE]
        setattr(config, FIRST_PICTURE_ID, config.text_config.vocab_size)
        config.text_config.vocab_size += config.vq_config.num_embeddings
    return config
