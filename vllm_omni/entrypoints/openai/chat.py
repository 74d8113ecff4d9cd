"""``POST /v1/chat/completions``, answered in text and speech.

The text is vLLM's own, from its prompt to its JSON: its generators get the text of an answer alone, and what they make
of it is passed on, with the speech beside it in OpenAI's form (``message.audio``, ``delta.audio``). A request for text
alone is vLLM's from end to end.
"""

from __future__ import annotations

import asyncio
import base64
import copy
import json
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import aclosing
from typing import Any

from fastapi import Request
from openai.types.chat.chat_completion_audio import ChatCompletionAudio
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest, ChatCompletionResponse
from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
from vllm.entrypoints.serve.engine.protocol import ErrorResponse
from vllm.exceptions import VLLMError
from vllm.inputs import EngineInput
from vllm.renderers.chat_utils import ConversationMessage

from vllm_omni.engine.rejection import rejection
from vllm_omni.entrypoints.async_omni import AsyncOmni
from vllm_omni.entrypoints.openai.media_metrics import AudioMetrics, MediaTimer
from vllm_omni.entrypoints.openai.protocol import OmniChatCompletionRequest
from vllm_omni.entrypoints.openai.speech import Speech
from vllm_omni.errors import InvalidRequest
from vllm_omni.media.audio import AudioEncoder, find_audio_format
from vllm_omni.messages.outputs import OmniRequestOutput
from vllm_omni.names import suggest
from vllm_omni.vllm_patches import adopt

logger = logging.getLogger(__name__)

DONE = "data: [DONE]\n\n"


