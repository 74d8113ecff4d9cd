"""The process of a front end: vLLM's application, over engines of another process."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
from argparse import Namespace
from collections.abc import AsyncIterator, Mapping, MutableSequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import prometheus_client.values
import uvloop
from fastapi import FastAPI
from vllm.logger import configure_logging_from_args
from vllm.tasks import SupportedTask
from vllm.utils.system_utils import set_process_title

from vllm_omni.config import OmniConfig
from vllm_omni.entrypoints.front_ends.forwarding import forward_the_rest
from vllm_omni.entrypoints.front_ends.link import EngineLink
from vllm_omni.entrypoints.front_ends.messages import Status
from vllm_omni.entrypoints.front_ends.remote import RemoteOmni, RemoteOrchestrator
from vllm_omni.errors import OmniError
from vllm_omni.process.logs import name_stage_process
from vllm_omni.process.tether import ServerTether, enter_stage_process

logger = logging.getLogger(__name__)

MULTIPROCESS_DIRECTORY = "PROMETHEUS_MULTIPROC_DIR"  # Prometheus' own variable


class Blueprint(NamedTuple):
    """What every front end is made of.

    Attributes:
        args: of ``serve``.
        max_model_lens: of each engine, as it has started.
        tasks: that the first stage's engine supports.
        metrics: where each front end keeps its metrics, for all to show.
    """

    args: Namespace
    config: OmniConfig
    max_model_lens: Mapping[str, int]
    tasks: tuple[SupportedTask, ...]
    metrics: Path


def serve(
    tether: ServerTether,
    sock: socket.socket,
    listener: socket.socket,
    loads: MutableSequence[int],
    index: int,
    blueprint: Blueprint,
) -> None:
    """The process, from its start to its end.

    Args:
        sock: connected to the process of the engines.
        listener: which all front ends share.
        loads: open connections of each front end.
    """
    enter_stage_process()
    name_stage_process(tether.stage)
    set_process_title("APIServer")
    logging.getLogger("vllm_omni").parent = logging.getLogger("vllm")
    configure_logging_from_args(blueprint.args)
    try:
        uvloop.run(_serve(sock, listener, loads, index, blueprint))
    except Exception as exc:
        # What it could not start with has been reported; an error that is expected has a message of its own.
        logger.error("%s: %s", tether.stage, exc, exc_info=None if isinstance(exc, OmniError) else exc)
        raise SystemExit(1) from exc
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # as it ends: what libraries do at exit must not be interrupted


def share_metrics(directory: Path) -> None:
    """Keep metrics that are made from now on in files."""
    os.environ[MULTIPROCESS_DIRECTORY] = str(directory)
    prometheus_client.values.ValueClass = prometheus_client.values.get_value_class()


async def _serve(
    sock: socket.socket, listener: socket.socket, loads: MutableSequence[int], index: int, blueprint: Blueprint
) -> None:
    from vllm_omni.entrypoints.openai.app import build_omni_app, serve_app

    args = blueprint.args
    orchestrator: RemoteOrchestrator
    statuses: list[Status] = []  # before there is an orchestrator

    def measure() -> tuple[int, int]:
        budget = orchestrator.media_budget
        return budget.received.num_held_bytes, budget.num_held_bytes

    def stop() -> None:
        os.kill(os.getpid(), signal.SIGTERM)  # which vLLM's server handles

    link = EngineLink(statuses.append, stop, measure)
    await link.connect(sock)
    try:
        orchestrator = RemoteOrchestrator(blueprint.config, link, blueprint.max_model_lens, blueprint.tasks)
        omni = await asyncio.to_thread(RemoteOmni, orchestrator, link)
        for status in statuses:
            orchestrator.update(status)
        link.on_status = orchestrator.update
        share_metrics(blueprint.metrics)  # those of the application: what was made before counts where the engines are
        app: FastAPI = await build_omni_app(omni, args, link.turn, link.take_place)
        forward_the_rest(app, link)
        _report_ready_of(app, link)
        await serve_app(app, omni, args, listener, (loads, index))
    except Exception as exc:
        link.report_ready(str(exc))  # which it no longer is, or never was
        raise


def _report_ready_of(app: FastAPI, link: EngineLink) -> None:
    """Report it once the server has read its settings, and is about to accept connections."""
    upstream = app.router.lifespan_context

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[Any]:
        async with upstream(app) as state:
            link.report_ready()
            yield state

    app.router.lifespan_context = lifespan
