"""``POST /v1/audio/speech``: text to speech, as a file, as a stream of its bytes or as events."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import Any

from fastapi import Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from vllm.entrypoints.serve.engine.protocol import ErrorResponse
from vllm.entrypoints.serve.engine.serving import BaseServing
from vllm.entrypoints.serve.utils.sse_keep_alive import with_sse_keep_alive

from vllm_omni.entrypoints.async_omni import AsyncOmni
from vllm_omni.entrypoints.deadline import Deadline
from vllm_omni.entrypoints.openai.arrivals import deadline_of
from vllm_omni.entrypoints.openai.errors import end_of_stream
from vllm_omni.entrypoints.openai.media_metrics import AudioMetrics, MediaTimer
from vllm_omni.entrypoints.openai.mistakes import check_fields
from vllm_omni.entrypoints.openai.protocol import SpeechRequest
from vllm_omni.entrypoints.openai.sse import Base64Pieces, chain, event
from vllm_omni.media import find_format
from vllm_omni.media.audio import AUDIO_FORMATS, AudioEncoder
from vllm_omni.messages.outputs import OmniRequestOutput


class Speech:
    """Encodes the audio of one reply: pieces of samples in, pieces of a file out.

    Args:
        sample_rate: of the samples, Hz.
        deadline: of the request; before the end of the samples, the engine keeps it.
    """

    def __init__(self, encoder: AudioEncoder, sample_rate: int, timer: MediaTimer, deadline: Deadline) -> None:
        self._encoder = encoder
        self._sample_rate = sample_rate
        self._timer = timer
        self._deadline = deadline
        self._num_samples = 0

    async def encode(self, output: OmniRequestOutput) -> bytes:
        """Encode the samples of an output; returns the bytes that can be sent now, often none."""
        samples = output.multimodal_output.get("audio")
        if samples is None or not len(samples):
            return b""
        self._num_samples += len(samples)
        data = await asyncio.to_thread(self._encoder.encode, samples)  # a minute of mp3 takes about a second
        self._timer.piece()
        return data

    async def finish(self) -> bytes:
        """The rest of the file."""
        async with self._deadline.limit("the encoding of the speech"):
            data = await asyncio.to_thread(self._encoder.finish)
        self._timer.end(self._num_samples / self._sample_rate)
        return data


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

    async def create_speech(self, request: SpeechRequest, raw_request: Request) -> Response:
        """Serve one request. The response starts with the first bytes, so that an earlier error has an HTTP status.

        Raises:
            InvalidRequest: an unknown field, voice, format or parameter; a text that cannot be spoken.
            StageFailed: a stage failed before the first bytes.
        """
        timer, deadline = MediaTimer(self._metrics), deadline_of(request.deadline_s, raw_request)
        unknown_model = await self._upstream._check_model(request)
        if isinstance(unknown_model, ErrorResponse):
            return JSONResponse(unknown_model.model_dump(), status_code=unknown_model.error.code)
        self._engine.check_admission()
        check_fields(request)
        self._engine.check_available(["audio"])
        audio_format = find_format("audio", AUDIO_FORMATS, request.response_format)
        sample_rate, is_stream = self._pipeline.sample_rate, request.stream_format is not None
        assert sample_rate is not None, "a model with audio output has one"
        encoder = AudioEncoder(audio_format, sample_rate, is_stream=is_stream, speed=request.speed)
        speech = Speech(encoder, sample_rate, timer, deadline)
        usage = {"input_tokens": 0, "output_tokens": 0}
        trace_headers = await self._upstream._get_trace_headers(raw_request.headers)
        pieces = self._pieces(self._speak(request, raw_request, trace_headers, deadline), speech, usage)
        if not is_stream:
            data = b"".join([piece async for piece in pieces])
            return Response(data, media_type=audio_format.media_type)
        # Files have at least a header or a frame of silence; raw samples may be empty.
        first = await anext(pieces, b"")
        if request.stream_format == "audio":
            return StreamingResponse(chain(first, pieces), media_type=audio_format.media_type)
        events = with_sse_keep_alive(self._events(chain(first, pieces), usage), self._sse_keep_alive_s)
        return StreamingResponse(events, media_type="text/event-stream")

    def _speak(
        self,
        request: SpeechRequest,
        raw_request: Request,
        trace_headers: Mapping[str, str] | None,
        deadline: Deadline,
    ) -> AsyncGenerator[OmniRequestOutput, None]:
        # The first stage samples nothing. Parameters given for a stage win over the fields of the request.
        params: dict[str, dict[str, Any]] = {name: {} for name in self._engine.config.stage_names[1:]}
        if request.seed is not None:
            params = {name: {"seed": request.seed} for name in params}
        if request.max_new_tokens is not None and self._pipeline.speech_stage is not None:
            params[self._pipeline.speech_stage]["max_tokens"] = request.max_new_tokens
        for name, fields in self._engine.params.check_overrides(request.sampling_params_list).items():
            params[name] = {**params.get(name, {}), **fields}
        # Only events report the number of tokens.
        wants_codes = request.stream_format == "sse" and "codec_ids" in self._pipeline.extra_outputs
        return self._engine.speak(
            request.input,
            params,
            f"speech-{self._upstream._base_request_id(raw_request)}",
            instructions=request.instructions,
            modalities=("audio", "codec_ids") if wants_codes else ("audio",),
            speaker=request.speaker,
            lora_request=self._upstream._maybe_get_adapters(request),
            trace_headers=trace_headers,
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
        encoder = Base64Pieces()
        async with aclosing(pieces):
            try:
                async for piece in pieces:
                    if text := encoder.encode(piece):
                        yield event({"type": "speech.audio.delta", "audio": text})
                if text := encoder.encode(b"", is_last=True):
                    yield event({"type": "speech.audio.delta", "audio": text})
                yield event({"type": "speech.audio.done", "usage": {**usage, "total_tokens": sum(usage.values())}})
            except Exception as exc:  # the response has started: it ends with the error
                yield event({"type": "speech.audio.error", **end_of_stream(exc, "speech")})
