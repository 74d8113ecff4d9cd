"""``StageEngine``: one vLLM engine as a node of the graph."""

from __future__ import annotations

import asyncio
import copy
import logging
import os
import signal
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine
from contextlib import aclosing, suppress
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, TypeVar

from pydantic import ValidationError
from vllm.config import VllmConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.exceptions import VLLMClientError
from vllm.lora.request import LoRARequest
from vllm.multimodal.cache import MultiModalProcessorOnlyCache
from vllm.platforms import current_platform
from vllm.renderers.inputs.preprocess import parse_model_prompt
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.usage.usage_lib import UsageContext
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.core_client import EngineCoreClient
from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError
from vllm.v1.engine.output_processor import OutputProcessor
from vllm.v1.executor.abstract import Executor

from vllm_omni.config import StageConfig
from vllm_omni.config.diffusion import DIFFUSION, DiffusionConfig
from vllm_omni.config.diffusion_params import DiffusionParams
from vllm_omni.config.epd import Instance, Tasks
from vllm_omni.engine.diffusion_request import ENGINE_PROMPT, make_sampling_params
from vllm_omni.engine.latency_metrics import default_slo
from vllm_omni.engine.metrics import StageLoggingStatLogger, StagePrometheusStatLogger
from vllm_omni.engine.output_processor import MultimodalOutputProcessor
from vllm_omni.engine.refusal import refusal
from vllm_omni.engine.request_processor import RequestProcessor
from vllm_omni.epd.budget import EPDConfig
from vllm_omni.errors import ConfigError, InvalidRequest, StageFailed, StageUnavailable
from vllm_omni.flow import Activation, Emission
from vllm_omni.messages.epd_step import EPD_CONFIG
from vllm_omni.messages.outputs import OmniRequestOutput
from vllm_omni.messages.payload import Payload
from vllm_omni.messages.stage_step import STAGE_ARGS
from vllm_omni.messages.timeline import TIMELINES, TaskNotes, task_of
from vllm_omni.model_executor.pipeline import RequestContext, StageRequest, StageSpec
from vllm_omni.process.run_directory import Lease
from vllm_omni.relay.hub import RelayHub
from vllm_omni.worker.platforms import ar_worker_cls

logger = logging.getLogger(__name__)

# After that a process is killed, and its semaphores stay until the program ends. Upstream's five seconds are too short
# for several engines on a few cores: a Python with torch and vLLM in it takes seconds of computing to end.
SHUTDOWN_TIMEOUT_S = 20.0

# How long the end of a request waits for its engine to say that it has dropped it. An engine answers between two steps,
# and a vocoder's step may take minutes: the engine then drops the request when that is over. The failure of a request,
# which ends its work in other stages, is told only afterwards.
ABORT_TIMEOUT_S = 1.0
# How long an engine may take to answer what is asked of it beside requests, for the same reason.
ANSWER_TIMEOUT_S = 300.0

CPU_KV_CACHE_BYTES = 2**30
"""Of an autoregressive stage on a CPU, unless the deployment or VLLM_CPU_KVCACHE_SPACE says otherwise."""
_KV_CACHE_ARGS = {"kv_cache_memory_bytes", "gpu_memory_utilization", "num_gpu_blocks_override"}


class StageState(StrEnum):
    RUNNING = "running"
    RESTARTING = "restarting"
    FAILED = "failed"


@dataclass(frozen=True)
class StageStatus:
    """What a stage tells of itself; replaced as a whole, because the supervisor's thread writes it."""

    state: StageState = StageState.RUNNING
    reason: str | None = None  # why it is not running
    num_restarts: int = 0  # since the server's start


class Door:
    """Where requests wait, before their first stage, while generation is paused; they can be aborted there."""

    def __init__(self) -> None:
        self.inside: set[str] = set()  # ids of requests that have entered and not left
        self._opened = asyncio.Event()
        self._opened.set()
        self._emptied = asyncio.Event()
        self._emptied.set()

    @property
    def is_open(self) -> bool:
        return self._opened.is_set()

    def close(self) -> None:
        self._opened.clear()

    def open(self) -> None:
        self._opened.set()

    async def enter(self, request_id: str) -> None:
        if request_id not in self.inside:
            await self._opened.wait()
            self.inside.add(request_id)
            self._emptied.clear()

    def leave(self, request_id: str) -> None:
        """Does nothing for a request that has not entered."""
        self.inside.discard(request_id)
        if not self.inside:
            self._emptied.set()

    async def wait_until_empty(self) -> None:
        await self._emptied.wait()


