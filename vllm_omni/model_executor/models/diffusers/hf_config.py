"""``DiffusersConfigParser``: vLLM's parser for diffusers pipelines (``config_format="diffusers"``)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig
from vllm.transformers_utils.config_parser_base import ConfigParserBase

from vllm_omni.config import read_model_index
from vllm_omni.model_executor.generation_model import GenerationConfig

ARCHITECTURE = "DiffusersPipeline"


class DiffusersConfigParser(ConfigParserBase):
    """Reads ``model_index.json`` into ``GenerationConfig.model_config``."""

    def parse(
        self,
        model: str | Path,
        trust_remote_code: bool,
        revision: str | None = None,
        code_revision: str | None = None,
        **kwargs: Any,
    ) -> tuple[dict[str, Any], PreTrainedConfig]:
        index = read_model_index(str(model), revision=revision)
        return index, GenerationConfig(architectures=[ARCHITECTURE], model_config=index)
