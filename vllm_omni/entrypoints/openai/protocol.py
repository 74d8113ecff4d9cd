"""Request bodies: vLLM's, extended by modalities, speech and SLOs."""

from __future__ import annotations

import inspect
from typing import Annotated, Any, Literal, Self

from openai.types import completion_create_params as completion
from openai.types.chat import completion_create_params as chat
from pydantic import BaseModel, ConfigDict, Field, ValidationError, WithJsonSchema
from vllm.entrypoints.openai.chat_completion.protocol import BatchChatCompletionRequest, ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.sampling_params import SamplingParams

from vllm_omni.entrypoints.openai.mistakes import check_fields, invalid_body
from vllm_omni.entrypoints.openai.schema import documented
from vllm_omni.errors import InvalidRequest
from vllm_omni.media.audio import AUDIO_FORMATS, SPEEDS
from vllm_omni.messages.slo import SLO_ARGS, Slo

IGNORED_FIELDS = {
    *inspect.get_annotations(chat.CompletionCreateParamsBase),
    *inspect.get_annotations(completion.CompletionCreateParamsBase),
} - {"modalities", "audio"}
"""Fields of OpenAI's requests for text, which have no effect if vLLM does not know them."""


_MILLISECONDS = {"type": ["number", "null"], "exclusiveMinimum": 0}
SLO_SCHEMA = {
    "type": ["object", "null"],
    "properties": {
        "ttft_ms": _MILLISECONDS,
        "tpot_ms": _MILLISECONDS,
        "tpot_share": {"type": ["number", "null"], "exclusiveMinimum": 0, "maximum": 1},
    },
    "additionalProperties": False,
}

MAX_DEADLINE_S = 86400.0
MIN_PRIORITY, MAX_PRIORITY = -(2**63), 2**63 - 1  # as it travels

DeadlineField = Annotated[
    float | None,
    Field(
        gt=0,
        le=MAX_DEADLINE_S,
        description="Seconds from its arrival after which the request is aborted in every stage (504).",
    ),
]

PriorityField = Annotated[
    int,
    Field(
        description="Requests with a lower value start and run before others; in stages that generate tokens, where "
        "their `scheduling_policy` is `priority`.",
        json_schema_extra={"minimum": MIN_PRIORITY, "maximum": MAX_PRIORITY},
    ),
]


class Voice(BaseModel):
    """A voice as OpenAI's API also names it: an object with an id."""

    model_config = ConfigDict(extra="forbid")

    id: str


class AudioOutput(BaseModel):
    """OpenAI's ``audio`` parameter."""

    model_config = ConfigDict(extra="forbid")

    voice: str | Voice | None = documented("A name of `/v1/audio/voices`; the first by default.")
    format: str = documented("The file's format.", default="wav", values=AUDIO_FORMATS)

    @property
    def speaker(self) -> str | None:
        return self.voice.id if isinstance(self.voice, Voice) else self.voice


class _TimedRequest(BaseModel):
    """Adds the latency targets (SLO) and the deadline of a request to vLLM's fields."""

    slo: Annotated[Any, WithJsonSchema(SLO_SCHEMA)] = Field(
        default=None,
        description="Milliseconds to the first token, and between two tokens, and the share of the gaps that meet the "
        'latter (0.9): {"ttft_ms": 1000, "tpot_ms": 50, "tpot_share": 0.99}, or some of them.',
    )

    deadline_s: DeadlineField = None

    def check(self) -> None:
        """Raise ``InvalidRequest`` for an unknown field, or an SLO that cannot be honoured."""
        check_fields(self, ignored=IGNORED_FIELDS)
        Slo.parse(self.slo)
        if self.slo is not None and getattr(self, "use_beam_search", False):
            raise InvalidRequest("slo: cannot be combined with use_beam_search", param="slo")

    def to_sampling_params(self, *args: Any, **kwargs: Any) -> SamplingParams:
        params: SamplingParams = super().to_sampling_params(*args, **kwargs)  # type: ignore[misc]
        if self.slo is not None:
            params.extra_args = {**(params.extra_args or {}), SLO_ARGS: self.slo}
        return params

    @classmethod
    def of(cls, request: BaseModel) -> Self:
        """The same request with our fields: ``/invocations`` reads vLLM's classes.

        Raises:
            InvalidRequest: one of our fields is wrong.
        """
        if isinstance(request, cls):
            return request
        try:
            return cls.model_validate(request.model_dump(exclude_unset=True))
        except ValidationError as exc:
            raise invalid_body(exc.errors(include_url=False), cls) from None


