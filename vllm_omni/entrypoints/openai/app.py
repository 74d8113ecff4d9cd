"""The server: vLLM's application with ``AsyncOmni`` as its engine, and our routes in place of some of its own."""

from __future__ import annotations

import signal
import socket
from argparse import Namespace
from collections.abc import AsyncIterator, Callable, Coroutine, MutableSequence
from contextlib import asynccontextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, NoReturn, TypeAlias

import uvloop
import vllm.envs as envs
from fastapi import APIRouter, Depends, FastAPI, Request, WebSocket
from fastapi.responses import JSONResponse, Response
from fastapi.routing import APIRoute
from starlette.routing import BaseRoute
from vllm.entrypoints.launchers.api_server.app_state import init_app_state
from vllm.entrypoints.launchers.app import build_app
from vllm.entrypoints.launchers.launcher import serve_http, setup_server
from vllm.entrypoints.launchers.utils.server_utils import get_uvicorn_log_config
from vllm.entrypoints.openai.chat_completion import api_router as upstream_chat
from vllm.entrypoints.openai.completion import api_router as upstream_completion
from vllm.entrypoints.serve.utils.api_utils import load_aware_call, validate_json_request, with_cancellation

from vllm_omni.config import OmniConfig
from vllm_omni.deploy.autoscaling import Autoscaling
from vllm_omni.engine.media_connector import check_recording
from vllm_omni.entrypoints.async_omni import AsyncOmni
from vllm_omni.entrypoints.deadline import Deadline
from vllm_omni.entrypoints.openai.api_keys import require_api_keys
from vllm_omni.entrypoints.openai.arrivals import count_arrivals
from vllm_omni.entrypoints.openai.bodies import limit_bodies
from vllm_omni.entrypoints.openai.chat import OmniServingChat
from vllm_omni.entrypoints.openai.completion import OmniServingCompletion
from vllm_omni.entrypoints.openai.diffusion_app import build_diffusion_app
from vllm_omni.entrypoints.openai.draining import draining_router
from vllm_omni.entrypoints.openai.engine import EngineWithArguments, serve_graphs
from vllm_omni.entrypoints.openai.errors import add_error_handlers, body_of
from vllm_omni.entrypoints.openai.fair_keys import FairShare, Turns, share_fairly, take_turns
from vllm_omni.entrypoints.openai.graph_media import add_graph_media_routes
from vllm_omni.entrypoints.openai.job_places import TakePlace
from vllm_omni.entrypoints.openai.media_metrics import AudioMetrics
from vllm_omni.entrypoints.openai.mistakes import check_fields
from vllm_omni.entrypoints.openai.page import page_router
from vllm_omni.entrypoints.openai.protocol import (
    IGNORED_FIELDS,
    OmniBatchChatCompletionRequest,
    OmniChatCompletionRequest,
    OmniCompletionRequest,
    SpeechBatchRequest,
    SpeechRequest,
)
from vllm_omni.entrypoints.openai.replicas import Membership, address_of, open_registry, replicas_router
from vllm_omni.entrypoints.openai.results import Results
from vllm_omni.entrypoints.openai.scaling import scaling_router
from vllm_omni.entrypoints.openai.schema import answers, describe_app
from vllm_omni.entrypoints.openai.speech import OmniServingSpeech
from vllm_omni.entrypoints.openai.speech_batch import create_batch
from vllm_omni.entrypoints.openai.speech_stream import speak_stream
from vllm_omni.entrypoints.openai.traces import traces_router
from vllm_omni.entrypoints.openai.voices import OmniServingVoices, add_voice_routes
from vllm_omni.errors import ConfigError, Unavailable, UnknownModel
from vllm_omni.names import suggest
from vllm_omni.vllm_patches import check_before_decoding, decline_chats

if TYPE_CHECKING:
    from vllm_omni.flow.remote.registry.redis import RedisRegistry

Serve: TypeAlias = "Callable[[AsyncOmni, Namespace, socket.socket, RedisRegistry | None], Coroutine[Any, Any, None]]"
"""Serves a started model by HTTP on a socket, as a member of a registry."""

router = APIRouter()  # of models with audio output
common_router = APIRouter()
COMMON_ROUTERS = (common_router, draining_router, scaling_router, replicas_router, traces_router, page_router)
"""Of every model."""

# How long clients have, once the stages have ended, to send and to receive what is left.
CLOSE_TIMEOUT_S = 5

