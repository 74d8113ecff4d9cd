"""The vLLM plugin: everything that is registered with vLLM is registered here.

vLLM calls ``register`` (entry-point group ``vllm.general_plugins``) in the front end, in every engine core and in every
worker. What is replaced at run time stands in ``vllm_patches.py``.
"""

from __future__ import annotations

import functools
import logging

ARCHITECTURES = {
    "BagelImageDecoder": "vllm_omni.model_executor.models.bagel.image_decoder:BagelImageDecoder",
    "BagelLanguageModel": "vllm_omni.model_executor.models.bagel.language_model:BagelLanguageModel",
    "JanusImageDecoder": "vllm_omni.model_executor.models.janus.image_decoder:JanusImageDecoder",
    "JanusLanguageModel": "vllm_omni.model_executor.models.janus.language_model:JanusLanguageModel",
    "GlmImageLanguageModel": "vllm_omni.model_executor.models.glm_image.language_model:GlmImageLanguageModel",
    "HunyuanImage3ImageDecoder": (
        "vllm_omni.model_executor.models.hunyuan_image_3.image_decoder:HunyuanImage3ImageDecoder"
    ),
    "HunyuanImage3LanguageModel": (
        "vllm_omni.model_executor.models.hunyuan_image_3.language_model:HunyuanImage3LanguageModel"
    ),
    "MiMoAudioDecoder": "vllm_omni.model_executor.models.mimo_audio.decoder:MiMoAudioDecoder",
    "MiMoAudioLanguageModel": "vllm_omni.model_executor.models.mimo_audio.language_model:MiMoAudioLanguageModel",
    "Qwen2_5OmniThinker": "vllm_omni.model_executor.models.qwen2_5_omni.thinker:Qwen2_5OmniThinker",
    "Qwen2_5OmniTalker": "vllm_omni.model_executor.models.qwen2_5_omni.talker:Qwen2_5OmniTalker",
    "Qwen2_5OmniToken2Wav": "vllm_omni.model_executor.models.qwen2_5_omni.token2wav:Qwen2_5OmniToken2Wav",
    "Qwen3OmniThinker": "vllm_omni.model_executor.models.qwen3_omni_moe.thinker:Qwen3OmniThinker",
    "Qwen3OmniTalker": "vllm_omni.model_executor.models.qwen3_omni_moe.talker:Qwen3OmniTalker",
    "Qwen3OmniCode2Wav": "vllm_omni.model_executor.models.qwen3_omni_moe.code2wav:Qwen3OmniCode2Wav",
    "Qwen3TTSTalker": "vllm_omni.model_executor.models.qwen3_tts.talker:Qwen3TTSTalker",
    "Qwen3TTSCodec": "vllm_omni.model_executor.models.qwen3_tts.codec:Qwen3TTSCodec",
    # vLLM inspects this class before it starts an engine, and never instantiates it: diffusers loads the pipeline.
    "DiffusersPipeline": "vllm_omni.model_executor.generation_model:GenerationModel",
}


@functools.cache
def register() -> None:
    """Register our architectures, configuration format and loader, and log through vLLM's logger. Idempotent.

    In a process of a stage, also end the process with its parent.
    """
    from transformers import AutoConfig
    from vllm.model_executor.models.registry import ModelRegistry
    from vllm.transformers_utils.config import register_config_parser

    from vllm_omni.config import DIFFUSERS
    from vllm_omni.model_executor.models.diffusers.hf_config import DiffusersConfigParser
    from vllm_omni.model_executor.models.hunyuan_image_3.config import HunyuanConfig, HunyuanImage3Config
    from vllm_omni.model_executor.models.qwen3_tts.hf_config import MODEL_TYPE, Qwen3TTSConfig

    known = ModelRegistry.get_supported_archs()
    for architecture, location in ARCHITECTURES.items():
        if architecture not in known:
            ModelRegistry.register_model(architecture, location)

    register_config_parser(DIFFUSERS)(DiffusersConfigParser)
    AutoConfig.register(MODEL_TYPE, Qwen3TTSConfig, exist_ok=True)
    for config in (HunyuanImage3Config, HunyuanConfig):
        AutoConfig.register(config.model_type, config, exist_ok=True)

    # Our log lines follow vLLM's handlers, levels and formats.
    logging.getLogger("vllm_omni").parent = logging.getLogger("vllm")

    from vllm_omni.process.node_address import NODE_ADDRESS, listen_at
    from vllm_omni.process.shared_weights import LOAD_FORMAT, SHARED_WEIGHTS
    from vllm_omni.process.tether import enter_stage_process, stage_sections

    if stage_sections().get(SHARED_WEIGHTS):  # importing vLLM's loaders takes two seconds, which not all processes need
        from vllm.model_executor.model_loader import register_model_loader

        from vllm_omni.model_executor.shared_loader import SharedWeightsLoader

        register_model_loader(LOAD_FORMAT)(SharedWeightsLoader)

    enter_stage_process()
    if (address := stage_sections().get(NODE_ADDRESS)) is not None:
        listen_at(address)
