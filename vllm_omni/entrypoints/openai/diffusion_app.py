"""The server of a diffusion pipeline: vLLM's application with these routes, without those that need a tokenizer."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel
from starlette.routing import Route
from vllm.entrypoints.launchers.app import build_app
from vllm.entrypoints.openai.models.protocol import BaseModelPath
from vllm.entrypoints.serve.utils.api_utils import load_aware_call, with_cancellation

from vllm_omni.entrypoints.async_omni import AsyncOmni
from vllm_omni.entrypoints.openai.diffusion import DiffusionModels, DiffusionServing, describe
from vllm_omni.entrypoints.openai.diffusion_protocol import (
    ImageChatRequest,
    ImageRequest,
    SoundRequest,
    VideoRequest,
)
from vllm_omni.entrypoints.openai.image_chat import OmniServingImageChat
from vllm_omni.entrypoints.openai.images import OmniServingImages
from vllm_omni.entrypoints.openai.media_files import OmniServingFiles
from vllm_omni.entrypoints.openai.media_metrics import ImageMetrics

JSON = ("application/json",)
FORMS = (*JSON, "multipart/form-data")
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


def build_diffusion_app(omni: AsyncOmni, args: Namespace) -> FastAPI:
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
    add_media_routes(app, {serving.modality: serving}, args.sse_keep_alive_interval)
    _add_route(
        app,
        "/v1/chat/completions",
        OmniServingImageChat(serving).complete,
        ImageChatRequest,
        JSON,
        "Generate an image or a sound from the last message.",
    )
    return app


def add_media_routes(app: FastAPI, servings: Mapping[str, DiffusionServing], keep_alive_s: float) -> None:
    """Add the routes of images, videos and sounds; those of other modalities than the model's say which it has.

    Args:
        servings: by output modality of the model.
        keep_alive_s: send a comment after so many seconds of a stream without an event; 0: never.
    """
    for modality in ("image", "video", "audio"):
        serving = servings.get(modality) or next(iter(servings.values()))
        images, files = OmniServingImages(serving, keep_alive_s), OmniServingFiles(serving)
        match modality:
            case "image":
                said = "Generate images from a text."
                _add_route(app, "/v1/images/generations", images.generate, ImageRequest, JSON, said)
                said = "Generate images from a text and images."
                _add_route(app, "/v1/images/edits", images.edit, ImageRequest, FORMS, said)
            case "video":
                _add_route(app, "/v1/videos/sync", files.video, VideoRequest, FORMS, "Generate a video, as a file.")
            case "audio":
                _add_route(app, "/v1/audio/generate", files.sound, SoundRequest, JSON, "Generate a sound, as a file.")


def _add_route(
    app: FastAPI, path: str, answer: Callable[..., Any], body: type[BaseModel], kinds: Sequence[str], description: str
) -> None:
    app.add_api_route(
        path,
        with_cancellation(load_aware_call(answer)),
        methods=["POST"],
        description=description,
        openapi_extra=describe(body, kinds),
        response_model=None,
    )
