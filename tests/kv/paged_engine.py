"""An engine whose model is arithmetic on its KV cache: real schedulers, connectors and relays, and no weights.

The entry of a token in the caches depends on the token, its position, the layer and the head; the next token depends on
all entries of a request. So a page that came late, from the wrong place or to the wrong place gives another token than
``answer`` returns.
"""

from __future__ import annotations

import concurrent.futures
from collections.abc import Callable, Sequence
from typing import Any

import torch
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from tests import text_model
from tests.text_model import MAX_MODEL_LEN
from vllm_omni.core.sched.epd import EPDScheduler
from vllm_omni.kv.kv_connector import RelayKVConnector, WorkerSide
from vllm_omni.kv.pages import PagedCaches
from vllm_omni.messages.payload import decode
from vllm_omni.relay.hub import RelayHub

BLOCK_SIZE = 4
NUM_LAYERS = 2
NUM_HEADS = 2
HEAD_SIZE = 4
VOCAB_SIZE = 64
MAX_STEPS = 400


def kept(token: int, position: int, layer: int, head: int) -> torch.Tensor:
    """Return the cache entry of a token in a layer and head: [HEAD_SIZE * 2], whole numbers."""
    return torch.arange(2 * HEAD_SIZE) + (token * 31 + position * 7 + layer * 5 + head * 3) % 89


def next_token(num_kept: float) -> int:
    return int(num_kept) % (VOCAB_SIZE - 8) + 8


def answer(prompt: Sequence[int], num_tokens: int) -> list[int]:
    """Return the reply of the model."""
    tokens = list(prompt)
    for _ in range(num_tokens):
        total = sum(
            float(kept(token, position, layer, head).sum()) * (position + 1)
            for position, token in enumerate(tokens)
            for layer in range(NUM_LAYERS)
            for head in range(NUM_HEADS)
        )
        tokens.append(next_token(total))
    return tokens[len(prompt) :]


