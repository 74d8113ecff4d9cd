"""Shared by the routes of a diffusion pipeline: the body, the model's name, input images, the request to the engine."""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import AsyncExitStack, aclosing, nullcontext
from dataclasses import dataclass, field
from typing import Annotated, Any

from fastapi import Depends, Request
from PIL import Image
from starlette.datastructures import FormData, UploadFile
from vllm.entrypoints.openai.models.serving import OpenAIModelRegistry
from vllm.entrypoints.serve.engine.protocol import ModelList
from vllm.multimodal.media.base import MediaWithBytes
from vllm.utils import random_uuid

from vllm_omni.engine.media_connector import BudgetedConnector, media_limits
from vllm_omni.engine.rejection import rejection
from vllm_omni.entrypoints.async_omni import AsyncOmni
from vllm_omni.entrypoints.openai.arrivals import deadline_of, priority_of
from vllm_omni.entrypoints.openai.diffusion_protocol import DiffusionFields, name_field
from vllm_omni.entrypoints.openai.media_metrics import ImageMetrics, MediaTimer
from vllm_omni.errors import InvalidRequest, StorageFull, UnknownModel
from vllm_omni.messages.outputs import OmniRequestOutput, collect
from vllm_omni.names import suggest

ROUTES = {
    "image": "/v1/images/generations",
    "video": "/v1/videos/sync",
    "audio": "/v1/audio/generate",
}
"""Output modality of a pipeline -> its route."""

# Bytes that an image takes at its peak, by decoded bytes, while it is decoded (a WebP) and sent to the engine.
SENDING_FACTOR = 4


@dataclass
class InputImages:
    """Images of a request, which are read only when nothing else keeps the request from starting."""

    # Field of the body, and what ``DiffusionServing.read_image`` reads; empty once it has.
    given: Sequence[tuple[str, Any]] = ()
    sizes: list[tuple[int, int]] = field(default_factory=list)  # of those that have been read, [width, height]


class DiffusionModels(OpenAIModelRegistry):
    """``/v1/models`` for a model without a context length."""

    async def show_available_models(self) -> ModelList:
        models: ModelList = await super().show_available_models()
        for card in models.data:
            card.max_model_len = None
        return models


class DiffusionServing:
    """Sends the requests of the routes to the engine.

    Args:
        models: the names under which the pipeline is served.
        modality: of the output.
        image_metrics: count the times of images; None: they are not measured.
    """

    def __init__(
        self, omni: AsyncOmni, models: OpenAIModelRegistry, modality: str, image_metrics: ImageMetrics | None = None
    ) -> None:
        self._omni = omni
        self._models = models
        self._image_metrics = image_metrics
        self.pipeline = omni.orchestrator.pipeline
        self.modality = modality
        config = omni.model_config
        self._media = BudgetedConnector(
            allowed_local_media_path=config.allowed_local_media_path,
            allowed_media_domains=config.allowed_media_domains,
            factor=SENDING_FACTOR,
        )

    def model_name(self, fields: DiffusionFields) -> str:
        return fields.model or self._models.model_name()

    def check(self, modality: str) -> None:
        """Raise ``InvalidRequest`` if the pipeline has another output modality; the message names its route."""
        if modality != self.modality:
            where = ROUTES[self.modality]
            raise InvalidRequest(
                f"the output of this model is {self.modality}, not {modality}: POST {where}", param="model"
            )

    async def outputs(
        self, prompt: str, fields: DiffusionFields, images: InputImages, raw_request: Request
    ) -> AsyncGenerator[OmniRequestOutput, None]:
        """Stream the engine's outputs; closing the generator aborts the request.

        Until the engine has the images, they hold a part of the server's budget.

        Raises:
            InvalidRequest: names the invalid field as in the body.
            UnknownModel: the request names another one.
            Overloaded: too many requests with images are being read.
            StageFailed: the stage failed on the request.
            DeadlineExceeded: the deadline passed.
        """
        if await self._models.check_model(fields.model) is not None:
            served = [model.name for model in self._models.base_model_paths]
            raise UnknownModel(
                f"model = {fields.model!r} is not served: {suggest(str(fields.model), served)}", param="model"
            )
        self._omni.check_admission()
        timer, deadline = MediaTimer(self._image_metrics), deadline_of(fields.deadline_s, raw_request)
        request_id = f"{self.modality}-{raw_request.headers.get('X-Request-Id') or random_uuid()}"
        with self._omni.orchestrator.media_budget.hold() if images.given else nullcontext() as holding:
            media = {}
            if holding is not None:
                async with deadline.limit("the reading of the input images"):
                    holding.media = await self._read(images)
                media = {"multi_modal_data": {"image": holding.media}}
            async with deadline.limit("the reading of the prompt"):
                engine_prompt = await self._engine_prompt(prompt, media)
            try:
                outputs = self._omni.generate(
                    engine_prompt,
                    self._stage_params(fields),
                    request_id,
                    priority=priority_of(fields.priority, raw_request),
                    deadline_s=deadline.left_s(),
                    **self._arguments(fields, raw_request),
                )
                async with aclosing(outputs):
                    async for output in outputs:
                        if "images" in output.multimodal_output or output.preview is not None:
                            timer.piece()
                            if output.finished:
                                timer.end()
                        yield output
            except InvalidRequest as exc:
                raise name_field(exc, type(fields)) from exc

    async def _engine_prompt(self, prompt: str, media: Mapping[str, Any]) -> Any:
        return {"prompt": prompt, **media}

    def _stage_params(self, fields: DiffusionFields) -> Any:
        return fields.params()

    def _arguments(self, fields: DiffusionFields, raw_request: Request) -> dict[str, Any]:
        """Further arguments of ``AsyncOmni.generate``."""
        return {}

    async def answer(
        self, prompt: str, fields: DiffusionFields, images: InputImages, raw_request: Request
    ) -> OmniRequestOutput:
        """Collect the whole answer; see ``outputs``."""
        return await collect(self.outputs(prompt, fields, images, raw_request))

    # -- input images -------------------------------------------------------------------------------------------------

    async def _read(self, images: InputImages) -> list[Image.Image]:
        read = [await self.read_image(source, name) for name, source in images.given]
        images.sizes, images.given = [image.size for image in read], ()
        return read

    async def read_image(self, given: Any, field: str) -> Image.Image:
        """Read an input image: an uploaded file, its bytes, a URL (http, https, data) or base64.

        Raises:
            InvalidRequest: the image cannot be fetched or decoded.
        """
        try:
            if isinstance(given, UploadFile | bytes):
                file = given if isinstance(given, bytes) else await read_upload(given)
                image = await self._media.decode_image(file)
            elif isinstance(given, str):
                url = given if ":" in given[:8] else f"data:image/*;base64,{given}"
                image = await self._media.fetch_image_async(url)
            else:
                raise ValueError(f"must be a file or a URL, not {type(given).__name__}")
        except InvalidRequest as exc:  # it is too large
            raise InvalidRequest(f"{field}: {exc}", param=field) from exc
        except Exception as exc:
            raise InvalidRequest(f"{field}: the image cannot be read: {rejection(exc)}", param=field) from exc
        return image.media if isinstance(image, MediaWithBytes) else image


