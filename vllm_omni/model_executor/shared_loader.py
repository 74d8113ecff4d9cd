"""``SharedWeightsLoader``: vLLM's default loader, run once for all engines of a server that load the same weights."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace

import torch
from torch import nn
from vllm.config import ModelConfig, VllmConfig
from vllm.config.load import LoadConfig
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
from vllm.model_executor.model_loader.utils import process_weights_after_loading
from vllm.model_executor.utils import weights_already_processed
from vllm.platforms import current_platform
from vllm.utils.torch_utils import set_default_torch_dtype

from vllm_omni.model_executor.shared_weights import shared_weights
from vllm_omni.vllm_patches import unpacked_cpu_weights


class SharedWeightsLoader(DefaultModelLoader):
    """The first engine loads and publishes; the others adopt what it has published, and read no checkpoint.

    vLLM has an owner and followers on CUDA (``ipc_cache``); as there, followers run vLLM's post-processing only for
    what is beside the tensors. On a CPU, linear weights stay as they are loaded: oneDNN would copy them, packed, into
    memory that cannot be shared.
    """

    def __init__(self, load_config: LoadConfig) -> None:
        super().__init__(replace(load_config, load_format="safetensors"))

    def load_model(self, vllm_config: VllmConfig, model_config: ModelConfig, prefix: str = "") -> nn.Module:
        if model_config is not vllm_config.model_config:  # a draft model
            return super().load_model(vllm_config, model_config, prefix)
        weights = shared_weights(vllm_config)
        device = torch.device(current_platform.device_type)
        unpacked = unpacked_cpu_weights() if device.type == "cpu" else nullcontext()
        with unpacked, weights.claim() as must_load, set_default_torch_dtype(model_config.dtype):
            with torch.device("cpu"):
                model = self.create_model(vllm_config=vllm_config, model_config=model_config, prefix=prefix)
            if must_load:
                weights.prepare(model)
                self.load_weights(model, model_config)
            else:
                weights.adopt(model)
            with nullcontext() if must_load else weights_already_processed():
                process_weights_after_loading(model, model_config, device)
            if must_load:
                weights.publish(model)
        return model.eval()
