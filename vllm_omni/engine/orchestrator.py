"""``Orchestrator``: binds a planned graph to its stage engines and owns the life of every request."""

from __future__ import annotations

import asyncio
import logging
import os
import time
import weakref
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from msgspec import to_builtins
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from vllm.outputs import RequestOutput
from vllm.plugins import load_general_plugins
from vllm.sampling_params import SamplingParams
from vllm.transformers_utils.config import get_config

from vllm_omni import envs
from vllm_omni.config import DIFFUSERS, OmniConfig, StageConfig
from vllm_omni.config.diffusion_params import DiffusionParams
from vllm_omni.engine.admission import AdmissionGate, GatedNode
from vllm_omni.engine.instance_args import check_mix, make_instances
from vllm_omni.engine.instances import InstanceGroup
from vllm_omni.engine.latency_metrics import LatencyMetrics, RequestLatency
from vllm_omni.engine.metrics import METRICS, STAGE_LABEL
from vllm_omni.engine.node import StageNode
from vllm_omni.engine.request_processor import RequestProcessor
from vllm_omni.engine.stage import StageEngine
from vllm_omni.errors import ConfigError, InvalidRequest, OmniError, StageFailed
from vllm_omni.flow import ENTRY, GraphParser, GraphRuntime
from vllm_omni.messages.outputs import OmniRequestOutput
from vllm_omni.messages.slo import Slo, slo_of
from vllm_omni.model_executor.pipeline import Pipeline, RequestContext, StageRequest, load_pipeline
from vllm_omni.model_executor.step_threads import NUM_STAGES
from vllm_omni.names import suggest
from vllm_omni.process.run_directory import RunDirectory
from vllm_omni.process.status import StageState
from vllm_omni.process.supervisor import Supervisor, in_thread
from vllm_omni.process.tether import ServerTether
from vllm_omni.relay.hub import OPTIONS, RelayHub, RelayOptions
from vllm_omni.relay.select import Placement, choose_backend

logger = logging.getLogger(__name__)

# How long a start that failed waits for the processes that it ended; they need no more than a moment.
START_ABORTED_TIMEOUT_S = 10.0
PAUSE_MODES = ("abort", "wait", "keep")  # vLLM's


