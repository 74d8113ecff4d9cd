"""A deployment as bytes: what a front end sends to the hosts that join it."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any, NoReturn

import msgspec

from vllm_omni.config.model import EDGE_FIELDS, STAGE_FIELDS, EdgeConfig, OmniConfig, StageConfig
from vllm_omni.errors import ConfigError


def pack_config(config: OmniConfig) -> bytes:
    """Encode a deployment, without its pipeline if it is the caller's own: that is code, which each host has.

    Raises:
        ConfigError: a value of a stage is an object of this process.
    """
    edges = [{name: getattr(one, name) for name in ("source", "target", *EDGE_FIELDS)} for one in config.edges]
    whole = {
        "model": config.model,
        "model_type": config.model_type,
        "stages": [_plain(stage) for stage in config.stages],
        "edges": edges,
        "voices": dict(config.voices),
    }
    return msgspec.msgpack.encode(whole)


def _plain(stage: StageConfig) -> dict[str, Any]:
    if stage.vllm_config is not None:
        raise ConfigError(f"stage {stage.name!r}: a ready vllm_config cannot travel to other hosts: give engine_args")
    fields = {name: getattr(stage, name) for name in STAGE_FIELDS}
    if isinstance(executor := stage.executor_class, type):
        fields["executor_class"] = f"{executor.__module__}.{executor.__qualname__}"
    for name, value in fields.items():
        try:
            msgspec.msgpack.encode(value, enc_hook=_reject)
        except (TypeError, ValueError, OverflowError) as exc:
            raise ConfigError(f"stage {stage.name!r}: {name} cannot travel to other hosts: {exc}") from exc
    return fields


def _reject(value: object) -> NoReturn:
    raise TypeError(f"{value!r} is an object of this process; give a plain value")


def unpack_config(data: bytes, model: str, pipeline: type | None) -> OmniConfig:
    """Decode a deployment on another host.

    Args:
        model: where the checkpoint is on this host.
        pipeline: the caller's own, as on the front end.

    Raises:
        ConfigError: the front end has another pipeline.
    """
    whole = msgspec.msgpack.decode(data)
    own = whole["model_type"] if pipeline is None else pipeline.__name__
    if own != whole["model_type"]:
        raise ConfigError(f"--pipeline: the front end serves {whole['model_type']!r}, not {own!r}")
    for stage in whole["stages"]:
        if stage["model"] == whole["model"]:
            stage["model"] = model
    return OmniConfig(
        model=model,
        model_type=whole["model_type"],
        pipeline=pipeline,
        stages=tuple(StageConfig(**stage) for stage in whole["stages"]),
        edges=tuple(EdgeConfig(**edge) for edge in whole["edges"]),
        voices=whole["voices"],
    )


def on_host(config: OmniConfig, engines: Collection[str]) -> OmniConfig:
    """The deployment as a host sees it that serves these engines: they run here, and all others elsewhere."""
    return replace(config, stages=tuple(_on_host(stage, engines) for stage in config.stages))


def _on_host(stage: StageConfig, engines: Collection[str]) -> StageConfig:
    if stage.name in engines or (stage.nodes > 1 and any(name in engines for name in stage.part_names)):
        return replace(stage, host=None)
    names = stage.engine_names
    if any(name in engines for name in names):
        return replace(stage, host=[None if name in engines else ELSEWHERE for name in names])
    # What several engines of it are is the front end's affair, also where they could not have a host (``nodes``).
    args = {name: value for name, value in stage.engine_args.items() if name not in ("nnodes", "data_parallel_size")}
    return replace(
        stage,
        host=ELSEWHERE,
        engine_args=args,
        replicas=1,
        max_replicas=None,
        balance=None,
        nodes=1,
        epd={},
        unified=None,
    )


ELSEWHERE = "elsewhere"
