"""``RemoteOmni``: ``AsyncOmni`` in a front end whose engines belong to another process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Collection, Iterable, Mapping
from contextlib import aclosing
from functools import cached_property
from typing import Any

from vllm.config import ModelConfig, VllmConfig
from vllm.lora.request import LoRARequest
from vllm.renderers import BaseRenderer, renderer_from_config
from vllm.sampling_params import SamplingParams
from vllm.tasks import SupportedTask
from vllm.v1.engine.input_processor import InputProcessor

from vllm_omni.config import OmniConfig
from vllm_omni.config.diffusion_params import DiffusionParams
from vllm_omni.engine.media_names import keeps_media
from vllm_omni.engine.orchestrator import Orchestrator
from vllm_omni.engine.queue_limits import QueueLimits
from vllm_omni.engine.request_processor import RequestProcessor
from vllm_omni.engine.running import STOPPING
from vllm_omni.engine.stage import StageEngine
from vllm_omni.entrypoints.async_omni import AsyncOmni
from vllm_omni.entrypoints.front_ends.link import EngineLink
from vllm_omni.entrypoints.front_ends.messages import Status
from vllm_omni.errors import Overloaded, ShuttingDown, StageUnavailable
from vllm_omni.messages.outputs import OmniRequestOutput
from vllm_omni.process.status import StageState, StageStatus
from vllm_omni.vllm_patches import name_media_by_content


class EngineFace:
    """What a front end has of an engine in another process: its configuration, and what reads prompts.

    Args:
        tasks: that the engine supports.
        has_own_vocabulary: see ``StageSpec``.
    """

    def __init__(self, vllm_config: VllmConfig, tasks: tuple[SupportedTask, ...], *, has_own_vocabulary: bool) -> None:
        self.vllm_config = vllm_config
        self._tasks = tasks
        self._has_own_vocabulary = has_own_vocabulary

    @property
    def model_config(self) -> ModelConfig:
        return self.vllm_config.model_config

    @cached_property
    def renderer(self) -> BaseRenderer:
        renderer = renderer_from_config(self.vllm_config)
        name_media_by_content(renderer, trusts_uuids=not keeps_media(self.vllm_config))
        return renderer

    @cached_property
    def input_processor(self) -> InputProcessor:
        processor = InputProcessor(self.vllm_config, self.renderer)
        if self._has_own_vocabulary:
            processor.generation_config_fields = {}  # as in ``StageLLM``
        return processor

    async def get_supported_tasks(self) -> tuple[SupportedTask, ...]:
        return self._tasks

    def check_admission(self, n: int = 1, request_id: str | None = None) -> None:
        """Upstream's limit has become one of ``QueueLimits``."""

    async def is_tracing_enabled(self) -> bool:
        return self.vllm_config.observability_config.otlp_traces_endpoint is not None

    async def notify_kv_transfer_request_rejected(self, *args: Any, **kwargs: Any) -> None:
        """Upstream's, of requests whose caches wait elsewhere: none reaches the engine from here."""


class RemoteStage(StageEngine):
    """A stage's engine that runs elsewhere: its configuration and its state."""

    face: EngineFace
    has_died = False  # the engine's status says it

    @property
    def llm(self) -> Any:
        return self.face

    def read_prompts(self, reader: RequestProcessor) -> None:
        """Read the prompts of requests here."""
        reader.bind(self.face.renderer)


class RemoteLimits(QueueLimits):
    """The limits of stages, by what the process of the engines has reported last; it decides when a request starts."""

    def __init__(self, limits: Mapping[str, int], note_rejected: Callable[[str], None]) -> None:
        super().__init__(limits)
        self._note_rejected = note_rejected
        self._retry_after: dict[str, int] = {}

    def update(self, reported: Mapping[str, tuple[int, int]]) -> None:
        for stage, (num_open, retry_after_s) in reported.items():
            self._open[stage], self._retry_after[stage] = num_open, retry_after_s

    def check(self, stages: Collection[str], n: int = 1, *, is_request: bool = True) -> None:
        before = self.num_rejected.copy()
        try:
            super().check(stages, n, is_request=is_request)
        except Overloaded:
            for stage in (self.num_rejected - before).elements():
                self._note_rejected(stage)
            raise

    def retry_after_s(self, stage: str) -> int:
        return self._retry_after.get(stage, 1)