TEXT_HANDLERS = {
    "openai_serving_chat_batch": "create_batch_chat_completion",
    "openai_serving_responses": "create_responses",
    "anthropic_serving_messages": "create_messages",
    "cohere_serving_chat_v2": "create_chat_v2",
    "serving_tokens": "serve_tokens",
}
"""vLLM's other handlers of requests for text that name a model, in the state of its application -> their method."""

SOUND_HANDLERS = ("openai_serving_transcription", "openai_serving_translation")
"""vLLM's handlers of uploaded sounds, where the model transcribes."""

HTTP_ARGS = (
    "enable_ssl_refresh host port ssl_keyfile ssl_certfile ssl_ca_certs ssl_cert_reqs ssl_ciphers "
    "h11_max_incomplete_event_size h11_max_header_count".split()
)
"""Flags that vLLM's HTTP server takes under the same names."""


@router.post(
    "/v1/chat/completions",
    dependencies=[Depends(validate_json_request)],
    responses=answers("text/event-stream"),
    response_model=None,
)
async def create_chat_completion(request: OmniChatCompletionRequest, raw_request: Request) -> Response | None:
    """Reply to a conversation in text, speech or both: whole, or as a stream of events."""
    response: Response | None = await upstream_chat.create_chat_completion(request, raw_request)
    return response


@router.post(
    "/v1/completions",
    dependencies=[Depends(validate_json_request)],
    responses=answers("text/event-stream"),
    response_model=None,
)
async def create_completion(request: OmniCompletionRequest, raw_request: Request) -> Response | None:
    """Complete a text: whole, or as a stream of events."""
    response: Response | None = await upstream_completion.create_completion(request, raw_request)
    return response


@router.post(
    "/v1/chat/completions/batch",
    dependencies=[Depends(validate_json_request)],
    responses=answers(),
    response_model=None,
)
async def create_batch_chat_completion(request: OmniBatchChatCompletionRequest, raw_request: Request) -> Response:
    """Reply to several conversations at once, in text."""
    check_fields(request, IGNORED_FIELDS)
    response: Response = await upstream_chat.create_batch_chat_completion(request, raw_request)
    return response


@router.post(
    "/v1/audio/speech",
    dependencies=[Depends(validate_json_request)],
    responses=answers("audio/*", "text/event-stream"),
    response_class=Response,
)
@with_cancellation
@load_aware_call
async def create_speech(request: SpeechRequest, raw_request: Request) -> Response:
    """Speak a text: as a file, as a stream of its bytes, or as events."""
    speech: OmniServingSpeech = raw_request.app.state.openai_serving_speech
    return await speech.create_speech(request, raw_request)


@router.post(
    "/v1/audio/speech/batch",
    dependencies=[Depends(validate_json_request)],
    responses=answers(),
    response_model=None,
)
@with_cancellation
@load_aware_call
async def create_speech_batch(request: SpeechBatchRequest, raw_request: Request) -> Response:
    """Speak several texts at once; each has a file or an error of its own."""
    return await create_batch(raw_request.app.state.openai_serving_speech, request, raw_request)


@router.websocket("/v1/audio/speech/stream")
async def create_speech_stream(websocket: WebSocket) -> None:
    """Speak a text that arrives in pieces."""
    speech: OmniServingSpeech = websocket.app.state.openai_serving_speech
    omni: AsyncOmni = websocket.app.state.engine_client
    await speak_stream(websocket, speech.start_stream, omni.orchestrator.requests)


@router.get("/v1/audio/voices")
async def voices(raw_request: Request) -> JSONResponse:
    """The names of voices: the checkpoint's, and the deployment's for them."""
    speech: OmniServingSpeech = raw_request.app.state.openai_serving_speech
    return JSONResponse(speech.voices())


@common_router.get("/health")
async def health(raw_request: Request) -> JSONResponse:
    """The state of each engine; 200 while every stage has one that is alive, else 503 and which stage has not."""
    omni: AsyncOmni = raw_request.app.state.engine_client
    report: dict[str, Any] = {"stages": {name: asdict(status) for name, status in omni.stage_report().items()}}
    if hosts := omni.orchestrator.draining.host_report():
        report["hosts"] = {name: asdict(status) for name, status in hosts.items()}
    if front_ends := raw_request.app.state.front_ends:
        report["front_ends"] = {name: asdict(one.current_status()) for name, one in front_ends.items()}
    try:
        await omni.check_health()
    except Unavailable as exc:
        return JSONResponse(body_of(exc) | report, 503)
    return JSONResponse(report)