class OmniServingChat(OpenAIServingChat):
    """vLLM's chat handler, with speech."""

    engine_client: AsyncOmni
    audio_metrics: AudioMetrics | None
    timer: MediaTimer  # of the request, in the view that serves it

    @classmethod
    def of(
        cls, upstream: OpenAIServingChat, engine_client: AsyncOmni, audio_metrics: AudioMetrics | None
    ) -> OmniServingChat:
        """The same handler with speech, on the same settings; they are many, and vLLM has made one already."""
        chat = adopt(cls, upstream)
        chat.engine_client, chat.audio_metrics = engine_client, audio_metrics
        # What the deployment says of the stage that writes the text holds here, too.
        first = engine_client.config.stages[0]
        chat.default_sampling_params = {**upstream.default_sampling_params, **first.default_sampling_params}
        return chat

    async def create_chat_completion(
        self, request: ChatCompletionRequest, raw_request: Request | None = None
    ) -> AsyncGenerator[str, None] | ChatCompletionResponse | ErrorResponse:
        """As upstream. What is wrong with a request is found before an answer begins, streamed or not.

        Raises:
            InvalidRequest: an unknown modality, voice, format, stage or parameter.
            StageUnavailable: a stage that the answer needs is dead.
        """
        assert isinstance(request, OmniChatCompletionRequest)
        self._check(request)
        modalities = ["text"] if request.modalities is None else request.modalities
        self.engine_client.check_available(modalities)
        # Upstream hands its engine the prompt and the text's parameters; the rest of the request goes with the engine.
        view = copy.copy(self)
        view.timer = MediaTimer(self.audio_metrics)
        view.engine_client = self.engine_client.with_defaults(
            modalities=modalities,
            speaker=request.audio.voice if request.audio else None,
            stage_params=request.sampling_params_list,
        )
        return await super(OmniServingChat, view).create_chat_completion(request, raw_request)

    def _check(self, request: OmniChatCompletionRequest) -> None:
        request.check_slo()
        known = self.engine_client.orchestrator.pipeline.modalities
        for modality in request.modalities or ():
            if modality not in known:
                raise InvalidRequest(f"modalities: unknown modality {modality!r}: {suggest(modality, known)}")
        find_audio_format(request.audio_format)
        if request.wants_audio and (request.n or 1) > 1:
            raise InvalidRequest(f"n = {request.n}: an answer with audio is one, as its one text is spoken; give n = 1")
        if request.wants_audio and request.use_beam_search:
            raise InvalidRequest("use_beam_search: not with audio, as the text that is spoken would be known too late")

    async def render_chat_request(
        self, request: ChatCompletionRequest
    ) -> tuple[list[ConversationMessage], list[EngineInput]] | ErrorResponse:
        """As upstream, which lets some errors of media through that vLLM's server takes for its own (500)."""
        try:
            return await super().render_chat_request(request)
        except VLLMError:
            raise
        except Exception as exc:
            raise rejection(exc) from exc

    # -- one answer ---------------------------------------------------------------------------------------------------

    async def chat_completion_full_generator(
        self,
        request: ChatCompletionRequest,
        result_generator: AsyncIterator[OmniRequestOutput],
        request_id: str,
        *args: Any,
        **kwargs: Any,
    ) -> ErrorResponse | ChatCompletionResponse:
        """As upstream, with ``message.audio``; without ``content`` where speech alone was asked for."""
        assert isinstance(request, OmniChatCompletionRequest)
        if not request.wants_audio:
            return await super().chat_completion_full_generator(request, result_generator, request_id, *args, **kwargs)
        speech = self._speech(request, is_stream=False)

        async def listen() -> AsyncIterator[OmniRequestOutput]:
            async for output in result_generator:
                await speech.encode(output)
                yield output

        response = await super().chat_completion_full_generator(request, listen(), request_id, *args, **kwargs)
        if isinstance(response, ChatCompletionResponse):
            message = response.choices[0].message
            message.audio = ChatCompletionAudio(
                id=f"audio-{request_id}",
                data=base64.b64encode(await speech.finish()).decode(),
                expires_at=response.created,
                transcript=message.content or "",
            )
            if not request.wants_text:
                message.content = None
        return response

    # -- a stream -----------------------------------------------------------------------------------------------------

    def chat_completion_stream_generator(
        self,
        request: ChatCompletionRequest,
        result_generator: AsyncIterator[OmniRequestOutput],
        request_id: str,
        *args: Any,
        **kwargs: Any,
    ) -> AsyncGenerator[str, None]:
        """As upstream; speech comes in ``delta.audio``, piece by piece, before what ends the stream."""
        assert isinstance(request, OmniChatCompletionRequest)
        if not request.wants_audio:
            return super().chat_completion_stream_generator(request, result_generator, request_id, *args, **kwargs)
        assert isinstance(result_generator, AsyncGenerator)
        return self._stream(request, result_generator, request_id, *args, **kwargs)

    async def _stream(
        self,
        request: OmniChatCompletionRequest,
        outputs: AsyncGenerator[OmniRequestOutput, None],
        request_id: str,
        *args: Any,
        **kwargs: Any,
    ) -> AsyncGenerator[str, None]:
        speech = self._speech(request, is_stream=True)
        writer = _Writer(f"audio-{request_id}", request.wants_text)
        # Upstream's lines, and outputs with sound, in the order in which they come; then an error or None. No more than
        # one waits, so that a client who reads slowly holds the engine's outputs back.
        events: asyncio.Queue[str | OmniRequestOutput | Exception | None] = asyncio.Queue(1)
        text_has_ended = False

        async def read_text() -> AsyncIterator[OmniRequestOutput]:
            """What upstream sees: the outputs with text, up to its end."""
            nonlocal text_has_ended
            async for output in outputs:
                if output.multimodal_output:
                    await events.put(output)
                if not output.outputs:
                    continue
                text_has_ended = output.outputs[0].finish_reason not in (None, "error")
                yield output
                if text_has_ended:
                    return

        lines = super().chat_completion_stream_generator(request, read_text(), request_id, *args, **kwargs)

        async def read() -> None:
            end: Exception | None = None
            try:
                async for line in lines:
                    await events.put(line)
                if text_has_ended:
                    async for output in outputs:
                        await events.put(output)
            except Exception as exc:
                end = exc
            await events.put(end)

        ending: list[str] = []  # upstream's last lines (finish_reason, usage, [DONE]) wait for the end of the speech
        async with aclosing(outputs), aclosing(lines):
            reader = asyncio.create_task(read())
            try:
                while (event := await events.get()) is not None:
                    if isinstance(event, Exception):
                        raise event
                    if isinstance(event, OmniRequestOutput):
                        if data := await speech.encode(event):
                            yield writer.audio(data)
                        continue
                    for line in writer.rewrite(event):
                        if text_has_ended and writer.is_ending(line):
                            ending.append(line)
                        else:
                            yield line
                if text_has_ended:
                    yield writer.end_of_audio(await speech.finish())
            except Exception as exc:  # the answer has begun: it ends with the error, as upstream's do
                logger.exception("request %s: failed while its speech was streamed", request_id)
                ending = [f"data: {self.create_streaming_error_response(exc)}\n\n", DONE]
            finally:
                reader.cancel()
                await asyncio.gather(reader, return_exceptions=True)
            for line in ending:
                yield line

    def _speech(self, request: OmniChatCompletionRequest, *, is_stream: bool) -> Speech:
        sample_rate = self.engine_client.orchestrator.pipeline.sample_rate
        assert sample_rate is not None, "a model that speaks has one"
        encoder = AudioEncoder(find_audio_format(request.audio_format), sample_rate, is_stream=is_stream)
        return Speech(encoder, sample_rate, self.timer)


