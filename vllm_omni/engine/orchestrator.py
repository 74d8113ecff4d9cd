"""``Orchestrator``: binds a planned graph to its stage engines and runs requests through it."""

from __future__ import annotations

import asyncio
import logging
import weakref
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache, partial
from typing import Any

from vllm.exceptions import VLLMError
from vllm.sampling_params import SamplingParams

from vllm_omni import envs
from vllm_omni.config import OmniConfig
from vllm_omni.config.diffusion_params import DiffusionParams
from vllm_omni.engine.admission import AdmissionGate
from vllm_omni.engine.answer import EMPTY, Answer, kind_of_output
from vllm_omni.engine.cache_edges import cache_sources, check_layouts, with_connectors
from vllm_omni.engine.controller_places import controllers_on_hosts
from vllm_omni.engine.draining import Draining
from vllm_omni.engine.engine_maker import EngineMaker
from vllm_omni.engine.flow_metrics import FlowMetrics
from vllm_omni.engine.function_node import FunctionNode
from vllm_omni.engine.function_process import FunctionProcess
from vllm_omni.engine.graph_checks import check_graph
from vllm_omni.engine.graph_metrics import collect
from vllm_omni.engine.group import EngineGroup
from vllm_omni.engine.hosting import make_listener
from vllm_omni.engine.instances import InstanceGroup
from vllm_omni.engine.latency_metrics import LatencyMetrics, RequestLatency
from vllm_omni.engine.load_pipeline import load_pipeline
from vllm_omni.engine.media_budget import MediaBudget
from vllm_omni.engine.media_connector import CONNECTION
from vllm_omni.engine.memory import memory_sections
from vllm_omni.engine.metrics import METRICS
from vllm_omni.engine.node import ServedNode, StageNode
from vllm_omni.engine.otel import OtelExporter
from vllm_omni.engine.payload_edges import PayloadEdges
from vllm_omni.engine.pipeline_checks import check_pipeline
from vllm_omni.engine.queue_limits import QueueLimits, num_answers
from vllm_omni.engine.relay_options import make_relay_options, secret_file_of
from vllm_omni.engine.remote_controllers import RemoteControllers, make_runtime
from vllm_omni.engine.request_call import AGAIN, MAX_CALLS, RequestCall
from vllm_omni.engine.request_params import check_params
from vllm_omni.engine.request_processor import RequestProcessor
from vllm_omni.engine.request_record import RequestRecord
from vllm_omni.engine.running import RunningRequests
from vllm_omni.engine.scaling import Scaling
from vllm_omni.engine.sessions import Sessions
from vllm_omni.engine.stage import ABORT_TIMEOUT_S, StageEngine
from vllm_omni.engine.stage_edges import called_by, maker_of
from vllm_omni.engine.startup import start_engines
from vllm_omni.engine.streamed_reply import StreamedReplies
from vllm_omni.engine.traces import Traces
from vllm_omni.engine.user_reader import UserAway
from vllm_omni.errors import (
    ConfigError,
    InvalidRequest,
    OmniError,
    ShuttingDown,
    StageFailed,
    UnknownModel,
)
from vllm_omni.flow import StaticPlan, parse_graphs
from vllm_omni.flow.graph.plan import Route
from vllm_omni.flow.run.scope import index_plans
from vllm_omni.hosts.listener import HostListener
from vllm_omni.messages.outputs import OmniRequestOutput
from vllm_omni.messages.payload import Payload, encode
from vllm_omni.model_executor.pipeline import RequestContext
from vllm_omni.names import suggest
from vllm_omni.relay.hub import RelayHub, RelayOptions
from vllm_omni.relay.select import LOCAL

logger = logging.getLogger(__name__)

PAUSE_MODES = ("abort", "wait", "keep")  # vLLM's