class OmniCompletionRequest(_TimedRequest, CompletionRequest):
    """vLLM's request, with an SLO and a deadline."""


class OmniBatchChatCompletionRequest(BatchChatCompletionRequest):
    """vLLM's request for several conversations, which are answered in text, at once."""

    modalities: list[Literal["text"]] | None = None
    stream: Literal[False] = False


class OmniChatCompletionRequest(_TimedRequest, ChatCompletionRequest):
    """vLLM's request, with an SLO, a deadline, and the modalities of the reply."""

    modalities: list[str] | None = Field(default=None, description='Modalities of the reply; ["text"] by default.')
    audio: AudioOutput | None = Field(default=None, description="The voice and the file format of the speech.")
    image: dict[str, Any] | None = Field(
        default=None, description="Parameters of the picture, for a language model that denoises: see docs/unified.md."
    )
    sampling_params_list: list[dict[str, Any] | None] | dict[str, dict[str, Any]] | None = Field(
        default=None,
        description="Sampling parameters of the stages, by position or by name, over those of the request itself.",
    )

    @property
    def wants_audio(self) -> bool:
        return "audio" in (self.modalities or ())

    @property
    def wants_media(self) -> bool:
        """Whether the answer has more than a text."""
        return any(modality != "text" for modality in self.modalities or ())

    @property
    def wants_text(self) -> bool:
        return self.modalities is None or "text" in self.modalities

    @property
    def audio_format(self) -> str:
        return "wav" if self.audio is None else self.audio.format


class SpeechRequest(BaseModel):
    """OpenAI's request for speech; those from ``language`` on are ours."""

    model_config = ConfigDict(extra="allow")  # the handler rejects unknown fields, with the nearest name

    input: str = Field(description="The text to speak.")
    model: str | None = documented("A name of `/v1/models`; by default, the served model.")
    voice: str | Voice | None = documented("A name of `/v1/audio/voices`; the first by default.")
    instructions: str | None = Field(default=None, description="How to speak it.")
    response_format: str = documented("The file's format.", default="mp3", values=AUDIO_FORMATS)
    speed: float = Field(default=1.0, ge=SPEEDS[0], le=SPEEDS[1], description="Playback speed, at the same pitch.")
    stream_format: Literal["audio", "sse"] | None = Field(
        default=None,
        description='"audio": bytes as they are encoded; "sse": events; by default, one whole file.',
    )
    language: str | None = Field(
        default=None, description="Of the text, for models that speak several; by default, auto."
    )
    ref_audio: str | None = Field(
        default=None, description="A recording of the voice to clone: a URL (http, https, data) or base64."
    )
    ref_text: str | None = Field(
        default=None, description="What the recording says; without it, the timbre alone is cloned."
    )
    speaker_embedding: list[float] | None = Field(default=None, description="An x-vector, instead of a recording.")
    seed: int | None = Field(default=None, description="The random seed of every stage that samples.")
    max_new_tokens: int | None = Field(default=None, ge=1, description="Tokens of the speech, at most.")
    sampling_params_list: list[dict[str, Any] | None] | dict[str, dict[str, Any]] | None = Field(
        default=None, description="Sampling parameters of the stages, by position or by name, over the fields above."
    )
    priority: PriorityField = 0
    deadline_s: DeadlineField = None

    @property
    def speaker(self) -> str | None:
        return self.voice.id if isinstance(self.voice, Voice) else self.voice


MAX_BATCH = 128


class SpeechBatchRequest(BaseModel):
    """Several requests for speech; every other field is one of ``SpeechRequest``, for all items."""

    model_config = ConfigDict(extra="allow")

    items: list[dict[str, Any]] = Field(
        min_length=1,
        max_length=MAX_BATCH,
        description="Requests for speech, with an `input` each; their fields win over those beside `items`.",
    )
    model: str | None = documented("A name of `/v1/models`; by default, the served model.")
    deadline_s: DeadlineField = None