@common_router.get("/ready", responses=answers())
async def ready(raw_request: Request) -> JSONResponse:
    """Whether a request of any kind would be accepted now."""
    omni: AsyncOmni = raw_request.app.state.engine_client
    await omni.check_health()
    omni.orchestrator.queue_limits.check(omni.orchestrator.nodes, is_request=False)
    return JSONResponse({"ready": True})


@common_router.get("/v1/models/{model:path}", responses=answers())
async def show_model(model: str, raw_request: Request) -> JSONResponse:
    """One of the models of `/v1/models`."""
    served = (await raw_request.app.state.openai_serving_models.show_available_models()).data
    for one in served:
        if one.id == model:
            return JSONResponse(one.model_dump())
    raise UnknownModel(f"no model {model!r}: {suggest(model, [one.id for one in served])}", param="model")


def run_server(args: Namespace, config: OmniConfig, serve: Serve) -> None:
    """Start every stage, then serve until SIGINT or SIGTERM.

    Args:
        serve: ``serve_here``, or ``serve_front_ends``.

    Raises:
        ConfigError: the port is taken, or a parser of that name is not there.
        StageFailed: a stage did not start, or died.
        KeyboardInterrupt: a signal came before the server was up.
    """

    def interrupt(*_: object) -> NoReturn:
        raise KeyboardInterrupt

    registry = open_registry(args.replica_registry)
    # The port first: if it is taken, no stage was started in vain.
    try:
        _, sock = setup_server(args, reuse_port=False)  # front ends share it
    except (OSError, OverflowError) as exc:  # the latter: a port beyond 65535
        where = args.uds or f"{args.host or '0.0.0.0'}:{args.port}"
        said = exc.strerror or exc if isinstance(exc, OSError) else exc
        raise ConfigError(f"cannot listen at {where}: {said}") from exc
    except KeyError as exc:  # a name of a parser, with those that there are
        raise ConfigError(exc.args[0]) from exc
    # Once it is up, the server has a handler of its own.
    previous = signal.signal(signal.SIGTERM, interrupt)
    try:
        omni = AsyncOmni(config=config, log_stats=not args.disable_log_stats)
        try:
            uvloop.run(serve(omni, args, sock, registry))
        finally:
            omni.shutdown()
    finally:
        signal.signal(signal.SIGTERM, previous)
        sock.close()


async def serve_here(omni: AsyncOmni, args: Namespace, sock: socket.socket, registry: RedisRegistry | None) -> None:
    """Serve in this process until SIGINT or SIGTERM; see ``serve_app``."""
    app = await build_omni_app(omni, args)
    async with administered(app, omni, args, registry):
        await serve_app(app, omni, args, sock)


@asynccontextmanager
async def administered(
    app: FastAPI, omni: AsyncOmni, args: Namespace, registry: RedisRegistry | None
) -> AsyncIterator[None]:
    """Be a member of the registry inside the block, and propose how many replicas there should be."""
    name = (args.served_model_name or [args.model])[0]
    orchestrator, state = omni.orchestrator, app.state
    state.membership = Membership(orchestrator, registry, address_of(args), name)
    state.autoscaling = Autoscaling(
        orchestrator.scaling, orchestrator.engines_of, orchestrator.latency_metrics, is_automatic=args.autoscale
    )
    async with state.membership.joined(), state.autoscaling.running():
        yield


async def serve_app(
    app: FastAPI,
    omni: AsyncOmni,
    args: Namespace,
    sock: socket.socket,
    peer_loads: tuple[MutableSequence[int], int] = ([0], 0),
) -> None:
    """Serve the application until SIGINT or SIGTERM, or until the first stage has died too often.

    Args:
        peer_loads: open connections of each front end, and which one this is.

    Raises:
        StageFailed: the latter.
    """
    results: Results = app.state.results
    log_config = get_uvicorn_log_config(args)
    more: dict[str, Any] = {} if log_config is None else {"log_config": log_config}
    async with results.kept():
        stopped = await serve_http(
            app,
            sock=sock,
            # Upstream then accepts connections itself. libuv closes those for which no file descriptor is free, and
            # once it has lost the one that it keeps for this purpose, it uses a whole core until others are free.
            peer_loads=peer_loads,
            log_level=args.uvicorn_log_level,
            access_log=not args.disable_uvicorn_access_log,
            timeout_keep_alive=envs.VLLM_HTTP_TIMEOUT_KEEP_ALIVE,
            timeout_graceful_shutdown=CLOSE_TIMEOUT_S,
            **{name: getattr(args, name) for name in HTTP_ARGS},
            **more,
        )
        # The server ends by itself when the first stage has died too often; by a signal, it has ended the stages.
        died = omni.dead_error if not omni.is_running and not omni.is_stopped else None
        await omni.aclose()
    await stopped
    if died is not None:
        raise died