class Orchestrator:
    """Starts the stages, runs requests through the graph, and ends the stages.

    ``start`` and ``shutdown`` block and belong to no event loop; ``generate`` belongs to one loop for its whole life.

    Attributes:
        engines: by name; the name of an instance is "thinker/PD0", of a replica "talker/0".
        nodes: by the name of the stage or function.
        plans: by graph, those included that only other graphs call.
        specs: of the stages, with their connectors.
        models: what requests name: the graphs of the pipeline and their graph calls, "graph.call".
        hub: the front end's; opens media for the user, and releases what no stage has read.
        requests: those that run, and whether others are accepted.

    Raises:
        ConfigError: the model or its pipeline cannot be loaded, or the deployment does not fit the graph.
    """

    engine_class = StageEngine

    def __init__(
        self,
        config: OmniConfig,
        *,
        log_stats: bool = False,
        on_listening: Callable[[HostListener], None] | None = None,
    ) -> None:
        self._on_listening = on_listening  # called at the start, when hosts can join
        envs.reject_unknown()
        self.config = config
        self.pipeline = load_pipeline(config)
        check_pipeline(self.pipeline)
        graphs = [self.pipeline.graph, *self.pipeline.further_graphs]
        self.plans = parse_graphs(graphs)
        check_graph(config, self.pipeline, list(self.plans.values()))
        served = [self.plans[graph.name] for graph in graphs]
        self.models = {one.name: one for plan in served for one in (plan, *plan.entries())}
        self._graphs = index_plans(list(self.plans.values()))[0]
        self._route = cache(lambda graph, outputs: self._graphs[graph].route(outputs))
        specs = {spec.name: spec for spec in self.pipeline.stages}
        self._cache_sources = cache_sources(self.plans.values(), specs)
        self.specs = with_connectors(self.plans.values(), specs, self._cache_sources)
        self.pipeline.set_chunks(config.edges)
        self.pipeline.set_voices(config.voices)
        self.hub = RelayHub(RelayOptions(secret_file=secret_file_of(config)), prefault=False)
        self.engines: dict[str, StageEngine] = {}
        self.nodes: dict[str, ServedNode] = {spec.name: FunctionNode(spec) for spec in self.pipeline.functions}
        self.gate = AdmissionGate()
        self.streamed_replies = StreamedReplies()
        self.controllers: RemoteControllers | None = None  # if some run beside engines on other hosts
        self.sessions: Sessions | None = None  # if the pipeline has any
        self.latency_metrics, self.flow_metrics, self.traces = LatencyMetrics(), FlowMetrics(), Traces()
        self.queue_limits = QueueLimits({})
        self.media_budget = MediaBudget(envs.VLLM_OMNI_MAX_MEDIA_BYTES, envs.VLLM_OMNI_MAX_WAITING_MEDIA)
        self._on_hosts = self.controllers_on_hosts(config)
        self._local_engines: list[StageEngine] = []  # those that read tensors of their own by reference
        reader = partial(RequestProcessor, self.media_budget, self.latency_metrics.read.observe)
        sources = self._cache_sources
        self.maker = EngineMaker(
            *(self.specs, sources, self.plans, self.hub, reader, self._on_hosts, self.engine_class), log_stats=log_stats
        )
        self._log_stats = log_stats
        self._finalizer: Callable[[], object] | None = None
        self.requests = RunningRequests()

    # -- start and end ------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start all stages at once; on any failure, including Ctrl-C, end those that started.

        Raises:
            ConfigError: a transport that cannot work where the stages are.
            StageFailed: a stage did not start, or not within ``VLLM_OMNI_STAGE_READY_TIMEOUT_S``.
        """
        for stage in self.config.stages:
            engines, self.nodes[stage.name] = self.maker.make_node(stage)
            self.engines |= {engine.name: engine for engine in engines}
        self.queue_limits = QueueLimits.of(self.engines.values())
        check_layouts(self._cache_sources, lambda stage: self.front(stage).vllm_config)
        options = {name: self._relay_options(engine) for name, engine in self.engines.items()}
        local = [name for name, its in options.items() if LOCAL in {edge.transport for edge in its.edges.values()}]
        self._local_engines = [self.engines[name] for name in local]
        memory = memory_sections(one for one in self.engines.values() if one.config.host_of() is None)
        listen = partial(make_listener, self.config, self.engines.values(), self._on_listening)
        running = start_engines(self.engines, options, self.hub, memory, self.function_processes, listen)
        self.running = running
        # Runs also when this object is collected, and at the interpreter's exit. There, finalizers run in the reverse
        # order of their creation: this one before those of vLLM's clients, which take their engines' end for a failure.
        self._finalizer = weakref.finalize(self, running.shutdown)
        self.draining = Draining(self.engines, self.nodes, running.hosts)
        self.scaling = Scaling(
            *(self.config, self.nodes, self.engines, self.maker, self._relay_options, self.queue_limits, running),
            self.draining,
        )
        payload_edges = PayloadEdges(self.plans.values(), self.specs)
        for node in self.nodes.values():
            node.gate = self.gate
            if isinstance(node, StageNode):
                node.streamed_replies = self.streamed_replies
                payload_edges.bind(node)
        plans = [payload_edges.with_own_payloads(plan) for plan in self.plans.values()]
        if running.listener is not None and self._on_hosts:
            self.controllers = RemoteControllers(self._on_hosts, self.nodes, running.listener)
        self.runtime = make_runtime(plans, self.nodes, self.controllers)
        if endpoint := self.front(self.config.stages[0].name).vllm_config.observability_config.otlp_traces_endpoint:
            self.traces = Traces(OtelExporter(endpoint))
        if (ttl_s := self.pipeline.session_ttl_s) is not None:
            self.sessions = Sessions(ttl_s, self.runtime.end_session, self.runtime.clock)
        if self._log_stats:
            sources = self.latency_metrics, self.queue_limits, self.flow_metrics, self.media_budget
            of_graph = partial(collect, self.runtime, self.engines.values(), self.nodes.values(), *sources)
            METRICS.add_graph(running.server_id, of_graph)

    def controllers_on_hosts(self, config: OmniConfig) -> dict[str, str]:
        """See ``controllers_on_hosts``; the graphs and stages are the same on all hosts."""
        return controllers_on_hosts(config, self.plans.values(), self.specs, self._cache_sources)

    def _relay_options(self, engine: StageEngine) -> RelayOptions:
        return make_relay_options(engine, self._reading_engines, self.plans.values(), self.config)

    def _reading_engines(self, stage: str) -> list[StageEngine]:
        return list(dict.fromkeys([self.front(stage), *self.engines_of(stage)]))

    def front(self, stage: str) -> StageEngine:
        """The stage's representative engine (tokenizer, model config); of several, the one that reads."""
        node = self.nodes[stage]
        if isinstance(node, EngineGroup):
            return node.front
        assert isinstance(node, StageEngine)
        return node

    def engines_of(self, stage: str) -> list[StageEngine]:
        """The engine of a stage, or its several engines."""
        return [engine for engine in self.engines.values() if engine.config.name == stage]

    @property
    def function_processes(self) -> list[FunctionProcess]:
        """The processes of the functions that have some."""
        functions = [node for node in self.nodes.values() if isinstance(node, FunctionNode)]
        return [process for node in functions for process in node.processes]

    @property
    def watched(self) -> list[StageEngine | FunctionProcess]:
        """All that has a state of its own, and a process that is restarted."""
        return [*self.engines.values(), *self.function_processes]

    def forget_images(self) -> None:
        """Drop embeddings that are kept between requests: the weights have changed, or memory is needed."""
        for node in self.nodes.values():
            if isinstance(node, InstanceGroup):
                node.images.clear()

    def shutdown(self) -> None:
        """End every stage and remove its files; a second call does nothing."""
        if self._finalizer is not None:
            self._finalizer()
        self.hub.close()
        self.traces.close()

    async def drain(self, timeout_s: float) -> None:
        """Reject new requests, and wait until the running ones have ended or the time is over."""
        self.requests.drain()
        logger.info("shutting down: running requests have %g s to end", timeout_s)
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self.requests.wait_until_none()

    async def aclose(self) -> None:
        """Abort running requests, await them, and stop reading from the engines; ``shutdown`` then ends those."""
        self.requests.end()
        if num_open := self.runtime.statistics().num_open_calls:
            logger.warning("shutting down: %d requests are aborted", num_open)
        await self.runtime.aclose()
        await self.scaling.aclose()
        if self.sessions is not None:
            self.sessions.close()
        for process in self.watched:
            await process.aclose()
        await CONNECTION.aclose()

    def check_health(self, stages: Iterable[str] | None = None) -> None:
        """Check the given stages (default: all).

        Raises:
            StageUnavailable: a stage is dead: it is being restarted, or could not be.
        """
        for name in self.nodes if stages is None else stages:
            self.nodes[name].check_health()

    def stages_of(self, outputs: Iterable[str], graph: str | None = None) -> list[str]:
        """The stages and functions that take part in answering with these outputs of the graph."""
        return list(dict.fromkeys(self._roles_of(self.plan_of(graph).name, frozenset(outputs))))

    def _roles_of(self, graph: str, outputs: frozenset[str]) -> Iterator[str]:
        route: Route = self._route(graph, outputs)
        for node in route.nodes.values():
            if node.graph is None:
                yield node.role
            else:
                yield from self._roles_of(called_by(self._graphs, node).name, route.outlets[node.name].fields)

    def stage_of(self, output: str, graph: str | None = None) -> str:
        """The stage or function that makes an output of a graph."""
        plan = self.plan_of(graph)
        return maker_of(self._graphs, plan, plan.outputs[output]).node.role

    def plan_of(self, graph: str | None) -> StaticPlan:
        """The plan of a graph or a graph call; None: the pipeline's first.

        Raises:
            UnknownModel: there is no such graph.
        """
        plan = self.models.get(self.pipeline.graph.name if graph is None else graph)
        if plan is None:
            raise UnknownModel(f"no graph {graph!r}: {suggest(str(graph), self.models)}", param="model")
        return plan

    # -- requests -----------------------------------------------------------------------------------------------------

    def modalities_of(self, graph: str | None = None) -> dict[str, str]:
        """The modalities that a graph can answer in, and their kinds (``KEYS`` of ``Answer``, or others of text)."""
        plan, named = self.plan_of(graph), self.pipeline.modalities.items()
        return {name: kind_of_output(plan, output, self.specs) for name, output in named if output in plan.outputs}

    def medium(self) -> str:
        """The medium that the first graph makes, where the first stage is a diffusion stage: other outputs follow it.

        Raises:
            ConfigError: it makes none.
        """
        made = self.modalities_of()
        for modality in made:
            if modality in EMPTY:
                return modality
        raise ConfigError(f"this pipeline generates {', '.join(made)}, and no image, video or sound: use AsyncOmni")

    def outputs_of(self, modalities: Sequence[str], graph: str | None = None) -> dict[str, str]:
        """Find the graph outputs that answer the modalities: modality -> output.

        Where the model replies in text, the text is always included: all other modalities are made from it.

        Raises:
            InvalidRequest: an unknown modality, or none.
        """
        modalities = [modalities] if isinstance(modalities, str) else modalities
        outputs = self.plan_of(graph).outputs
        named = {**self.pipeline.modalities, **self.pipeline.extra_outputs}
        known = {modality: output for modality, output in named.items() if output in outputs}
        for modality in modalities:
            if modality not in known:
                raise InvalidRequest(f"unknown modality {modality!r}: {suggest(str(modality), known)}")
        if not modalities:
            raise InvalidRequest(f"no modality asked for; valid: {', '.join(known)}")
        return {modality: known[modality] for modality in {"text", *modalities} if modality in known}

    async def generate(
        self,
        prompt: Any,
        params: Mapping[str, SamplingParams | DiffusionParams],
        request_id: str,
        *,
        modalities: Sequence[str] = ("text",),
        graph: str | None = None,
        options: Mapping[str, Any] | None = None,
        lora_request: Any = None,
        priority: int = 0,
        trace_headers: Mapping[str, str] | None = None,
        engine_kwargs: Mapping[str, Any] | None = None,
        deadline_s: float | None = None,
    ) -> AsyncGenerator[OmniRequestOutput, None]:
        """Run one request; yields deltas, the last one with ``finished`` and the stages' durations.

        Raises:
            InvalidRequest: the request is malformed, or names no graph of the pipeline.
            StageUnavailable: a stage that it needs is being restarted, or could not be.
            Overloaded: a stage that it needs has as many requests as it may.
            ShuttingDown: the server is being stopped.
            StageFailed: the request failed in a stage, or in the pipeline's own code that makes the stage's requests.
            CallAborted, DeadlineExceeded: see ``GraphCall``.
        """
        self.requests.check()
        plan = self.plan_of(graph)
        outputs = self.outputs_of(modalities, graph)
        slos = check_params(params, self.config, self.engines.values())
        stages = self.stages_of(outputs.values(), graph)
        self.check_health(stages)
        record = RequestRecord.of(prompt, self.flow_metrics)
        record.trace = trace = self.traces.begin(request_id, plan.name, record.arrived_at, trace_headers)
        context = RequestContext(
            request_id,
            dict(params),
            self.pipeline.check_options(options or {}),
            lora_request,
            priority,
            trace.headers,
            dict(engine_kwargs or {}),
            tuple(outputs),
            deadline_s,
        )
        with self.queue_limits.hold(stages, num_answers(params[self.config.stages[0].name])):
            call = await self._open(context, prompt, plan, frozenset(outputs.values()), stages, record)
            continued = {name: source.stage for name, source in self._cache_sources.items()}
            latency = RequestLatency(record, self.config.stages[0].name, slos, self.latency_metrics, continued)
            answer = Answer(self.pipeline, plan, request_id, record, outputs, latency)
            self.requests.enter()
            try:
                async for frame in call:
                    with UserAway(call.call):
                        yield answer.output_of(frame)
            except Exception as exc:
                trace.error = str(exc)
                if isinstance(exc, VLLMError):
                    raise
                latency.fail(exc)
                if (failed := self.requests.error_for_client(request_id, exc)) is exc:
                    raise
                raise failed from exc
            finally:
                # A task of its own: where a client leaves, anyio cancels the reader again at each of its awaits.
                await asyncio.shield(asyncio.ensure_future(self._end(call, record)))

    async def _end(self, call: RequestCall, record: RequestRecord) -> None:
        """Release what a request holds, whether it has ended or is left early."""
        await call.aclose()
        if call.session is not None and self.sessions is not None:
            self.sessions.leave(call.session)
        record.end(self.traces)
        await self._release(record.published)
        for request_id in call.request_ids:
            self.streamed_replies.forget(request_id)
        self.requests.leave()

    async def _release(self, payloads: Sequence[Payload]) -> None:
        """Release what the stages have published for a request, for all readers."""
        for payload in payloads:
            self.hub.release_payload(payload, for_all=True)
        local = [encode(payload) for payload in payloads if any(ref.backend == LOCAL for ref in payload.refs())]
        for engine in self._local_engines if local else ():
            with suppress(StageFailed):  # it has died, or releases them behind a step that takes longer
                await engine.ask(engine.llm.collective_rpc("release_payloads", args=(local,)), ABORT_TIMEOUT_S)

    async def _open(
        self,
        context: RequestContext,
        prompt: Any,
        plan: StaticPlan,
        outputs: frozenset[str],
        stages: Sequence[str],
        record: RequestRecord,
    ) -> RequestCall:
        """Open the request's call, in its session.

        Raises:
            InvalidRequest: a wrong prompt, an id that is in use, or a wrong deadline.
            OmniError: the pipeline does not fill the graph's placeholders.
        """
        try:
            inputs = await self.pipeline.request_inputs(prompt, context)
            self.requests.check()  # the server may be shutting down meanwhile
            if missing := self._route(plan.name, outputs).placeholders - set(inputs):
                raise KeyError(", ".join(sorted(missing)))
            inputs = {name: payload for name, payload in inputs.items() if name in plan.placeholders}
        except (InvalidRequest, ShuttingDown):
            raise
        except Exception as exc:
            raise OmniError(f"the pipeline did not fill its placeholders: {exc!r}") from exc
        session = context.session_id if self.sessions is not None else None
        call = RequestCall(
            self.runtime, self.gate, self.controllers, plan, outputs, stages, session, record.add, self.engines
        )
        await call.open(context, inputs)
        if session is not None and self.sessions is not None:
            self.sessions.enter(session)
        return call

    async def abort(self, request_id: str) -> None:
        """Abort a request and wait until every stage has dropped it; an unknown id is ignored."""
        for _ in range(MAX_CALLS):
            await self.runtime.abort(request_id, "by its owner")
            request_id = AGAIN.format(request_id)

    # -- pausing ------------------------------------------------------------------------------------------------------

    async def pause(self, mode: str) -> None:
        """Hold new requests before the first stage; running ones are aborted, awaited, or kept.

        This pauses the graph; the caller then pauses the engines. Afterwards no request is between two stages, except
        with the mode "keep", where it reaches the next engine and waits there.

        Args:
            mode: "abort": running requests end with ``CallAborted``. "wait": returns when they have left their last
                stage. "keep": they continue where they were after ``resume``.

        Raises:
            InvalidRequest: the mode is not supported.
        """
        if mode not in PAUSE_MODES:
            raise InvalidRequest(f"pause mode {mode!r}: {suggest(mode, PAUSE_MODES)}")
        self.gate.close()
        if mode == "abort":
            await asyncio.gather(*(self.runtime.abort(one, "generation was paused") for one in self.gate.admitted))
        if mode == "wait":
            await self.gate.wait_until_empty()

    def resume(self) -> None:
        """Admit the requests that wait before the first stage."""
        self.gate.open()