class StageLLM(AsyncLLM):
    """vLLM's ``AsyncLLM`` whose outputs carry tensors beside tokens, and whose engine core can be replaced."""

    output_handler: asyncio.Task[None] | None

    def __init__(self, vllm_config: VllmConfig, output_type: str, hub: RelayHub, log_stats: bool) -> None:
        super().__init__(
            vllm_config,
            Executor.get_class(vllm_config),
            log_stats=False,  # upstream's own loggers; it collects for those given here all the same
            stat_loggers=[StagePrometheusStatLogger, StageLoggingStatLogger] if log_stats else None,
            usage_context=UsageContext.ENGINE_CONTEXT,
            log_requests=False,
        )
        # Upstream hands its processor to the output loop when that starts, which inside an event loop is at once.
        assert self.output_handler is None, "a stage is started from a thread that has no event loop"
        self.output_type = output_type
        self.hub = hub
        self.published: dict[str, list[Payload]] = {}  # see MultimodalOutputProcessor
        self.notes: dict[str, TaskNotes] = {}  # likewise
        self.has_slo = bool(default_slo(vllm_config))
        self.output_processor: OutputProcessor = self._extend(self.output_processor)

    def _extend(self, upstream: OutputProcessor) -> MultimodalOutputProcessor:
        return MultimodalOutputProcessor(
            upstream, self.output_type, self.hub, self.published, self.notes, has_slo=self.has_slo
        )

    def replace_engine_core(self, engine_core: EngineCoreClient) -> None:
        """Go on with another engine core; what others hold of this object (renderer, input processor) stays.

        Call it in the event loop of the requests: upstream registers a request and sends it without a break between.
        """
        self.output_processor.propagate_error(EngineDeadError())  # whoever came after upstream told those waiting
        self.output_processor = self._extend(self.output_processor)
        self.output_handler = None  # upstream starts one for the new core with the next request
        self._profile_session_active = False
        self.engine_core = engine_core

    def __del__(self) -> None:
        """Upstream shuts down here, which fails at interpreter exit; ``StageEngine.shutdown`` is explicit."""


Answer = TypeVar("Answer")


class StageNode(ABC):
    """A stage as the graph sees it: one engine, or several instances."""

    config: StageConfig
    name: str  # of the engine: the stage's, or that of one of its instances
    door: Door | None = None  # of the first stage

    async def forward(self, activation: Activation) -> AsyncIterator[Emission]:
        """Run one activation: each chunk of its input is a request, in order; outputs go to every wanted field.

        An input without a chunk (a branch that has nothing to say) yields nothing. Cancelling aborts the request.

        Raises:
            InvalidRequest: the engine refused the request.
            StageFailed: the engine died, or the model failed on this request.
        """
        context: RequestContext = activation.context
        (chunks,) = activation.inputs.values()
        duration_s = 0.0  # without the time in which it waited for the next chunk
        async for chunk in chunks:
            if chunk.payload is None:
                continue
            started = time.monotonic()
            # Closed here, whatever happens: its end is the engine's acknowledgement of an abort.
            async with aclosing(self.generate(chunk.payload, context, activation.wanted, chunk.seq)) as outputs:
                async for output in outputs:
                    is_last = output.finished and chunk.last
                    if is_last:
                        context.stage_durations[self.name] = duration_s + time.monotonic() - started
                    for field in activation.wanted:
                        yield Emission(field, output, last=is_last)
            duration_s += time.monotonic() - started

    @abstractmethod
    def generate(
        self, request: StageRequest, context: RequestContext, wanted: frozenset[str], seq: int = 0
    ) -> AsyncGenerator[OmniRequestOutput, None]:
        """Stream one request, as deltas; if left early, end when the engine has dropped it.

        ``seq`` tells it from the other requests of its activation.
        """

    @abstractmethod
    def check_health(self) -> None:
        """Raises:
        StageUnavailable: no request can be served: what is dead is being restarted, or could not be.
        """

    @abstractmethod
    def current_status(self) -> StageStatus:
        """Of the stage as a whole."""