class PagedEngine:
    """One instance with ``tp_size`` ranks; each step is one call.

    Args:
        hub: the relays of its ranks.
        scheduler_cls: vLLM's, or one of ours.
    """

    def __init__(
        self,
        hub: RelayHub,
        *,
        scheduler_cls: type[Scheduler] = EPDScheduler,
        num_blocks: int = 64,
        tp_size: int = 1,
        prefix_caching: bool = False,
        max_num_batched_tokens: int = MAX_MODEL_LEN,
        max_num_seqs: int = 8,
        policy: str = "recompute",
        block_size: int = BLOCK_SIZE,
        additional_config: dict[str, Any] | None = None,
    ) -> None:
        init_none_hash(sha256)
        config = text_model.make_config(
            num_layers=NUM_LAYERS,
            num_heads=NUM_HEADS,
            head_size=HEAD_SIZE,
            vocab_size=VOCAB_SIZE,
            block_size=BLOCK_SIZE,
        )
        config.scheduler_config.max_num_seqs = max_num_seqs
        config.scheduler_config.max_num_batched_tokens = max_num_batched_tokens
        config.scheduler_config.disable_hybrid_kv_cache_manager = True
        config.cache_config.num_gpu_blocks = num_blocks
        config.cache_config.block_size = block_size
        config.cache_config.enable_prefix_caching = prefix_caching
        config.kv_transfer_config = KVTransferConfig(
            kv_connector="RelayKVConnector",
            kv_connector_module_path="vllm_omni.kv.kv_connector",
            kv_role="kv_both",
            kv_load_failure_policy=policy,  # type: ignore[arg-type]
        )
        config.additional_config = {"relay": {"transport": hub.options.transport}, **(additional_config or {})}
        spec = FullAttentionSpec(
            block_size=block_size,
            num_kv_heads=max(1, NUM_HEADS // tp_size),
            head_size=HEAD_SIZE,
            dtype=torch.float32,
        )
        names = [f"layer.{number}" for number in range(NUM_LAYERS)]
        kv_cache_config = KVCacheConfig(num_blocks, [], [KVCacheGroupSpec(names, spec)])
        self.block_size = block_size
        self.prefix_caching = prefix_caching
        self.scheduler = scheduler_cls(
            vllm_config=config,
            kv_cache_config=kv_cache_config,
            structured_output_manager=StructuredOutputManager(config),
            block_size=block_size,
        )
        self.ranks: list[RelayKVConnector] = []
        self.caches: list[list[torch.Tensor]] = []  # by rank and layer, [B, H, N, 2 * HEAD_SIZE]
        for rank in range(tp_size):
            shape = (num_blocks, spec.num_kv_heads, block_size, 2 * HEAD_SIZE)
            # NaN: a page that was never written spoils everything computed from it.
            caches = [torch.full(shape, float("nan")) for _ in names]
            paged = PagedCaches(
                dict(zip(names, caches, strict=True)),
                num_blocks,
                block_size=block_size,
                total_heads=dict.fromkeys(names, NUM_HEADS),
                tp_rank=rank,
                tp_size=tp_size,
            )
            connector = RelayKVConnector(config, KVConnectorRole.WORKER, kv_cache_config)
            connector.worker = WorkerSide(hub, paged, rank)
            self.ranks.append(connector)
            self.caches.append(caches)
        handshakes = {(0, rank): one.get_handshake_metadata() for rank, one in enumerate(self.ranks)}
        self.connector.set_xfer_handshake_metadata_pp_aware(handshakes)
        self.aggregator = KVOutputAggregator(tp_size)
        self.params: dict[str, dict[str, Any] | None] = {}  # of requests that have ended: their kv_transfer_params
        self.reasons: dict[str, str] = {}
        self.tokens: dict[str, list[int]] = {}
        self.num_computed: dict[str, int] = {}  # tokens that went through the model
        self.steps: list[SchedulerOutput] = []

    @property
    def connector(self) -> RelayKVConnector:
        connector = self.scheduler.get_kv_connector()
        assert isinstance(connector, RelayKVConnector)
        return connector

    # -- requests -----------------------------------------------------------------------------------------------------

    def add(self, name: str, prompt: Sequence[int], /, *, max_tokens: int = 4, **kv_transfer_params: Any) -> Request:
        params = SamplingParams(
            max_tokens=max_tokens,
            ignore_eos=True,
            extra_args={"kv_transfer_params": kv_transfer_params} if kv_transfer_params else None,
        )
        hasher = get_request_block_hasher(self.block_size, sha256) if self.prefix_caching else None
        request = Request(name, list(prompt), params, None, block_hasher=hasher)
        self.scheduler.add_request(request)
        self.tokens[name] = []
        return request

    def prefill(self, name: str, prompt: Sequence[int]) -> None:
        self.add(name, prompt, max_tokens=1, do_remote_decode=True)

    def abort(self, name: str) -> None:
        self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)

    # -- steps --------------------------------------------------------------------------------------------------------

    def step(self, *, wait: bool = True) -> SchedulerOutput:
        """Run one step; with ``wait``, the pulls that it starts have ended at return."""
        output = self.scheduler.schedule()
        self.steps.append(output)
        runner_output = self._execute(output, wait)
        for outputs in self.scheduler.update_from_output(output, runner_output).values():
            for one in outputs.outputs:
                self.tokens[one.request_id] += one.new_token_ids
                if one.finish_reason is not None:
                    self.params[one.request_id] = one.kv_transfer_params
                    self.reasons[one.request_id] = str(one.finish_reason)
        return output

    def run(self, until: Callable[[], object] | None = None) -> None:
        """Run steps until something is true, or everything has ended."""
        for _ in range(MAX_STEPS):
            if (until is not None and until()) or not self.scheduler.has_requests():
                return
            self.step()
        raise AssertionError(f"after {MAX_STEPS} steps nothing has come of it")

    def run_prefill(self, name: str, prompt: Sequence[int]) -> dict[str, Any]:
        """Return a prefill task's announcement."""
        self.prefill(name, prompt)
        self.run(lambda: name in self.params)
        params = self.params[name]
        assert params is not None
        return params

    def _execute(self, output: SchedulerOutput, wait: bool) -> ModelRunnerOutput:
        starts = dict(
            zip(output.scheduled_cached_reqs.req_ids, output.scheduled_cached_reqs.num_computed_tokens, strict=True)
        ) | {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
        of_ranks: list[ModelRunnerOutput | None] = []
        for rank, connector in enumerate(self.ranks):
            of_ranks.append(self._execute_rank(rank, connector, output, starts, wait))
        for name, num_tokens in output.num_scheduled_tokens.items():
            self.num_computed[name] = self.num_computed.get(name, 0) + num_tokens
        combined = self.aggregator.aggregate(of_ranks)
        assert combined is not None
        # Behind the forward of all ranks: a token depends on the heads of each.
        requests = self.scheduler.requests
        combined.sampled_token_ids = [
            [] if requests[name].is_prefill_chunk else [self._sample(name)] for name in combined.req_ids
        ]
        return combined

    def _execute_rank(
        self, rank: int, connector: RelayKVConnector, output: SchedulerOutput, starts: dict[str, int], wait: bool
    ) -> ModelRunnerOutput:
        """Call the connector in the order of vLLM's runner."""
        assert output.kv_connector_metadata is not None and connector.worker is not None
        connector.handle_preemptions(output.kv_connector_metadata)
        connector.bind_connector_metadata(output.kv_connector_metadata)
        heads = range(self.caches[rank][0].shape[1])
        first_head = connector.worker.caches.format.groups[0].first_head
        for layer in range(NUM_LAYERS) if output.num_scheduled_tokens else ():
            for name, num_tokens in output.num_scheduled_tokens.items():
                request = self.scheduler.requests[name]
                blocks = self.scheduler.kv_cache_manager.get_block_ids(name)[0]
                for position in range(starts[name], starts[name] + num_tokens):
                    block, offset = blocks[position // self.block_size], position % self.block_size
                    for head in heads:
                        token = request.all_token_ids[position]
                        self.caches[rank][layer][block, head, offset] = kept(token, position, layer, first_head + head)
            connector.save_kv_layer(f"layer.{layer}", self.caches[rank][layer], None)
        connector.start_load_kv(None)
        connector.wait_for_save()
        if wait:
            concurrent.futures.wait([pull.running for pull in connector.worker.target._pulls.values()], timeout=30)
        results = connector.get_transfer_results(output.finished_req_ids)
        of_connector = KVConnectorOutput(
            finished_sending=results.finished_sending,
            finished_recving=results.finished_recving,
            failed_recving=results.failed_recving,
            invalid_block_ids=connector.get_block_ids_with_load_errors(),
            kv_connector_worker_meta=connector.build_connector_worker_meta(),
        )
        connector.clear_connector_metadata()
        ids = list(output.num_scheduled_tokens)
        return ModelRunnerOutput(
            req_ids=ids,
            req_id_to_index={one: index for index, one in enumerate(ids)},
            kv_connector_output=of_connector,
        )

    def _sample(self, name: str) -> int:
        request = self.scheduler.requests[name]
        blocks = self.scheduler.kv_cache_manager.get_block_ids(name)[0]
        total = 0.0
        missing = set(range(NUM_HEADS))
        for rank, connector in enumerate(self.ranks):
            assert connector.worker is not None
            first = connector.worker.caches.format.groups[0].first_head
            for head in range(self.caches[rank][0].shape[1]):
                if first + head not in missing:
                    continue
                missing.remove(first + head)
                for layer in self.caches[rank]:
                    for position in range(request.num_computed_tokens):
                        block, offset = blocks[position // self.block_size], position % self.block_size
                        total += float(layer[block, head, offset].sum()) * (position + 1)
        assert total == total, f"request {name} was answered from pages that were never written"
        return next_token(total)

    # -- the end ------------------------------------------------------------------------------------------------------

    def assert_is_idle(self) -> None:
        """Check that no request has left anything behind."""
        assert not self.scheduler.has_requests() and not self.scheduler.requests
        free = self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
        assert free == self.scheduler.kv_cache_manager.block_pool.num_gpu_blocks - 1  # the null block
        self.connector.scheduler.check_idle()
        for connector in self.ranks:
            assert connector.worker is not None
            source, target = connector.worker.source, connector.worker.target
            assert not (source._waiting or source._buffers or source._saves)
            assert not (target._pulls or target._done or target._reading)

    def close(self) -> None:
        for connector in self.ranks:
            connector.shutdown()


def release(hub: RelayHub, params: dict[str, Any] | None) -> None:
    """Release the pages as the front end does after the decode task."""
    assert params is not None
    hub.release_payload(decode(params["pages"]), for_all=True)
