"""``AsyncOmni``: a graph of stages behind vLLM's ``EngineClient``."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterable, Callable, Iterable, Mapping, Sequence
from functools import partial
from inspect import signature
from os import PathLike
from typing import Any
from uuid import uuid4

from vllm.engine.protocol import EngineClient
from vllm.outputs import PoolingRequestOutput
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.tasks import SupportedTask

from vllm_omni.config import OmniConfig, StageConfig
from vllm_omni.config.diffusion_params import DiffusionParams
from vllm_omni.config.layers import find_config
from vllm_omni.deploy.needs import place_here
from vllm_omni.deploy.workers import RayWorkers
from vllm_omni.engine.instances import InstanceGroup, InstanceStatistics
from vllm_omni.engine.orchestrator import Orchestrator
from vllm_omni.engine.request_call import AGAIN
from vllm_omni.engine.stage_log import StageLogs
from vllm_omni.entrypoints.admin import StageAdmin
from vllm_omni.entrypoints.deadline import Deadline
from vllm_omni.entrypoints.pictures import alternate, join, one_each, read_picture_request
from vllm_omni.entrypoints.stage_params import ParamsList, StageParamsResolver
from vllm_omni.entrypoints.text_to_speech import Speaking, TextToSpeech, Voice, speaker_option
from vllm_omni.entrypoints.voice_cloning import Recording
from vllm_omni.errors import EngineLost, InvalidRequest, StageFailed, StageUnavailable
from vllm_omni.messages.outputs import OmniRequestOutput, collect
from vllm_omni.names import suggest
from vllm_omni.process.status import StageState, StageStatus

logger = logging.getLogger(__name__)

ENGINE_ARGUMENTS = signature(EngineClient.generate).parameters
ABORT_TIMEOUT_S = 10.0  # how long a shutdown waits for the stages to release their requests


class AsyncOmni(StageAdmin):
    """Starts every stage of a model and serves requests through its graph.

    Args:
        model: directory or hub name of the checkpoint.
        config: the whole deployment, as ``load_config`` returns it; instead of a model.
        stage_configs: the stages themselves, instead of those of the deployment files.
        pipeline, deploy_config, overrides, stage_overrides, epd, kv_pool, engine_args (``listen`` and ``token_file``
            among them): see
            ``vllm_omni.config.load_config``. So are ``worker_backend`` and ``ray_address``.
        log_stats: collect vLLM's metrics of every stage, and those of the graph.

    Raises:
        ConfigError: the deployment is wrong.
        StageFailed: a stage did not start; nothing is left running.
    """

    _workers: RayWorkers | None = None

    def __init__(
        self,
        model: str | PathLike[str] | None = None,
        *,
        config: OmniConfig | None = None,
        stage_configs: Sequence[StageConfig] | None = None,
        pipeline: type | str | None = None,
        deploy_config: str | PathLike[str] | None = None,
        overrides: Mapping[str, Any] | None = None,
        stage_overrides: Sequence[str] = (),
        epd: str | Mapping[str, Any] | None = None,
        kv_pool: int | Mapping[str, Any] | None = None,
        log_stats: bool = False,
        **engine_args: Any,
    ) -> None:
        changes = {
            "pipeline": pipeline,
            "deploy_config": deploy_config,
            "overrides": overrides,
            "stage_overrides": stage_overrides,
            "epd": epd,
            "kv_pool": kv_pool,
            **engine_args,
        }
        config = find_config(model, config, stage_configs, changes)
        if config.worker_backend == "ray":
            self._workers = RayWorkers(config)
            config = self._workers.config
        try:
            self.config = place_here(config)
            on_listening = None if self._workers is None else self._workers.start
            self._serve_by(Orchestrator(self.config, log_stats=log_stats, on_listening=on_listening))
        except BaseException:
            self._end_workers()
            raise

    def _end_workers(self) -> None:
        if self._workers is not None:
            self._workers.close()

    def _serve_by(self, orchestrator: Orchestrator) -> None:
        """Start the orchestrator, and serve requests by it."""
        self.orchestrator = orchestrator
        orchestrator.start()
        # The first stage reads the user's prompt, so it answers what vLLM's server asks of an engine. These objects
        # outlive the stage's engine when that is restarted.
        first = self.config.stages[0]
        self._entry_node = self.orchestrator.nodes[first.name]
        self.entry = entry = self.orchestrator.front(first.name).llm
        self.vllm_config = entry.vllm_config
        self.model_config = entry.model_config
        self.renderer = entry.renderer
        self.input_processor = entry.input_processor
        self.params = StageParamsResolver(
            self.config, self.model_config, lambda stage, *params: self.orchestrator.front(stage).check_params(*params)
        )
        self.speech = TextToSpeech(
            self.config, self.orchestrator, self.params, self.model_config, self.renderer, self.generate
        )
        self.voices = self.speech.voices
        self._stage_logs = StageLogs()

    # -- requests -----------------------------------------------------------------------------------------------------

    def generate(
        self,
        prompt: Any,
        sampling_params: ParamsList = None,
        request_id: str | None = None,
        *,
        modalities: Sequence[str] | None = None,
        graph: str | None = None,
        speaker: str | None = None,
        options: Mapping[str, Any] | None = None,
        deadline_s: float | None = None,
        lora_request: Any = None,
        trace_headers: Mapping[str, str] | None = None,
        priority: int = 0,
        stage_params: Mapping[str, Mapping[str, Any]] | None = None,
        **engine_kwargs: Any,
    ) -> AsyncGenerator[OmniRequestOutput, None]:
        """Stream one request: deltas of every modality as they come; the last output has ``finished``.

        A diffusion pipeline sends one output. If its parameters ask for progress or previews, it sends one for each
        denoise step, or for each preview, before that.

        Args:
            prompt: any prompt of vLLM's: text, ids, or a dictionary with ``multi_modal_data``; for a diffusion pipeline
                a text, or a dictionary with ``prompt``, ``negative_prompt`` and images in ``multi_modal_data``.
            sampling_params: of the first stage; or of the stages by position (None: that stage's defaults) or by name.
                For a diffusion pipeline ``DiffusionParams``, or their fields by name. ``DiffusionParams`` of a language
                model that denoises ask for a picture, and the prompt is as for a diffusion pipeline.
            modalities: modalities of the output: "text", "audio"; and "codec_ids" for the codes. All by default.
            graph: the name of one of the pipeline's graphs, or "graph.call"; its first graph by default.
            speaker: a voice of the checkpoint.
            options: further options of the pipeline, by name: ``language``, ``instructions``.
            deadline_s: abort and raise ``DeadlineExceeded`` after so many seconds.
            stage_params: stage -> fields that win over ``sampling_params``; checked by ``params.check_overrides``.
            engine_kwargs: other arguments of ``EngineClient.generate``, for the first stage.

        Raises:
            InvalidRequest: the request is malformed.
            StageUnavailable: a stage that the request needs is being restarted, or could not be.
            Overloaded: a stage that it needs has as many requests as it may (``max_num_queued_reqs``).
            ShuttingDown: the server is being stopped.
            StageFailed: a stage failed it.
        """
        self.orchestrator.requests.check()
        _check_arguments(priority, modalities, engine_kwargs)
        first = self.config.stages[0].name
        by_stage = self.params.by_stage(sampling_params) if self.draws else {}
        if isinstance(asked := by_stage.get(first), DiffusionParams):
            prompt, args = read_picture_request(self.orchestrator.pipeline, prompt, asked)
            sampling_params, modalities = {**by_stage, first: args}, modalities or ["image"]
        params = self.params.resolve(sampling_params, stage_params)
        wanted = list(self.orchestrator.modalities_of(graph)) if modalities is None else modalities
        run = partial(
            self.orchestrator.generate,
            modalities=wanted,
            graph=graph,
            options={**(options or {}), **speaker_option(speaker)},
            lora_request=lora_request,
            priority=priority,
            trace_headers=trace_headers,
            engine_kwargs=engine_kwargs,
        )
        request_id, deadline = request_id or uuid4().hex, Deadline(deadline_s)
        pipeline, of_first = self.orchestrator.pipeline, params[first]
        each = one_each(of_first, wanted, alternates=pipeline.continues_answers) if self.draws else ()

        def run_one(prompt: Any, one: SamplingParams, one_id: str) -> AsyncGenerator[OmniRequestOutput, None]:
            return run(prompt, {**params, first: one}, one_id, deadline_s=deadline.left_s())

        if len(each) > 1 and "text" not in wanted:
            return join([run_one(prompt, one, f"{request_id}-{i}") for i, one in enumerate(each)], request_id)
        if len(each) > 1:
            outputs = alternate(run_one, self.orchestrator.front(first), pipeline, prompt, each, request_id)
        else:
            outputs = run(prompt, params, request_id, deadline_s=deadline_s)
        if not (isinstance(of_first, SamplingParams) and of_first.output_kind is RequestOutputKind.FINAL_ONLY):
            return outputs

        def run_again() -> AsyncGenerator[OmniRequestOutput, None]:
            return run(prompt, params, AGAIN.format(request_id), deadline_s=deadline.left_s())

        is_repeatable = len(each) <= 1 and self.orchestrator.sessions is None  # a session's state may have changed
        return _only_final(outputs, request_id, run_again if is_repeatable else None)

    def speak(
        self,
        text: str | AsyncIterable[str],
        sampling_params: ParamsList = None,
        request_id: str | None = None,
        *,
        instructions: str | None = None,
        modalities: Sequence[str] = ("audio",),
        graph: str | None = None,
        speaker: str | None = None,
        ref_audio: Recording | None = None,
        ref_text: str | None = None,
        speaker_embedding: Sequence[float] | None = None,
        options: Mapping[str, Any] | None = None,
        deadline_s: float | None = None,
        lora_request: Any = None,
        priority: int = 0,
        trace_headers: Mapping[str, str] | None = None,
    ) -> AsyncGenerator[OmniRequestOutput, None]:
        """Text to speech: stream the speech of a text in pieces; the last one has ``finished``.

        Where the model has a language model in front, that is given the text as its reply instead of sampling one; the
        stages behind it run as for ``generate``. A model whose prompts are texts to speak does the same as for
        ``generate``; one that converses in speech is asked for the text. Each output has the token ids of the first
        stage's prompt, reply included, and no text.

        Args:
            text: the text to speak; no part of it is read as a control token. Or its pieces as they come: each sentence
                is then spoken as soon as it is complete, as it would be alone, and the last output has no sound.
            sampling_params: as for ``generate``; a first stage that samples nothing has none.
            instructions: how to speak it.
            modalities: "audio"; and "codec_ids" for the codes.
            speaker: a voice of the checkpoint, or an uploaded one.
            ref_audio: for a model that clones voices, a recording of one: a URL, base64, the bytes of a file, or
                samples and their rate.
            ref_text: what the recording says; without it, the timbre alone is cloned.
            speaker_embedding: an x-vector, instead of a recording.
            others: those of ``generate``.

        Raises:
            InvalidRequest: the request is malformed, or the model does not support text to speech.
            StageFailed: a stage failed it.
        """
        more = {"modalities": modalities, "graph": graph, "lora_request": lora_request}
        more |= {"priority": priority, "trace_headers": trace_headers}
        request_id, deadline = request_id or uuid4().hex, Deadline(deadline_s)
        speaking = Speaking(request_id, sampling_params, instructions, options or {}, deadline, more)
        return self.speech.speak(text, Voice(speaker, ref_audio, ref_text, speaker_embedding), speaking)

    @property
    def is_diffusion(self) -> bool:
        """Whether the user's prompt goes to a diffusion pipeline, rather than to a language model."""
        return self.config.stages[0].is_diffusion

    @property
    def draws(self) -> bool:
        """Whether the model that reads the prompt denoises pictures."""
        return self.orchestrator.pipeline.stages[0].publishes_pictures

    async def abort(self, request_id: str | Iterable[str]) -> None:
        """Abort requests; returns when every stage has released them. Unknown ids are ignored.

        An engine whose step takes longer than ``ABORT_TIMEOUT_S`` of ``engine/stage.py`` drops them at the step's end.
        """
        for one in [request_id] if isinstance(request_id, str) else request_id:
            await self.orchestrator.abort(one)

    def encode(self, *args: Any, **kwargs: Any) -> AsyncGenerator[PoolingRequestOutput, None]:
        raise InvalidRequest("this model generates; it has no embeddings")

    async def notify_kv_transfer_request_rejected(self, *args: Any, **kwargs: Any) -> None:
        await self.entry.notify_kv_transfer_request_rejected(*args, **kwargs)

    # -- state --------------------------------------------------------------------------------------------------------

    @property
    def is_stopped(self) -> bool:
        """Whether it is being shut down, or was: all requests are rejected."""
        return self.orchestrator.requests.is_over

    @property
    def is_running(self) -> bool:
        """False after a shutdown, and after the first stage has died too often: vLLM's server then ends."""
        return not self.is_stopped and self._entry_node.current_status().state is not StageState.FAILED

    @property
    def errored(self) -> bool:
        """Whether the first stage, which every request needs, is down, even while it is restarted.

        Each request checks the state of the other stages that it needs.
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
        """Check one stage, or all.

        Raises:
            StageUnavailable: a stage is dead: it is being restarted, or could not be.
            ShuttingDown: the server is being stopped.
            InvalidRequest: there is no such stage.
        """
        self.orchestrator.requests.check()
        if stage is not None and stage not in self.config.stage_names:
            raise InvalidRequest(f"unknown stage {stage!r}: {suggest(stage, self.config.stage_names)}")
        self.orchestrator.check_health(None if stage is None else [stage])

    def graph_of(self, model: str | None) -> str | None:
        """The graph or graph call that a request names as its model; None: the first graph, or a served name."""
        return model if model in self.orchestrator.models else None

    def check_replies(self) -> None:
        """Raise ``InvalidRequest`` if the model speaks its prompts, and so has no replies."""
        if self.orchestrator.pipeline.speaks_prompts:
            raise InvalidRequest("this model speaks a text, and replies to none: send the text to /v1/audio/speech")

    def check_available(self, modalities: Sequence[str], speaker: str | None = None, graph: str | None = None) -> None:
        """Check, before a reply starts, that the stages which produce these modalities are up.

        Raises:
            StageUnavailable: one of them is not.
            Overloaded: one of them has as many requests as it may.
            ShuttingDown: the server is being stopped.
            InvalidRequest: an unknown modality or speaker.
        """
        self.orchestrator.requests.check()
        if speaker is not None:
            self.orchestrator.pipeline.check_options({"speaker": speaker})
        outputs = self.orchestrator.outputs_of(modalities, graph)
        stages = self.orchestrator.stages_of(outputs.values(), graph)
        self.orchestrator.check_health(stages)
        self.orchestrator.queue_limits.check(stages)

    def stage_report(self) -> dict[str, StageStatus]:
        """The state of every engine: ``thinker``; of a stage with several ``thinker/PD0``, ``talker/1``. And of every
        process of a function.
        """
        return {one.name: one.current_status() for one in self.orchestrator.watched}

    def instance_statistics(self) -> dict[str, InstanceStatistics]:
        """The work of each instance, of every stage that has several."""
        nodes = self.orchestrator.nodes.items()
        return {name: node.statistics() for name, node in nodes if isinstance(node, InstanceGroup)}

    async def aclose(self) -> None:
        """Abort running requests, wait until every stage has released them, and end the stages."""
        await self.orchestrator.aclose()
        await asyncio.to_thread(self.shutdown)

    def shutdown(self, timeout: float | None = None) -> None:
        """End every stage; calling it twice does nothing.

        Args:
            timeout: seconds that running requests have to end; new ones are rejected meanwhile. None, 0: none.

        Called from a thread without the requests' event loop, as vLLM's server does, it aborts them first; in their own
        thread, await ``aclose`` instead.
        """
        requests = self.orchestrator.requests
        loop, is_first_call = requests.loop, not requests.is_draining
        requests.drain()
        if is_first_call and loop is not None and loop.is_running() and loop is not _running_loop():
            try:
                if timeout:
                    drained = asyncio.run_coroutine_threadsafe(self.orchestrator.drain(timeout), loop)
                    drained.result(timeout + ABORT_TIMEOUT_S)
                asyncio.run_coroutine_threadsafe(self.orchestrator.aclose(), loop).result(ABORT_TIMEOUT_S)
            except TimeoutError:
                logger.warning("requests were not aborted within %g s; ending the stages anyway", ABORT_TIMEOUT_S)
        requests.end()
        self.orchestrator.shutdown()
        self._end_workers()

    async def get_supported_tasks(self) -> tuple[SupportedTask, ...]:
        return await self.entry.get_supported_tasks()

    def check_admission(self, n: int = 1, request_id: str | None = None) -> None:
        """Upstream's, of requests for text.

        Raises:
            Overloaded: a stage that writes texts has as many requests as it may.
        """
        self.entry.check_admission(n, request_id)
        if "text" in self.orchestrator.modalities_of():
            outputs = self.orchestrator.outputs_of(["text"])
            self.orchestrator.queue_limits.check(self.orchestrator.stages_of(outputs.values()), n)

    async def is_tracing_enabled(self) -> bool:
        return await self.entry.is_tracing_enabled()

    async def do_log_stats(self) -> None:
        """Log a line for each stage (``StageLogs``); vLLM's server calls this every ``VLLM_LOG_STATS_INTERVAL``."""
        for engine in self.orchestrator.engines.values():
            await engine.llm.do_log_stats()  # of loggers that other plugins of vLLM add
        engines = {stage.name: self.orchestrator.engines_of(stage.name) for stage in self.config.stages}
        loggers = {stage: [one for engine in of for one in engine.llm.stat_loggers] for stage, of in engines.items()}
        self._stage_logs.log(loggers, self.orchestrator.latency_metrics.take())


def _check_arguments(priority: object, modalities: object, engine_kwargs: Iterable[str]) -> None:
    for name in engine_kwargs:
        if name not in ENGINE_ARGUMENTS:
            valid = {**signature(AsyncOmni.generate).parameters, **ENGINE_ARGUMENTS}.keys() - {"self", "engine_kwargs"}
            raise TypeError(f"unknown argument {name!r}: {suggest(name, sorted(valid))}")
    if type(priority) is not int or not -(2**63) <= priority < 2**63:  # it travels as a 64-bit integer
        raise InvalidRequest(f"priority = {priority!r}: must be an int from -2**63 to 2**63 - 1", param="priority")
    if modalities is not None and not (
        isinstance(modalities, Sequence) and all(isinstance(one, str) for one in modalities)
    ):
        raise InvalidRequest(f"modalities = {modalities!r}: must be a list of names")


async def _only_final(
    outputs: AsyncGenerator[OmniRequestOutput, None],
    request_id: str,
    run_again: Callable[[], AsyncGenerator[OmniRequestOutput, None]] | None,
) -> AsyncGenerator[OmniRequestOutput, None]:
    """One output with everything, for ``RequestOutputKind.FINAL_ONLY``.

    Args:
        run_again: if an engine is lost, the request runs once more: its user has nothing of it. None: it cannot.
    """
    try:
        final = await collect(outputs)
    except EngineLost as exc:
        if run_again is None:
            raise
        logger.warning("%s; request %s runs once more", exc, request_id)
        try:
            final = await collect(run_again())
        except StageUnavailable:  # no other engine of the stage
            raise exc from None
        final.request_id = request_id
    final.outputs.sort(key=lambda completion: completion.index)
    yield final


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None
