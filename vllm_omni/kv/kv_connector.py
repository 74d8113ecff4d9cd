"""``RelayKVConnector``: prefill on one engine, decode on another; the KV cache of the prompt goes over the relay.

This file is vLLM's contract (``KVConnectorBase_V1``) on both of its sides; ``migration.py`` decides which pages travel,
``page_relay.py`` moves them. A *prefill task* is a request whose ``extra_args`` have
``kv_transfer_params = {"do_remote_decode": True}``; it ends with an announcement as its output's
``kv_transfer_params``, which names where the pages of its prompt lie. The *decode task*, the same prompt on another
engine, brings that announcement; its blocks are allocated as soon as there is room, its pages are pulled in parallel
to the steps, and then the engine computes the prompt's last token again and samples the first one as if the prompt had
been computed here. If anything goes wrong with the pages, the engine computes the prompt itself.

When vLLM 0.32 calls the methods that matter here:

* A prefill task waits (``get_num_new_matched_tokens`` -> None) until every rank has leased buffers for its whole
  prompt. So the scheduler has the references before the prefill starts: vLLM frees a finished request, and asks for its
  announcement, before it passes on the workers' output of that step.
* ``start_load_kv`` is called after the forward if nothing in the step waits for it. A pull that started there would be
  a step late, so it starts when the step's metadata is bound.
* ``request_finished`` is called once, however a request ends; a running pull keeps its blocks until the worker reports
  that it has ended.

From: HydraInfer, section 4.3 (migration: announce, admit, pull, release).
"""

from __future__ import annotations

import array
import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.distributed.kv_transfer.kv_connector.utils import get_current_attn_backends
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
)
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector
from vllm.v1.kv_cache_interface import AttentionSpec, UniformTypeKVCacheSpecs
from vllm.v1.metrics.cache_hit_source import CacheHitSource
from vllm.v1.request import RequestStatus

from vllm_omni.errors import ConfigError
from vllm_omni.kv.identifiers import is_counter
from vllm_omni.kv.migration import Actions, MigrationScheduler, Scheduled
from vllm_omni.kv.page_relay import PageSource, PageTarget
from vllm_omni.kv.pages import CacheFormat, PagedCaches
from vllm_omni.messages.payload import TensorRef
from vllm_omni.relay.hub import OPTIONS, RelayHub, process_hub

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

_FAILED = (RequestStatus.FINISHED_ABORTED, RequestStatus.FINISHED_ERROR, RequestStatus.FINISHED_IGNORED)


@dataclass
class StepMetadata(KVConnectorMetadata):
    """What the scheduler's side sends every worker's with a step."""

    actions: Actions = field(default_factory=Actions)


@dataclass
class Leased(KVConnectorWorkerMetadata):
    """What the workers' sides send the scheduler's: buffers that were leased in a step, by request and rank."""

    refs: dict[str, dict[int, list[list[TensorRef]]]] = field(default_factory=dict)
    # Request -> why a rank will never have buffers for it.
    rejected: dict[str, str] = field(default_factory=dict)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        assert isinstance(other, Leased), "one kind of connector at a time"
        refs = {request_id: dict(ranks) for request_id, ranks in self.refs.items()}
        for request_id, ranks in other.refs.items():
            refs.setdefault(request_id, {}).update(ranks)
        return Leased(refs, self.rejected | other.rejected)


@dataclass
class Caches(KVConnectorHandshakeMetadata):
    """A rank's caches, which the scheduler's side receives once, at start."""

    format: CacheFormat


