"""``POST /v1/audio/speech``: text to speech, as a file, as a stream of its bytes or as events."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterable, Callable, Mapping
from contextlib import aclosing
from functools import partial
from typing import Any, NamedTuple

from fastapi import Request, WebSocket
from fastapi.responses import JSONResponse, Response, StreamingResponse
from vllm.entrypoints.serve.engine.protocol import ErrorResponse
from vllm.entrypoints.serve.engine.serving import BaseServing
from vllm.entrypoints.serve.utils.sse_keep_alive import with_sse_keep_alive

from vllm_omni.entrypoints.async_omni import AsyncOmni
from vllm_omni.entrypoints.deadline import Deadline
from vllm_omni.entrypoints.openai.arrivals import deadline_of, priority_of
from vllm_omni.entrypoints.openai.errors import end_of_stream
from vllm_omni.entrypoints.openai.media_metrics import AudioMetrics, MediaTimer
from vllm_omni.entrypoints.openai.mistakes import check_fields
from vllm_omni.entrypoints.openai.protocol import SpeechRequest
from vllm_omni.entrypoints.openai.sse import Base64Pieces, chain, event
from vllm_omni.errors import UnknownModel
from vllm_omni.media import find_format
from vllm_omni.media.audio import AUDIO_FORMATS, AudioEncoder
from vllm_omni.messages.outputs import OmniRequestOutput


class Speech:
    """Encodes the audio of one reply: pieces of samples in, pieces of a file out.

    Args:
        make_encoder: called with the sample rate, and ``num_channels``, when the first samples show them.
        sample_rate: of the samples, Hz, unless outputs carry another.
        deadline: of the request; before the end of the samples, the engine keeps it.
    """

    def __init__(
        self, make_encoder: Callable[..., AudioEncoder], sample_rate: int, timer: MediaTimer, deadline: Deadline
    ) -> None:
        self._make_encoder = make_encoder
        self._encoder: AudioEncoder | None = None
        self._sample_rate = sample_rate
        self._timer = timer
        self._deadline = deadline
        self._num_samples = 0

    async def encode(self, output: OmniRequestOutput) -> bytes:
        """Encode the samples of an output; returns the bytes that can be sent now, often none."""
        samples = output.multimodal_output.get("audio")
        if samples is None or not samples.numel():
            return b""
        if samples.ndim == 3:  # [1, channels, samples], of a diffusion pipeline
            samples = samples[0]
        if self._encoder is None:
            self._sample_rate = output.multimodal_output.get("sample_rate", self._sample_rate)
            self._encoder = self._make_encoder(self._sample_rate, num_channels=len(samples) if samples.ndim > 1 else 1)
        self._num_samples += samples.shape[-1]
        data = await asyncio.to_thread(self._encoder.encode, samples)  # a minute of mp3 takes about a second
        self._timer.piece()
        return data

    async def finish(self) -> bytes:
        """The rest of the file."""
        encoder = self._encoder or self._make_encoder(self._sample_rate)
        async with self._deadline.limit("the encoding of the speech"):
            data = await asyncio.to_thread(encoder.finish)
        self._timer.end(self._num_samples / self._sample_rate)
        return data


class SpeechAnswer(NamedTuple):
    """An answer that has been checked."""

    pieces: AsyncGenerator[bytes, None]  # of a file
    media_type: str
    usage: dict[str, int]  # counted while the pieces are read

    async def read(self) -> bytes:
        """The whole file."""
        async with aclosing(self.pieces) as pieces:
            return b"".join([piece async for piece in pieces])


class OmniServingSpeech:
    """Serves the routes of speech.

    Args:
        upstream: one of vLLM's handlers, which knows the served model names.
        sse_keep_alive_s: send a comment after so many seconds without an event; 0: never.
    """

    def __init__(
        self,
        upstream: BaseServing,
        engine_client: AsyncOmni,
        metrics: AudioMetrics | None,
        sse_keep_alive_s: float = 0.0,
    ) -> None:
        self._upstream = upstream
        self._engine = engine_client
        self._pipeline = engine_client.orchestrator.pipeline
        self._metrics = metrics
        self._sse_keep_alive_s = sse_keep_alive_s

    def voices(self) -> dict[str, list[str]]:
        return {"voices": [*self._pipeline.speakers, *self._pipeline.voices]}

    async def check_model(self, request: SpeechRequest) -> Response | None:
        """The answer for a model that is not served; None: it is."""
        unknown = await self._upstream._check_model(request)
        return JSONResponse(unknown.model_dump(), unknown.error.code) if isinstance(unknown, ErrorResponse) else None

    async def create_speech(self, request: SpeechRequest, raw_request: Request) -> Response:
        """Serve one request. The response starts with the first bytes, so that an earlier error has an HTTP status.

        Raises:
            InvalidRequest: an unknown field, voice, format or parameter; a text that cannot be spoken.
            StageFailed: a stage failed before the first bytes.
        """
        if (unknown_model := await self.check_model(request)) is not None:
            return unknown_model
        answer = await self.start(request, raw_request)
        pieces, media_type = answer.pieces, answer.media_type
        if request.stream_format is None:
            return Response(await answer.read(), media_type=media_type)
        # Files have at least a header or a frame of silence; raw samples may be empty.
        first = await anext(pieces, b"")
        if request.stream_format == "audio":
            return StreamingResponse(chain(first, pieces), media_type=media_type)
        events = with_sse_keep_alive(self._events(chain(first, pieces), answer.usage), self._sse_keep_alive_s)
        return StreamingResponse(events, media_type="text/event-stream")

    async def start_stream(
        self, request: SpeechRequest, websocket: WebSocket, text: AsyncIterable[str]
    ) -> SpeechAnswer:
        """Check a request whose text arrives in pieces.

        Raises:
            UnknownModel: the model is not served.
            InvalidRequest, StageUnavailable: as ``create_speech``.
        """
        if (unknown := await self._upstream._check_model(request)) is not None:
            raise UnknownModel(unknown.error.message, param="model")
        return await self.start(request, websocket, text=text)

    async def start(
        self,
        request: SpeechRequest,
        raw_request: Request | WebSocket,
        part: str = "",
        text: AsyncIterable[str] | None = None,
    ) -> SpeechAnswer:
        """Check a request for a served model; its engine starts when the first piece is read.

        Args:
            part: distinguishes the requests of one body.
            text: the pieces of a text, instead of the request's.

        Raises:
            InvalidRequest, StageUnavailable: as ``create_speech``.
        """
        timer, deadline = MediaTimer(self._metrics), deadline_of(request.deadline_s, raw_request)
        self._engine.check_admission()
        check_fields(request)
        self._engine.check_available(["audio"], graph=self._engine.graph_of(request.model))
        audio_format = find_format("audio", AUDIO_FORMATS, request.response_format)
        sample_rate, is_stream = self._pipeline.sample_rate, request.stream_format is not None
        assert sample_rate, "checked before the start of a model with audio output"
        make_encoder = partial(AudioEncoder, audio_format, is_stream=is_stream, speed=request.speed)
        speech = Speech(make_encoder, sample_rate, timer, deadline)
        usage = {"input_tokens": 0, "output_tokens": 0}
        trace_headers = await self._upstream._get_trace_headers(raw_request.headers)
        outputs = self._speak(request, text, raw_request, part, trace_headers, deadline)
        return SpeechAnswer(self._pieces(outputs, speech, usage), audio_format.media_type, usage)

    def _speak(
        self,
        request: SpeechRequest,
        text: AsyncIterable[str] | None,
        raw_request: Request | WebSocket,
        part: str,
        trace_headers: Mapping[str, str] | None,
        deadline: Deadline,
    ) -> AsyncGenerator[OmniRequestOutput, None]:
        # A first stage that is given its reply samples nothing. Parameters given for a stage win over the fields of the
        # request.
        stages = self._engine.config.stage_names[not self._pipeline.speaks_first :]
        params: dict[str, dict[str, Any]] = {name: {} for name in stages}
        if request.seed is not None:
            params = {name: {"seed": request.seed} for name in params}
        if request.max_new_tokens is not None and self._pipeline.speech_stage is not None:
            params[self._pipeline.speech_stage]["max_tokens"] = request.max_new_tokens
        for name, fields in self._engine.params.check_overrides(request.sampling_params_list).items():
            params[name] = {**params.get(name, {}), **fields}
        graph = self._engine.graph_of(request.model)
        # Only events, batches and streamed texts report the number of tokens.
        codes = self._pipeline.extra_outputs.get("codec_ids")
        has_codes = codes in self._engine.orchestrator.plan_of(graph).outputs
        wants_codes = (request.stream_format == "sse" or part or text is not None) and has_codes
        return self._engine.speak(
            request.input if text is None else text,
            params,
            f"speech-{self._upstream._base_request_id(raw_request)}{part}",
            instructions=request.instructions,
            modalities=("audio", "codec_ids") if wants_codes else ("audio",),
            graph=graph,
            speaker=request.speaker,
            ref_audio=request.ref_audio,
            ref_text=request.ref_text,
            speaker_embedding=request.speaker_embedding,
            options={} if request.language is None else {"language": request.language},
            lora_request=self._upstream._maybe_get_adapters(request),
            trace_headers=trace_headers,
            priority=priority_of(request.priority, raw_request),
            deadline_s=deadline.left_s(),
        )

    @staticmethod
    async def _pieces(
        outputs: AsyncGenerator[OmniRequestOutput, None], speech: Speech, usage: dict[str, int]
    ) -> AsyncGenerator[bytes, None]:
        async with aclosing(outputs):
            async for output in outputs:
                usage["input_tokens"] = len(output.prompt_token_ids or ())
                usage["output_tokens"] += len(output.multimodal_output.get("codec_ids", ()))
                if data := await speech.encode(output):
                    yield data
        if data := await speech.finish():
            yield data

    @staticmethod
    async def _events(pieces: AsyncGenerator[bytes, None], usage: dict[str, int]) -> AsyncGenerator[str, None]:
        async with aclosing(as_events(pieces, usage)) as events:
            try:
                async for one in events:
                    yield event(one)
            except Exception as exc:  # the response has started: it ends with the error
                yield event({"type": "speech.audio.error", **end_of_stream(exc, "speech")})


async def as_events(
    pieces: AsyncGenerator[bytes, None], usage: Mapping[str, int]
) -> AsyncGenerator[dict[str, Any], None]:
    """OpenAI's events for the pieces of a file, and for its end with the usage."""
    encoder = Base64Pieces()
    async with aclosing(pieces):
        async for piece in pieces:
            if text := encoder.encode(piece):
                yield {"type": "speech.audio.delta", "audio": text}
    if text := encoder.encode(b"", is_last=True):
        yield {"type": "speech.audio.delta", "audio": text}
    yield {"type": "speech.audio.done", "usage": {**usage, "total_tokens": sum(usage.values())}}