async def build_omni_app(
    omni: AsyncOmni, args: Namespace, turn: Turns | None = None, take_place: TakePlace | None = None
) -> FastAPI:
    """vLLM's application over these stages, ready to serve.

    Args:
        turn: gives requests of API keys their turns; those of this process take turns by default.
        take_place: see ``Results``.
    """
    results = Results(take_place)
    if omni.is_diffusion:
        app = build_diffusion_app(omni, args, results)
        for one in COMMON_ROUTERS:
            _replace_routes(app, one)
        _finish(app, omni, args, results, turn)
        return app
    graphs = list(omni.orchestrator.models)[1:]
    names = args.served_model_name or [args.model]
    template = args.chat_template or omni.orchestrator.pipeline.chat_template
    args = Namespace(**{**vars(args), "served_model_name": [*names, *graphs], "chat_template": template})
    tasks = await omni.get_supported_tasks()
    app = build_app(args, tasks, omni.model_config)
    for one in (*COMMON_ROUTERS, router):
        _replace_routes(app, one)
    # vLLM's own handlers answer in text; the chat handler passes the modalities of each request.
    text_engine: Any = EngineWithArguments(omni, Deadline(None), modalities=("text",))
    if omni.orchestrator.pipeline.speaks_prompts:
        decline_chats(omni.renderer)
    await init_app_state(text_engine, app.state, args, tasks)
    metrics = AudioMetrics() if app.state.log_stats else None
    _replace_handlers(app, omni, metrics)
    chat: OmniServingChat = app.state.openai_serving_chat
    app.state.openai_serving_speech = OmniServingSpeech(chat, omni, metrics, args.sse_keep_alive_interval)
    add_graph_media_routes(app, omni, chat, results, args.sse_keep_alive_interval)
    if omni.voices is not None:
        pipeline = omni.orchestrator.pipeline
        add_voice_routes(app, OmniServingVoices(omni.voices, lambda: [*pipeline.speakers, *pipeline.voices]))
    _finish(app, omni, args, results, turn)
    return app


def _replace_handlers(app: FastAPI, omni: AsyncOmni, metrics: AudioMetrics | None) -> None:
    """Change vLLM's handlers, so that they serve the graphs."""
    orchestrator, state = omni.orchestrator, app.state
    for name in SOUND_HANDLERS:
        if (handler := getattr(state, name, None)) is not None:
            check_before_decoding(handler, check_recording)
    state.openai_serving_chat = OmniServingChat.of(state.openai_serving_chat, omni, metrics)
    state.openai_serving_completion = OmniServingCompletion.of(state.openai_serving_completion, omni)
    for name, method in TEXT_HANDLERS.items():
        if orchestrator.pipeline.speaks_prompts:
            setattr(state, name, None)  # vLLM answers that the model does not support it
        elif len(orchestrator.models) > 1 and (handler := getattr(state, name, None)) is not None:
            serve_graphs(handler, method, omni)


def _finish(app: FastAPI, omni: AsyncOmni, args: Namespace, results: Results, turn: Turns | None) -> None:
    app.state.results = results
    app.state.front_ends = {}  # by name, where there are several
    app.state.served_names = args.served_model_name or [args.model]
    count_arrivals(app, omni.orchestrator.requests)
    limit_bodies(app, omni.orchestrator.media_budget.received)
    add_error_handlers(app)
    app.state.needs_key = require_api_keys(app, args)
    if args.fair_api_keys:
        share_fairly(app, turn or take_turns(FairShare()))
    describe_app(app, (args.served_model_name or [args.model])[0])


def _replace_routes(app: FastAPI, ours: APIRouter) -> None:
    """Put our routes before all others, and take out those that they replace."""
    replaced = {operation for route in ours.routes for operation in _operations(route)}
    others = [route for route in app.router.routes if not _operations(route) or _operations(route) - replaced]
    app.router.routes[:] = []
    app.include_router(ours)
    app.router.routes.extend(others)


def _operations(route: BaseRoute) -> set[tuple[str, str]]:
    return {(route.path, method) for method in route.methods} if isinstance(route, APIRoute) else set()
