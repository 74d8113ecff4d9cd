"""What the stages need of their devices: which of them share one, and their needs before they start."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from vllm.config import CacheConfig, VllmConfig
from vllm.model_executor.layers.vocab_parallel_embedding import pad_vocab_size
from vllm.platforms import current_platform
from vllm.utils.torch_utils import STR_DTYPE_TO_TORCH_DTYPE
from vllm.v1.executor.abstract import Executor
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheSpec, MLAAttentionSpec

from vllm_omni.config.weights import StoredTensor, read_tensors
from vllm_omni.diffusion.loading import FLOAT32_DECODERS, resolve_dtype
from vllm_omni.engine.stage import StageEngine
from vllm_omni.errors import ConfigError
from vllm_omni.model_executor.rank_memory import cache_bounds, configured_cache, current_device, dtype_name
from vllm_omni.model_executor.workerless_executor import WorkerlessExecutor
from vllm_omni.process.memory import UNPROFILED_DIVISOR, Device, StageMemory, format_bytes, name_rank
from vllm_omni.process.memory_division import MemorySection
from vllm_omni.worker.platforms import find_platform

# Tensors with a row for each token, whose number vLLM rounds up; "codec_head" is the talker's.
_VOCABULARY = re.compile(r"(^|\.)(embed_tokens|wte|lm_head|codec_head)\.weight$")
# Tensors of a language model, which an instance that only encodes does not load.
_LANGUAGE_MODEL = re.compile(r"(^|\.)(language_model|lm_head|model\.(layers|embed_tokens|norm))\.")


# -- which stages share a device ---------------------------------------------------------------------------------------


def memory_sections(engines: Iterable[StageEngine]) -> dict[str, MemorySection]:
    """Find the ranks on each device, by engine; none on a host where the configuration sizes every cache.

    On a GPU an engine without a section would check and measure the whole device, as if the others were not there.

    Raises:
        ConfigError: these sizes are more than the memory of the host.
    """
    engines = [engine for engine in engines if _measures_itself(engine.vllm_config)]
    if not any(_takes_a_share(engine) or engine.vllm_config.device_config.device_type != "cpu" for engine in engines):
        _check_caches(engines)
        return {}
    devices = {engine.name: devices_of(engine.vllm_config) for engine in engines}
    ranks: defaultdict[str, list[str]] = defaultdict(list)
    for name, of_ranks in devices.items():
        for rank, device in enumerate(of_ranks):
            ranks[device].append(name_rank(name, rank, len(of_ranks)))
    return {
        engine.name: MemorySection(
            devices[engine.name], {device: ranks[device] for device in devices[engine.name]}, memory_share(engine)
        )
        for engine in engines
    }


def _check_caches(engines: Iterable[StageEngine]) -> None:
    """Check sizes that nothing measures. The kernel gives memory when it is used: without this, requests would fail."""
    sizes = {
        engine.name: (engine.vllm_config.cache_config.kv_cache_memory_bytes or 0)
        * engine.vllm_config.parallel_config.local_world_size
        for engine in engines
        if _has_cache(engine)
    }
    total, device = sum(sizes.values()), find_device("cpu")
    if total > device.total:
        largest = max(sizes, key=lambda name: sizes[name])
        raise ConfigError(
            f"KV caches of {format_bytes(total)} are configured (kv_cache_memory_bytes, VLLM_CPU_KVCACHE_SPACE), "
            f"{format_bytes(sizes[largest])} of them for {largest}, and this host has {format_bytes(device.total)}"
        )


def devices_of(vllm_config: VllmConfig) -> list[str]:
    """The devices of an engine's ranks here: "cpu", or "cuda:0" with the number that the GPU has on its host."""
    parallel, device = vllm_config.parallel_config, vllm_config.device_config.device_type
    if device == "cpu":
        return ["cpu"] * parallel.local_world_size
    ids = parallel.assigned_physical_gpu_ids
    if ids is None:
        ids = [current_platform.device_id_to_physical_device_id(rank) for rank in range(parallel.local_world_size)]
    return [f"{device}:{number}" for number in ids[: parallel.local_world_size]]