async def read_upload(file: UploadFile) -> bytes:
    """Read an uploaded file into memory; until then, a large one lies on disk.

    Raises:
        InvalidRequest: it is too large.
    """
    media_limits().check_file(file.size or 0)
    return await file.read()


async def read_values(raw_request: Request) -> AsyncGenerator[dict[str, Any], None]:
    """Read the fields of the body, JSON or a form; a form field given several times becomes a list.

    A dependency of the routes, so that the body has been read before they start to wait for a disconnect. Files that
    were uploaded stay open until the answer is complete.

    Raises:
        InvalidRequest: the body is neither, or is not an object.
        RequestTooLarge: it is too large.
        Overloaded: all bodies together are.
        StorageFull: the disk has no room for its files.
    """
    async with AsyncExitStack() as stack:
        yield await _read_body(raw_request, stack)


async def _read_body(raw_request: Request, stack: AsyncExitStack) -> dict[str, Any]:
    kind = raw_request.headers.get("content-type", "").lower().split(";", maxsplit=1)[0].strip()
    if kind in ("multipart/form-data", "application/x-www-form-urlencoded"):
        try:
            return _fields(await stack.enter_async_context(raw_request.form()))
        except OSError as exc:
            said = f"the files of the form cannot be kept in {tempfile.gettempdir()} (TMPDIR): {exc.strerror}"
            raise StorageFull(said) from exc
    if kind not in ("", "application/json"):
        raise InvalidRequest(f"content-type {kind!r}: must be application/json or multipart/form-data")
    body = await raw_request.body()
    try:
        values = json.loads(body)
    except ValueError as exc:
        raise InvalidRequest(f"the body is not valid JSON: {exc}") from exc
    if not isinstance(values, dict):
        raise InvalidRequest("the body must be an object")
    return values


Values = Annotated[dict[str, Any], Depends(read_values)]
"""The body of a request, as the parameter of a route's handler."""


def _fields(form: FormData) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for key in form:
        name = key.removesuffix("[]")  # OpenAI's clients mark lists with brackets
        if (part := re.fullmatch(r"(\w+)\[(\w+)\]", name)) and isinstance(of := values.setdefault(part[1], {}), dict):
            of[part[2]] = form[key]  # and fields of objects
            continue
        several = [*as_list(values.get(name)), *form.getlist(key)]
        values[name] = several if len(several) > 1 else several[0]
    return values


def read_mapping(values: dict[str, Any], name: str) -> None:
    """Decode, in place, a form field that has JSON in it.

    Raises:
        InvalidRequest: the field is not valid JSON.
    """
    if isinstance(given := values.get(name), str):
        try:
            values[name] = json.loads(given)
        except ValueError as exc:
            raise InvalidRequest(f"{name}: must be an object in JSON: {exc}", param=name) from exc


def as_list(value: Any) -> list[Any]:
    return [] if value is None else value if isinstance(value, list) else [value]
