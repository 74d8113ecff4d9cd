"""What the routes of a diffusion pipeline have in common: the model's name, the input images, the request itself."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from typing import Any

from fastapi import Request
from PIL import Image
from pydantic import BaseModel
from starlette.datastructures import FormData, UploadFile
from vllm.entrypoints.openai.models.serving import OpenAIModelRegistry
from vllm.entrypoints.serve.engine.protocol import ErrorResponse, ModelList
from vllm.exceptions import VLLMNotFoundError
from vllm.multimodal.media import MediaConnector
from vllm.multimodal.media.base import MediaWithBytes
from vllm.multimodal.media.image import ImageMediaIO
from vllm.utils import random_uuid

from vllm_omni.engine.rejection import rejection
from vllm_omni.entrypoints.async_omni import AsyncOmni
from vllm_omni.entrypoints.openai.diffusion_protocol import DiffusionFields, name_field
from vllm_omni.entrypoints.openai.image_metrics import ImageMetrics, ImageTimer
from vllm_omni.errors import InvalidRequest
from vllm_omni.messages.outputs import OmniRequestOutput

ROUTES = {
    "image": "/v1/images/generations",
    "video": "/v1/videos/sync",
    "audio": "/v1/audio/generate",
}
"""What a pipeline answers in -> where it is asked for."""


class DiffusionModels(OpenAIModelRegistry):
    """The names of a model without a length of context."""

    async def show_available_models(self) -> ModelList:
        models: ModelList = await super().show_available_models()
        for card in models.data:
            card.max_model_len = None
        return models


class DiffusionServing:
    """Asks the engine for what the routes answer.

    Args:
        models: the names under which the pipeline is served.
        image_metrics: where pictures are timed; None: nowhere.
    """

    def __init__(self, omni: AsyncOmni, models: OpenAIModelRegistry, image_metrics: ImageMetrics | None = None) -> None:
        self._omni = omni
        self._models = models
        self._image_metrics = image_metrics
        self.pipeline = omni.orchestrator.pipeline
        config = omni.model_config
        self._media = MediaConnector(
            allowed_local_media_path=config.allowed_local_media_path,
            allowed_media_domains=config.allowed_media_domains,
        )

    @property
    def modality(self) -> str:
        """What the pipeline answers in."""
        return next(iter(self.pipeline.modalities))

    def model_name(self, fields: DiffusionFields) -> str:
        return fields.model or self._models.model_name()

    def check(self, modality: str) -> None:
        """Raises ``InvalidRequest`` if the pipeline answers in something else, with where that is asked for."""
        if modality != self.modality:
            where = ROUTES[self.modality]
            raise InvalidRequest(
                f"this model answers in {self.modality}, not in {modality}: POST {where}", param="model"
            )

    async def outputs(
        self,
        prompt: str,
        fields: DiffusionFields,
        images: Sequence[Image.Image],
        raw_request: Request,
    ) -> AsyncGenerator[OmniRequestOutput, None]:
        """What the engine answers.

        Closing it aborts the request.

        Raises:
            InvalidRequest: naming the field at fault as the body calls it.
            VLLMNotFoundError: another model's name.
            StageFailed: the stage failed it.
        """
        unknown = await self._models.check_model(fields.model)
        if isinstance(unknown, ErrorResponse):
            raise VLLMNotFoundError(unknown.error.message)
        self._omni.check_admission()
        timer = ImageTimer(self._image_metrics)
        request_id = f"{self.modality}-{raw_request.headers.get('X-Request-Id') or random_uuid()}"
        media = {"multi_modal_data": {"image": list(images)}} if images else {}
        try:
            outputs = self._omni.generate({"prompt": prompt, **media}, fields.params(), request_id)
            async with aclosing(outputs):
                async for output in outputs:
                    if "images" in output.multimodal_output or output.preview is not None:
                        timer.picture(is_finished=output.finished)
                    yield output
        except InvalidRequest as exc:
            raise name_field(exc, type(fields)) from exc

    async def answer(
        self, prompt: str, fields: DiffusionFields, images: Sequence[Image.Image], raw_request: Request
    ) -> OmniRequestOutput:
        """The whole answer; see ``outputs``."""
        answer: OmniRequestOutput | None = None
        async with aclosing(self.outputs(prompt, fields, images, raw_request)) as outputs:
            async for output in outputs:
                if answer is None:
                    answer = output
                else:
                    answer.add(output, aggregate=True)
        assert answer is not None, "a request ends with an output or an error"
        return answer

    # -- input images -------------------------------------------------------------------------------------------------

    async def read_image(self, given: Any, field: str) -> Image.Image:
        """An image of a request: an uploaded file, a URL (http, https, data) or base 64.

        Raises:
            InvalidRequest: it cannot be had, or is no image.
        """
        try:
            if isinstance(given, UploadFile):
                image = await asyncio.to_thread(ImageMediaIO().load_bytes, await given.read())
            elif isinstance(given, str) and ":" in given[:8]:
                image = await self._media.fetch_image_async(given)
            elif isinstance(given, str):
                image = await asyncio.to_thread(ImageMediaIO().load_base64, "image", given)
            else:
                raise ValueError(f"it must be a file or a URL, not {type(given).__name__}")
        except Exception as exc:
            raise InvalidRequest(f"{field}: no image that can be read: {rejection(exc)}", param=field) from exc
        return image.media if isinstance(image, MediaWithBytes) else image


async def read_values(raw_request: Request) -> AsyncGenerator[dict[str, Any], None]:
    """The body's fields, from JSON or from a form; of a form's field that is there several times, a list.

    A dependency of the routes, so that the body has been read when they begin to listen for the client's leaving; what
    was uploaded stays open until they have answered.

    Raises:
        InvalidRequest: it is neither, or no mapping.
    """
    kind = raw_request.headers.get("content-type", "").lower().split(";", maxsplit=1)[0].strip()
    if kind in ("multipart/form-data", "application/x-www-form-urlencoded"):
        form = await raw_request.form()
        try:
            yield _fields(form)
        finally:
            await form.close()
    elif kind in ("", "application/json"):
        try:
            values = json.loads(await raw_request.body())
        except ValueError as exc:
            raise InvalidRequest(f"the body is no JSON: {exc}") from exc
        if not isinstance(values, dict):
            raise InvalidRequest("the body must be an object")
        yield values
    else:
        raise InvalidRequest(f"content-type {kind!r}: must be application/json or multipart/form-data")


def _fields(form: FormData) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for key in form:
        name = key.removesuffix("[]")  # OpenAI's clients write lists so
        several = [*as_list(values.get(name)), *form.getlist(key)]
        values[name] = several if len(several) > 1 else several[0]
    return values


def read_mapping(values: dict[str, Any], name: str) -> None:
    """Make a field of a form that is JSON a mapping, in place.

    Raises:
        InvalidRequest: it is no JSON.
    """
    if isinstance(given := values.get(name), str):
        try:
            values[name] = json.loads(given)
        except ValueError as exc:
            raise InvalidRequest(f"{name}: must be an object in JSON: {exc}", param=name) from exc


def event(name: str, values: Mapping[str, Any]) -> str:
    """One event of a stream."""
    return f"event: {name}\ndata: {json.dumps(values, separators=(',', ':'))}\n\n"


def describe(body: type[BaseModel], kinds: Sequence[str] = ("application/json",)) -> dict[str, Any]:
    """Of a route that reads its body itself, for its documentation."""
    schema = body.model_json_schema()
    return {"requestBody": {"required": True, "content": {kind: {"schema": schema} for kind in kinds}}}


def as_list(value: Any) -> list[Any]:
    return [] if value is None else value if isinstance(value, list) else [value]