class RelayKVConnector(KVConnectorBase_V1):
    """Moves the KV cache of a prompt between engines; see the module.

    There must be one KV cache group, whose blocks hold every token of a request: vLLM makes one for models with sliding
    windows too, unless a connector says that it supports several. Pipeline and context parallelism are not supported.

    Raises:
        ConfigError: an unsupported model or parallelism; the message says which.
    """

    _cache_hit_source = CacheHitSource.P2P
    scheduler: MigrationScheduler  # in the scheduler's role only

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig):
        super().__init__(vllm_config, role, kv_cache_config)
        _check(vllm_config, kv_cache_config)
        if role is KVConnectorRole.SCHEDULER:
            self.scheduler = MigrationScheduler(kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size)
        self.worker: WorkerSide | None = None  # made with the caches

    # -- worker -------------------------------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        rank = get_tensor_model_parallel_rank()
        caches = _paged_caches(self._vllm_config, self._kv_cache_config, kv_caches, rank)
        hub = process_hub(self._vllm_config.additional_config)
        if self._kv_transfer_config.is_kv_producer:
            hub.prepare()
        self.worker = WorkerSide(hub, caches, rank)

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        return None if self.worker is None else Caches(self.worker.caches.format)

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        assert isinstance(connector_metadata, StepMetadata), "made by build_connector_meta"
        assert self.worker is not None, "steps come after the caches"
        self.worker.start_step(connector_metadata.actions)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        return  # bind_connector_metadata did

    def wait_for_layer_load(self, layer_name: str) -> None:
        return  # a request is scheduled when all its layers are here

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        if self.worker is not None and self.has_connector_metadata():
            self.worker.source.save_layer(self.worker.caches.owner(layer_name))

    def wait_for_save(self) -> None:
        assert self.worker is not None, "steps come after the caches"
        self.worker.source.end_step()

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        assert self.worker is not None, "steps come after the caches"
        for request_id in finished_req_ids:
            self.worker.target.cancel(request_id)
        done, failed = self.worker.target.take_done()
        return KVConnectorTransferResults(finished_recving=done, failed_recving=failed)

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        assert self.worker is not None, "steps come after the caches"
        leased, self.worker.leased = self.worker.leased, None
        return leased

    def shutdown(self) -> None:
        if self.worker is not None:
            self.worker.close()

    # -- scheduler ----------------------------------------------------------------------------------------------------

    def set_xfer_handshake_metadata_pp_aware(self, metadata: dict[tuple[int, int], Any]) -> None:
        ranks = [metadata[key] for key in sorted(metadata)]
        assert all(isinstance(one, Caches) for one in ranks)
        self.scheduler.ranks = tuple(one.format for one in ranks)

    def on_new_request(self, request: Request) -> None:
        if request.kv_transfer_params:
            digest = partial(_digest, request)
            self.scheduler.add(request.request_id, request.num_prompt_tokens, request.kv_transfer_params, digest)

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        num_tokens = self.scheduler.num_new_tokens(request.request_id, num_computed_tokens)
        return num_tokens, bool(num_tokens)

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        if num_external_tokens:
            self.scheduler.load(request.request_id, blocks.get_block_ids()[0], num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        def blocks_of(request_id: str) -> list[int]:
            state = scheduler_output.kv_connector_block_state
            assert state is not None, "vLLM sets it before it calls this method"
            blocks = state.get_block_ids(request_id)
            assert blocks is not None, "the request is scheduled"
            return blocks[0]

        return StepMetadata(self.scheduler.take_actions(_scheduled(scheduler_output), blocks_of))

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        if connector_output.kv_connector_worker_meta is not None:
            assert isinstance(connector_output.kv_connector_worker_meta, Leased)
            leased = connector_output.kv_connector_worker_meta
            self.scheduler.add_leased(leased.refs, leased.rejected)

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return False, self.scheduler.finish(request.request_id, is_failed=request.status in _FAILED)

    def has_pending_push_work(self) -> bool:
        # Otherwise the last request's buffers would stay until the next request's first step.
        return self.scheduler.has_drops

    def num_announced_tokens(self, request: Request) -> int:
        """Tokens of a waiting request's prompt whose pages will be pulled when it is admitted; the last one counts,
        though it is computed again."""
        return self.scheduler.num_announced_tokens(request.request_id)

    def abort_announced(self, request_ids: Iterable[str]) -> None:
        """Drop the pages of prefill tasks that were aborted after they had ended: no decode task may know of them."""
        for request_id in request_ids:
            self.scheduler.abort_announced(request_id)

    def reset_cache(self) -> bool:
        return True  # nothing outlives its request


def _check(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> None:
    parallel = vllm_config.parallel_config
    for name in ("pipeline_parallel_size", "decode_context_parallel_size", "prefill_context_parallel_size"):
        if getattr(parallel, name) > 1:
            raise ConfigError(f"RelayKVConnector moves the caches of tensor-parallel ranks: {name} must be 1")
    groups = kv_cache_config.kv_cache_groups
    if len(groups) > 1:
        raise ConfigError(
            f"RelayKVConnector moves caches of one group, and this model has {len(groups)} of them; "
            "disable_hybrid_kv_cache_manager = true makes one, unless the model has state-space layers"
        )
    for group in groups:
        spec = group.kv_cache_spec
        specs = spec.kv_cache_specs.values() if isinstance(spec, UniformTypeKVCacheSpecs) else [spec]
        for one in specs:
            if not isinstance(one, AttentionSpec):
                raise ConfigError(f"RelayKVConnector moves caches of attention layers, not a {type(one).__name__}")
    options = vllm_config.additional_config.get(OPTIONS) or {}
    if options.get("transport", "inline") == "inline":
        raise ConfigError(
            'RelayKVConnector needs a relay with buffers: additional_config["relay"]["transport"] must be one of '
            "shm, tcp, nixl, mooncake, cuda_ipc, local"
        )


def _scheduled(output: SchedulerOutput) -> Iterator[Scheduled]:
    num_tokens, cached = output.num_scheduled_tokens, output.scheduled_cached_reqs
    for new in output.scheduled_new_reqs:
        yield Scheduled(new.req_id, new.num_computed_tokens, num_tokens[new.req_id])
    for request_id, num_computed_tokens in zip(cached.req_ids, cached.num_computed_tokens, strict=True):
        yield Scheduled(request_id, num_computed_tokens, num_tokens[request_id])


def _digest(request: Request) -> str:
    """Name a prompt by its tokens, images and adapter.

    Raises:
        ValueError: a prompt of embeddings, which has no tokens.
    """
    if request.prompt_token_ids is None:
        raise ValueError("a prompt of embeddings is not moved between engines")
    digest = hashlib.blake2b(array.array("q", request.prompt_token_ids).tobytes(), digest_size=16)
    for feature in request.mm_features:
        identifier = "" if is_counter(feature.identifier) else feature.identifier
        digest.update(f"\n{feature.mm_position.offset} {identifier}".encode())
    if request.lora_request is not None:
        digest.update(f"\n{request.lora_request.lora_name}".encode())
    return digest.hexdigest()


# -- the worker's side ------------------------------------------------------------------------------------------------


class WorkerSide:
    """One rank's caches, and the pages that it saves and pulls."""

    def __init__(self, hub: RelayHub, caches: PagedCaches, rank: int) -> None:
        self.rank = rank
        self.caches = caches
        self.source = PageSource(hub, caches)
        self.target = PageTarget(hub, caches, rank)
        self.leased: Leased | None = None

    def start_step(self, actions: Actions) -> None:
        for request_id in actions.drops:
            self.source.drop(request_id)
        for reserve in actions.reserves:
            self.source.reserve(reserve)
        granted, rejected = self.source.grant()
        if granted or rejected:
            refs = {request_id: {self.rank: of_groups} for request_id, of_groups in granted.items()}
            self.leased = Leased(refs, rejected)
        self.source.start_step(actions.saves)
        for load in actions.loads:
            self.target.start(load)

    def close(self) -> None:
        self.target.close()
        self.source.close()


def _paged_caches(
    vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, kv_caches: dict[str, torch.Tensor], rank: int
) -> PagedCaches:
    group = kv_cache_config.kv_cache_groups[0]
    spec, names = group.kv_cache_spec, list(kv_caches)
    specs: dict[str, Any] = dict.fromkeys(names, spec)
    if isinstance(spec, UniformTypeKVCacheSpecs):
        specs = {name: spec.kv_cache_specs.get(name, next(iter(spec.kv_cache_specs.values()))) for name in names}
    layers = vllm_config.compilation_config.static_forward_context
    # The CPU's attention backend has several page layouts; its layers know which one it uses.
    ways = {getattr(layers[name], "isa", "") for name in names if name in layers}
    backends = {backend.get_name() for backend in get_current_attn_backends(vllm_config, names)}
    content = "/".join(
        [
            *sorted(backends | ways - {""}),
            vllm_config.cache_config.cache_dtype,
            str(kv_caches[names[0]].dtype).removeprefix("torch."),
            f"{len(names)} layers {hashlib.blake2b(','.join(names).encode(), digest_size=4).hexdigest()}",
        ]
    )
    tp_size = vllm_config.parallel_config.tensor_parallel_size
    model_heads = vllm_config.model_config.get_total_num_kv_heads()
    rank_heads = vllm_config.model_config.get_num_kv_heads(vllm_config.parallel_config)
    total_heads: dict[str, int] = {}
    for name in names:
        shards = specs[name].max_tp_shards
        if shards is not None:  # a latent that is replicated on every rank
            total_heads[name] = specs[name].num_heads * min(shards, tp_size)
        elif tp_size == 1:
            total_heads[name] = specs[name].num_heads
        elif specs[name].num_heads == rank_heads:
            total_heads[name] = model_heads
    is_known = len(total_heads) == len(names)
    return PagedCaches(
        kv_caches,
        kv_cache_config.num_blocks,
        block_size=spec.block_size,
        content=content,
        total_heads=total_heads if is_known else None,
        tp_rank=rank,
        tp_size=tp_size,
    )


def relay_connector(connector: KVConnectorBase_V1 | None) -> RelayKVConnector | None:
    """The connector by which pages migrate between instances: of several, the first."""
    of = connector._connectors if isinstance(connector, MultiConnector) else (connector,)
    return next((one for one in of if isinstance(one, RelayKVConnector)), None)
