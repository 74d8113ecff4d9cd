"""The server of a diffusion pipeline: vLLM's application with these routes, without those that need a tokenizer."""

from __future__ import annotations

from argparse import Namespace

from fastapi import FastAPI
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
    serving = DiffusionServing(omni, models, image_metrics)
    state = app.state
    state.engine_client, state.vllm_config, state.args = omni, omni.vllm_config, args
    state.log_stats = not args.disable_log_stats
    state.enable_server_load_tracking, state.server_load_metrics = args.enable_server_load_tracking, 0
    state.openai_serving_models = models
    images, files = OmniServingImages(serving, args.sse_keep_alive_interval), OmniServingFiles(serving)
    for path, answer, body, kinds, description in (
        ("/v1/images/generations", images.generate, ImageRequest, JSON, "Generate images from a text."),
        ("/v1/images/edits", images.edit, ImageRequest, FORMS, "Generate images from a text and images."),
        ("/v1/videos/sync", files.video, VideoRequest, FORMS, "Generate a video, as a file."),
        ("/v1/audio/generate", files.sound, SoundRequest, JSON, "Generate a sound, as a file."),
        (
            "/v1/chat/completions",
            OmniServingImageChat(serving).complete,
            ImageChatRequest,
            JSON,
            "Generate an image or a sound from the last message.",
        ),
    ):
        app.add_api_route(
            path,
            with_cancellation(load_aware_call(answer)),
            methods=["POST"],
            description=description,
            openapi_extra=describe(body, kinds),
            response_model=None,
        )
    return app