class Orchestrator:
    """Starts the stages, runs requests through the graph, and takes everything down again.

    ``start`` and ``shutdown`` block and belong to no event loop; ``generate`` belongs to one loop for its whole life.
    """

    def __init__(self, config: OmniConfig, *, log_stats: bool = False) -> None:
        envs.refuse_unknown()
        self.config = config
        entry = config.stages[0]
        revision = entry.engine_args.get("revision")
        trust = bool(entry.engine_args.get("trust_remote_code", False))
        try:
            load_general_plugins()  # ours tells vLLM of diffusers' layout
            config_format = DIFFUSERS if config.model_type == DIFFUSERS else "auto"
            hf_config = get_config(config.model, trust, revision=revision, config_format=config_format)
            self.pipeline: Pipeline = load_pipeline(config.model_type, config.model, hf_config, revision)
        except ConfigError:
            raise
        except (OSError, ValueError) as exc:
            raise ConfigError(f"{config.model}: {exc}") from exc
        self.plan = GraphParser(self.pipeline.graph).parse()
        specs = {spec.name: spec for spec in self.pipeline.stages}
        if set(specs) != set(config.stage_names):
            raise ConfigError(
                f"the graph of {config.model_type} has the stages {', '.join(specs)}, the deployment has "
                f"{', '.join(config.stage_names)}"
            )
        edges = {
            (self.plan.nodes[edge.source].role, self.plan.nodes[edge.target].role)
            for edge in self.plan.edges
            if ENTRY not in (edge.source, edge.target)
        }
        for edge in config.edges:
            if (edge.source, edge.target) not in edges:
                known = ", ".join(f"{source}->{target}" for source, target in sorted(edges))
                raise ConfigError(f"edge {edge.source}->{edge.target}: the graph has no such edge; it has {known}")
        self.pipeline.set_chunks(config.edges)
        # Opens what is for the user, and releases what nobody came for.
        self.hub = RelayHub(RelayOptions(), prefault=False)
        self.engines: dict[str, StageEngine] = {}  # by name; of a stage with instances: "thinker/PD0"
        self.nodes: dict[str, StageNode] = {}  # by stage
        self.gate = AdmissionGate()
        self.latency_metrics = LatencyMetrics()
        self._specs = specs
        self._log_stats = log_stats
        self._finalizer: Callable[[], object] | None = None

    # -- start and end ------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start all stages at once; on any failure, Ctrl-C included, take down what did start.

        Raises:
            ConfigError: a transport that cannot work where the stages are.
            StageFailed: a stage did not start, or not within ``VLLM_OMNI_STAGE_READY_TIMEOUT_S``.
        """
        # Stages share the cores (model_executor/step_threads.py): who waits must not keep one from another stage.
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
        for stage in self.config.stages:
            engines, node = self.make_node(stage)
            self.engines |= {engine.name: engine for engine in engines}
            self.nodes[stage.name] = node
        options = {name: self._relay_options(engine) for name, engine in self.engines.items()}
        run_directory = RunDirectory()
        starts: dict[str, Future[None]] = {}
        try:
            with run_directory.inherited():
                for engine in self.engines.values():
                    tether = ServerTether(run_directory.path, engine.name)
                    tether[NUM_STAGES] = len(self.engines)
                    tether[OPTIONS] = to_builtins(options[engine.name])
                    starts[engine.name] = in_thread(engine.start, tether, self.hub)
                _await_starts(starts)
        except BaseException:
            _shutdown(self.engines.values(), [], run_directory)
            # The directory's end was theirs, too: what was still starting does not outlive this call.
            wait(starts.values(), timeout=START_ABORTED_TIMEOUT_S)
            raise
        # Also when nobody holds this object any more, and at the interpreter's end. There the youngest comes first, so
        # it is made after those of vLLM's clients, which would take the end of their engines for a death.
        supervisors = [Supervisor(engine, run_directory) for engine in self.engines.values()]
        self._finalizer = weakref.finalize(self, _shutdown, self.engines.values(), supervisors, run_directory)
        first = self.config.stages[0].name
        self.runtime = GraphRuntime(self.plan, {**self.nodes, first: GatedNode(self.nodes[first], self.gate)})
        if self._log_stats:
            METRICS.add_graph(
                str(run_directory.path),
                partial(_collect, self.runtime, self.engines.values(), self.nodes.values(), self.latency_metrics),
            )

    def make_node(self, stage: StageConfig) -> tuple[list[StageEngine], StageNode]:
        """The engines of a stage, none of which is started, and what stands for them in the graph.

        Raises:
            ConfigError: a mix of instances that this model does not have.
        """
        make_engine = partial(StageEngine, stage, self._specs[stage.name], log_stats=self._log_stats)
        reader = self._make_reader() if stage.stage_id == 0 else None
        if not stage.deployment.is_split:
            engine = make_engine(reader=reader)
            return [engine], engine
        instances = make_instances(stage)
        front = next(instance for instance in instances if instance.is_front)
        speaker = make_engine(instance=front, reader=reader)
        check_mix(stage, speaker.vllm_config.model_config)  # before vLLM complains of the others in its own words
        engines = [speaker if instance is front else make_engine(instance=instance) for instance in instances]
        return engines, InstanceGroup(stage, engines, self.hub)

    def _make_reader(self) -> RequestProcessor:
        return RequestProcessor(
            envs.VLLM_OMNI_MAX_READING_MEDIA, envs.VLLM_OMNI_MAX_WAITING_MEDIA, self.latency_metrics.read.observe
        )

    def front(self, stage: str) -> StageEngine:
        """The engine that speaks for a stage: it reads prompts, and knows the model."""
        node = self.nodes[stage]
        if isinstance(node, InstanceGroup):
            return node.front
        assert isinstance(node, StageEngine)
        return node

    def engines_of(self, stage: str) -> list[StageEngine]:
        """All that a stage is made of."""
        return [engine for engine in self.engines.values() if engine.config.name == stage]

    def forget_images(self) -> None:
        """Embeddings that are kept between requests: the weights have changed, or memory is wanted."""
        for node in self.nodes.values():
            if isinstance(node, InstanceGroup):
                node.images.clear()

    def _relay_options(self, engine: StageEngine) -> RelayOptions:
        """How a stage publishes: to the stages that read its rows, to its other instances, or to the user."""
        num_bytes = envs.VLLM_OMNI_RELAY_BYTES
        if engine.instance is not None:
            num_bytes = engine.config.deployment.relay_bytes or num_bytes
        device = engine.vllm_config.device_config.device_type
        if not engine.kind.generates_tokens:
            transport = choose_backend("auto", Placement(), f"{engine.name}->user")
            return RelayOptions(transport, num_bytes)
        targets = {
            self.plan.nodes[edge.target].role
            for edge in self.plan.edges
            if ENTRY not in (edge.source, edge.target)
            and self.plan.nodes[edge.source].role == engine.config.name
            and edge.source_field in engine.spec.publishing_fields
        }
        between = engine.config.deployment.transport
        if not targets:
            if engine.instance is None:
                return RelayOptions()
            transport = choose_backend(between, Placement(devices=(device, device)), f"{engine.name}->instances")
            return RelayOptions(transport, num_bytes, host=envs.VLLM_OMNI_RELAY_HOST)
        edges = [self.config.edge(engine.config.name, target) for target in sorted(targets)]
        if len({(edge.transport, edge.stream, edge.credits) for edge in edges}) > 1:
            names = ", ".join(f"{edge.source}->{edge.target}" for edge in edges)
            raise ConfigError(f"edges {names}: a stage publishes once: give them one transport, stream and credits")
        edge = edges[0]
        asked: str = edge.transport
        if engine.instance is not None and between != "auto":
            if asked not in ("auto", between):
                raise ConfigError(
                    f"stage {edge.source!r}: epd.transport = {between!r}, but edge {edge.source}->{edge.target} has "
                    f"{asked!r}: an instance publishes once: give them one transport"
                )
            asked = between
        transport = choose_backend(asked, Placement(devices=(device, device)), f"{edge.source}->{edge.target}")
        num_readers = sum(self.front(one).vllm_config.parallel_config.tensor_parallel_size for one in targets)
        is_streamed = edge.stream and len(targets) == 1
        return RelayOptions(transport, num_bytes, num_readers, is_streamed, edge.credits, envs.VLLM_OMNI_RELAY_HOST)

    def shutdown(self) -> None:
        """End every stage and remove what they left on disk; calling it twice does nothing."""
        if self._finalizer is not None:
            self._finalizer()
        self.hub.close()

    async def aclose(self) -> None:
        """Abort what is running, await it, and stop listening to the engines; ``shutdown`` then ends them."""
        await self.runtime.aclose()
        for engine in self.engines.values():
            await engine.aclose()

    def check_health(self, stages: Iterable[str] | None = None) -> None:
        """Of these stages, or of all.

        Raises:
            StageUnavailable: one is dead: it is being restarted, or could not be.
        """
        for name in self.nodes if stages is None else stages:
            self.nodes[name].check_health()

    def stages_of(self, outputs: Iterable[str]) -> list[str]:
        """The stages that take part in answering with these outputs of the graph."""
        return [self.plan.nodes[name].role for name in self.plan.route(frozenset(outputs)).nodes]

    # -- a request ----------------------------------------------------------------------------------------------------

    def outputs_of(self, modalities: Sequence[str]) -> dict[str, str]:
        """Graph outputs that answer the modalities: modality -> output.

        Where the model replies in text, the text is always among them: whatever else it answers is made from it.

        Raises:
            InvalidRequest: an unknown modality, or none.
        """
        modalities = [modalities] if isinstance(modalities, str) else modalities
        known = {**self.pipeline.modalities, **self.pipeline.extra_outputs}
        for modality in modalities:
            if modality not in known:
                raise InvalidRequest(f"unknown modality {modality!r}: {suggest(str(modality), known)}")
        if not modalities:
            raise InvalidRequest(f"no modality asked for; valid: {', '.join(known)}")
        always = {name for name in ("text",) if name in known}
        return {modality: known[modality] for modality in always.union(modalities)}

    async def generate(
        self,
        prompt: Any,
        params: Mapping[str, SamplingParams | DiffusionParams],
        request_id: str,
        *,
        modalities: Sequence[str] = ("text",),
        options: Mapping[str, Any] | None = None,
        lora_request: Any = None,
        priority: int = 0,
        trace_headers: Mapping[str, str] | None = None,
        engine_kwargs: Mapping[str, Any] | None = None,
        deadline_s: float | None = None,
    ) -> AsyncGenerator[OmniRequestOutput, None]:
        """Run one request; yields deltas as they come, the last one with ``finished`` and the stages' durations.

        Raises:
            InvalidRequest: the request is malformed.
            StageUnavailable: a stage that it needs is being restarted, or could not be.
            StageFailed: a stage failed it.
            CallAborted, DeadlineExceeded: see ``GraphCall``.
        """
        outputs = self.outputs_of(modalities)
        slos = self._slos_of(params)
        self.check_health(self.stages_of(outputs.values()))
        context = RequestContext(
            request_id,
            params,
            self.pipeline.validate(options or {}),
            lora_request,
            priority,
            trace_headers,
            engine_kwargs or {},
        )
        if isinstance(prompt, dict) and "arrival_time" in prompt:
            context.arrived_at = prompt["arrival_time"]  # read before, by vLLM's handler of a chat
        inputs = {"prompt": StageRequest(prompt)}
        call = self.runtime.open(request_id, inputs, set(outputs.values()), context=context, deadline_s=deadline_s)
        modality_of = {output: modality for modality, output in outputs.items()}
        unfinished = set(outputs)
        latency = RequestLatency(context, self.config.stages[0].name, slos, self.latency_metrics)
        started = time.monotonic()
        try:
            async for frame in call:
                modality = modality_of[frame.field]
                if frame.last:
                    unfinished.discard(modality)
                output = self._to_user(modality, frame.payload, request_id)
                output.finished = not unfinished
                output.stage_durations = dict(context.stage_durations)
                if output.finished:
                    output.stage_durations["total"] = time.monotonic() - started
                    output.latency_parts, output.slo_reports = latency.end()
                yield output
        except OmniError as exc:
            latency.fail(exc)
            raise
        finally:
            await call.aclose()
            for payload in context.payloads:
                self.hub.release_payload(payload, for_all=True)
            self.gate.leave(request_id)

    def _slos_of(self, params: Mapping[str, SamplingParams | DiffusionParams]) -> dict[str, Slo]:
        """By stage, of those that have one.

        Raises:
            InvalidRequest: a request's own is malformed.
        """
        slos = {}
        for engine in self.engines.values():
            of_stage = params.get(engine.config.name)
            if isinstance(of_stage, SamplingParams) and (slo := slo_of(of_stage.extra_args, engine.default_slo)):
                slos[engine.config.name] = slo
        return slos

    async def abort(self, request_id: str) -> None:
        """Abort a request and wait until every stage has let go of it; an unknown id is ignored."""
        await self.runtime.abort(request_id, "by its owner")

    # -- pausing ------------------------------------------------------------------------------------------------------

    async def pause(self, mode: str) -> None:
        """Hold new requests before the first stage; what runs is aborted, awaited, or stays where it is.

        This is what the graph does; the engines are paused by the caller, after it. Afterwards nothing is between two
        stages, but for the mode "keep", where it reaches the next engine and waits there.

        Args:
            mode: "abort": requests that run end with ``CallAborted``. "wait": returns when they have ended by
                themselves, after their last stage. "keep": they go on after ``resume`` where they were.

        Raises:
            InvalidRequest: another mode.
        """
        if mode not in PAUSE_MODES:
            raise InvalidRequest(f"pause mode {mode!r}: {suggest(mode, PAUSE_MODES)}")
        self.gate.close()
        if mode == "abort":
            running = list(self.gate.admitted)
            await asyncio.gather(*(self.runtime.abort(one, "generation was paused") for one in running))
        if mode == "wait":
            await self.gate.wait_until_empty()

    def resume(self) -> None:
        """Let in what waits before the first stage."""
        self.gate.open()

    def _to_user(self, modality: str, payload: OmniRequestOutput | None, request_id: str) -> OmniRequestOutput:
        """A stage's output as the user sees it: the text as vLLM made it, other modalities without a text."""
        if modality == "text" and payload is not None:
            output = OmniRequestOutput.of(payload)
            output.request_id = request_id
            # The same object goes to the next stage; the user's copy is added to.
            output.outputs = [replace(one, token_ids=list(one.token_ids)) for one in payload.outputs]
            return output
        output = OmniRequestOutput.of(RequestOutput(request_id, None, [], None, outputs=[], finished=False))
        sample_rate = {"sample_rate": self.pipeline.sample_rate} if self.pipeline.sample_rate else {}
        if payload is not None and modality in self.pipeline.modalities:
            output.multimodal_output = {**payload.multimodal_output, **(sample_rate if modality == "audio" else {})}
        elif modality == "audio":
            output.multimodal_output = {"audio": torch.zeros(0), **sample_rate}
        elif modality != "text":
            output.multimodal_output = {
                modality: [] if payload is None else self.pipeline.extra_output(modality, payload)
            }
        return output


