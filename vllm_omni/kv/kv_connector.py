"""``RelayKVConnector``: prefill on one engine, decode on another; the KV cache of the prompt goes over the relay.

vLLM's contract (``KVConnectorBase_V1``), on both of its sides. A *prefill task* is a request whose ``extra_args`` have
``kv_transfer_params = {"do_remote_decode": True}``; it ends with an announcement as its output's
``kv_transfer_params``, which names where the pages of its prompt lie. The *decode task*, the same prompt on another
engine, brings that announcement; its blocks are allocated as soon as there is room, its pages are pulled beside the
steps, and then the engine computes the prompt's last token again and samples the first one as if the prompt had been
computed here. Whatever goes wrong with the pages, the engine computes the prompt itself.

Where vLLM 0.32 calls what, as far as it matters here:

* A prefill task waits (``get_num_new_matched_tokens`` -> None) until every rank has leased buffers for its whole
  prompt. So the references are with the scheduler before the prefill begins: vLLM frees a finished request, and asks
  for its announcement, before it hands over what the workers said of that step.
* ``start_load_kv`` comes behind the forward when nothing of the step waits for it. A pull that began there would begin
  a step late, so that it begins when the step's metadata is bound.
* ``request_finished`` comes once for whatever way a request ends; a pull under way keeps its blocks until the worker
  says that it has ended.

From: HydraInfer, section 4.3 (migration: announce, admit, pull, release).
"""

from __future__ import annotations

import array
import hashlib
import logging
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
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
from vllm.v1.kv_cache_interface import AttentionSpec, UniformTypeKVCacheSpecs
from vllm.v1.metrics.cache_hit_source import CacheHitSource
from vllm.v1.request import RequestStatus

from vllm_omni.errors import ConfigError, RelayBroken
from vllm_omni.kv.page_relay import Load, PageSource, PageTable, PageTarget, Reserve, Save
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

logger = logging.getLogger(__name__)

MAX_ANNOUNCED = 4096  # announcements that an abort may still overtake
_FAILED = (RequestStatus.FINISHED_ABORTED, RequestStatus.FINISHED_ERROR, RequestStatus.FINISHED_IGNORED)
# Names that vLLM counts up where it hashes no images; the same one means something else in another process.
_COUNTED = re.compile(r"renderer\d+-mm-\d+")


@dataclass
class StepMetadata(KVConnectorMetadata):
    """What the scheduler's side tells every worker's with a step."""

    reserves: list[Reserve] = field(default_factory=list)
    saves: list[Save] = field(default_factory=list)
    loads: list[Load] = field(default_factory=list)
    # Requests whose buffers nobody is told of, or will use.
    drops: list[str] = field(default_factory=list)


@dataclass
class Leased(KVConnectorWorkerMetadata):
    """What the workers' sides tell the scheduler's: buffers that were leased in a step, by request and rank."""

    refs: dict[str, dict[int, list[list[TensorRef]]]] = field(default_factory=dict)
    # Request -> why a rank has no buffers for it, and never will.
    refused: dict[str, str] = field(default_factory=dict)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        assert isinstance(other, Leased), "one kind of connector at a time"
        refs = {request_id: dict(ranks) for request_id, ranks in self.refs.items()}
        for request_id, ranks in other.refs.items():
            refs.setdefault(request_id, {}).update(ranks)
        return Leased(refs, self.refused | other.refused)


@dataclass
class Caches(KVConnectorHandshakeMetadata):
    """A rank's caches, which the scheduler's side hears of once, at start."""

    format: CacheFormat


