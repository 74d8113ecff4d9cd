"""``StageEngine``: one vLLM engine as a node of the graph.

The path of a request: ``forward`` (``StageNode``) calls ``generate`` for each chunk, which prepares the engine's
request and streams it through ``run``.
"""

from __future__ import annotations

import asyncio
import copy
import logging
import threading
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Mapping
from contextlib import AbstractContextManager, aclosing, asynccontextmanager, nullcontext, suppress
from dataclasses import replace
from typing import Any, TypeVar

from msgspec import structs
from vllm.config import VllmConfig
from vllm.exceptions import VLLMClientError
from vllm.sampling_params import SamplingParams
from vllm.v1.engine.core_client import EngineCoreClient
from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError
from vllm.v1.metrics.loggers import StatLoggerBase

from vllm_omni import envs
from vllm_omni.config import StageConfig
from vllm_omni.config.epd import Instance
from vllm_omni.engine.adapters import load_adapter
from vllm_omni.engine.cache_edges import CacheSource
from vllm_omni.engine.decodable import check_stage_args
from vllm_omni.engine.engine_args import config_of_instance, create_vllm_config
from vllm_omni.engine.engine_run import EngineRun
from vllm_omni.engine.kinds import ENGINE_KINDS
from vllm_omni.engine.latency_metrics import default_slo
from vllm_omni.engine.node import StageNode
from vllm_omni.engine.pool_args import with_adapter
from vllm_omni.engine.reading import Reading
from vllm_omni.engine.rejection import raise_reported, rejection
from vllm_omni.engine.remote_processes import RemoteProcesses, make_processes
from vllm_omni.engine.rendering import render_prompt
from vllm_omni.engine.request_caches import RequestCaches, check_prompt
from vllm_omni.engine.request_processor import RequestProcessor
from vllm_omni.engine.stage_llm import StageLLM
from vllm_omni.engine.stage_params import check_stage_params
from vllm_omni.engine.transfer_params import KV_CONFIG
from vllm_omni.errors import EngineLost, InvalidRequest, StageFailed
from vllm_omni.hosts.remote_engine import RemoteEngine
from vllm_omni.messages.outputs import OmniRequestOutput
from vllm_omni.messages.report import Reporter, ignore
from vllm_omni.messages.timeline import TIMELINES
from vllm_omni.model_executor.pipeline import RequestContext, StageRequest, StageSpec, client_checks
from vllm_omni.process.stage_processes import StageProcesses, ended_early, killed_by
from vllm_omni.process.status import StageState, StageStatus
from vllm_omni.process.tether import ServerTether
from vllm_omni.process.watchdog import Watchdog
from vllm_omni.relay.hub import RelayHub
from vllm_omni.vllm_patches import keep_media_in_front_end

logger = logging.getLogger(__name__)

# How long an aborted request waits for its engine, which drops it between two steps, before its other stages end.
ABORT_TIMEOUT_S = 1.0
# How long an engine may take to answer any other call, for the same reason.
ANSWER_TIMEOUT_S = 300.0
UNLIMITED_S = 1e7

T = TypeVar("T")