def _await_starts(starts: Mapping[str, Future[None]]) -> None:
    """Raise the error of the first stage that fails; all have started when this returns."""
    timeout_s = envs.VLLM_OMNI_STAGE_READY_TIMEOUT_S
    done, pending = wait(starts.values(), timeout_s, FIRST_EXCEPTION)
    for future in done:
        future.result()
    for name, future in starts.items():
        if future in pending:
            raise StageFailed(name, f"not ready after {timeout_s:g} s (VLLM_OMNI_STAGE_READY_TIMEOUT_S)")


def _collect(
    runtime: GraphRuntime,
    engines: Iterable[StageEngine],
    nodes: Iterable[StageNode],
    latency_metrics: LatencyMetrics,
) -> Iterator[Metric]:
    """What the graph holds at the moment, whether its stages are up, and where requests' time went."""
    yield from latency_metrics.collect()
    statistics = runtime.statistics()
    for name, meaning, value in (
        ("num_open_calls", "Requests that the graph is running.", statistics.num_open_calls),
        (
            "num_running_activations",
            "Stages at work on a request, over all requests.",
            statistics.num_running_activations,
        ),
        ("num_buffered_frames", "Chunks not yet read by their stage or user.", statistics.num_buffered_frames),
    ):
        yield GaugeMetricFamily(f"vllm_omni:{name}", meaning, value)
    is_up = GaugeMetricFamily("vllm_omni:stage_up", "1 while the stage's engine is alive.", labels=[STAGE_LABEL])
    restarts = CounterMetricFamily("vllm_omni:stage_restarts", "Restarts of a stage's engine.", labels=[STAGE_LABEL])
    for engine in engines:
        status = engine.current_status()
        is_up.add_metric([engine.name], int(status.state is StageState.RUNNING))
        restarts.add_metric([engine.name], status.num_restarts)
    yield is_up
    yield restarts
    if groups := [node for node in nodes if isinstance(node, InstanceGroup)]:
        yield from _collect_instances(groups)


