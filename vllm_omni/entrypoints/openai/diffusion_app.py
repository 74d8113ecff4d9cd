"""The server of a diffusion pipeline: vLLM's application with these routes, without those that need a tokenizer."""

from __future__ import annotations

from argparse import Namespace
from typing import Annotated, Any

from fastapi import APIRouter, Depends, FastAPI, Request
from fastapi.responses import Response
from starlette.routing import Route
from vllm.entrypoints.launchers.app import build_app
from vllm.entrypoints.openai.models.protocol import BaseModelPath
from vllm.entrypoints.serve.utils.api_utils import load_aware_call, with_cancellation

from vllm_omni.entrypoints.async_omni import AsyncOmni
from vllm_omni.entrypoints.openai.diffusion import DiffusionModels, DiffusionServing, describe, read_values
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

FORMS = ("application/json", "multipart/form-data")
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

router = APIRouter()
Values = Annotated[dict[str, Any], Depends(read_values)]  # the body


@router.post("/v1/images/generations", openapi_extra=describe(ImageRequest), response_model=None)
@with_cancellation
@load_aware_call
async def generate_images(raw_request: Request, values: Values) -> Response:
    """Generate images from a text."""
    images: OmniServingImages = raw_request.app.state.serving_images
    return await images.generate(values, raw_request)


@router.post("/v1/images/edits", openapi_extra=describe(ImageRequest, FORMS), response_model=None)
@with_cancellation
@load_aware_call
async def edit_images(raw_request: Request, values: Values) -> Response:
    """Generate images from a text and images."""
    images: OmniServingImages = raw_request.app.state.serving_images
    return await images.edit(values, raw_request)


@router.post("/v1/videos/sync", openapi_extra=describe(VideoRequest, FORMS), response_model=None)
@with_cancellation
@load_aware_call
async def generate_video(raw_request: Request, values: Values) -> Response:
    """Generate a video, as a file."""
    files: OmniServingFiles = raw_request.app.state.serving_files
    return await files.video(values, raw_request)


@router.post("/v1/audio/generate", openapi_extra=describe(SoundRequest), response_model=None)
@with_cancellation
@load_aware_call
async def generate_sound(raw_request: Request, values: Values) -> Response:
    """Generate a sound, as a file."""
    files: OmniServingFiles = raw_request.app.state.serving_files
    return await files.sound(values, raw_request)


@router.post("/v1/chat/completions", openapi_extra=describe(ImageChatRequest), response_model=None)
@with_cancellation
@load_aware_call
async def complete_chat(raw_request: Request, values: Values) -> Response:
    """Generate an image or a sound from the last message."""
    chat: OmniServingImageChat = raw_request.app.state.serving_chat
    return await chat.complete(values, raw_request)


def build_diffusion_app(omni: AsyncOmni, args: Namespace) -> FastAPI:
    """Build vLLM's application with these routes, and the state that its own routes read."""
    app = build_app(args, (), omni.model_config)
    app.router.routes[:] = [
        route for route in app.router.routes if not (isinstance(route, Route) and route.path in TEXT_ROUTES)
    ]
    app.include_router(router)
    names = args.served_model_name or [args.model]
    models = DiffusionModels(omni.model_config, [BaseModelPath(name=name, model_path=args.model) for name in names])
    image_metrics = None if args.disable_log_stats else ImageMetrics()
    serving = DiffusionServing(omni, models, image_metrics)
    state = app.state
    state.engine_client, state.vllm_config, state.args = omni, omni.vllm_config, args
    state.log_stats = not args.disable_log_stats
    state.enable_server_load_tracking, state.server_load_metrics = args.enable_server_load_tracking, 0
    state.openai_serving_models = models
    state.serving_images = OmniServingImages(serving, args.sse_keep_alive_interval)
    state.serving_files = OmniServingFiles(serving)
    state.serving_chat = OmniServingImageChat(serving)
    return app
