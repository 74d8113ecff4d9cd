"""How a model is deployed: one frozen schema (``model``), and the one way into it (``layers``)."""

from vllm_omni.config.checkpoint import (
    DIFFUSERS,
    LANGUAGE,
    MODEL_INDEX,
    added_pipelines,
    bundled_model_types,
    has_model_index,
    read_model_config,
    read_model_index,
    read_model_type,
    supported_model_types,
)
from vllm_omni.config.documents import dump_value
from vllm_omni.config.layers import load_config
from vllm_omni.config.model import CHUNK_KEYS, EdgeConfig, OmniConfig, Origin, StageConfig

__all__ = [
    "CHUNK_KEYS",
    "DIFFUSERS",
    "LANGUAGE",
    "MODEL_INDEX",
    "EdgeConfig",
    "OmniConfig",
    "Origin",
    "StageConfig",
    "added_pipelines",
    "bundled_model_types",
    "dump_value",
    "has_model_index",
    "load_config",
    "read_model_config",
    "read_model_index",
    "read_model_type",
    "supported_model_types",
]
