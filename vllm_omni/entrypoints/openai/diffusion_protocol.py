"""Bodies of requests to a diffusion pipeline, and their conversion into ``DiffusionParams``."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, ClassVar, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.requests import HTTPConnection

from vllm_omni.config.diffusion_params import DiffusionParams
from vllm_omni.entrypoints.openai.mistakes import invalid_body, shorten
from vllm_omni.entrypoints.openai.protocol import AudioOutput, DeadlineField, PriorityField
from vllm_omni.entrypoints.openai.schema import documented
from vllm_omni.errors import InvalidRequest
from vllm_omni.media.audio import AUDIO_FORMATS
from vllm_omni.media.image import IMAGE_FORMATS
from vllm_omni.media.video import VIDEO_FORMATS

MAX_PARTIAL_IMAGES = 3  # as in OpenAI's API
SIZE = "WIDTHxHEIGHT in pixels, or auto: the pipeline's own."
DEFAULT_NUM_STEPS = 50  # of most pipelines; one that makes fewer steps sends fewer previews than requested


class DiffusionFields(BaseModel):
    """Fields of every route; a missing one is the pipeline's own default."""

    model_config = ConfigDict(extra="forbid")

    WISHES: ClassVar[frozenset[str]] = frozenset()
    """Parameters that no field of the body asks for: where nothing honours them, they have no effect."""

    model: str | None = documented("A name of `/v1/models`; by default, the served model.")
    negative_prompt: str | None = documented("What the output should not show.")
    num_inference_steps: int | None = documented("Denoise steps.", at_least=1)
    guidance_scale: float | None = documented("Strength of the guidance by the prompt.", at_least=0)
    true_cfg_scale: float | None = documented(
        "The same, by a second run of the denoiser, for pipelines to which guidance_scale is an input.", at_least=0
    )
    seed: int | None = documented(
        "Random seed; output i of several has seed + i.", at_least=-(2**63), at_most=2**64 - 1
    )
    cache_threshold: float | None = documented(
        "Of the step cache: larger reuses more; 0 switches it off; by default, the deployment's.", at_least=0
    )
    priority: PriorityField = 0
    deadline_s: DeadlineField = None
    extra_params: dict[str, Any] = Field(
        default={}, description="Further keyword arguments of the pipeline's call, as it names them."
    )

    def params(self) -> dict[str, Any]:
        """Fields of ``DiffusionParams``, by name."""
        same = [name for name in DiffusionParams.__struct_fields__ if name in type(self).model_fields]
        values = {name: value for name in same if (value := getattr(self, name)) is not None}
        return values | ({"extra_args": self.extra_params} if self.extra_params else {})


