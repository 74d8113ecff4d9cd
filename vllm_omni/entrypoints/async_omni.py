"""``AsyncOmni``: a graph of stages behind vLLM's ``EngineClient``."""

from __future__ import annotations

import asyncio
import copy
import logging
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from os import PathLike
from typing import Any, TypeAlias, TypeVar
from uuid import uuid4

import msgspec
from pydantic import TypeAdapter, ValidationError
from vllm.engine.protocol import EngineClient
from vllm.exceptions import VLLMClientError
from vllm.lora.request import LoRARequest
from vllm.outputs import PoolingRequestOutput
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.tasks import SupportedTask
from vllm.v1.engine import PauseMode

from vllm_omni.config import OmniConfig, StageConfig, load_config, read_model_type
from vllm_omni.config.diffusion_params import DiffusionParams
from vllm_omni.engine.instances import InstanceGroup, InstanceStatistics
from vllm_omni.engine.orchestrator import Orchestrator
from vllm_omni.engine.stage import StageEngine
from vllm_omni.engine.stage_llm import StageLLM
from vllm_omni.entrypoints.speech_prompt import tokenize_speech_prompt
from vllm_omni.errors import ConfigError, InvalidRequest, StageFailed
from vllm_omni.messages.outputs import OmniRequestOutput
from vllm_omni.names import suggest
from vllm_omni.process.status import StageState, StageStatus

logger = logging.getLogger(__name__)

ABORT_TIMEOUT_S = 10.0  # how long a shutdown waits for the stages to let go of their requests

StageParams: TypeAlias = SamplingParams | DiffusionParams | Mapping[str, Any] | None
"""Parameters of one stage: vLLM's object, for a diffusion stage ours; or its fields by name."""

ParamsList: TypeAlias = StageParams | Sequence[StageParams] | Mapping[str, StageParams]
"""Parameters of one request: of the first stage; of the stages by position; or by name."""

Answer = TypeVar("Answer")


@dataclass(frozen=True)
class RequestDefaults:
    """What a request asks for where it does not say."""

    modalities: tuple[str, ...] | None = None  # None: everything that the model answers in
    speaker: str | None = None
    stage_params: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # fields over those of each stage


@dataclass
class _Life:
    """Shared by the views of one engine (``with_defaults``)."""

    stopped: bool = False
    loop: asyncio.AbstractEventLoop | None = None  # that of the requests, once there was one