def find_device(name: str) -> Device:
    """Read the memory of a device of ``devices_of``.

    Raises:
        ConfigError: this process does not see it.
    """
    if name == "cpu":
        return current_device(name)
    for ordinal in range(torch.accelerator.device_count()):
        if name.endswith(f":{current_platform.visible_device_id_to_physical_device_id(ordinal)}"):
            return current_device(name, ordinal)
    raise ConfigError(f"device {name}: there is no such GPU, or it is not visible: give --device-memory SIZE")


def visible_devices() -> list[str]:
    """The devices that this process may use, named as in ``devices_of``, in the order that ``device_ids`` count."""
    kind = current_platform.device_type
    if kind == "cpu":
        return ["cpu"]
    physical = current_platform.visible_device_id_to_physical_device_id
    return [f"{kind}:{physical(ordinal)}" for ordinal in range(torch.accelerator.device_count())]


def find_closed_device(name: str) -> Device:
    """A device of ``visible_devices`` as if all of it were free: reading that takes some of a GPU's memory for as long
    as the process lives.
    """
    if name == "cpu":
        return find_device(name)
    total = current_platform.get_device_total_memory(visible_devices().index(name))
    return Device(name=name, total=total, free=total)


def memory_share(engine: StageEngine) -> float | None:
    """``gpu_memory_utilization`` of an engine, if its configuration sets it."""
    share = engine.vllm_config.cache_config.gpu_memory_utilization
    is_set = "gpu_memory_utilization" in engine.config.engine_args or share != CacheConfig.gpu_memory_utilization
    return share if is_set else None


def _measures_itself(vllm_config: VllmConfig) -> bool:
    """Whether the classes that run the engine report to the others on its device; those of another package may not."""
    executor = Executor.get_class(vllm_config)
    is_known = issubclass(executor, WorkerlessExecutor) or executor.__module__.startswith("vllm.")
    return is_known and find_platform(vllm_config.device_config.device_type).divides_memory


def has_configured_cache(engine: StageEngine) -> bool:
    """Whether the configuration gives the size of its cache, in bytes or blocks."""
    cache = engine.vllm_config.cache_config
    return cache.kv_cache_memory_bytes is not None or cache.num_gpu_blocks_override is not None


def _takes_a_share(engine: StageEngine) -> bool:
    return _has_cache(engine) and not has_configured_cache(engine)


def _has_cache(engine: StageEngine) -> bool:
    return engine.kind.generates_tokens and not engine.vllm_config.is_mm_encoder_only


# -- before the start --------------------------------------------------------------------------------------------------