class ImageRequest(DiffusionFields):
    """OpenAI's request for images, with further parameters of diffusion pipelines."""

    prompt: str = Field(description="What the images show.")
    n: int = documented("Number of images.", default=1, at_least=1)
    size: str = documented(SIZE, default="auto")
    response_format: Literal["b64_json", "url"] | None = Field(
        default=None, description="url: addresses of the files, which expire; by default, the files in base64."
    )
    output_format: str = documented("The files' format.", default="png", values=IMAGE_FORMATS)
    output_compression: int | None = Field(default=None, ge=0, le=100, description="Quality of a jpeg or webp.")
    stream: bool = False
    partial_images: int = Field(default=0, ge=0, le=MAX_PARTIAL_IMAGES, description="Previews in a stream.")
    progress: bool = Field(default=False, description="In a stream, an event after each denoise step.")
    # OpenAI's fields that have no effect here.
    background: Literal["auto", "opaque"] | None = None
    quality: str | None = None
    style: str | None = None
    moderation: str | None = None
    user: str | None = None
    safety_identifier: str | None = None
    input_fidelity: str | None = None

    def params(self) -> dict[str, Any]:
        values = super().params() | read_size(self.size) | {"num_outputs_per_prompt": self.n}
        if self.partial_images:
            num_steps = max(self.num_inference_steps or DEFAULT_NUM_STEPS, 1)
            values["preview_every"] = max(num_steps // (self.partial_images + 1), 1)  # evenly, before the last step
        return values


class VideoRequest(DiffusionFields):
    """Request for a video, in the form of vLLM-Omni's server."""

    prompt: str = Field(description="What the video shows.")
    size: str = documented(SIZE, default="auto")
    seconds: float | None = Field(default=None, gt=0, description="Instead of num_frames.")
    num_frames: int | None = documented("Number of frames.", at_least=1)
    fps: int | None = documented("Frames per second.", at_least=1)
    guidance_scale_2: float | None = documented("guidance_scale of a second expert (Wan2.2).", at_least=0)
    output_format: str = documented("The file's format.", default="mp4", values=VIDEO_FORMATS)
    user: str | None = None

    def params(self) -> dict[str, Any]:
        return super().params() | read_size(self.size)


class SoundRequest(DiffusionFields):
    """Request for a sound, in the form of vLLM-Omni's server."""

    input: str = Field(description="Description of the sound.")
    audio_length: float | None = Field(default=None, gt=0, description="Seconds.")
    audio_start: float = Field(default=0.0, ge=0, description="Start within the generated sound, seconds.")
    response_format: str = documented("The file's format.", default="wav", values=AUDIO_FORMATS)
    return_url: bool = Field(default=False, description="Answer with the address of the file, which expires.")
    user: str | None = None

    def params(self) -> dict[str, Any]:
        values = super().params()
        if self.audio_length is not None:
            times = {"audio_start_in_s": self.audio_start, "audio_end_in_s": self.audio_start + self.audio_length}
            values["extra_args"] = times | values.get("extra_args", {})
        elif self.audio_start:
            raise InvalidRequest(f"audio_start = {self.audio_start:g}: give audio_length, too", param="audio_length")
        return values


class ImageChatRequest(DiffusionFields):
    """A chat request to an image or sound model; fields for sampling text are ignored."""

    model_config = ConfigDict(extra="allow")

    messages: list[dict[str, Any]] = Field(min_length=1)
    modalities: list[str] | None = documented("Modalities of the reply; by default, those of the pipeline.")
    audio: AudioOutput | None = documented("The file format of a sound model's reply, which has no voice.")
    n: int | None = documented("Number of outputs.", at_least=1)
    num_outputs_per_prompt: int | None = documented("The same.", at_least=1)
    size: str = documented(SIZE, default="auto")
    height: int | None = documented("Pixels, in place of size.", at_least=1)
    width: int | None = documented("Pixels, in place of size.", at_least=1)
    num_frames: int | None = documented("Number of frames.", at_least=1)
    fps: int | None = documented("Frames per second.", at_least=1)
    stream: bool = False

    def params(self) -> dict[str, Any]:
        num_outputs = {"num_outputs_per_prompt": self.num_outputs_per_prompt or self.n or 1}
        return read_size(self.size) | super().params() | num_outputs


class ImageAnswer(BaseModel):
    b64_json: str | None = Field(default=None, description="The file in base64.")
    url: str | None = Field(default=None, description="Its address, with `response_format` url.")


class ImagesAnswer(BaseModel):
    """OpenAI's answer with images."""

    created: int
    background: Literal["opaque"] = "opaque"
    data: list[ImageAnswer]
    output_format: str
    size: str
    usage: dict[str, Any]
    expires_at: int | None = Field(default=None, description="Of addresses, seconds since 1970.")


class SoundAnswer(BaseModel):
    """The address of a sound, with `return_url`."""

    created: int
    url: str
    expires_at: int


class ChatAnswer(BaseModel):
    """OpenAI's answer of a chat; `content` of a message has the images, `audio` the sound."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[dict[str, Any]]
    usage: dict[str, Any]


Body = TypeVar("Body", bound=BaseModel)

_FIELD_OF = {
    "height": "size",
    "width": "size",
    "num_outputs_per_prompt": "n",
    "extra_args": "extra_params",
    "audio_end_in_s": "audio_length",
}
"""Field of ``DiffusionParams``, or argument of a pipeline -> its name in the bodies, where that differs."""


def read_body(body: type[Body], values: Mapping[str, Any]) -> Body:
    """Parse a body. A form has only texts, which are converted to numbers where a field is one.

    Raises:
        InvalidRequest: names the field, and for an unknown one the nearest.
    """
    try:
        return body.model_validate(values)
    except ValidationError as exc:
        raise invalid_body(exc.errors(include_url=False), body) from None


def read_query(query: type[Body], raw_request: HTTPConnection) -> Body:
    """Parse the query of an address, as ``read_body`` a body."""
    return read_body(query, dict(raw_request.query_params))


def name_field(exc: InvalidRequest, body: type[BaseModel]) -> InvalidRequest:
    """The same error with the field's name in the body."""
    name = exc.param
    if name is None or name in body.model_fields:
        return exc
    fields = (_FIELD_OF.get(name), None if name in DiffusionParams.__struct_fields__ else "extra_params")
    field = next((one for one in fields if one in body.model_fields), None)
    return exc if field is None else InvalidRequest(f"{field}: {exc}", param=field)


def read_size(size: str) -> dict[str, int]:
    """Parse a size into ``{"height": ..., "width": ...}``, empty for "auto".

    Raises:
        InvalidRequest: the size has another form.
    """
    if size == "auto":
        return {}
    if (match := re.fullmatch(r"(-?\d{1,9})[xX](-?\d{1,9})", size.strip())) is None:
        raise InvalidRequest(
            f"size = {shorten(size)}: must be 'auto' or WIDTHxHEIGHT, for example 1024x768", param="size"
        )
    return {"width": int(match[1]), "height": int(match[2])}
