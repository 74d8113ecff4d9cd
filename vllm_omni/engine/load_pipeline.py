"""Find and make the pipeline of a deployment's model."""

from __future__ import annotations

from vllm.plugins import load_general_plugins
from vllm.transformers_utils.config import get_config

from vllm_omni.config import DIFFUSERS, OmniConfig, has_model_index
from vllm_omni.errors import ConfigError
from vllm_omni.model_executor.pipeline import Pipeline, find_pipeline_cls


def load_pipeline(config: OmniConfig) -> Pipeline:
    """Make the pipeline that the deployment names, or that its model type has.

    Raises:
        ConfigError: the checkpoint's configuration cannot be read, or there is no such pipeline.
    """
    args = config.stages[0].engine_args
    revision, trust = args.get("revision"), bool(args.get("trust_remote_code", False))
    try:
        load_general_plugins()  # ours registers diffusers' layout with vLLM
        config_format = DIFFUSERS if has_model_index(config.model, revision=revision) else "auto"
        hf_config = get_config(config.model, trust, revision=revision, config_format=config_format)
        pipeline_cls = config.pipeline or find_pipeline_cls(config.model_type)
        return pipeline_cls(config.model, hf_config, revision)
    except ConfigError:
        raise
    except (OSError, ValueError) as exc:
        raise ConfigError(f"{config.model}: {exc}") from exc
