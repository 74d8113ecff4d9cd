"""The server of a diffusion pipeline: vLLM's application with these routes, without those that need a tokenizer."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Mapping
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel
from starlette.routing import Route
from vllm.entrypoints.launchers.app import build_app
from vllm.entrypoints.openai.models.protocol import BaseModelPath
from vllm.entrypoints.serve.utils.api_utils import load_aware_call, with_cancellation

from vllm_omni.engine.running import RunningRequests
from vllm_omni.entrypoints.async_omni import AsyncOmni
from vllm_omni.entrypoints.openai.diffusion import DiffusionModels, DiffusionServing
from vllm_omni.entrypoints.openai.diffusion_protocol import (
    ChatAnswer,
    ImageChatRequest,
    ImageRequest,
    ImagesAnswer,
    SoundAnswer,
    SoundRequest,
    VideoRequest,
)
from vllm_omni.entrypoints.openai.image_chat import OmniServingImageChat
from vllm_omni.entrypoints.openai.images import IMAGE_SCHEMAS, OmniServingImages
from vllm_omni.entrypoints.openai.media_files import OmniServingFiles
from vllm_omni.entrypoints.openai.media_metrics import ImageMetrics
from vllm_omni.entrypoints.openai.results import FILE_NAME, FILE_ROUTE, FileQuery, Results
from vllm_omni.entrypoints.openai.schema import answers, describe, describe_query, file_answers
from vllm_omni.entrypoints.openai.video_jobs import OmniServingVideos
from vllm_omni.entrypoints.openai.video_protocol import (
    REFERENCES,
    Video,
    VideoContentQuery,
    VideoDeleted,
    VideoList,
    VideoListQuery,
)
from vllm_omni.entrypoints.openai.videos import VideoMaker

JSON = ("application/json",)
FORMS = (*JSON, "multipart/form-data")
VIDEOS = "/v1/videos"
UNAVAILABLE = (HTTPStatus.SERVICE_UNAVAILABLE, HTTPStatus.GATEWAY_TIMEOUT)
FILE_ERRORS = (HTTPStatus.FORBIDDEN, HTTPStatus.CONFLICT, HTTPStatus.GONE, HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE)
TEXT_ROUTES = (
    "/tokenize",
    "/detokenize",
    "/tokenizer_info",
    "/v1/systemone",
    "/invocations",
    "/v1/load_lora_adapter",
    "/v1/unload_lora_adapter",
)
"""Routes that vLLM has for every task and that a pipeline without a tokenizer cannot answer."""


def build_diffusion_app(omni: AsyncOmni, args: Namespace, results: Results) -> FastAPI:
    """Build vLLM's application with these routes, and the state that its own routes read."""
    app = build_app(args, (), omni.model_config)
    app.router.routes[:] = [
        route for route in app.router.routes if not (isinstance(route, Route) and route.path in TEXT_ROUTES)
    ]
    names = args.served_model_name or [args.model]
    models = DiffusionModels(omni.model_config, [BaseModelPath(name=name, model_path=args.model) for name in names])
    image_metrics = None if args.disable_log_stats else ImageMetrics()
    serving = DiffusionServing(omni, models, omni.orchestrator.medium(), image_metrics)
    state = app.state
    state.engine_client, state.vllm_config, state.args = omni, omni.vllm_config, args
    state.log_stats = not args.disable_log_stats
    state.enable_server_load_tracking, state.server_load_metrics = args.enable_server_load_tracking, 0
    state.openai_serving_models = models
    requests = omni.orchestrator.requests
    add_media_routes(app, {serving.modality: serving}, results, requests, args.sse_keep_alive_interval)
    _add_route(
        app,
        "/v1/chat/completions",
        OmniServingImageChat(serving).complete,
        describe(ImageChatRequest, JSON),
        answers("text/event-stream", model=ChatAnswer),
        "Generate an image or a sound from the last message.",
    )
    return app


