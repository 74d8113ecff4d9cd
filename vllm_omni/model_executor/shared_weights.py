"""``shared_weights``: the weights that engines of a server share, and what identifies them."""

from __future__ import annotations

import hashlib
import json

from vllm import __version__ as vllm_version
from vllm.config import VllmConfig

from vllm_omni.errors import ConfigError
from vllm_omni.kv.pool.checkpoint import checkpoint_digest
from vllm_omni.model_executor.device_block import CudaMemory
from vllm_omni.model_executor.device_weights import DeviceWeights
from vllm_omni.model_executor.host_weights import HostWeights
from vllm_omni.model_executor.weight_tensors import SharedModel
from vllm_omni.process.shared_weights import LOAD_FORMAT
from vllm_omni.process.tether import ServerTether


def shared_weights(vllm_config: VllmConfig) -> SharedModel:
    """The weights of an engine, on its device; a GPU is this process's current one.

    Raises:
        ConfigError: the engine belongs to no server, or its checkpoint has no safetensors files.
    """
    tether = vllm_config.additional_config
    if not isinstance(tether, ServerTether):
        raise ConfigError(f"load_format = {LOAD_FORMAT!r}: engines of one server share weights, and this one has none")
    key = weights_key(vllm_config)
    if vllm_config.device_config.device_type == "cpu":
        return HostWeights(tether.directory, key)
    memory = CudaMemory()
    return DeviceWeights(tether.directory, f"{key}-{memory.uuid}", memory)


def weights_key(vllm_config: VllmConfig) -> str:
    """Identify the weights of a rank by all that determines their bytes.

    The architecture stands for the tensors that it takes of a checkpoint; buffers follow from the model's configuration
    and ``max_model_len`` (rotary tables).
    """
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    fields = {
        "checkpoint": checkpoint_digest(model.model, model.revision),
        "architectures": model.architectures,
        "config": model.hf_config.to_dict(),
        "dtype": str(model.dtype),
        "quantization": model.quantization,
        "max_model_len": model.max_model_len,
        "is_encoder_only": vllm_config.is_mm_encoder_only,
        "ranks": [parallel.tensor_parallel_size, parallel.pipeline_parallel_size, parallel.enable_expert_parallel],
        "rank": parallel.rank,
        "vllm": vllm_version,
    }
    return hashlib.sha256(json.dumps(fields, sort_keys=True, default=str).encode()).hexdigest()[:32]