def _collect_instances(groups: Iterable[InstanceGroup]) -> Iterator[Metric]:
    """Who did how much, of stages with several instances."""
    tasks = CounterMetricFamily("vllm_omni:instance_tasks", "Tasks that an instance was given.", labels=[STAGE_LABEL])
    encoded = CounterMetricFamily("vllm_omni:images_encoded", "Images that an instance encoded.", labels=[STAGE_LABEL])
    found = CounterMetricFamily("vllm_omni:images_found", "Images that had been encoded before.", labels=[STAGE_LABEL])
    migrated = CounterMetricFamily("vllm_omni:kv_migrations", "KV caches that migrated.", labels=[STAGE_LABEL])
    redone = CounterMetricFamily("vllm_omni:tasks_redone", "Tasks given to a second instance.", labels=[STAGE_LABEL])
    for group in groups:
        statistics = group.statistics()
        for name, number in statistics.num_tasks.items():
            tasks.add_metric([name], number)
        encoded.add_metric([group.name], statistics.num_encoded)
        found.add_metric([group.name], statistics.images.num_hits)
        migrated.add_metric([group.name], statistics.num_migrations)
        redone.add_metric([group.name], statistics.num_redone)
    yield from (tasks, encoded, found, migrated, redone)


def _shutdown(engines: Iterable[StageEngine], supervisors: Sequence[Supervisor], run_directory: RunDirectory) -> None:
    if os.getpid() != run_directory.server_pid:  # a fork of the user's program, at its end
        return
    for supervisor in supervisors:  # what ends now has not died
        supervisor.stop()
    for supervisor in supervisors:
        supervisor.join()
    try:
        with ThreadPoolExecutor(thread_name_prefix="stage-shutdown") as pool:
            pool.map(_shutdown_engine, engines)
    except RuntimeError:  # the interpreter is ending and gives no threads any more
        for engine in engines:
            _shutdown_engine(engine)
    run_directory.remove()
    METRICS.remove_server(str(run_directory.path))


def _shutdown_engine(engine: StageEngine) -> None:
    try:
        engine.shutdown()
    except Exception:  # the other stages, and the directory, are still to go
        logger.exception("stage %s: shutdown failed", engine.name)