class StageEngine(StageNode):
    """One engine: starts it, runs activations on it, tells its health.

    ``start`` and ``restart`` block for seconds and belong in a thread; everything else belongs to one event loop.

    Args:
        instance: which one it is, of a stage that has several.
    """

    def __init__(
        self,
        config: StageConfig,
        spec: StageSpec,
        *,
        log_stats: bool = False,
        instance: Instance | None = None,
    ) -> None:
        self.config = config if instance is None else _config_of(config, instance)
        self.spec = spec
        self.name = config.name if instance is None else instance.name
        self.log_stats = log_stats
        self.instance = instance
        self.vllm_config = config.vllm_config or self._create_vllm_config()
        self.default_slo = default_slo(self.vllm_config)
        self._status = StageStatus()
        self.on_status: Callable[[], None] | None = None  # told of a new one, from any thread
        self.reader: RequestProcessor | None = None  # of the engine that reads the user's prompts
        self._loop: asyncio.AbstractEventLoop | None = None  # that of the requests, once there was one

    # -- life ---------------------------------------------------------------------------------------------------------

    def start(self, lease: Lease, hub: RelayHub) -> None:
        """Start the engine's processes and load the model. Blocks until the engine is ready.

        Args:
            hub: the front end's, which opens what is for the user.

        Raises:
            StageFailed: the engine did not start; the cause is attached.
        """
        self._lease = lease
        lease.update(self.vllm_config.additional_config)
        lease[TIMELINES] = self.config.is_autoregressive
        self.vllm_config.additional_config = lease
        # A start writes what the engine found out into its configuration, and would add to it another time.
        media_cache = None if self.instance is None else self._take_media_cache()
        self._fresh_config = copy.deepcopy(self.vllm_config)
        logger.info("stage %s: starting", self.name)
        started = time.monotonic()
        try:
            self.llm = StageLLM(self.vllm_config, self.spec.output_type, hub, self.log_stats)
        except Exception as exc:
            raise StageFailed(self.name, f"did not start: {lease.failure() or exc}") from exc
        if media_cache is not None:
            media_cache()
        if self.reader is not None:
            self.reader.bind(self.llm.renderer)
        if self.config.stage_id or (self.instance is not None and not self.instance.is_front):
            self.llm.profiler = None  # of the front end, where torch has one at a time
        lease.note_processes()
        logger.info("stage %s: ready after %.1f s", self.name, time.monotonic() - started)

    def _take_media_cache(self) -> Callable[[], None]:
        """Keep processed media in the front end alone; call what is returned when the engine is up.

        The prompts of a stage with several instances are rendered once, by one of them. Upstream's cache leaves out
        what it has sent before, to whichever instance that was.
        """
        model_config = self.vllm_config.model_config
        multimodal = model_config.multimodal_config
        num_gb = 0.0 if multimodal is None else multimodal.mm_processor_cache_gb
        if multimodal is not None:
            multimodal.mm_processor_cache_gb = 0.0

        def put_back() -> None:
            if multimodal is not None and num_gb > 0:
                multimodal.mm_processor_cache_gb = num_gb
                self.llm.renderer._mm_processor_cache = MultiModalProcessorOnlyCache(model_config)

        return put_back

    def restart(self) -> None:
        """Clear away what is left of an engine that died and start another in its place. Blocks as ``start`` does.

        Raises:
            StageFailed: the engine did not start; what did is gone again.
        """
        started = time.monotonic()
        self.llm.engine_core.shutdown(timeout=0)
        try:
            self._lease.end_processes()
            config = copy.deepcopy(self._fresh_config)
            engine_core = EngineCoreClient.make_async_mp_client(
                vllm_config=config, executor_class=Executor.get_class(config), log_stats=self.llm.log_stats
            )
            # The new engine has none of the media that the front end believes it to have.
            asyncio.run(self.llm.renderer.clear_mm_cache_async())
        except Exception as exc:
            reason = f"did not start: {self._lease.failure() or exc}"
            with suppress(TimeoutError):
                self._lease.end_processes()
            raise StageFailed(self.name, reason) from exc
        self._replace_engine_core(engine_core)
        self._lease.note_processes()
        self._lease.remove_dead_sockets()
        logger.info("stage %s: ready again after %.1f s", self.name, time.monotonic() - started)

    def _replace_engine_core(self, engine_core: EngineCoreClient) -> None:
        replaced = threading.Event()

        def replace() -> None:
            self.llm.replace_engine_core(engine_core)
            replaced.set()

        if self._loop is not None and self._loop.is_running():
            with suppress(RuntimeError):  # it has been closed meanwhile
                self._loop.call_soon_threadsafe(replace)
                if replaced.wait(ANSWER_TIMEOUT_S):
                    return
        self.llm.replace_engine_core(engine_core)

    def kill(self) -> None:
        """End the engine's processes at once, however far they are."""
        self._lease.kill_processes()

    def has_lost_process(self) -> bool:
        """Whether the engine core or a worker has ended."""
        return self._lease.has_lost_process()

    async def aclose(self) -> None:
        """Stop reading the engine's outputs, so that its end is not taken for a death. Call it before ``shutdown``."""
        handler, self.llm.output_handler = self.llm.output_handler, None
        if handler is not None:
            handler.cancel()
            await asyncio.gather(handler, return_exceptions=True)

    def shutdown(self) -> None:
        """End the engine's processes; does nothing when it was not started."""
        if "llm" in self.__dict__:
            self.llm.shutdown(timeout=SHUTDOWN_TIMEOUT_S)

    # -- health -------------------------------------------------------------------------------------------------------

    @property
    def status(self) -> StageStatus:
        """As the supervisor left it."""
        return self._status

    @status.setter
    def status(self, status: StageStatus) -> None:
        self._status = status
        if self.on_status is not None:
            self.on_status()

    @property
    def has_died(self) -> bool:
        """Whether the engine is dead, or nobody hears it any more; the end of an event loop cancels who hears it."""
        handler = self.llm.output_handler
        is_deaf = handler is not None and handler.done() and not handler.cancelled()
        return self.llm.engine_core.resources.engine_dead or is_deaf

    def check_health(self) -> None:
        """Raises:
        StageUnavailable: the engine is dead: it is being restarted, or could not be.
        """
        status = self.current_status()
        if status.state is not StageState.RUNNING:
            raise StageUnavailable(self.name, f"{status.state}: {status.reason}")

    def current_status(self) -> StageStatus:
        status = self.status
        if status.state is StageState.RUNNING and self.has_died:  # the supervisor is about to notice
            return StageStatus(StageState.RESTARTING, self.cause_of_death(), status.num_restarts)
        return status

    def cause_of_death(self) -> str:
        """As a sentence: "its engine has died: ..."."""
        cause = self._lease.failure()
        manager = self.llm.engine_core.resources.engine_manager
        codes = [] if manager is None else manager.finished_procs().values()
        if cause is None and (killed := [-code for code in codes if code < 0]):
            cause = f"killed by {signal.Signals(killed[0]).name}"
        return f"its engine has died: {cause}" if cause else "its engine has died"

    async def ask(self, question: Coroutine[Any, Any, Answer], timeout_s: float = ANSWER_TIMEOUT_S) -> Answer:
        """What the engine answers to a call that is no request.

        Upstream leaves whoever asks a dying engine waiting for ever.

        Raises:
            StageFailed: the engine refuses, dies, or does not answer in time.
        """
        self._loop = asyncio.get_running_loop()
        self.llm._run_output_handler()  # ends when the engine dies
        handler = self.llm.output_handler
        assert handler is not None
        answer = self._loop.create_task(question)
        try:
            await asyncio.wait({answer, handler}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            if answer.done():
                return answer.result()
        except EngineDeadError:
            pass
        except Exception as exc:  # upstream's clients raise bare exceptions with what the engine said
            raise StageFailed(self.name, str(exc) or repr(exc)) from exc
        finally:
            answer.cancel()
        if self.has_died:
            raise StageFailed(self.name, self.cause_of_death())
        raise StageFailed(self.name, f"no answer within {timeout_s:g} s")

    async def relay_statistics(self) -> list[dict[str, dict[str, int]]]:
        """Of each of the stage's ranks, by backend (``RelayStatistics``): what it has published and who has not come.

        Raises:
            StageFailed: the engine does not answer.
        """
        return await self.ask(self.llm.collective_rpc("relay_statistics"))

    # -- node of the graph --------------------------------------------------------------------------------------------

    async def generate(
        self, request: StageRequest, context: RequestContext, wanted: frozenset[str], seq: int = 0
    ) -> AsyncGenerator[OmniRequestOutput, None]:
        """See ``StageNode.generate``."""
        if self.door is not None:
            await self.door.enter(context.request_id)
        self.check_health()
        if self.config.is_diffusion:
            prompt: Any = ENGINE_PROMPT
            params = await asyncio.to_thread(self._diffusion_params, request, context)  # it may encode images
        else:
            is_first = self.config.stage_id == 0
            prompt = await self.render(request.prompt) if is_first else request.prompt
            params = self.sampling_params(request, context, wanted)
        request_id = f"{context.request_id}-{self.name}" + (f"-{seq}" if seq else "")
        async with aclosing(self.run(prompt, params, request_id, context, context.payloads)) as outputs:
            async for output in outputs:
                yield output

    async def run(
        self, prompt: Any, params: SamplingParams, request_id: str, context: RequestContext, published: list[Payload]
    ) -> AsyncGenerator[OmniRequestOutput, None]:
        """Stream one rendered prompt through the engine; if left early, end when the engine has dropped it.

        Args:
            request_id: of this run alone.
            published: filled, at the end, with what the engine has published; whoever has it releases it.

        Raises:
            InvalidRequest: the engine refused the request.
            StageFailed: the engine died, or the model failed on this request.
        """
        self._loop = asyncio.get_running_loop()
        is_first = self.config.stage_id == 0
        lora_request = context.lora_request if is_first else None
        if self.instance is not None and self.instance.kind == Tasks.E and self.vllm_config.lora_config is None:
            lora_request = None  # it concerns the language model alone
        if lora_request is not None:
            await self._load_adapter(lora_request)
        outputs = self.llm.generate(
            prompt,
            params,
            request_id,
            lora_request=lora_request,
            priority=context.priority,
            trace_headers=context.trace_headers,
            **(context.engine_kwargs if is_first else {}),
        )
        sent_at, is_noted = time.time(), False
        try:
            async with aclosing(outputs):
                async for output in outputs:
                    assert isinstance(output, OmniRequestOutput)
                    self._raise_error(output)
                    if output.finished:
                        self._note_task(request_id, params, context, sent_at)
                        is_noted = True
                    yield output
        except VLLMClientError as exc:
            raise refusal(exc, self.name) from exc
        except EngineGenerateError as exc:
            raise StageFailed(self.name, f"failed the request: {exc.__cause__ or exc!r}") from exc
        except EngineDeadError as exc:
            raise StageFailed(self.name, self.cause_of_death()) from exc
        except (asyncio.CancelledError, GeneratorExit, InvalidRequest, StageFailed):
            await self._await_abort()
            raise
        finally:
            if not is_noted:
                self._note_task(request_id, params, context, sent_at)
            published += self.llm.published.pop(request_id, ())

    def _note_task(self, request_id: str, params: SamplingParams, context: RequestContext, sent_at: float) -> None:
        notes = self.llm.notes.pop(request_id, TaskNotes())
        if self.config.is_autoregressive:
            context.note_task(self.config.name, task_of(params.extra_args), sent_at, time.time(), notes)

    async def _load_adapter(self, lora_request: LoRARequest) -> None:
        """Before the engine does it within a step, where an adapter that it cannot load would end it."""
        if self.vllm_config.lora_config is None:
            flag = f"--stage {self.name}.enable_lora=true"
            raise InvalidRequest(
                f"lora_request: stage {self.name!r} was started without adapters; start it with {flag}"
            )
        try:
            await self.ask(self.llm.add_lora(lora_request))
        except StageFailed as exc:
            if self.has_died:
                raise
            raise InvalidRequest(f"lora_request: {exc}") from exc

    async def _await_abort(self) -> None:
        """Upstream has sent the abort and does not wait. An engine answers in the order in which it is asked."""
        try:
            await self.ask(self.llm.is_paused(), ABORT_TIMEOUT_S)
        except StageFailed as exc:  # dead, which also ends requests; or in a step that takes longer
            logger.debug("abort not acknowledged: %s", exc)

    async def render(self, prompt: Any) -> Any:
        """The user's prompt as the engine reads it. What goes wrong here is the prompt's fault: ``InvalidRequest``."""
        if not (isinstance(prompt, dict) and "type" in prompt):  # else it is rendered already
            try:
                parsed = parse_model_prompt(self.llm.model_config, prompt)
                (prompt,) = await self.llm.renderer.render_cmpl_async([parsed])
            except Exception as exc:
                raise refusal(exc, self.name) from exc
        # A number of another type would end the thread by which the engine hears of requests.
        wrong = [token for token in prompt.get("prompt_token_ids") or () if type(token) is not int]
        if wrong:
            raise InvalidRequest(f"prompt_token_ids: {wrong[0]!r} is no int")
        if self.spec.check_prompt is not None:
            self.spec.check_prompt(prompt)
        return prompt

    def sampling_params(self, request: StageRequest, context: RequestContext, wanted: frozenset[str]) -> SamplingParams:
        """Those of a request, with what the stage needs."""
        given = context.params[self.config.name]
        assert isinstance(given, SamplingParams), "AsyncOmni.stage_params makes those that the stage's type needs"
        params = given.clone()
        publishes = bool(self.spec.publishing_fields & wanted)
        if publishes and params.n > 1:
            raise InvalidRequest(f"stage {self.name!r}: n = {params.n}: the next stage reads one answer; give n = 1")
        if publishes or params.output_kind is not RequestOutputKind.FINAL_ONLY:
            params.output_kind = RequestOutputKind.DELTA
        for name, value in self.spec.sampling_params.items():
            setattr(params, name, value)
        params.all_stop_token_ids.update(params.stop_token_ids or ())  # what min_tokens must not let through
        args = dict(request.args)
        if publishes:
            args["publish"] = True
            # A cached prefix is not computed, so it would have no rows to publish.
            params.skip_reading_prefix_cache = True
        # Whatever the user put there under our key must not reach the runner.
        extra_args = {name: value for name, value in (params.extra_args or {}).items() if name != STAGE_ARGS}
        params.extra_args = {**extra_args, STAGE_ARGS: args} if args else extra_args or None
        return params

    def _diffusion_params(self, request: StageRequest, context: RequestContext) -> SamplingParams:
        params = context.params[self.config.name]
        assert isinstance(params, DiffusionParams), "AsyncOmni.stage_params makes those that the stage's type needs"
        return make_sampling_params(request.prompt, params, DiffusionConfig(**self.config.diffusion))

    def _raise_error(self, output: OmniRequestOutput) -> None:
        error = output.multimodal_output.get("error")
        if error is not None and output.multimodal_output.get("invalid"):
            raise InvalidRequest(f"stage {self.name!r}: {error}")
        if error is not None:
            raise StageFailed(self.name, error)
        told = output.ec_transfer_params or {}
        if told.get("error"):
            raise (InvalidRequest(told["error"]) if told.get("invalid") else StageFailed(self.name, told["error"]))
        if any(completion.finish_reason == "error" for completion in output.outputs):
            raise StageFailed(self.name, "its engine gave the request up (finish_reason 'error')")

    # -- configuration ------------------------------------------------------------------------------------------------

    def _create_vllm_config(self) -> VllmConfig:
        args: dict[str, Any] = {"model": self.config.model, "disable_log_stats": not self.log_stats}
        args["use_tqdm_on_load"] = False  # the bars of several stages would overwrite one another
        # Left to choose, vLLM takes any other file for weights where these are missing.
        args["load_format"] = "safetensors"
        args |= self._stage_defaults() | dict(self.config.engine_args)
        own = ["worker_cls", "scheduler_cls"] + (["hf_overrides"] if self.spec.architecture else [])
        for name in own:
            if self.config.engine_args.get(name):
                raise ConfigError(f"stage {self.name!r}: {name}: set by the model's pipeline, and cannot be changed")
        for name, value in self.spec.engine_args.items():
            if self.config.engine_args.get(name, value) != value:
                given = self.config.engine_args[name]
                raise ConfigError(f"stage {self.name!r}: {name} = {given!r}: this model runs with {value!r} only")
            args[name] = value
        if args.get("enable_lora") and current_platform.device_type == "cpu" and args.get("max_num_seqs") != 1:
            given = args.get("max_num_seqs")
            raise ConfigError(
                f"stage {self.name!r}: max_num_seqs = {given!r}: with enable_lora on a CPU it must be 1: "
                "vLLM's CPU kernels use an adapter for requests of the same step that have none, too"
            )
        if self.config.is_diffusion:
            args["additional_config"] = {**args.get("additional_config", {}), DIFFUSION: dict(self.config.diffusion)}
        if self.spec.architecture:
            args["hf_overrides"] = self.spec.hf_overrides or {"architectures": [self.spec.architecture]}
        if self.config.budgets:
            # Checked here: what is wrong is told before an engine starts.
            EPDConfig.parse(self.config.budgets)
            args["additional_config"] = {**args.get("additional_config", {}), EPD_CONFIG: self.config.budgets}
        tells_of_images = self.instance is not None or EPD_CONFIG in args.get("additional_config", {})
        if tells_of_images and args.get("async_scheduling"):
            raise ConfigError(
                f"stage {self.name!r}: async_scheduling = True: with budgets, or as several instances, a stage tells "
                "of its images with each step, which an asynchronous runner's output cannot; leave it out"
            )
        if self.config.executor_class is not None:
            args["distributed_executor_backend"] = self.config.executor_class
        # Our runner extends V1's; the switch is read here and in every process of the stage.
        os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"
        # A forked child inherits locks of threads that it does not have, and stages start from threads.
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"
        try:
            return AsyncEngineArgs(**args).create_engine_config(UsageContext.ENGINE_CONTEXT)
        except ValidationError as exc:
            said = "; ".join(error["msg"].removeprefix("Value error, ") for error in exc.errors(include_url=False))
            raise ConfigError(f"stage {self.name!r}: {said}") from exc
        except (ValueError, TypeError, NotImplementedError, VLLMClientError) as exc:
            raise ConfigError(f"stage {self.name!r}: {exc}") from exc

    def _stage_defaults(self) -> dict[str, Any]:
        """What a stage of its type runs with unless the deployment says otherwise."""
        device = current_platform.device_type
        defaults: dict[str, Any]
        if not self.config.is_autoregressive:
            defaults = {
                "dtype": "float32",
                "distributed_executor_backend": "vllm_omni.model_executor.oneshot_executor.OneShotExecutor",
                "scheduler_cls": "vllm_omni.core.sched.diffusion.DiffusionScheduler",
                "skip_tokenizer_init": True,
                "enable_prefix_caching": False,
                "enforce_eager": True,
                "max_num_seqs": 8,
                "max_model_len": 16,  # one prompt token and one output token
            }
            if self.config.is_diffusion:
                defaults |= {
                    "dtype": "float32" if device == "cpu" else "bfloat16",
                    "distributed_executor_backend": (
                        "vllm_omni.model_executor.diffusers_executor.DiffusersPipelineExecutor"
                    ),
                    "worker_cls": "vllm_omni.worker.diffusion_worker.DiffusionWorker",  # of vLLM's own executors
                }
            return defaults
        defaults = {
            "async_scheduling": False,
            "worker_cls": ar_worker_cls(device),
            "scheduler_cls": "vllm_omni.core.sched.epd.EPDScheduler",
        }
        if device == "cpu" and self.config.engine_args.get("tensor_parallel_size", 1) == 1:
            # In the engine core's own process: on the CPU vLLM would otherwise add a worker and two hops a step.
            defaults["distributed_executor_backend"] = "vllm.v1.executor.uniproc_executor.UniProcExecutor"
        if device == "cpu" and self.config.engine_args.get("enable_lora"):
            defaults["max_num_seqs"] = 1  # see _create_vllm_config
        is_kv_cache_sized = os.environ.get("VLLM_CPU_KVCACHE_SPACE") or _KV_CACHE_ARGS & set(self.config.engine_args)
        if device == "cpu" and not is_kv_cache_sized:
            # vLLM would give each stage most of the machine's memory.
            defaults["kv_cache_memory_bytes"] = CPU_KV_CACHE_BYTES
        return defaults


def _config_of(config: StageConfig, instance: Instance) -> StageConfig:
    """The stage's, with the engine arguments of one of its instances."""
    args = {**config.engine_args, **instance.engine_args}
    additional = {**(config.engine_args.get("additional_config") or {}), **(args.get("additional_config") or {})}
    return replace(config, engine_args=args | ({"additional_config": additional} if additional else {}))