class AsyncOmni(EngineClient):
    """Starts every stage of a model and serves requests through its graph.

    Args:
        model: directory or hub name of the checkpoint.
        config: the whole deployment, as ``load_config`` makes it; instead of a model.
        stage_configs: the stages themselves, instead of what the deployment files say.
        deploy_config, overrides, stage_overrides, epd, engine_args: see ``vllm_omni.config.load_config``.
        log_stats: collect vLLM's metrics of every stage, and those of the graph.

    Raises:
        ConfigError: the deployment is wrong.
        StageFailed: a stage did not start; nothing is left running.
    """

    def __init__(
        self,
        model: str | PathLike[str] | None = None,
        *,
        config: OmniConfig | None = None,
        stage_configs: Sequence[StageConfig] | None = None,
        deploy_config: str | PathLike[str] | None = None,
        overrides: Mapping[str, Any] | None = None,
        stage_overrides: Sequence[str] = (),
        epd: str | Mapping[str, Any] | None = None,
        log_stats: bool = False,
        **engine_args: Any,
    ) -> None:
        is_changed = deploy_config is not None or overrides or stage_overrides or epd is not None or engine_args
        if config is not None:
            if model or stage_configs is not None or is_changed:
                raise ConfigError("a config is whole: give it alone")
        elif stage_configs is not None:
            if is_changed:
                raise ConfigError("stage_configs are whole: give them alone, or a model with what to change")
            if not stage_configs:
                raise ConfigError("stage_configs: at least one stage is needed")
            first = stage_configs[0]
            model = model or first.model or (first.vllm_config.model_config.model if first.vllm_config else "")
            config = OmniConfig(model=str(model), model_type=read_model_type(model), stages=tuple(stage_configs))
        elif model is None:
            raise ConfigError("give a model: the directory or hub name of a checkpoint")
        else:
            config = load_config(
                model,
                deploy_config=deploy_config,
                overrides=overrides,
                stage_overrides=stage_overrides,
                epd=epd,
                **engine_args,
            )
        self.config = config
        self.orchestrator = Orchestrator(config, log_stats=log_stats)
        self.orchestrator.start()
        self.defaults = RequestDefaults()
        self._life = _Life()
        # What vLLM's server asks of an engine, the first stage answers: it is the one that reads the user's prompt.
        # These objects outlive the stage's engine when that is restarted.
        self._entry_node = self.orchestrator.nodes[config.stages[0].name]
        self._entry_engine = self.orchestrator.front(config.stages[0].name)
        entry = self._entry_engine.llm
        self.entry = entry
        self.vllm_config = entry.vllm_config
        self.model_config = entry.model_config
        self.renderer = entry.renderer
        self.input_processor = entry.input_processor

    # -- requests -----------------------------------------------------------------------------------------------------

    def generate(
        self,
        prompt: Any,
        sampling_params: ParamsList = None,
        request_id: str | None = None,
        *,
        modalities: Sequence[str] | None = None,
        speaker: str | None = None,
        deadline_s: float | None = None,
        lora_request: Any = None,
        trace_headers: Mapping[str, str] | None = None,
        priority: int = 0,
        prompt_text: str | None = None,
        tokenization_kwargs: dict[str, Any] | None = None,
        data_parallel_rank: int | None = None,
        session_id: str | None = None,
        kv_hints: Any = None,
        reasoning_ended: bool | None = None,
        reasoning_parser_kwargs: dict[str, Any] | None = None,
    ) -> AsyncGenerator[OmniRequestOutput, None]:
        """Stream one request: deltas of every modality as they come; the last output has ``finished``.

        Of a diffusion pipeline that is one output, unless its parameters ask for progress or previews: then there is
        one before it for each denoise step, or for each preview.

        Args:
            prompt: any prompt of vLLM's: text, ids, or a dictionary with ``multi_modal_data``; for a diffusion pipeline
                a text, or a dictionary with ``prompt``, ``negative_prompt`` and images in ``multi_modal_data``.
            sampling_params: of the first stage; or of the stages by position (None: that stage's defaults) or by name.
                A diffusion pipeline's are ``DiffusionParams``, or their fields by name.
            modalities: what to answer in: "text", "audio"; and "codec_ids" for the codes. Everything by default.
            speaker: a voice of the checkpoint.
            deadline_s: abort and raise ``DeadlineExceeded`` after so many seconds.
            others: those of ``EngineClient.generate``, for the first stage.

        Raises:
            InvalidRequest: the request is malformed.
            StageUnavailable: a stage that it needs is being restarted, or could not be.
            StageFailed: a stage failed it.
        """
        self._life.loop = asyncio.get_running_loop()
        if type(priority) is not int:
            raise InvalidRequest(f"priority = {priority!r}: must be an int")
        if modalities is not None and not (
            isinstance(modalities, Sequence) and all(isinstance(one, str) for one in modalities)
        ):
            raise InvalidRequest(f"modalities = {modalities!r}: must be a list of names")
        params = self.stage_params(sampling_params)
        speaker = self.defaults.speaker if speaker is None else speaker
        if modalities is None:
            modalities = self.defaults.modalities
        outputs = self.orchestrator.generate(
            prompt,
            params,
            request_id or uuid4().hex,
            modalities=tuple(self.orchestrator.pipeline.modalities) if modalities is None else modalities,
            options={} if speaker is None else {"speaker": speaker},
            lora_request=lora_request,
            priority=priority,
            trace_headers=trace_headers,
            engine_kwargs={
                "prompt_text": prompt_text,
                "tokenization_kwargs": tokenization_kwargs,
                "data_parallel_rank": data_parallel_rank,
                "session_id": session_id,
                "kv_hints": kv_hints,
                "reasoning_ended": reasoning_ended,
                "reasoning_parser_kwargs": reasoning_parser_kwargs,
            },
            deadline_s=deadline_s,
        )
        first = params[self.config.stages[0].name]
        is_final_only = isinstance(first, SamplingParams) and first.output_kind is RequestOutputKind.FINAL_ONLY
        return _merge(outputs) if is_final_only else outputs

    async def speak(
        self,
        text: str,
        sampling_params: ParamsList = None,
        request_id: str | None = None,
        *,
        instructions: str | None = None,
        modalities: Sequence[str] = ("audio",),
        speaker: str | None = None,
        deadline_s: float | None = None,
        lora_request: Any = None,
        priority: int = 0,
        trace_headers: Mapping[str, str] | None = None,
    ) -> AsyncGenerator[OmniRequestOutput, None]:
        """Stream the speech of a given text, word for word: pieces of it as they come, the last one ``finished``.

        The first stage is given its reply instead of sampling one; the stages behind it work as always. Each output has
        the ids of that stage's prompt, reply included, and no text.

        Args:
            text: what to say; no part of it is read as a control token.
            sampling_params: of the stages behind the first, by position (None for the first) or by name.
            instructions: how to say it.
            modalities: "audio"; and "codec_ids" for the codes.
            others: those of ``generate``.

        Raises:
            InvalidRequest: the request is malformed, or the model says no given text.
            StageFailed: a stage failed it.
        """
        self._life.loop = asyncio.get_running_loop()
        pipeline, first = self.orchestrator.pipeline, self.config.stages[0].name
        if pipeline.speech_stage is None:
            raise InvalidRequest(f"this model ({self.config.model_type}) says no given text")
        if "text" in modalities:
            raise InvalidRequest("modalities: speech of a given text has no other text; ask for audio alone")
        params = self.stage_params(sampling_params)
        if self._by_stage(sampling_params).get(first) or self.defaults.stage_params.get(first):
            raise InvalidRequest(f"sampling parameters of stage {first!r}: it samples nothing, as its reply is given")
        params[first] = SamplingParams(temperature=0.0, max_tokens=1, detokenize=False)
        # Behind the prompt: one token for the first stage to end with, two with which the speech begins.
        models = [self.orchestrator.front(name).vllm_config.model_config for name in (first, pipeline.speech_stage)]
        max_num_tokens = min(model.max_model_len for model in models) - 2
        prompt_token_ids, num_reply_tokens = await tokenize_speech_prompt(
            self.renderer, pipeline.speech_prompt(text, instructions), max_num_tokens
        )
        speaker = self.defaults.speaker if speaker is None else speaker
        options = {"num_reply_tokens": num_reply_tokens} | ({} if speaker is None else {"speaker": speaker})
        outputs = self.orchestrator.generate(
            {"prompt_token_ids": prompt_token_ids},
            params,
            request_id or uuid4().hex,
            modalities=modalities,
            options=options,
            lora_request=lora_request,
            priority=priority,
            trace_headers=trace_headers,
            deadline_s=deadline_s,
        )
        async with aclosing(outputs):
            async for output in outputs:
                if output.multimodal_output or output.finished:  # else it is the first stage's
                    output.prompt_token_ids = prompt_token_ids
                    yield output

    def with_defaults(
        self, *, modalities: Sequence[str] | None = None, speaker: str | None = None, stage_params: ParamsList = None
    ) -> AsyncOmni:
        """The same engines, asked for this by requests that do not say; for callers that know ``EngineClient`` alone.

        Args:
            stage_params: fields over those that a request has, of the stages by position or by name.

        Raises:
            InvalidRequest: a modality, speaker, stage or parameter that there is not.
        """
        if modalities is not None:
            self.orchestrator.outputs_of(modalities)
        self.orchestrator.pipeline.validate({} if speaker is None else {"speaker": speaker})
        over: dict[str, Mapping[str, Any]] = {}
        for name, params in self._by_stage(stage_params).items():
            if isinstance(params, SamplingParams | DiffusionParams):
                raise InvalidRequest(f"sampling parameters of stage {name!r}: give the fields to change, by name")
            if params and self.config.stage(name).is_diffusion:
                over[name] = _diffusion_fields(name, params)
            elif params:
                validated = _validate(name, params)
                if name != self.config.stages[0].name:
                    _check_single(name, validated)
                over[name] = {key: getattr(validated, key) for key in params}
        view = copy.copy(self)
        view.defaults = RequestDefaults(None if modalities is None else tuple(modalities), speaker, over)
        return view

    def stage_params(self, given: ParamsList) -> dict[str, SamplingParams | DiffusionParams]:
        """Parameters of every stage, defaults filled in.

        Raises:
            InvalidRequest: an unknown stage or parameter, with the nearest valid name.
        """
        by_name = self._by_stage(given)
        params = {name: self._one_stage_params(name, by_name.get(name)) for name in self.config.stage_names}
        for name in self.config.stage_names[1:]:
            _check_single(name, params[name])
        return params

    @property
    def is_diffusion(self) -> bool:
        """Whether the user's prompt goes to a diffusion pipeline, rather than to a language model."""
        return self.config.stages[0].is_diffusion

    def _by_stage(self, given: ParamsList) -> dict[str, StageParams]:
        names = self.config.stage_names
        is_fields = self.is_diffusion or (isinstance(given, Mapping) and set(given) <= _SAMPLING_FIELDS)
        if isinstance(given, Mapping) and (set(given) & set(names) or not is_fields):
            for name in given:
                if name not in names:
                    raise InvalidRequest(f"sampling parameters for unknown stage {name!r}: {suggest(str(name), names)}")
            by_name = dict(given)
        elif isinstance(given, Sequence) and not isinstance(given, str):
            if len(given) > len(names):
                raise InvalidRequest(f"{len(given)} sets of sampling parameters for the stages {', '.join(names)}")
            by_name = dict(zip(names, given, strict=False))
        else:
            by_name = {names[0]: given}
        for name, params in by_name.items():
            if not isinstance(params, SamplingParams | DiffusionParams | Mapping | None):
                raise InvalidRequest(f"sampling parameters of stage {name!r} = {params!r}: must be fields by name")
        return by_name

    def _one_stage_params(self, stage: str, given: StageParams) -> SamplingParams | DiffusionParams:
        over = self.defaults.stage_params.get(stage, {})
        if self.config.stage(stage).is_diffusion:
            if isinstance(given, SamplingParams):
                raise InvalidRequest(f"parameters of stage {stage!r}: it samples no tokens; give DiffusionParams")
            fields = _diffusion_fields(stage, given or {})
            return DiffusionParams(**{**self.config.stage(stage).default_sampling_params, **fields, **over})
        if isinstance(given, DiffusionParams):
            raise InvalidRequest(f"parameters of stage {stage!r}: it samples tokens; give SamplingParams")
        if isinstance(given, SamplingParams):
            _check_seed(stage, given.seed)
            try:  # as the engine will: a field of a wrong type would end the thread by which it hears of requests
                msgspec.msgpack.decode(msgspec.msgpack.encode(given), type=SamplingParams)
            except (msgspec.ValidationError, TypeError) as exc:
                raise InvalidRequest(f"sampling parameters of stage {stage!r}: {exc}") from exc
            return msgspec.structs.replace(given, **over) if over else given
        values = dict(self.config.stage(stage).default_sampling_params)
        if stage == self.config.stages[0].name:
            values = {**self.model_config.get_diff_sampling_param(), **values}
        return _validate(stage, {**values, **(given or {}), **over})

    async def abort(self, request_id: str | Iterable[str]) -> None:
        """Abort requests; returns when every stage has let go of them. Unknown ids are ignored.

        Their engines have then dropped them; one whose step takes longer than ``ABORT_TIMEOUT_S`` of
        ``engine/stage.py`` does so at the step's end.
        """
        for one in [request_id] if isinstance(request_id, str) else request_id:
            await self.orchestrator.abort(one)

    def encode(self, *args: Any, **kwargs: Any) -> AsyncGenerator[PoolingRequestOutput, None]:
        raise InvalidRequest("this model generates; it has no embeddings to give")

    async def notify_kv_transfer_request_rejected(self, *args: Any, **kwargs: Any) -> None:
        await self.entry.notify_kv_transfer_request_rejected(*args, **kwargs)

    # -- state --------------------------------------------------------------------------------------------------------

    @property
    def is_running(self) -> bool:
        """False when it was shut down, and when the first stage has died too often: vLLM's server then ends."""
        return not self._life.stopped and self._entry_node.current_status().state is not StageState.FAILED

    @property
    def is_stopped(self) -> bool:
        return self._life.stopped

    @property
    def errored(self) -> bool:
        """Whether the first stage, which every request needs, is down, be it for a moment.

        The others' states are asked by each request that needs them.
        """
        return self._entry_node.current_status().state is not StageState.RUNNING

    @property
    def dead_error(self) -> BaseException:
        try:
            self._entry_node.check_health()
        except StageFailed as exc:
            return exc
        return StageFailed(self._entry_node.name, "has not died")

    async def check_health(self, stage: str | None = None) -> None:
        """Of one stage, or of all.

        Raises:
            StageUnavailable: it is dead: it is being restarted, or could not be.
            InvalidRequest: there is no such stage.
        """
        if stage is not None and stage not in self.config.stage_names:
            raise InvalidRequest(f"unknown stage {stage!r}: {suggest(stage, self.config.stage_names)}")
        self.orchestrator.check_health(None if stage is None else [stage])

    def check_available(self, modalities: Sequence[str]) -> None:
        """Whether the stages that answer in these modalities are up: to be asked before an answer is begun.

        Raises:
            StageUnavailable: one of them is not.
            InvalidRequest: an unknown modality.
        """
        outputs = self.orchestrator.outputs_of(modalities)
        self.orchestrator.check_health(self.orchestrator.stages_of(outputs.values()))

    def stage_report(self) -> dict[str, StageStatus]:
        """The state of every stage, by name; of one with several instances, that of each: ``thinker/PD0``."""
        return {name: engine.current_status() for name, engine in self.orchestrator.engines.items()}

    def instance_statistics(self) -> dict[str, InstanceStatistics]:
        """Of each stage that has several instances: who did how much."""
        nodes = self.orchestrator.nodes.items()
        return {name: node.statistics() for name, node in nodes if isinstance(node, InstanceGroup)}

    async def aclose(self) -> None:
        """Abort what runs, wait until every stage has let go of it, and end the stages."""
        await self.orchestrator.aclose()
        await asyncio.to_thread(self.shutdown)

    def shutdown(self, timeout: float | None = None) -> None:
        """End every stage; calling it twice does nothing.

        Called in another thread than that of the requests, as vLLM's server does, it aborts them first; in their own
        thread, await ``aclose`` instead.
        """
        loop, was_stopped = self._life.loop, self._life.stopped
        self._life.stopped = True
        if not was_stopped and loop is not None and loop.is_running() and loop is not _running_loop():
            aborted = asyncio.run_coroutine_threadsafe(self.orchestrator.aclose(), loop)
            try:
                aborted.result(ABORT_TIMEOUT_S)
            except TimeoutError:
                logger.warning("requests not aborted within %g s; the stages are ended all the same", ABORT_TIMEOUT_S)
        self.orchestrator.shutdown()

    async def get_supported_tasks(self) -> tuple[SupportedTask, ...]:
        return await self.entry.get_supported_tasks()

    def check_admission(self, n: int = 1, request_id: str | None = None) -> None:
        self.entry.check_admission(n, request_id)

    async def is_tracing_enabled(self) -> bool:
        return await self.entry.is_tracing_enabled()

    async def do_log_stats(self) -> None:
        for engine in self.orchestrator.engines.values():
            await engine.llm.do_log_stats()
        self.orchestrator.latency_metrics.log()

    # -- what concerns every stage ------------------------------------------------------------------------------------
    # All of it raises StageFailed when a stage refuses it, is dead, or does not answer in time.

    async def pause_generation(self, *, mode: PauseMode = "abort", clear_cache: bool = True) -> None:
        """Stop every stage between two steps; requests that come meanwhile wait until ``resume_generation``.

        A request is in several stages in the course of its life, so vLLM's modes are those of the whole graph: "abort"
        ends requests that run with ``CallAborted``; "wait" returns when they have left their last stage; "keep" leaves
        them where they are, and one that is between two stages waits in the next.

        Args:
            clear_cache: forget prefixes and media, also those of kept requests, which are then computed again.

        Raises:
            InvalidRequest: another mode.
        """
        await self.orchestrator.pause(mode)
        if clear_cache:
            self.orchestrator.forget_images()
        await self._ask(lambda llm: llm.pause_generation(mode=mode, clear_cache=clear_cache))

    async def resume_generation(self) -> None:
        try:
            await self._ask(lambda llm: llm.resume_generation())
        finally:
            self.orchestrator.resume()

    async def is_paused(self) -> bool:
        return not self.orchestrator.gate.is_open

    async def sleep(self, level: int = 1, mode: PauseMode = "abort") -> None:
        """Pause, see ``pause_generation``, and have the stages free memory: vLLM's levels.

        Of a diffusion stage, level 1 moves the weights into the CPU's memory, and level 2 drops them: waking up reads
        the files again. Generation stages have no cache, and keep their weights.
        """
        await self.orchestrator.pause(mode)
        self.orchestrator.forget_images()
        await self._ask(lambda llm: llm.pause_generation(mode=mode), self._engines("generation"))
        await self._ask(lambda llm: llm.sleep(level, mode), self._engines("ar", "diffusion"))

    async def wake_up(self, tags: list[str] | None = None) -> bool:
        """Undo ``sleep``, or a part of it; returns whether all memory is back, and requests are let in again."""
        is_awake = all(await self._ask(lambda llm: llm.wake_up(tags), self._engines("ar", "diffusion")))
        if is_awake:
            await self.resume_generation()
        return is_awake

    async def is_sleeping(self) -> bool:
        return all(await self._ask(lambda llm: llm.is_sleeping(), self._entry_engines))

    async def release_kv_cache_memory(self) -> None:
        await self._ask(lambda llm: llm.release_kv_cache_memory(), self._engines("ar"))

    async def start_profile(
        self,
        profile_prefix: str | None = None,
        *,
        delay_iterations: int | None = None,
        max_iterations: int | None = None,
    ) -> None:
        """Trace every stage that was started with ``profiler_config``; file names have the prefix and the stage's name.

        The front end, which the stages share, is traced with the first stage.

        Raises:
            InvalidRequest: no stage was.
        """
        bounds = {"delay_iterations": delay_iterations, "max_iterations": max_iterations}
        started: list[StageEngine] = []
        for engine in self._profiled_engines():
            name = engine.name.replace("/", "-")  # of an instance: "thinker/PD0"
            prefix = name if profile_prefix is None else f"{profile_prefix}_{name}"
            try:
                await engine.ask(engine.llm.start_profile(prefix, **bounds))
            except StageFailed:
                await self._ask(lambda llm: llm.stop_profile(), started)
                raise
            started.append(engine)

    async def stop_profile(self) -> None:
        await self._ask(lambda llm: llm.stop_profile(), self._profiled_engines())

    def _profiled_engines(self) -> list[StageEngine]:
        engines = self.orchestrator.engines.values()
        profiled = [engine for engine in engines if engine.vllm_config.profiler_config.profiler is not None]
        if not profiled:
            raise InvalidRequest("no stage can be profiled: start them with profiler_config")
        return profiled

    async def reset_mm_cache(self) -> None:
        self.orchestrator.forget_images()
        await self._ask(lambda llm: llm.reset_mm_cache())

    async def reset_encoder_cache(self) -> None:
        self.orchestrator.forget_images()
        await self._ask(lambda llm: llm.reset_encoder_cache(), self._engines("ar"))

    async def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        return all(
            await self._ask(
                lambda llm: llm.reset_prefix_cache(reset_running_requests, reset_connector), self._engines("ar")
            )
        )

    async def _ask(
        self, question: Callable[[StageLLM], Coroutine[Any, Any, Answer]], engines: Iterable[StageEngine] | None = None
    ) -> list[Answer]:
        """Ask these stages, or all, at once; when all have answered or failed, raises the first failure."""
        engines = self.orchestrator.engines.values() if engines is None else engines
        answers = await asyncio.gather(
            *(engine.ask(question(engine.llm)) for engine in engines), return_exceptions=True
        )
        for answer in answers:
            if isinstance(answer, BaseException):
                raise answer
        return [answer for answer in answers if not isinstance(answer, BaseException)]

    def _engines(self, *engine_types: str) -> list[StageEngine]:
        return [engine for engine in self.orchestrator.engines.values() if engine.config.engine_type in engine_types]

    # -- what concerns the first stage: the others' models have no adapters, and other methods ------------------------

    async def add_lora(self, lora_request: LoRARequest) -> bool:
        """Load an adapter of the first stage. A request for it (``lora_request``) does so, too.

        Raises:
            StageFailed: the stage runs without adapters, or cannot load this one.
        """
        return all(await self._ask_adapters(lambda llm: llm.add_lora(lora_request)))

    async def remove_lora(self, lora_id: int) -> bool:
        # An instance that had no request for it has not loaded it.
        return any(await self._ask_adapters(lambda llm: llm.remove_lora(lora_id)))

    async def list_loras(self) -> set[int]:
        return set[int]().union(*await self._ask_adapters(lambda llm: llm.list_loras()))

    async def pin_lora(self, lora_id: int) -> bool:
        """Keep an adapter that is loaded from making room for others."""
        return all(await self._ask_adapters(lambda llm: llm.pin_lora(lora_id)))

    @property
    def _entry_engines(self) -> list[StageEngine]:
        return self.orchestrator.engines_of(self.config.stages[0].name)

    async def _ask_adapters(self, question: Callable[[StageLLM], Coroutine[Any, Any, Answer]]) -> list[Answer]:
        if self.vllm_config.lora_config is None:
            name = self._entry_node.name
            raise StageFailed(
                name, f"it was started without adapters (LoRA): start it with --stage {name}.enable_lora=true"
            )
        has_adapters = [engine for engine in self._entry_engines if engine.vllm_config.lora_config is not None]
        return await self._ask(question, has_adapters)

    async def collective_rpc(
        self,
        method: str,
        timeout: float | None = None,  # noqa: ASYNC109  # upstream's signature
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> list[Any]:
        """What each rank of the first stage answers, instance by instance."""
        answers = await self._ask(lambda llm: llm.collective_rpc(method, timeout, args, kwargs), self._entry_engines)
        return [rank for ranks in answers for rank in ranks]


async def _merge(outputs: AsyncGenerator[OmniRequestOutput, None]) -> AsyncGenerator[OmniRequestOutput, None]:
    """One output with everything, as ``RequestOutputKind.FINAL_ONLY`` wants it."""
    merged: OmniRequestOutput | None = None
    async with aclosing(outputs):
        async for output in outputs:
            if merged is None:
                merged = output
            else:
                merged.add(output, aggregate=True)
    assert merged is not None, "a request ends with an output or an error"
    merged.outputs.sort(key=lambda completion: completion.index)
    yield merged


def _validate(stage: str, values: Mapping[str, Any]) -> SamplingParams:
    for name in values:
        if name not in _SAMPLING_FIELDS:
            raise InvalidRequest(
                f"unknown sampling parameter {name!r} of stage {stage!r}: {suggest(str(name), _SAMPLING_FIELDS)}"
            )
    try:
        params = _SAMPLING_PARAMS.validate_python(dict(values))
    except ValidationError as exc:
        # Pydantic tells of both that it might have been: an object, which it is not, and fields.
        wrong = [error for error in exc.errors(include_url=False) if error["type"] != "is_instance_of"]
        said = "; ".join(f"{'.'.join(map(str, error['loc'][1:]))}: {error['msg']}" for error in wrong)
        raise InvalidRequest(f"sampling parameters of stage {stage!r}: {said}") from exc
    except (VLLMClientError, TypeError) as exc:
        raise InvalidRequest(f"sampling parameters of stage {stage!r}: {exc}") from exc
    _check_seed(stage, params.seed)
    return params


def _diffusion_fields(stage: str, given: DiffusionParams | Mapping[str, Any]) -> dict[str, Any]:
    """What was given, checked; of an object, what differs from nothing said."""
    try:
        if isinstance(given, DiffusionParams):
            given.validate()
            default = DiffusionParams()
            fields = {name: getattr(given, name) for name in given.__struct_fields__}
            return {name: value for name, value in fields.items() if value != getattr(default, name)}
        params = DiffusionParams.of(given)
        params.validate()
        return {name: getattr(params, name) for name in given}
    except InvalidRequest as exc:
        raise InvalidRequest(f"stage {stage!r}: {exc}", param=exc.param) from exc


def _check_single(stage: str, params: SamplingParams | DiffusionParams) -> None:
    if isinstance(params, SamplingParams) and params.n > 1:
        raise InvalidRequest(f"sampling parameters of stage {stage!r}: n = {params.n}: it answers once; give n = 1")


def _check_seed(stage: str, seed: int | None) -> None:
    """A seed travels as a 64-bit integer; one that does not fit would fail after the engine's client has noted it."""
    if seed is not None and not -(2**63) <= seed < 2**64:
        raise InvalidRequest(f"sampling parameters of stage {stage!r}: seed = {seed}: valid: -2**63 to 2**64 - 1")


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


_SAMPLING_PARAMS = TypeAdapter(SamplingParams)
_SAMPLING_FIELDS = dict.fromkeys(  # in order, for messages
    name for name in SamplingParams.__struct_fields__ if not name.startswith("_") and name != "output_kind"
).keys()
