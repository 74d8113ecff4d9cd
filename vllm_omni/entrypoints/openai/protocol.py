"""The bodies of requests, where they say more than vLLM's do."""

from typing import Any

from pydantic import BaseModel, ConfigDict, Field
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest


class AudioOutput(BaseModel):
    """OpenAI's ``audio`` parameter."""

    model_config = ConfigDict(extra="forbid")

    voice: str | None = None  # a speaker of the checkpoint; its first one by default
    format: str = "wav"


class OmniChatCompletionRequest(ChatCompletionRequest):
    """vLLM's request, and what to answer in."""

    modalities: list[str] | None = Field(default=None, description='What to answer in; ["text"] by default.')
    audio: AudioOutput | None = Field(default=None, description="The voice and the file format of the speech.")
    sampling_params_list: list[dict[str, Any] | None] | dict[str, dict[str, Any]] | None = Field(
        default=None,
        description="Sampling parameters of the stages, by position or by name, over those of the request itself.",
    )

    @property
    def wants_audio(self) -> bool:
        return "audio" in (self.modalities or ())

    @property
    def wants_text(self) -> bool:
        return self.modalities is None or "text" in self.modalities

    @property
    def audio_format(self) -> str:
        return "wav" if self.audio is None else self.audio.format
