"""``StepRows``: the rows of a step, made of what the model returned as other stages read them, and kept."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group
from vllm.v1.worker.gpu_model_runner import ExecuteModelState, GPUModelRunner

from vllm_omni.kv.pool.offload.spec import keep_rows
from vllm_omni.model_executor.row_cache import RowCache, keeps_rows, row_bytes
from vllm_omni.model_executor.row_publisher import RowPublisher
from vllm_omni.model_executor.stage_model import PublishesLayers, PublishesRows, StepRequest

logger = logging.getLogger(__name__)

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import KVCacheConfig


class StepRows:
    """Makes the rows of a runner's steps.

    Attributes:
        layers: after which layers the model returns what rows are made of; none: after the last.
        cache: the rows of cached tokens, in engines that keep them. Every rank has one, as every rank computes rows;
            those of one rank are kept and published.
    """

    def __init__(self, runner: GPUModelRunner, model: Any) -> None:
        self._runner = runner
        self._publisher = model if isinstance(model, PublishesRows) else None
        self._layer_publisher = model if isinstance(model, PublishesLayers) and model.row_layers else None
        self.layers = () if self._layer_publisher is None else self._layer_publisher.row_layers
        self.cache: RowCache | None = None

    def allocate(self, kv_cache_config: KVCacheConfig) -> None:
        """Allocate the cache, if the engine is to have one, before a KV connector learns of the KV cache."""
        runner = self._runner
        if not keeps_rows(runner.vllm_config, kv_cache_config):
            if row_bytes(runner.vllm_config):
                logger.warning("row_cache: this model's KV cache has no block for every token, so no rows are kept")
            return
        hidden = torch.zeros(1, runner.model_config.get_hidden_size(), dtype=runner.dtype, device=runner.device)
        row = self._make(runner.input_ids.gpu[:1], hidden, [hidden] * len(self.layers))
        num_slots = kv_cache_config.num_blocks * kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size
        is_kept = get_tensor_model_parallel_rank() == 0
        self.cache = RowCache(num_slots if is_kept else 0, row)
        if is_kept and has_kv_transfer_group():
            keep_rows(get_kv_transfer_group(), self.cache.pages(kv_cache_config.num_blocks))

    def finish(self, state: ExecuteModelState) -> torch.Tensor:
        """The rows of a step; they are kept, if the engine keeps any."""
        num_tokens = state.scheduler_output.total_num_scheduled_tokens
        layers = [layer[:num_tokens] for layer in state.aux_hidden_states or ()]
        rows = self._make(self._runner.input_ids.gpu[:num_tokens], state.hidden_states[:num_tokens], layers)
        if self.cache is not None and get_tensor_model_parallel_rank() == 0:
            self.cache.write(self._runner.input_batch.block_table[0].slot_mapping.gpu[:num_tokens], rows)
        return rows

    def add_to_publisher(self, rows: torch.Tensor, step: StepRequest) -> RowPublisher:
        """Add a request's rows of a step, behind those of tokens that were not computed for it.

        Args:
            rows: of the whole step, kept: requests of one step may share blocks.
        """
        info, start, num_new, offset = step
        publisher = info.publisher
        assert isinstance(publisher, RowPublisher)
        if start > publisher.next_row:
            assert self.cache is not None, "a request reads the prefix cache where rows are kept"
            table = self._runner.input_batch.block_table[0]
            block_ids = table.block_table.np[self._runner.input_batch.req_id_to_index[info.request_id]]
            publisher.add_cached(self.cache.read(block_ids, table.block_size, publisher.next_row, start))
        publisher.add(rows[offset : offset + num_new], start)
        return publisher

    def _make(
        self, input_ids: torch.Tensor, hidden_states: torch.Tensor, layers: Sequence[torch.Tensor]
    ) -> torch.Tensor:
        """In the next stage's form where the model knows it; otherwise what the last layer returned."""
        if self._layer_publisher is not None:
            return self._layer_publisher.finished_layer_rows(input_ids, layers)
        if self._publisher is not None:
            return self._publisher.finished_rows(input_ids, hidden_states)
        return hidden_states.clone()  # the next step overwrites them
