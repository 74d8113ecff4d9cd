"""``StageLLM``: vLLM's engine client, for outputs that carry tensors and for engine cores that are replaced."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from msgspec import structs
from vllm.config import VllmConfig
from vllm.tasks import SupportedTask
from vllm.usage.usage_lib import UsageContext
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.core_client import EngineCoreClient
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.engine.output_processor import OutputProcessor, RequestOutputCollector
from vllm.v1.executor.abstract import Executor
from vllm.v1.metrics.loggers import PrometheusStatLogger, StatLoggerBase

from vllm_omni.core.sched.read_window import report_of
from vllm_omni.engine.decodable import check_request
from vllm_omni.engine.host_statistics import Recorded, Totals
from vllm_omni.engine.latency_metrics import default_slo
from vllm_omni.engine.media_budget import HOLDING
from vllm_omni.engine.media_cache import SenderCache
from vllm_omni.engine.media_names import keeps_media, of_tenant
from vllm_omni.engine.metrics import StagePrometheusStatLogger
from vllm_omni.engine.output_processor import MultimodalOutputProcessor
from vllm_omni.engine.stage_log import StageStatLogger
from vllm_omni.messages.payload import Payload
from vllm_omni.messages.timeline import TaskNotes
from vllm_omni.relay.hub import RelayHub
from vllm_omni.vllm_patches import name_media_by_content, replace_sender_cache

T = TypeVar("T")


class StageLLM(AsyncLLM):
    """vLLM's ``AsyncLLM`` whose outputs carry tensors beside tokens, and whose engine core can be replaced.

    Args:
        has_own_vocabulary: see ``StageSpec``.
        generates_tokens: False: its log lines count steps and results.
        client_addresses: where to bind for an engine core that is started elsewhere; None: it is started here.
        client_index: of the clients of this engine core; the first one supervises it.
        make_statistics: makes, of this client, what gets its statistics in the place of loggers.
        profiles_front_end: whether ``start_profile`` also profiles this process; torch allows one profiler in it.
    """

    output_handler: asyncio.Task[None] | None
    _keeps_media = False  # in the host's pool

    def __init__(
        self,
        vllm_config: VllmConfig,
        output_type: str,
        hub: RelayHub,
        *,
        has_own_vocabulary: bool = False,
        log_stats: bool = False,
        profiles_front_end: bool = True,
        generates_tokens: bool = True,
        client_addresses: dict[str, str] | None = None,
        client_index: int = 0,
        make_statistics: Callable[[StageLLM], StatLoggerBase] | None = None,
    ) -> None:
        self._client_index = client_index
        self._num_results = num_results = Counter[str]()
        self.stat_loggers: list[StageStatLogger] = []  # one for each data-parallel rank; none without ``log_stats``

        def make_logger(vllm_config: VllmConfig, engine_index: int) -> StageStatLogger:
            results = None if generates_tokens else num_results
            self.stat_loggers.append(StageStatLogger(vllm_config, engine_index, num_results=results))
            return self.stat_loggers[-1]

        loggers: list[Any] = [StagePrometheusStatLogger, make_logger] if log_stats else []
        if make_statistics is not None:
            loggers = [lambda vllm_config, engine_index: make_statistics(self)]
        super().__init__(
            vllm_config,
            Executor.get_class(vllm_config),
            log_stats=False,  # upstream's own loggers; statistics are collected all the same for the loggers below
            stat_loggers=loggers or None,
            usage_context=UsageContext.ENGINE_CONTEXT,
            log_requests=False,
            client_addresses=client_addresses,
            client_index=client_index,
        )
        if make_statistics is not None and self.logger_manager is not None:
            # Upstream adds its own, for a registry that nobody reads on a host.
            loggers = self.logger_manager.stat_loggers
            self.logger_manager.stat_loggers = [one for one in loggers if type(one) is not PrometheusStatLogger]
        # Upstream's output loop keeps the processor it starts with, and inside an event loop it starts at once.
        assert self.output_handler is None, "a stage is started from a thread that has no event loop"
        if has_own_vocabulary:
            # Upstream takes stop ids from the checkpoint's generation_config.json even with generation_config="vllm".
            self.input_processor.generation_config_fields = {}
        if not profiles_front_end:
            self.profiler = None
        self._sender_cache = replace_sender_cache(self.renderer, SenderCache)
        self._keeps_media = keeps_media(vllm_config)
        name_media_by_content(self.renderer, trusts_uuids=not self._keeps_media)
        self.published: dict[str, list[Payload]] = {}  # see MultimodalOutputProcessor
        self.notes: dict[str, TaskNotes] = {}  # likewise
        self._extend = partial(
            MultimodalOutputProcessor,
            output_type=output_type,
            hub=hub,
            published=self.published,
            notes=self.notes,
            num_results=num_results,
            has_slo=bool(default_slo(vllm_config)),
        )
        self.output_processor: OutputProcessor = self._extend(self.output_processor)

    async def add_request(self, request_id: str, prompt: Any, *args: Any, **kwargs: Any) -> RequestOutputCollector:
        """As upstream, after which the engine has the prompt's media."""
        queue = await super().add_request(request_id, prompt, *args, **kwargs)
        if self._sender_cache is not None:
            self._sender_cache.note_sent(prompt)
        if (holding := HOLDING.get()) is not None:
            holding.release()
        return queue

    async def _add_request(self, request: EngineCoreRequest, *args: Any, **kwargs: Any) -> None:
        """As upstream, which adds end ids of the tokenizer and the checkpoint even where the model's vocabulary ends
        before them: ``min_tokens`` would index past it. A tenant's media have names of their own in the pool.
        """
        if self._keeps_media and request.cache_salt and request.mm_features:
            salt = request.cache_salt
            features = [replace(one, identifier=of_tenant(one.identifier, salt)) for one in request.mm_features]
            request = structs.replace(request, mm_features=features)
        check_request(request)
        if request.sampling_params is not None:
            stop_ids, size = request.sampling_params.all_stop_token_ids, self.model_config.get_vocab_size()
            stop_ids.difference_update({one for one in stop_ids if not 0 <= one < size})
        await super()._add_request(request, *args, **kwargs)

    def num_received(self, request_id: str) -> dict[str, int]:
        """See ``MultimodalOutputProcessor.num_received``."""
        assert isinstance(self.output_processor, MultimodalOutputProcessor)
        return self.output_processor.num_received(request_id)

    async def report_read(self, request_id: str, num_read: int) -> None:
        """Report to the engine how many outputs of a request its reader has taken.

        Args:
            request_id: the engine's id of one sequence.
        """
        await self.engine_core.add_request_async(report_of(request_id, num_read))

    @property
    def num_cached_rows(self) -> int:
        """See ``MultimodalOutputProcessor``."""
        assert isinstance(self.output_processor, MultimodalOutputProcessor)
        return self.output_processor.num_cached_rows

    def totals(self) -> Totals:
        """What was counted since the start."""
        return Totals(dict(self._num_results), self.num_cached_rows)

    def record(self, recorded: Recorded) -> None:
        """Take what another client of this engine core has counted, as if it had been counted here."""
        assert isinstance(self.output_processor, MultimodalOutputProcessor)
        self._num_results.update(Counter(recorded.totals.results) - self._num_results)
        self.output_processor.num_cached_rows = recorded.totals.num_cached_rows
        for step in recorded.steps if self.logger_manager is not None else ():
            self.logger_manager.record(step.scheduler, step.iteration_stats(), self.renderer.stat_mm_cache())

    async def fail(self) -> None:
        """The engine core has ended, of which it could not notify this client itself: end its requests."""
        await self.stop_reading()
        self.engine_core.resources.engine_dead = True
        self.output_processor.propagate_error(EngineDeadError())

    def connect(self, vllm_config: VllmConfig, addresses: dict[str, str] | None) -> EngineCoreClient:
        """A client for another engine core, for ``replace_engine_core``. Blocks until that is ready."""
        executor = Executor.get_class(vllm_config)
        return EngineCoreClient.make_async_mp_client(
            vllm_config, executor, self.log_stats, addresses, client_index=self._client_index
        )

    @property
    def has_failed(self) -> bool:
        """Whether the engine core is dead, or its outputs are no longer read.

        The end of an event loop cancels the task that reads outputs; that is no failure.
        """
        handler = self.output_handler
        is_unread = handler is not None and handler.done() and not handler.cancelled()
        return self.engine_core.resources.engine_dead or is_unread

    def start_reading(self) -> asyncio.Task[None]:
        """Return the task that reads the engine's outputs, which ends when the engine dies; start it if need be."""
        self._run_output_handler()
        assert self.output_handler is not None
        return self.output_handler

    async def answer(self, call: Coroutine[Any, Any, T], timeout_s: float | None = None) -> T:
        """Await a call of the engine. Upstream leaves the caller of a dying engine waiting for ever.

        Raises:
            EngineDeadError: the engine died meanwhile, or its outputs are no longer read.
            TimeoutError: it did not answer in time.
        """
        answer = asyncio.get_running_loop().create_task(call)
        try:
            reading = self.start_reading()
            await asyncio.wait({answer, reading}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            if answer.done():
                return answer.result()
        finally:
            answer.cancel()
        raise EngineDeadError if reading.done() or self.has_failed else TimeoutError

    async def get_supported_tasks(self) -> tuple[SupportedTask, ...]:
        """As upstream, which asks the engine within its first request."""
        if not hasattr(self, "_supported_tasks"):
            await self.answer(super().get_supported_tasks())
        return self._supported_tasks

    async def stop_reading(self) -> None:
        """Stop reading outputs, so that the engine's shutdown is not taken for a failure."""
        handler, self.output_handler = self.output_handler, None
        if handler is not None:
            handler.cancel()
            await asyncio.gather(handler, return_exceptions=True)

    def exit_codes(self) -> list[int]:
        """Exit codes of the engine's processes that have ended."""
        manager = self.engine_core.resources.engine_manager
        return [] if manager is None else list(manager.finished_procs().values())

    def replace_engine_core(self, engine_core: EngineCoreClient) -> None:
        """Continue with another engine core; the renderer and the input processor, which others hold, stay.

        Call it in the event loop of the requests: upstream registers a request and sends it without a break between.
        """
        # Upstream has failed the requests it knew; these came afterwards.
        self.output_processor.propagate_error(EngineDeadError())
        self.output_processor = self._extend(self.output_processor)
        self.output_handler = None  # upstream starts one for the new core with the next request
        self._profile_session_active = False
        self.engine_core = engine_core

    def __del__(self) -> None:
        """Upstream shuts down here, which fails at interpreter exit; ``StageEngine.shutdown`` is explicit."""
