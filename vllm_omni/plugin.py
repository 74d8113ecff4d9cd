"""The vLLM plugin: everything that is registered with vLLM is registered here, and nothing of vLLM is replaced.

vLLM calls ``register`` (entry-point group ``vllm.general_plugins``) in the front end, in every engine core and in every
worker.
"""

from __future__ import annotations

import logging

ARCHITECTURES = {
    "Qwen2_5OmniThinker": "vllm_omni.model_executor.models.qwen2_5_omni.thinker:Qwen2_5OmniThinker",
    "Qwen2_5OmniTalker": "vllm_omni.model_executor.models.qwen2_5_omni.talker:Qwen2_5OmniTalker",
    "Qwen2_5OmniToken2Wav": "vllm_omni.model_executor.models.qwen2_5_omni.token2wav:Qwen2_5OmniToken2Wav",
    # vLLM only inspects this class, before it lets an engine start; the pipeline itself is diffusers' business.
    "DiffusersPipeline": "vllm_omni.model_executor.generation_model:GenerationModel",
}


_registered = False


def register() -> None:
    """Register our architectures and configuration format, and join vLLM's log. Idempotent.

    In a stage's process, also tie it to its parent.
    """
    global _registered
    if _registered:
        return
    _registered = True

    from vllm.model_executor.models.registry import ModelRegistry
    from vllm.transformers_utils.config import register_config_parser

    from vllm_omni.config import DIFFUSERS
    from vllm_omni.model_executor.models.diffusers.hf_config import DiffusersConfigParser

    known = ModelRegistry.get_supported_archs()
    for architecture, location in ARCHITECTURES.items():
        if architecture not in known:
            ModelRegistry.register_model(architecture, location)

    register_config_parser(DIFFUSERS)(DiffusersConfigParser)

    # Our lines go where vLLM's go, and obey what it was told about levels and formats.
    logging.getLogger("vllm_omni").parent = logging.getLogger("vllm")

    from vllm_omni.process.run_directory import enter_stage_process

    enter_stage_process()
