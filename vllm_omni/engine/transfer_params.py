"""What engines are sent whose KV cache or embeddings travel: their connector, and the parameters of their requests."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vllm.sampling_params import RequestOutputKind, SamplingParams

from vllm_omni.messages.request import StageRequest
from vllm_omni.messages.slo import SLO_ARGS
from vllm_omni.model_executor.pipeline import StageSpec

EC, KV = "ec_transfer_params", "kv_transfer_params"
"""Keys of ``SamplingParams.extra_args``, and of vLLM's outputs, with which connectors exchange references."""

KV_CONFIG = "kv_transfer_config"
"""The engine argument that names a KV connector."""


def kv_connector(role: str) -> dict[str, Any]:
    """The value of ``KV_CONFIG``.

    Args:
        role: vLLM's: "kv_producer", "kv_consumer" or "kv_both".
    """
    return {
        "kv_connector": "RelayKVConnector",
        "kv_connector_module_path": "vllm_omni.kv.kv_connector",
        "kv_load_failure_policy": "recompute",
        "kv_role": role,
    }


def without_reply(params: SamplingParams, extra_args: Mapping[str, Any]) -> SamplingParams:
    """Parameters of a request that only computes its prompt: its token is discarded. Schedulers follow the SLO."""
    slo = {key: value for key, value in (params.extra_args or {}).items() if key == SLO_ARGS}
    return SamplingParams(
        temperature=0.0,
        max_tokens=1,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
        extra_args={**slo, **extra_args},
    )


def cache_args(spec: StageSpec, request: StageRequest, params: SamplingParams, wanted: frozenset[str]) -> Any:
    """The value of ``KV`` for a request of a stage that passes or reads a KV cache; None: it does neither."""
    if spec.cache_fields & wanted:
        return {"do_remote_decode": True}
    # Log probabilities of the prompt are computed with it, so that a request with them computes it here.
    return request.cache if params.prompt_logprobs is None else None
