"""Which settings of a stage cannot be combined, and what to do instead; each alone is valid."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, TypeAlias

from vllm_omni.config.kv_pool import find_conflicts

if TYPE_CHECKING:
    from vllm_omni.config.model import StageConfig

Conflicts: TypeAlias = Mapping[str, object]
"""What cannot be combined -> whether it is."""


def find_conflict(stage: StageConfig) -> str | None:
    """The first settings that cannot be combined; None: all can be."""
    for check in _CHECKS:
        for message, is_wrong in check(stage).items():
            if is_wrong:
                return message
    return None


def _sections(stage: StageConfig) -> Conflicts:
    is_ready = stage.vllm_config is not None
    return {
        "diffusion: only a stage with engine_type 'diffusion' has this section, and this one is "
        f"{stage.engine_type!r}": stage.diffusion and not stage.is_diffusion,
        "epd: only the first stage, which reads the prompt, has this section, and only if its engine_type is 'ar'": (
            stage.epd and not _reads_prompt(stage)
        ),
        "epd: cannot be combined with a ready vllm_config; give engine_args instead": stage.epd and is_ready,
        "kv_pool: only a stage with engine_type 'ar' has KV pages": stage.kv_pool and not stage.is_autoregressive,
    }


def _pool(stage: StageConfig) -> Conflicts:
    pool = stage.pool
    return {
        **dict.fromkeys(find_conflicts(stage.kv_pool), True),
        "epd.image_cache_bytes: has no effect with kv_pool.media_bytes, which keeps the images of all instances: "
        "leave it out": pool is not None and pool.keeps_media and "image_cache_bytes" in stage.epd,
        "kv_pool: cannot be combined with a ready vllm_config; give engine_args": (
            stage.kv_pool and stage.vllm_config is not None
        ),
        "kv_pool: pages are named by the hashes of the prefix cache: leave enable_prefix_caching on": (
            pool is not None and pool.keeps_pages and _has_no_prefix_cache(stage)
        ),
    }


def _rows(stage: StageConfig) -> Conflicts:
    if stage.row_cache is None:
        return {}
    return {
        "row_cache: only a stage with engine_type 'ar' has a KV cache, and rows beside it": (
            not stage.is_autoregressive
        ),
        "row_cache: cannot be combined with a ready vllm_config; give engine_args": stage.vllm_config is not None,
        "row_cache = true: rows are kept for prefixes: leave enable_prefix_caching on": (
            stage.row_cache and _has_no_prefix_cache(stage)
        ),
        "row_cache = true: pages that this kv_transfer_config loads have no rows": (
            stage.row_cache and stage.engine_args.get("kv_transfer_config")
        ),
    }


def _pictures(stage: StageConfig) -> Conflicts:
    if stage.unified is None:
        return {}
    are_apart = stage.deployment.separates_pictures
    return {
        "unified: only the first stage, which reads the prompt, has this key, and only if its engine_type is 'ar', "
        "without a ready vllm_config": not _reads_prompt(stage) or stage.vllm_config is not None,
        "unified = true: cannot be combined with instances of kind G, which generate pictures apart from texts": (
            stage.unified and are_apart
        ),
        "unified = false: an instance must generate pictures: add G:1 to epd.instances": (
            not stage.unified and not are_apart
        ),
    }


def _engines(stage: StageConfig) -> Conflicts:
    is_ready, is_replicated = stage.vllm_config is not None, stage.max_engines > 1
    devices = stage.engine_args.get("device_ids") or ()
    return {
        "give engine_args or a ready vllm_config, not both": stage.engine_args and is_ready,
        "replicas: cannot be combined with a ready vllm_config; give engine_args": is_replicated and is_ready,
        "replicas: cannot be combined with epd.instances, which are several engines already: give more of those": (
            is_replicated and stage.deployment.is_split
        ),
        "balance: has no effect on one engine: give replicas (instances have epd.balance)": (
            stage.balance is not None and not is_replicated
        ),
        f"max_replicas = {stage.max_replicas}: there are more at the start: replicas = {stage.replicas}": (
            stage.max_replicas is not None and stage.max_replicas < stage.replicas
        ),
        f"{'replicas' if stage.max_replicas is None else 'max_replicas'} = {stage.max_engines}: cannot share "
        f"{len(devices)} device_ids evenly": len(devices) % stage.max_engines,
    }


def _nodes(stage: StageConfig) -> Conflicts:
    """Of an engine that spans hosts with names."""
    if stage.nodes == 1 or stage.host is None:
        return {}
    names = stage.host if isinstance(stage.host, list) else [stage.host]
    args, where = stage.engine_args, f"nodes = {stage.nodes}: "
    num_tensor_ranks = args.get("tensor_parallel_size") or 1
    return {
        f"{where}host = {stage.host!r}: give {stage.nodes} different names, one for each host, and start each "
        "with --headless, also on the front end's machine, unless Ray does": (
            not len(names) == len({*names} - {None}) == stage.nodes
        ),
        f"{where}cannot share tensor_parallel_size = {num_tensor_ranks} evenly": num_tensor_ranks % stage.nodes,
        f"{where}cannot be combined with replicas, max_replicas, epd.instances or kv_pool: leave them out": (
            stage.max_engines > 1 or stage.deployment.is_split or stage.pool is not None
        ),
        f"{where}vLLM's executor for several hosts runs it: leave executor_class, distributed_executor_backend and "
        "pipeline_parallel_size out": _chooses_executor(stage),
        f"{where}each host chooses its devices: leave device_ids out": args.get("device_ids"),
    }


def _hosts(stage: StageConfig) -> Conflicts:
    others = stage.has_other_host
    return {
        f"host = {stage.host!r}: give one name, or {len(stage.engine_names)}, one for each {_each_engine(stage)}": (
            len(stage.hosts) != len(stage.engine_names)
        ),
        "host: cannot be combined with a ready vllm_config, which another host has not: give engine_args": (
            stage.vllm_config is not None and others
        ),
        "host: instances on other hosts cannot be combined with kv_pool.media_bytes, which the front end looks up "
        "in the memory of its own host: leave one of them out": (
            stage.deployment.is_split and others and stage.pool is not None and stage.pool.keeps_media
        ),
        "host: cannot be combined with vLLM's nnodes or data_parallel_size: an engine is on one host, or on "
        "several by nodes": others and _is_several_by_vllm(stage),
    }


def _model(stage: StageConfig) -> Conflicts:
    return {
        "model: the path of a checkpoint is needed (or a ready vllm_config)": (
            not stage.model and stage.vllm_config is None
        ),
        "executor_class and engine_args.distributed_executor_backend set the same thing: give one of them": (
            stage.executor_class is not None and "distributed_executor_backend" in stage.engine_args
        ),
    }


_CHECKS: tuple[Callable[[StageConfig], Conflicts], ...] = (
    _sections,
    _pool,
    _rows,
    _pictures,
    _engines,
    _nodes,
    _hosts,
    _model,
)


def _reads_prompt(stage: StageConfig) -> bool:
    return stage.is_autoregressive and stage.stage_id == 0


def _has_no_prefix_cache(stage: StageConfig) -> bool:
    return stage.engine_args.get("enable_prefix_caching") is False


def _chooses_executor(stage: StageConfig) -> bool:
    args = stage.engine_args
    has_executor = stage.executor_class is not None or args.get("distributed_executor_backend") is not None
    return has_executor or (args.get("pipeline_parallel_size") or 1) > 1


def _is_several_by_vllm(stage: StageConfig) -> bool:
    return any((stage.engine_args.get(name) or 1) > 1 for name in ("nnodes", "data_parallel_size"))


def _each_engine(stage: StageConfig) -> str:
    if stage.deployment.is_split:
        return f"instance: {', '.join(stage.engine_names)}"
    return "replica" if stage.max_replicas is None else "replica that may start"