class RemoteOrchestrator(Orchestrator):
    """The graphs and configurations of a server, without its engines: requests run in the process that has them.

    Args:
        max_model_lens: of each engine, as it has started.
        tasks: that the first stage's engine supports.
    """

    engine_class = RemoteStage

    def __init__(
        self,
        config: OmniConfig,
        link: EngineLink,
        max_model_lens: Mapping[str, int],
        tasks: tuple[SupportedTask, ...],
    ) -> None:
        super().__init__(config)
        self._link = link
        self._max_model_lens = max_model_lens
        self._tasks = tasks
        self._groups: dict[str, StageStatus] = {}  # the states of stages with several engines

    def start(self) -> None:
        """Make the nodes as they are there; nothing is started."""
        for stage in self.config.stages:
            engines, self.nodes[stage.name] = self.maker.make_node(stage)
            self.engines |= {engine.name: engine for engine in engines}
        self.queue_limits = RemoteLimits(QueueLimits.of(self.engines.values()).limits, self._link.note_rejected)
        for engine in self.engines.values():
            assert isinstance(engine, RemoteStage)
            engine.vllm_config.model_config.max_model_len = self._max_model_lens[engine.name]
            # Media that one front end has sent are unknown to the others: upstream then keeps them here alone.
            engine.vllm_config.parallel_config._api_process_count = 2
            own_vocabulary = self.specs[engine.config.name].has_own_vocabulary
            engine.face = EngineFace(engine.vllm_config, self._tasks, has_own_vocabulary=own_vocabulary)
        first = self.front(self.config.stages[0].name)
        assert isinstance(first, RemoteStage)
        first.read_prompts(RequestProcessor(self.media_budget, self._link.note_read))

    def check_health(self, stages: Iterable[str] | None = None) -> None:
        """As there. The replicas of a stage may be others than at the start, so its state is what was reported."""
        for name in self.nodes if stages is None else stages:
            if (status := self._groups.get(name)) is None:
                self.nodes[name].check_health()
            elif status.state is not StageState.RUNNING:
                raise StageUnavailable(name, f"{status.state}: {status.reason}")

    def update(self, status: Status) -> None:
        """Note the state of the engines."""
        self._groups = {
            name: status.engines[name] for name in (self.nodes.keys() - self.engines) & status.engines.keys()
        }
        for one in self.watched:
            if one.name in status.engines:
                one.set_status(status.engines[one.name])
        assert isinstance(self.queue_limits, RemoteLimits)
        self.queue_limits.update(status.limits)

    async def generate(
        self,
        prompt: Any,
        params: Mapping[str, SamplingParams | DiffusionParams],
        request_id: str,
        **arguments: Any,
    ) -> AsyncGenerator[OmniRequestOutput, None]:
        """As there."""
        self.requests.check()
        self.requests.enter()
        try:
            async with aclosing(self._link.generate(prompt, params, request_id, _plain(arguments))) as outputs:
                async for output in outputs:
                    yield output
        finally:
            self.requests.leave()

    async def abort(self, request_id: str) -> None:
        await self._link.abort(request_id)

    async def aclose(self) -> None:
        self.requests.end()
        self._link.fail_all(ShuttingDown(STOPPING))
        await asyncio.sleep(0)  # the readers of the calls then leave them


class RemoteOmni(AsyncOmni):
    """``AsyncOmni`` over a ``RemoteOrchestrator``: it reads prompts, and its requests run elsewhere.

    What the HTTP server asks about the server as a whole does not reach it (``forwarding.py``).
    """

    def __init__(self, orchestrator: RemoteOrchestrator, link: EngineLink) -> None:
        self.config = orchestrator.config
        self._link = link
        self._serve_by(orchestrator)

    async def add_lora(self, lora_request: LoRARequest) -> bool:
        await self._link.add_adapter(lora_request)
        return True

    async def do_log_stats(self) -> None:
        """The process of the engines logs."""


def _plain(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a request as builtin collections, which travel."""
    plain = {
        name: dict(value) if isinstance(value, Mapping) and type(value) is not dict else value
        for name, value in arguments.items()
    }
    return plain | {"modalities": list(arguments.get("modalities", ("text",)))}