def add_media_routes(
    app: FastAPI,
    servings: Mapping[str, DiffusionServing],
    results: Results,
    requests: RunningRequests,
    keep_alive_s: float,
) -> None:
    """Add the routes of images, videos and sounds; those of other modalities than the model's say which it has.

    Args:
        servings: by output modality of the model.
        results: opened here.
        keep_alive_s: send a comment after so many seconds of a stream without an event; 0: never.
    """
    results.open()
    _add_file_route(app, FILE_ROUTE, results.file, FileQuery, "Fetch a result by its signed address.", name=FILE_NAME)
    for modality in ("image", "video", "audio"):
        serving = servings.get(modality) or next(iter(servings.values()))
        files = OmniServingFiles(serving, results)
        match modality:
            case "image":
                images = OmniServingImages(serving, results, keep_alive_s)
                answer = answers("text/event-stream", model=ImagesAnswer, errors=UNAVAILABLE)
                said = "Generate images from a text."
                _add_route(app, "/v1/images/generations", images.generate, describe(ImageRequest, JSON), answer, said)
                body = describe(ImageRequest, FORMS, IMAGE_SCHEMAS)
                said = "Generate images from a text and images."
                _add_route(app, "/v1/images/edits", images.edit, body, answer, said)
            case "video":
                body = describe(VideoRequest, FORMS, REFERENCES)
                said = "Generate a video, as a file."
                _add_route(app, "/v1/videos/sync", files.video, body, file_answers("video/*"), said)
                _add_job_routes(app, OmniServingVideos(VideoMaker(serving), results, requests), body)
            case "audio":
                body = describe(SoundRequest, JSON)
                said = "Generate a sound, as a file."
                _add_route(app, "/v1/audio/generate", files.sound, body, file_answers("audio/*", SoundAnswer), said)


def _add_job_routes(app: FastAPI, videos: OmniServingVideos, body: Mapping[str, Any]) -> None:
    one = f"{VIDEOS}/{{video_id}}"
    created = answers(model=Video, errors=[*UNAVAILABLE, HTTPStatus.TOO_MANY_REQUESTS])
    _add_route(app, VIDEOS, videos.create, body, created, "Start to make a video.")
    query = describe_query(VideoListQuery)
    for path, method, answer, more, model in (
        (VIDEOS, "GET", videos.list, query, VideoList),
        (one, "GET", videos.retrieve, {}, Video),
        (one, "DELETE", videos.delete, {}, VideoDeleted),
    ):
        said: dict[str, Any] = {"openapi_extra": more, "responses": answers(model=model), "response_model": None}
        app.add_api_route(path, answer, methods=[method], **said)
    description = "The file of a complete video, or small pictures of it."
    _add_file_route(app, f"{one}/content", videos.content, VideoContentQuery, description)


def _add_file_route(
    app: FastAPI,
    path: str,
    answer: Callable[..., Any],
    query: type[BaseModel],
    description: str,
    name: str | None = None,
) -> None:
    """Add a route that sends a file, whole, in ranges, or its headers alone."""
    responses = file_answers("*/*", errors=FILE_ERRORS)
    responses[HTTPStatus.PARTIAL_CONTENT.value] = {"description": "The bytes of `Range`.", "content": {"*/*": {}}}
    about: dict[str, Any] = {"description": description, "openapi_extra": describe_query(query), "responses": responses}
    app.add_api_route(path, answer, methods=["GET"], name=name, response_class=Response, **about)
    app.add_api_route(path, answer, methods=["HEAD"], include_in_schema=False, response_class=Response)


def _add_route(
    app: FastAPI,
    path: str,
    answer: Callable[..., Any],
    body: Mapping[str, Any],
    responses: dict[int | str, dict[str, Any]],
    description: str,
) -> None:
    app.add_api_route(
        path,
        with_cancellation(load_aware_call(answer)),
        methods=["POST"],
        description=description,
        openapi_extra=dict(body),
        responses=responses,
        response_class=JSONResponse if "model" in responses[200] else Response,
        response_model=None,
    )
