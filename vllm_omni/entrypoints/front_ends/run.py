"""``serve_front_ends``: run the processes that serve HTTP, and answer their calls, until the server ends.

One process has the engines, and everything of which there is one: the graphs' calls, limits, sessions, restarts. It
answers what concerns the server as a whole by vLLM's application, which does not listen. The front ends have all that
costs time with each request but belongs to no other: HTTP, templates, tokenizing, media, JSON.
"""

from __future__ import annotations

import asyncio
import logging
import multiprocessing
import signal
import socket
from argparse import Namespace
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import httpx
from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from vllm.lora.request import LoRARequest

from vllm_omni.engine.group import EngineGroup
from vllm_omni.entrypoints.async_omni import AsyncOmni
from vllm_omni.entrypoints.front_ends.calls import HttpHeaders
from vllm_omni.entrypoints.front_ends.forwarding import OF_CONNECTIONS
from vllm_omni.entrypoints.front_ends.host import Blueprint
from vllm_omni.entrypoints.front_ends.messages import Answered, Status
from vllm_omni.entrypoints.front_ends.metrics import SharedMetrics
from vllm_omni.entrypoints.front_ends.process import NOT_ACCEPTING, FrontEnd
from vllm_omni.entrypoints.openai.app import CLOSE_TIMEOUT_S, administered, build_omni_app
from vllm_omni.entrypoints.openai.fair_keys import FairShare
from vllm_omni.entrypoints.openai.job_places import JobPlaces, TakePlace
from vllm_omni.errors import StageFailed
from vllm_omni.process.status import StageState
from vllm_omni.process.supervisor import Supervisor, in_thread
from vllm_omni.process.tether import ServerTether

if TYPE_CHECKING:
    from vllm_omni.flow.remote.registry.redis import RedisRegistry

logger = logging.getLogger(__name__)

END_TIMEOUT_S = 10.0
"""How long front ends may take to end, beyond what their requests and clients have."""


async def serve_front_ends(
    omni: AsyncOmni, args: Namespace, listener: socket.socket, registry: RedisRegistry | None
) -> None:
    """Serve until SIGINT or SIGTERM, or until the first stage or a front end has died too often.

    Raises:
        StageFailed: a front end did not start, or the latter.
    """
    app = await build_omni_app(omni, args)
    async with (
        app.state.results.kept(),
        administered(app, omni, args, registry),
        app.router.lifespan_context(app),
        FrontEnds(omni, app, args, listener).running() as front_ends,
    ):
        await front_ends.wait()
    await omni.aclose()
    if front_ends.failure is not None:
        raise front_ends.failure


