"""What a stage with a pool is given: vLLM's offloading connector with our parts, where its encoded media are kept, and
adapters named by content.
"""

from __future__ import annotations

import hashlib
import json
import os
import socket
from collections.abc import Mapping
from functools import lru_cache
from typing import Any
from urllib.parse import urlsplit
from uuid import uuid4

from msgspec import structs
from vllm.config import VllmConfig
from vllm.lora.request import LoRARequest

from vllm_omni.config.kv_pool import ROW_BYTES, KVPoolConfig
from vllm_omni.errors import ConfigError
from vllm_omni.kv.pool.checkpoint import checkpoint_digest
from vllm_omni.messages.request import StageRequest
from vllm_omni.model_executor.pipeline import StageSpec
from vllm_omni.model_executor.row_cache import row_bytes
from vllm_omni.names import hide_password
from vllm_omni.relay.secret import Secret

HASH_ALGORITHMS = ("sha256", "sha256_cbor")  # the same in all processes; the other ones start from a random number
_NO_IDENTITY = {"_name_or_path", "transformers_version"}  # of a configuration


def offloading_connector(pool: KVPoolConfig, stage: str) -> dict[str, Any]:
    """The value of ``kv_transfer_config``.

    Args:
        stage: part of the pages' identity.
    """
    tier = {
        "type": "PoolTier",
        "module_path": "vllm_omni.kv.pool.offload.tier",
        "stage": stage,
        "memory_bytes": pool.memory_bytes,
        "disk": (pool.disk or "") if pool.disk_bytes else "",
        "disk_bytes": pool.disk_bytes,
        "directory": pool.directory or "",
        "redis": pool.redis or "",
        "token_file": os.path.abspath(pool.token_file) if pool.token_file else "",
    }
    return {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {
            "spec_name": "PoolOffloadingSpec",
            "spec_module_path": "vllm_omni.kv.pool.offload.spec",
            "cpu_bytes_to_use": pool.staging_bytes,
            "canonical_layout": pool.canonical_layout,
            "offload_prompt_only": False,  # the next turn's prompt has the reply
            "eviction_policy": "TinyLFUDuelPolicy",
            "cache_policy_module_path": "vllm_omni.kv.pool.offload.policy",
            "secondary_tiers": [tier],
        },
    }


def with_offloading(connector: Mapping[str, Any] | None, pool: KVPoolConfig, stage: str) -> dict[str, Any]:
    """The pool's connector; behind that by which pages migrate, if there is one: pages handed over are taken first."""
    offloading = offloading_connector(pool, stage)
    if not connector:
        return offloading
    return {
        "kv_connector": "MultiConnector",
        "kv_role": connector["kv_role"],
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"connectors": [dict(connector), offloading]},
    }


def check_hosts(pool: KVPoolConfig) -> None:
    """Check what an engine needs to share pages with other hosts. Redis need not be there: pages stay here until it is.

    Raises:
        ConfigError: the URL is none of Redis, or the token file cannot be used.
        MissingDependency: the extra ``redis`` is not installed.
    """
    if pool.redis is None:
        return
    from vllm_omni.kv.pool.hosts import check_url  # needs redis

    check_url(pool.redis)
    if pool.token_file:
        try:
            Secret.read(pool.token_file)
        except ConfigError as exc:
            raise ConfigError(f"kv_pool.token_file: {exc}") from exc


def check_address(pool: KVPoolConfig, host: str) -> None:
    """Check that other hosts can read an engine's pages.

    Args:
        host: where the engine's relays listen.

    Raises:
        ConfigError: they cannot reach this address, or it cannot be listened at.
    """
    if pool.redis is None:
        return
    if _is_loopback(host) and not _is_loopback(urlsplit(pool.redis).hostname):
        raise ConfigError(
            f"kv_pool.redis = {hide_password(pool.redis)!r}: other hosts read pages at VLLM_OMNI_RELAY_HOST, which is "
            f"{host!r}: set it to the address at which they reach this one, or give that by --listen"
        )
    try:
        family, _, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, socket.SOCK_STREAM) as one:
            one.bind(address)
    except OSError as exc:
        raise ConfigError(f"kv_pool.redis: this host cannot listen at VLLM_OMNI_RELAY_HOST = {host!r}: {exc}") from exc