def declared_memory(engine: StageEngine, name: str, total: int) -> StageMemory:
    """The needs of one rank: weights by the checkpoint, activations estimated, the cache by its declared bounds.

    Args:
        total: bytes of its device.
    """
    config = engine.vllm_config
    weights = _weights(engine) // config.parallel_config.world_size
    if not engine.kind.generates_tokens:
        dtype = dtype_name(config) if engine.config.is_diffusion else None
        return StageMemory(stage=name, weights=weights, activations=weights // UNPROFILED_DIVISOR, dtype=dtype)
    specs, per_seq = _cache_specs(config), _logits_bytes(config)
    activations = _token_bytes(config) + config.scheduler_config.max_num_seqs * per_seq
    smallest, largest = cache_bounds(config, specs)
    cache = configured_cache(config, specs, memory_share(engine), total, weights + activations) if specs else None
    return StageMemory(
        stage=name,
        weights=weights,
        activations=activations,
        cache_min=smallest,
        cache_max=largest,
        cache=cache,
        max_model_len=config.model_config.max_model_len,
        max_num_seqs=config.scheduler_config.max_num_seqs,
        activations_per_seq=per_seq,
        dtype=dtype_name(config),
    )


def _weights(engine: StageEngine) -> int:
    """Bytes of the parameters of all ranks together; what a model skips of its tensors is counted, too."""
    config = engine.vllm_config.model_config
    if engine.config.is_diffusion:
        weights = sum(_component_bytes(engine, name, entry) for name, entry in config.hf_config.model_config.items())
    else:
        dtype = STR_DTYPE_TO_TORCH_DTYPE.get(engine.spec.weight_dtype, config.dtype)
        float_bytes = None if config.quantization else dtype.itemsize
        tensors = _loaded_tensors(engine, read_tensors(config.model, engine.spec.weight_folder, config.revision))
        weights = sum(_padded(tensor).num_bytes(float_bytes) for tensor in tensors)
    if not weights:
        raise ConfigError(f"stage {engine.name!r}: {config.model} has no safetensors, whose sizes could be read")
    return weights


def _loaded_tensors(engine: StageEngine, tensors: Iterable[StoredTensor]) -> list[StoredTensor]:
    text_config = engine.vllm_config.model_config.hf_text_config
    skips_head = engine.kind.generates_tokens and getattr(text_config, "tie_word_embeddings", False)
    skips_language_model = engine.vllm_config.is_mm_encoder_only
    return [
        tensor
        for tensor in tensors
        if tensor.name.startswith(engine.spec.weight_prefix)
        and not (skips_head and tensor.name.endswith("lm_head.weight"))
        and not (skips_language_model and _LANGUAGE_MODEL.search(tensor.name))
    ]


def _padded(tensor: StoredTensor) -> StoredTensor:
    if not _VOCABULARY.search(tensor.name):
        return tensor
    return tensor._replace(shape=(pad_vocab_size(tensor.shape[0]), *tensor.shape[1:]))


def _component_bytes(engine: StageEngine, name: str, entry: Any) -> int:
    """Of one entry of ``model_index.json``: ``name: [library, class]``, or something else."""
    if not (isinstance(entry, list) and len(entry) == 2 and all(entry)):
        return 0
    config, device = engine.vllm_config.model_config, torch.device(engine.vllm_config.device_config.device_type)
    is_default = config.dtype == resolve_dtype("auto", device)
    dtype = torch.float32 if is_default and entry[1] in FLOAT32_DECODERS else config.dtype
    return sum(tensor.num_bytes(dtype.itemsize) for tensor in read_tensors(config.model, name, config.revision))


def _token_bytes(config: VllmConfig) -> int:
    """Estimate what the tokens of a step allocate on one rank; a start measures it with vLLM's profile run.

    A batch holds its hidden states four times, and the outputs of an MLP, gate and up and their product, once each.
    Embeddings of images wait in the encoder's cache.
    """
    model, scheduler, text_config = config.model_config, config.scheduler_config, config.model_config.hf_text_config
    hidden = model.get_hidden_size()
    mlp = text_config.intermediate_size if hasattr(text_config, "intermediate_size") else 4 * hidden
    per_token = 4 * hidden + 3 * mlp // config.parallel_config.tensor_parallel_size
    images = scheduler.encoder_cache_size * hidden if model.is_multimodal_model else 0
    return (scheduler.max_num_batched_tokens * per_token + images) * model.dtype.itemsize


def _logits_bytes(config: VllmConfig) -> int:
    """Of one request in the sampler, which has two copies in float32."""
    return 2 * config.model_config.get_vocab_size() * torch.float32.itemsize


def _cache_specs(config: VllmConfig) -> Mapping[str, KVCacheSpec]:
    """The KV cache of each attention layer of a rank, all with full attention: too much for models with windows."""
    model, cache = config.model_config, config.cache_config
    if model.is_attention_free or config.is_mm_encoder_only:
        return {}
    spec = FullAttentionSpec(
        block_size=cache.block_size,
        num_kv_heads=model.get_num_kv_heads(config.parallel_config),
        head_size=model.get_head_size(),
        dtype=STR_DTYPE_TO_TORCH_DTYPE.get(cache.cache_dtype, model.dtype),
    )
    if model.use_mla:  # one latent vector for each token, no values
        spec = MLAAttentionSpec(block_size=spec.block_size, num_kv_heads=1, head_size=spec.head_size, dtype=spec.dtype)
    return {f"layer {number}": spec for number in range(model.get_num_layers_by_block_type(config.parallel_config))}