class _Writer:
    """Lines of a stream: upstream's, rewritten where they must be, and those of the speech."""

    def __init__(self, audio_id: str, wants_text: bool) -> None:
        self._audio_id = audio_id
        self._wants_text = wants_text
        self._head: dict[str, Any] = {}  # what every chunk begins with
        self._transcript = ""

    def rewrite(self, line: str) -> Iterator[str]:
        """Upstream's line as one or more: finish_reason apart from text; text as transcript where none is wanted."""
        chunk = None if line == DONE else json.loads(line.removeprefix("data: "))
        if chunk is None or not chunk.get("choices"):
            yield line
            return
        self._head = {name: chunk[name] for name in ("id", "object", "created", "model")}
        (choice,) = chunk["choices"]
        delta = choice["delta"]
        content = delta.get("content")
        self._transcript += content or ""
        if not self._wants_text and content is not None:
            delta["content"] = None
            if content:
                delta["audio"] = {"id": self._audio_id, "transcript": content}
        if choice.get("finish_reason") is None:
            yield line if self._wants_text else _line(chunk)
            return
        if any(value for value in delta.values()):
            yield _line({**chunk, "choices": [{**choice, "finish_reason": None, "stop_reason": None}]})
        ending = {name: choice[name] for name in ("index", "finish_reason", "stop_reason") if name in choice}
        yield _line({**chunk, "choices": [{**ending, "delta": {}, "logprobs": None}]})

    @staticmethod
    def is_ending(line: str) -> bool:
        """Whether a line belongs at the very end: what is no delta."""
        if line == DONE:
            return True
        choices = json.loads(line.removeprefix("data: ")).get("choices")
        return not choices or choices[0]["finish_reason"] is not None

    def audio(self, data: bytes) -> str:
        """A piece of the speech."""
        return self._audio({"data": base64.b64encode(data).decode()})

    def end_of_audio(self, data: bytes) -> str:
        """The rest of the speech. Its transcript goes with it unless it went before it."""
        rest = {"data": base64.b64encode(data).decode()} if data else {}
        transcript = {"transcript": self._transcript} if self._wants_text else {}
        return self._audio({**rest, **transcript, "expires_at": int(time.time())})

    def _audio(self, audio: dict[str, Any]) -> str:
        delta = {"audio": {"id": self._audio_id, **audio}}
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": None}
        return _line({**self._head, "choices": [choice]})


def _line(chunk: dict[str, Any]) -> str:
    return f"data: {json.dumps(chunk, ensure_ascii=False, separators=(',', ':'))}\n\n"