def _is_loopback(host: str | None) -> bool:
    """Whether only this host reaches an address; None: a Unix socket."""
    return not host or host in ("localhost", "::1") or host.startswith("127.")


def unpoolable(config: VllmConfig, pool: KVPoolConfig, spec: StageSpec) -> str | None:
    """Why an engine's pages cannot be kept, if that is so; one that only encodes has none."""
    if spec.engine_args.get("enable_prompt_embeds"):
        return "its prompts are rows of another stage, and its own model alone does not name the pages: leave it out"
    if config.kv_transfer_config is None:
        return None
    if not config.cache_config.enable_prefix_caching:
        return "vLLM has no prefix cache for this model, by which pages are named: leave it out"
    if pool.redis is not None and (algo := config.cache_config.prefix_caching_hash_algo) not in HASH_ALGORITHMS:
        return (
            f"redis: pages that are named by {algo!r} are found by no other engine: set prefix_caching_hash_algo to "
            + (" or ".join(map(repr, HASH_ALGORITHMS)))
        )
    return None


def name_pages(config: VllmConfig) -> None:
    """Complete the identity of an engine's pages, in place: by its model's configuration, quantization and revision,
    and whether they have rows.

    Weights alone do not determine them: another scaling of positions gives other pages. Pages have no rows where an
    engine may have pulled them from another one, which has sent none, and in vLLM's canonical layout.
    """
    assert config.kv_transfer_config is not None
    extra = config.kv_transfer_config.kv_connector_extra_config
    if "connectors" not in extra and not extra["canonical_layout"] and (num_bytes := row_bytes(config)):
        extra[ROW_BYTES] = num_bytes
    for connector in extra.get("connectors", [{"kv_connector_extra_config": extra}]):
        for tier in connector.get("kv_connector_extra_config", {}).get("secondary_tiers", ()):
            identity = _identity(config) + (" with rows" if extra.get(ROW_BYTES) else "")
            tier |= {"identity": identity, "revision": config.model_config.revision or ""}


def _identity(config: VllmConfig) -> str:
    model = config.model_config
    fields = {name: value for name, value in model.hf_config.to_dict().items() if name not in _NO_IDENTITY}
    text = json.dumps([fields, model.quantization], sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def media_pool(config: VllmConfig, pool: KVPoolConfig, stage: str) -> dict[str, Any]:
    """The settings of an engine's pool of encoded media, for its runner (``worker/media_pool.py``).

    Raises:
        ConfigError: the model has no encoder whose output could be kept.
    """
    model = config.model_config
    if not model.supports_multimodal_inputs:
        raise ConfigError("kv_pool.media_bytes: this model reads no images, audio or video: leave it out")
    if model.is_encoder_decoder:
        raise ConfigError("kv_pool.media_bytes: an encoder-decoder model keeps no encoder output: leave it out")
    return {
        "stage": stage,
        "identity": _identity(config),
        "memory_bytes": pool.media_bytes,
        "directory": pool.directory or "",
        "disk": (pool.disk or "") if pool.media_disk_bytes else "",
        "disk_bytes": pool.media_disk_bytes,
    }


def with_adapter(request: StageRequest, pool: KVPoolConfig | None, adapter: LoRARequest | None) -> StageRequest:
    """Name a request's pages by the weights of its adapter, if it has one and there is a pool.

    Upstream names them by the adapter's name, which may be another adapter's after a restart.

    Args:
        request: its prompt rendered.
    """
    if pool is None or adapter is None:
        return request
    salt = f"{request.prompt.get('cache_salt') or ''}+{_adapter_digest(adapter.lora_path)}"
    return structs.replace(request, prompt={**request.prompt, "cache_salt": salt})


@lru_cache(maxsize=1024)
def _adapter_digest(path: str) -> str:
    try:
        return checkpoint_digest(path)
    except ConfigError:  # of another format: its pages are for this process alone
        return uuid4().hex