class RelayKVConnector(KVConnectorBase_V1):
    """See the module.

    One KV cache group, whose blocks hold every token of a request: vLLM arranges that for models with sliding windows
    where a connector does not say that it can do with less. Pipeline and context parallelism are refused.

    Raises:
        ConfigError: a model or a parallelism that it cannot move; the message says which.
    """

    _cache_hit_source = CacheHitSource.P2P
    scheduler: SchedulerSide  # of the scheduler's role alone

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig):
        super().__init__(vllm_config, role, kv_cache_config)
        _check(vllm_config, kv_cache_config)
        if role is KVConnectorRole.SCHEDULER:
            self.scheduler = SchedulerSide(kv_cache_config)
        self.worker: WorkerSide | None = None  # with the caches

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
        self.worker.begin_step(connector_metadata)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        return  # bind_connector_metadata did

    def wait_for_layer_load(self, layer_name: str) -> None:
        return  # a request is scheduled when all its layers are here

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        if self.worker is not None and self.has_connector_metadata():
            self.worker.save_layer(layer_name)

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
        self.scheduler.add(request)

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        return self.scheduler.num_new_tokens(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        if num_external_tokens:
            self.scheduler.load(request, blocks.get_block_ids()[0], num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        return self.scheduler.build_metadata(scheduler_output)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        if connector_output.kv_connector_worker_meta is not None:
            assert isinstance(connector_output.kv_connector_worker_meta, Leased)
            self.scheduler.take_leased(connector_output.kv_connector_worker_meta)

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return False, self.scheduler.finish(request)

    def has_pending_push_work(self) -> bool:
        # Or the last request's buffers would be dropped with the next request's first step.
        return bool(self.scheduler.drops)

    def num_announced_tokens(self, request: Request) -> int:
        """Tokens of a waiting request's prompt whose pages will be pulled when it is admitted, the last one's as well,
        which is computed again."""
        return self.scheduler.num_announced_tokens(request)

    def abort_announced(self, request_ids: Iterable[str]) -> None:
        """Prefill tasks that had ended when they were aborted: nobody may have heard of their pages."""
        for request_id in request_ids:
            self.scheduler.abort_announced(request_id)

    def reset_cache(self) -> bool:
        return True  # nothing is kept beyond a request


def _check(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> None:
    parallel = vllm_config.parallel_config
    for name in (
        "pipeline_parallel_size",
        "decode_context_parallel_size",
        "prefill_context_parallel_size",
    ):
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


# -- the worker's side ------------------------------------------------------------------------------------------------


class WorkerSide:
    """One rank: its caches, and what it puts and pulls."""

    def __init__(self, hub: RelayHub, caches: PagedCaches, rank: int) -> None:
        self.rank = rank
        self.caches = caches
        self.source = PageSource(hub, caches)
        self.target = PageTarget(hub, caches, rank)
        self.leased: Leased | None = None

    def begin_step(self, metadata: StepMetadata) -> None:
        for request_id in metadata.drops:
            self.source.drop(request_id)
        for reserve in metadata.reserves:
            self.source.reserve(reserve)
        granted, refused = self.source.grant()
        if granted or refused:
            refs = {request_id: {self.rank: of_groups} for request_id, of_groups in granted.items()}
            self.leased = Leased(refs, refused)
        self.source.begin_step(metadata.saves)
        for load in metadata.loads:
            self.target.begin(load)

    def save_layer(self, layer_name: str) -> None:
        self.source.save_layer(self.caches.owner(layer_name))

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
    # The CPU's backend has several ways to lay out a page; which one, it has told its layers.
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
        if shards is not None:  # a latent that every rank has
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


# -- the scheduler's side ---------------------------------------------------------------------------------------------


@dataclass
class _PrefillTask:
    num_tokens: int
    num_pages: int
    digest: str
    refs: dict[int, list[list[TensorRef]]] = field(default_factory=dict)  # by rank
    num_saved: int = 0  # pages, of this request, that a worker has been told to save
    error: str = ""


@dataclass
class _DecodeTask:
    page_table: bytes
    is_loaded: bool = False  # or was, or could not be: a request's pages are pulled once


class SchedulerSide:
    """Which requests' pages go out and come in. Decides; what it decides goes out with ``build_metadata``."""

    def __init__(self, kv_cache_config: KVCacheConfig) -> None:
        self.ranks: tuple[CacheFormat, ...] = ()
        self.block_size: int = kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size
        self.prefills: dict[str, _PrefillTask] = {}
        self.decodes: dict[str, _DecodeTask] = {}
        self.reserves: list[Reserve] = []
        self.loads: list[Load] = []
        self.drops: list[str] = []
        self._announced: dict[str, None] = {}  # requests, the oldest first

    def add(self, request: Request) -> None:
        params = request.kv_transfer_params
        if not params:
            return
        if params.get("do_remote_prefill"):
            try:
                self.decodes[request.request_id] = _DecodeTask(self._read(request, params))
            except (RelayBroken, ValueError) as exc:
                logger.warning("request %s: its prompt is computed here: %s", request.request_id, exc)
        if params.get("do_remote_decode"):
            num_pages = -(-request.num_prompt_tokens // self.block_size)
            task = self.prefills[request.request_id] = _PrefillTask(request.num_prompt_tokens, num_pages, "")
            try:
                task.digest = _digest(request)
                self.reserves.append(Reserve(request.request_id, num_pages))
            except ValueError as exc:
                task.error = str(exc)

    def _read(self, request: Request, params: dict[str, Any]) -> bytes:
        """The page table of an announcement, looked over."""
        if error := params.get("error"):
            raise ValueError(f"the source has announced no pages: {error}")
        pages, num_tokens = params.get("pages"), params.get("num_tokens")
        if not isinstance(pages, bytes):
            raise ValueError(f"kv_transfer_params have no page table in 'pages', but {type(pages).__name__}")
        if num_tokens != request.num_prompt_tokens or params.get("prompt") != _digest(request):
            raise ValueError(
                f"the announcement is of another prompt, of {num_tokens} tokens; this one has "
                f"{request.num_prompt_tokens}"
            )
        table = PageTable.decode(pages)
        for rank, target in enumerate(self.ranks):
            if reason := table.why_not(target, rank):
                raise ValueError(f"the pages that were announced cannot be used here: {reason}")
        if table.num_pages != -(-request.num_prompt_tokens // self.block_size):
            raise ValueError(f"a page table of {table.num_pages} pages for {num_tokens} tokens")
        return pages

    def num_new_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        prefill = self.prefills.get(request.request_id)
        if prefill is not None and not prefill.error and len(prefill.refs) < len(self.ranks):
            return None, False
        num_tokens = self.num_announced_tokens(request)
        # The last token is computed here in any case.
        if num_tokens - 1 <= num_computed_tokens:
            return 0, False
        return num_tokens - num_computed_tokens, True

    def num_announced_tokens(self, request: Request) -> int:
        decode = self.decodes.get(request.request_id)
        return 0 if decode is None or decode.is_loaded else request.num_prompt_tokens

    def load(self, request: Request, blocks: list[int], num_external_tokens: int) -> None:
        decode = self.decodes[request.request_id]
        first = (request.num_prompt_tokens - num_external_tokens) // self.block_size
        num_pages = -(-request.num_prompt_tokens // self.block_size)
        decode.is_loaded = True
        self.loads.append(Load(request.request_id, first, blocks[first:num_pages], decode.page_table))
        decode.page_table = b""

    def build_metadata(self, output: SchedulerOutput) -> StepMetadata:
        metadata = StepMetadata(self.reserves, [], self.loads, self.drops)
        self.reserves, self.loads, self.drops = [], [], []
        if self.prefills:
            for new in output.scheduled_new_reqs:
                self._save(metadata, output, new.req_id, new.num_computed_tokens)
            cached = output.scheduled_cached_reqs
            for request_id, num_computed_tokens in zip(cached.req_ids, cached.num_computed_tokens, strict=True):
                self._save(metadata, output, request_id, num_computed_tokens)
        return metadata

    def _save(self, metadata: StepMetadata, output: SchedulerOutput, request_id: str, num_computed_tokens: int) -> None:
        """The pages that are full behind this step, and behind the last one of a prompt also the one that is not.

        Those that were not computed in this step, but found in the prefix cache or pulled, as well. What was saved
        before a preemption is not saved again: it is the same.
        """
        task = self.prefills.get(request_id)
        if task is None or task.error or task.num_saved == task.num_pages:
            return
        num_tokens = num_computed_tokens + output.num_scheduled_tokens[request_id]
        num_pages = task.num_pages if num_tokens >= task.num_tokens else num_tokens // self.block_size
        if num_pages <= task.num_saved:
            return
        assert output.kv_connector_block_state is not None, "vLLM gives it to whoever builds this metadata"
        blocks = output.kv_connector_block_state.get_block_ids(request_id)
        assert blocks is not None, "the request is scheduled"
        is_last = num_pages == task.num_pages
        metadata.saves.append(Save(request_id, task.num_saved, blocks[0][task.num_saved : num_pages], is_last))
        task.num_saved = num_pages

    def take_leased(self, leased: Leased) -> None:
        for request_id, refs in leased.refs.items():
            if (task := self.prefills.get(request_id)) is not None:  # otherwise it is on the list of drops
                task.refs |= refs
        for request_id, reason in leased.refused.items():
            if (task := self.prefills.get(request_id)) is not None:
                logger.warning("request %s: its pages cannot be announced: %s", request_id, reason)
                task.error = reason
                self.drops.append(request_id)  # of the other ranks

    def finish(self, request: Request) -> dict[str, Any] | None:
        """The announcement of a prefill task."""
        self.decodes.pop(request.request_id, None)
        task = self.prefills.pop(request.request_id, None)
        if task is None:
            return None
        self.reserves = [one for one in self.reserves if one.request_id != request.request_id]
        if task.error:
            return {"do_remote_prefill": True, "error": task.error}
        if request.status in _FAILED or task.num_saved < task.num_pages:
            self.drops.append(request.request_id)
            return None
        table = PageTable(
            task.num_pages,
            self.ranks,
            {
                f"{rank}/{group}/{buffer}": ref
                for rank, of_groups in sorted(task.refs.items())
                for group, refs in enumerate(of_groups)
                for buffer, ref in enumerate(refs)
            },
        )
        self._announced[request.request_id] = None
        while len(self._announced) > MAX_ANNOUNCED:
            del self._announced[next(iter(self._announced))]
        return {
            "do_remote_prefill": True,
            "num_tokens": request.num_prompt_tokens,
            "prompt": task.digest,
            "block_size": self.block_size,
            "pages": table.encode(),
        }

    def abort_announced(self, request_id: str) -> None:
        if request_id in self._announced:
            del self._announced[request_id]
            self.drops.append(request_id)


def _digest(request: Request) -> str:
    """Names a prompt: its tokens, images and adapter.

    Raises:
        ValueError: a prompt of embeddings, which has no tokens.
    """
    if request.prompt_token_ids is None:
        raise ValueError("a prompt of embeddings is not moved between engines")
    digest = hashlib.blake2b(array.array("q", request.prompt_token_ids).tobytes(), digest_size=16)
    for feature in request.mm_features:
        identifier = "" if _COUNTED.match(feature.identifier) else feature.identifier
        digest.update(f"\n{feature.mm_position.offset} {identifier}".encode())
    if request.lora_request is not None:
        digest.update(f"\n{request.lora_request.lora_name}".encode())
    return digest.hexdigest()