class StageEngine(StageNode):
    """One engine: starts it, runs requests on it, reports its health.

    ``start`` and ``restart`` block for seconds and belong in a thread; everything else belongs to one event loop.

    Args:
        instance: which one it is, of a stage that has several.

    Attributes:
        num_requests: that run here.
        start_s: how long the start took, in seconds.
        is_drained: see ``set_drained``.
        was_ended: see ``Supervised``.
        reader: bounds how many prompts are read at a time; for the engine that reads the user's prompts.
        cache_source: of the requests that bring a KV cache.
        remote: the engine on another host, if the deployment places it there.
    """

    def __init__(
        self,
        config: StageConfig,
        spec: StageSpec,
        *,
        log_stats: bool = False,
        instance: Instance | None = None,
        reader: RequestProcessor | None = None,
        cache_source: CacheSource | None = None,
    ) -> None:
        self.config = config if instance is None else config_of_instance(config, instance)
        self.kind = ENGINE_KINDS[config.engine_type]
        self.spec = replace(spec, sampling_params={**spec.sampling_params, **self.kind.sampling_params})
        self.name = config.name if instance is None else instance.name
        self.instance = instance
        self.cache_source = cache_source
        self.remote: RemoteEngine | None = None
        self.vllm_config = config.vllm_config or create_vllm_config(self.config, spec, instance, log_stats=log_stats)
        self.default_slo = default_slo(self.vllm_config)
        self._is_first = config.stage_id == 0
        self._log_stats = log_stats
        self._reader = reader
        self._status = StageStatus()
        self.on_status: Callable[[], None] = lambda: None  # called after each change of status, by the supervisor
        self._llm: StageLLM | None = None
        self._processes: StageProcesses | RemoteProcesses | None = None
        self._make_statistics: Callable[[StageLLM], StatLoggerBase] | None = None  # see ``attach``
        self._loop: asyncio.AbstractEventLoop | None = None  # the requests' event loop, once there was one
        self.num_requests, self.start_s = 0, 0.0
        self.is_drained = False
        self.was_ended = False
        self._watchdog = Watchdog(self)
        self._stuck: str | None = None  # why the watchdog has ended the engine, until it is restarted

    @property
    def llm(self) -> StageLLM:
        """vLLM's client of the engine."""
        assert self._llm is not None, "the stage has not been started"
        return self._llm

    # -- start and end ------------------------------------------------------------------------------------------------

    def start(self, tether: ServerTether, hub: RelayHub) -> None:
        """Start the engine's processes and load the model. Blocks until the engine is ready.

        Args:
            hub: the front end's, which opens media for the user.

        Raises:
            StageFailed: the engine did not start; the cause is attached.
        """
        self._processes = processes = make_processes(tether, self.remote, log_stats=self._log_stats)
        self._hub = hub
        self.bind_config(tether)
        logger.info("stage %s: starting", self.name)
        started = time.monotonic()
        with self._media_cache(), processes.starting(self.vllm_config.device_config.device_type):
            # A start writes what the engine measured into its configuration; a restart needs it as it was.
            self._fresh_config = copy.deepcopy(self.vllm_config)
            try:
                self._llm = self._make_llm(self.vllm_config, processes.launch())
            except Exception as exc:
                raise StageFailed(self.name, self._start_failure(exc)) from exc
        if self._reader is not None:
            self._reader.bind(self.llm.renderer)
        processes.note()
        self.start_s = time.monotonic() - started
        logger.info("stage %s: ready after %.1f s", self.name, self.start_s)

    def _make_llm(self, vllm_config: VllmConfig, addresses: dict[str, str] | None, client_index: int = 0) -> StageLLM:
        is_front = self._is_first and (self.instance is None or self.instance.is_front)
        return StageLLM(
            vllm_config,
            self.spec.output_type,
            self._hub,
            has_own_vocabulary=self.spec.has_own_vocabulary,
            log_stats=self._log_stats,
            generates_tokens=self.kind.generates_tokens,
            profiles_front_end=is_front and client_index == 0,
            client_addresses=addresses,
            client_index=client_index,
            make_statistics=self._make_statistics,
        )

    def attach(
        self,
        processes: StageProcesses,
        hub: RelayHub,
        vllm_config: VllmConfig,
        addresses: dict[str, str],
        make_statistics: Callable[[StageLLM], StatLoggerBase] | None,
    ) -> None:
        """Let requests run here on an engine core that the front end supervises. Blocks until it is ready."""
        self._processes, self._hub, self._stuck = processes, hub, None
        self._make_statistics = make_statistics
        if self._llm is None:
            self._llm = self._make_llm(vllm_config, addresses, client_index=1)
        else:
            self.llm.engine_core.shutdown(timeout=0)
            self._replace_engine_core(self.llm.connect(vllm_config, addresses))

    async def detach(self, reason: str) -> None:
        """The engine core that was attached has ended: end its requests. On their event loop."""
        self._stuck = self._stuck or f"its engine has died: {reason}"
        await self.llm.fail()

    def bind_config(self, tether: ServerTether) -> None:
        """Complete the configuration with which the engine's processes start: they live as long as the tether's."""
        tether.update(self.vllm_config.additional_config)
        tether[TIMELINES] = self.kind.generates_tokens
        self.vllm_config.additional_config = tether

    def _media_cache(self) -> AbstractContextManager[None]:
        if self.instance is None and not self.spec.publishes_pictures:
            return nullcontext()  # a prompt is sent once, and with pictures again behind each of them
        return keep_media_in_front_end(self.vllm_config.model_config, lambda: self.llm.renderer)

    def restart(self) -> None:
        """Clear away what is left of an engine that died and start another in its place. Blocks as ``start`` does.

        Raises:
            StageFailed: the engine did not start; the processes that did are gone again.
        """
        processes = self._started
        started = time.monotonic()
        self._stuck = None
        self.llm.engine_core.shutdown(timeout=0)
        try:
            processes.end()
            config = copy.deepcopy(self._fresh_config)
            with processes.starting(self.vllm_config.device_config.device_type):
                engine_core = self.llm.connect(config, processes.launch())
            # The new engine has none of the media that the front end believes it to have.
            asyncio.run(self.llm.renderer.clear_mm_cache_async())
        except Exception as exc:
            reason = self._start_failure(exc)
            with suppress(TimeoutError):
                processes.end()
            raise StageFailed(self.name, reason) from exc
        self._replace_engine_core(engine_core)
        processes.note()
        processes.remove_dead_sockets()
        logger.info("stage %s: ready again after %.1f s", self.name, time.monotonic() - started)

    def _replace_engine_core(self, engine_core: EngineCoreClient) -> None:
        """Replace it in the requests' event loop, if one runs."""
        replaced = threading.Event()

        def replace() -> None:
            self.llm.replace_engine_core(engine_core)
            replaced.set()

        if self._loop is not None and self._loop.is_running():
            with suppress(RuntimeError):  # the loop was closed meanwhile
                self._loop.call_soon_threadsafe(replace)
                if replaced.wait(ANSWER_TIMEOUT_S):
                    return
        self.llm.replace_engine_core(engine_core)

    def kill(self) -> None:
        """Kill the engine's processes, whatever they are doing."""
        self._started.kill()

    async def aclose(self) -> None:
        """Stop reading the engine's outputs. Call it before ``shutdown``, which would look like a failure."""
        await self._watchdog.stop()
        await self.llm.stop_reading()

    def shutdown(self) -> None:
        """End the engine's processes; does nothing when it was not started."""
        if self._llm is not None:
            self._llm.shutdown(timeout=envs.VLLM_OMNI_STAGE_SHUTDOWN_TIMEOUT_S)
            self._started.kill()  # vLLM kills a core that is stuck, but not its forked ranks

    def remove(self) -> None:
        """End the engine's processes and remove what they left; the server runs on."""
        if self._llm is not None:
            self._llm.shutdown(timeout=0)
        if self._processes is not None:
            self._processes.end()

    @property
    def _started(self) -> StageProcesses | RemoteProcesses:
        assert self._processes is not None, "the stage has not been started"
        return self._processes

    # -- health -------------------------------------------------------------------------------------------------------

    @property
    def has_died(self) -> bool:
        """Whether requests on the engine fail."""
        return self.llm.has_failed or self._started.has_ended

    def can_start(self) -> bool:
        return self._started.can_start()

    def pids(self) -> list[int]:
        """Process ids of the engine core and its workers that live."""
        return self._started.pids()

    def has_lost_process(self) -> bool:
        """Whether the engine core or a worker has ended."""
        return self._started.has_lost_one()

    def current_status(self) -> StageStatus:
        if self._status.state is StageState.RUNNING and self.has_died:  # the supervisor has not noticed yet
            return StageStatus(StageState.RESTARTING, self.termination_reason(), self._status.num_restarts)
        if self._status.state is StageState.RUNNING and self.is_drained:
            return StageStatus(StageState.DRAINED, "it gets no new requests", self._status.num_restarts)
        return self._status

    def set_status(self, status: StageStatus) -> None:
        """For the supervisor, from its thread."""
        self._status = status
        self.on_status()

    def set_drained(self, is_drained: bool) -> None:
        """Whether others of its group (``EngineGroup``) get its new requests; those that run here end here."""
        self.is_drained = is_drained
        self.on_status()

    def termination_reason(self) -> str:
        """Why the engine died: "its engine has died: ..."."""
        if self._stuck is not None:
            return self._stuck
        cause = self._started.failure() or killed_by(self.llm.exit_codes())
        return f"its engine has died: {cause}" if cause else "its engine has died"

    def _start_failure(self, error: Exception) -> str:
        return f"did not start: {self._started.failure() or ended_early(error) or error}"

    async def ask(self, call: Coroutine[Any, Any, T], timeout_s: float = ANSWER_TIMEOUT_S) -> T:
        """Await a call of the engine that is not a request.

        Raises:
            StageFailed: the engine answers with an error, dies, or does not answer in time.
        """
        self._loop = asyncio.get_running_loop()
        try:
            return await self.llm.answer(call, timeout_s)
        except EngineDeadError as exc:
            reason = self.termination_reason() if self.has_died else "its outputs are no longer read"
            raise StageFailed(self.name, reason) from exc
        except TimeoutError as exc:
            raise StageFailed(self.name, f"no answer within {timeout_s:g} s") from exc
        except Exception as exc:  # upstream's clients raise bare exceptions with the engine's message
            raise StageFailed(self.name, str(exc) or repr(exc)) from exc

    async def relay_statistics(self, timeout_s: float = ANSWER_TIMEOUT_S) -> list[dict[str, dict[str, int]]]:
        """Fetch ``RelayStatistics`` of each of the stage's ranks, by backend.

        Raises:
            StageFailed: the engine does not answer in time.
        """
        return await self.ask(self.llm.collective_rpc("relay_statistics"), timeout_s)

    # -- for the watchdog (``Watched``) -------------------------------------------------------------------------------

    def has_requests(self) -> bool:
        return self.num_requests > 0

    async def answer(self) -> None:
        await self.ask(self.llm.is_paused(), UNLIMITED_S)

    def cpu_s(self) -> float:
        return self._started.cpu_s()

    def end_stuck(self, after_s: float) -> None:
        self._stuck = f"its engine made no step for {after_s:g} s, with requests"
        logger.error("stage %s: %s", self.name, self._stuck)
        self.kill()

    # -- requests -----------------------------------------------------------------------------------------------------

    async def generate(
        self,
        request: StageRequest,
        context: RequestContext,
        wanted: frozenset[str],
        suffix: str = "",
        report: Reporter = ignore,
    ) -> AsyncGenerator[OmniRequestOutput, None]:
        """See ``StageNode.generate``."""
        self.check_health()
        prompt, params = await self.prepare(request, context, wanted)
        request_id = f"{context.request_id}-{self.name}{suffix}"
        async with aclosing(self.run(prompt, params, request_id, context, report)) as outputs:
            async for output in outputs:
                yield output

    def check_params(self, params: SamplingParams, given: Mapping[str, Any]) -> None:
        """See ``check_stage_params``."""
        check_stage_params(self, params, given)

    async def prepare(
        self, request: StageRequest, context: RequestContext, wanted: frozenset[str]
    ) -> tuple[Any, SamplingParams]:
        """Make the engine's prompt and parameters for a request.

        Raises:
            InvalidRequest: the prompt cannot be read, or a parameter cannot be honoured.
        """
        is_rendered = isinstance(request.prompt, dict) and "type" in request.prompt
        if self.kind.renders_prompt and (self._is_first or not is_rendered):
            request = structs.replace(request, prompt=await self.render(request.prompt))
        request = with_adapter(request, self.config.pool, context.lora_request)
        if request.given:
            ids = [*request.prompt["prompt_token_ids"], *request.given]
            request = structs.replace(request, prompt={**request.prompt, "prompt_token_ids": ids})
        source = self.config.name if request.cache is None or self.cache_source is None else self.cache_source.stage
        given = context.params[source]
        if self.spec.cache_fields & wanted:
            check_prompt(self.config.name, request.prompt)
        if self.spec.make_args is not None:
            with client_checks(f"stage {self.name!r}: make_args"):
                more = self.spec.make_args(request, context, wanted, self.vllm_config)
            request = structs.replace(request, args={**request.args, **more})
        with client_checks(f"stage {self.name!r}: its arguments"):
            check_stage_args(request.args)
        return await self.kind.engine_request(self.config, self.spec, request, given, wanted)

    @property
    def _transfers_fail_requests(self) -> bool:
        """Whether a transfer that fails may end a request. Ours compute what they cannot pull."""
        transfers = self.vllm_config.kv_transfer_config, self.vllm_config.ec_transfer_config
        return self.instance is None and KV_CONFIG not in self.spec.engine_args and transfers != (None, None)

    async def render(self, prompt: Any) -> Any:
        """See ``render_prompt``."""
        return await render_prompt(self.llm, self.spec, self.name, prompt)

    async def run(
        self, prompt: Any, params: SamplingParams, request_id: str, context: RequestContext, report: Reporter
    ) -> AsyncGenerator[OmniRequestOutput, None]:
        """Stream one rendered prompt through the engine; if closed early, return once the engine has dropped it.

        Args:
            request_id: unique to this run.
            report: gets the times of the task before the last output, and at the end the payloads that the engine has
                published, which its owner releases.

        Raises:
            InvalidRequest: the engine rejected the request.
            StageFailed: the engine died, or the model failed on this request.
        """
        self._loop = asyncio.get_running_loop()
        answers_user = self._is_first or self.cache_source is not None
        lora_request = await load_adapter(self, context.lora_request) if answers_user else None
        reading = Reading(self.llm, request_id, params, generates_tokens=self.kind.generates_tokens)
        run = EngineRun(
            self.config.name,
            self.name,
            self.llm,
            request_id,
            params,
            report,
            generates_tokens=self.kind.generates_tokens,
        )
        outputs = self.llm.generate(
            prompt,
            params,
            request_id,
            lora_request=lora_request,
            priority=context.priority,
            trace_headers=run.headers(context.trace_headers),
            **(context.engine_kwargs if answers_user else {}),
        )
        caches = RequestCaches(self.cache_source, self.spec, prompt, params, self._hub, lora_request)
        is_constrained = params.structured_outputs is not None and not self._transfers_fail_requests
        self.num_requests += 1
        self._watchdog.start()
        error: BaseException | None = None
        try:
            async with self._translate_errors(), aclosing(outputs):
                async for output in outputs:
                    assert isinstance(output, OmniRequestOutput)
                    raise_reported(output, self.name, is_constrained=is_constrained)
                    run.note_output(output)
                    caches.note_output(output)
                    reading.note_pulled()
                    yield output
                    await reading.report()
        except BaseException as exc:
            error = exc
            raise
        finally:
            self.num_requests -= 1
            run.end(error)

    @asynccontextmanager
    async def _translate_errors(self) -> AsyncIterator[None]:
        """Raise vLLM's errors of a request as ours; one that ends early has been dropped by the engine afterwards."""
        try:
            yield
        except VLLMClientError as exc:
            raise rejection(exc, self.name) from exc
        except EngineGenerateError as exc:
            raise StageFailed(self.name, f"failed the request: {exc.__cause__ or exc!r}") from exc
        except EngineDeadError as exc:
            raise EngineLost(self.name, self.termination_reason()) from exc
        except (asyncio.CancelledError, GeneratorExit, InvalidRequest, StageFailed):
            await self._await_abort()
            raise

    async def _await_abort(self) -> None:
        """Wait for the abort that upstream has sent: an engine answers calls in their order."""
        try:
            await self.ask(self.llm.is_paused(), ABORT_TIMEOUT_S)
        except StageFailed as exc:  # the engine is dead, which also ends requests, or its step takes longer
            logger.debug("abort not acknowledged: %s", exc)