class FrontEnds:
    """The front ends of a server.

    Attributes:
        share: of requests of all front ends, by API key.
        take_place: gives jobs of all front ends their places.
        failure: why the server ends; None: a signal.
    """

    def __init__(self, omni: AsyncOmni, app: FastAPI, args: Namespace, listener: socket.socket) -> None:
        self.share = FairShare()
        self.take_place: TakePlace = JobPlaces().take
        self.failure: BaseException | None = None
        self._omni = omni
        self._orchestrator = omni.orchestrator
        self._args = args
        self._listener = listener
        self._loop = asyncio.get_running_loop()
        self._is_over = asyncio.Event()
        self._is_push_due = False
        self._watched: set[str] = set()  # names of engines and functions
        self._directory = omni.orchestrator.running.run_directory
        self._metrics = SharedMetrics(self._directory.path)
        self._front_ends: dict[str, FrontEnd] = {}
        self._supervisors: list[Supervisor] = []
        app.state.front_ends = self._front_ends
        app.router.routes.insert(0, Route("/metrics", self._show_metrics))
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        self._client = httpx.AsyncClient(transport=transport, base_url="http://engines", timeout=None)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[FrontEnds]:
        """Have them serve inside the block; at its end, let their requests end, and end them.

        Raises:
            StageFailed: one did not start.
        """
        orchestrator = self._orchestrator
        self._watch()
        orchestrator.scaling.on_change = self._note_scaling
        orchestrator.queue_limits.on_change = self._push_soon
        for number in (signal.SIGINT, signal.SIGTERM):  # from now on: the first may be up before the last
            self._loop.add_signal_handler(number, self._is_over.set)
        starting = asyncio.ensure_future(self._start())
        waiting = asyncio.ensure_future(self.wait())
        try:
            await asyncio.wait({starting, waiting}, return_when=asyncio.FIRST_COMPLETED)
            if starting.done():
                starting.result()
            yield self
        finally:
            waiting.cancel()
            await self._end()
            await asyncio.gather(starting, waiting, return_exceptions=True)

    async def wait(self) -> None:
        """Wait until the server is to end."""
        await self._is_over.wait()

    async def _start(self) -> None:
        num_front_ends = self._args.api_server_count
        loads = multiprocessing.get_context("spawn").RawArray("i", [NOT_ACCEPTING] * num_front_ends)
        engines = self._orchestrator.engines.values()
        blueprint = Blueprint(
            self._args,
            self._omni.config,
            {one.name: one.vllm_config.model_config.max_model_len for one in engines},
            await self._omni.get_supported_tasks(),
            self._metrics.directory,
        )
        for index in range(num_front_ends):
            tether = ServerTether(self._directory.path, f"front_end/{index}", is_of_engine=False)
            self._front_ends[tether.stage] = FrontEnd(
                index, blueprint, self._listener, loads, self, tether, self._note_change
            )
        with self._directory.inherited():
            starts = [asyncio.wrap_future(in_thread(one.start)) for one in self._front_ends.values()]
            await asyncio.gather(*starts)
        if not self._is_over.is_set():
            self._supervisors = [Supervisor(one, self._directory) for one in self._front_ends.values()]

    async def _end(self) -> None:
        for supervisor in self._supervisors:
            supervisor.stop()
        self._listener.close()  # open in the front ends, as long as they accept connections
        self._orchestrator.requests.drain()  # front ends decide which requests have arrived before
        front_ends = self._front_ends.values()
        for one in front_ends:
            one.stop()
        timeout_s = self._omni.vllm_config.shutdown_timeout + CLOSE_TIMEOUT_S + END_TIMEOUT_S
        ends = [asyncio.ensure_future(one.wait_until_ended()) for one in front_ends]
        _, late = await asyncio.wait(ends, timeout=timeout_s) if ends else (set(), set[Any]())
        if late:
            logger.warning("%d front ends have not ended within %g s, and are killed", len(late), timeout_s)
        await asyncio.gather(*(one.aclose() for one in front_ends))
        await asyncio.gather(*(asyncio.to_thread(one.end) for one in front_ends), *ends)
        await asyncio.gather(*(asyncio.to_thread(one.join) for one in self._supervisors))
        await self._client.aclose()

    # -- the state of the engines -------------------------------------------------------------------------------------

    def _watch(self) -> None:
        """Be notified of changes of all that are not watched yet."""
        for one in self._orchestrator.watched:
            if one.name not in self._watched:
                self._call_after(one.on_status, one)
        self._watched = {one.name for one in self._orchestrator.watched}

    def _note_scaling(self) -> None:
        self._watch()
        self._note_change()

    def _call_after(self, before: Any, one: Any) -> None:
        """Be notified of changes of an engine's status, by its supervisor's thread."""

        def notify() -> None:
            before()
            self._loop.call_soon_threadsafe(self._note_change)

        one.on_status = notify

    def _note_change(self) -> None:
        failed = [one for one in self._front_ends.values() if one.current_status().state is StageState.FAILED]
        if self.failure is None and not self._omni.is_running:
            self.failure = self._omni.dead_error
        elif self.failure is None and failed:
            self.failure = StageFailed(failed[0].name, failed[0].current_status().reason or "")
        if self.failure is not None:
            self._is_over.set()
        self._push_soon()

    def _push_soon(self) -> None:
        """Report the state to all front ends, once for all changes of one iteration of the loop."""
        if not self._is_push_due:
            self._is_push_due = True
            self._loop.call_soon(self._push)

    def _push(self) -> None:
        self._is_push_due = False
        limits = self._orchestrator.queue_limits
        groups = [one for one in self._orchestrator.nodes.values() if isinstance(one, EngineGroup)]
        status = Status(
            0,
            {one.name: one.current_status() for one in (*self._orchestrator.watched, *groups)},
            {stage: (number, limits.retry_after_s(stage)) for stage, (number, _) in limits.num_open().items()},
        )
        for one in self._front_ends.values():
            one.send(status)

    # -- ``Served`` ---------------------------------------------------------------------------------------------------

    def generate(self, prompt: Any, params: Any, request_id: str, /, **arguments: Any) -> AsyncGenerator[Any, None]:
        self._orchestrator.requests.note_arrived()
        return self._orchestrator.generate(prompt, params, request_id, **arguments)

    async def answer(self, method: str, url: str, headers: HttpHeaders, body: bytes) -> Answered:
        response = await self._client.request(method, url, headers=headers, content=body)
        self._push()  # an engine's death is in an answer before its supervisor has noticed
        kept = [(name, value) for name, value in response.headers.multi_items() if name not in OF_CONNECTIONS]
        return Answered(0, response.status_code, kept, response.content)

    async def add_adapter(self, adapter: LoRARequest) -> None:
        await self._omni.add_lora(adapter)

    def note_read(self, seconds: float) -> None:
        self._orchestrator.latency_metrics.read.observe(seconds)

    def note_rejected(self, stage: str) -> None:
        self._orchestrator.queue_limits.num_rejected[stage] += 1

    async def _show_metrics(self, request: Request) -> Response:
        """The metrics of the engines, and of all front ends together."""
        front_ends = list(self._front_ends.values())
        await asyncio.gather(*(one.measure() for one in front_ends))
        budget = self._orchestrator.media_budget
        budget.received.num_bytes_elsewhere = sum(one.num_held[0] for one in front_ends)
        budget.num_bytes_elsewhere = sum(one.num_held[1] for one in front_ends)
        return await asyncio.to_thread(self._metrics.show, request.headers.get("accept", ""))
