"""``POST /v1/chat/completions``, answered in text and speech.

vLLM's handler does everything for text, from the prompt to the JSON: its generators see the text outputs of a reply
alone. The speech is added in OpenAI's form (``message.audio``, ``delta.audio``). vLLM serves a request for text alone
from end to end.
"""

from __future__ import annotations

import base64
import copy
from collections.abc import AsyncGenerator, AsyncIterator, Collection, Mapping
from contextlib import aclosing
from functools import partial
from typing import Any

from fastapi import Request
from openai.types.chat.chat_completion_audio import ChatCompletionAudio
from vllm.entrypoints.generate.base.protocol import validate_request_mm_kwargs
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest, ChatCompletionResponse
from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
from vllm.entrypoints.serve.engine.protocol import ErrorResponse
from vllm.exceptions import GenerationError, VLLMError
from vllm.inputs import EngineInput
from vllm.outputs import CompletionOutput
from vllm.renderers.chat_utils import ConversationMessage

from vllm_omni.engine.rejection import rejection
from vllm_omni.entrypoints.async_omni import AsyncOmni
from vllm_omni.entrypoints.deadline import Deadline
from vllm_omni.entrypoints.openai.arrivals import deadline_of
from vllm_omni.entrypoints.openai.chat_media import AnswerMedia
from vllm_omni.entrypoints.openai.chat_stream import ChatStreamWriter, MediaStream
from vllm_omni.entrypoints.openai.engine import EngineWithArguments, without_tracebacks
from vllm_omni.entrypoints.openai.errors import end_of_stream, write_end_of_stream
from vllm_omni.entrypoints.openai.media_metrics import AudioMetrics, MediaTimer
from vllm_omni.entrypoints.openai.protocol import OmniChatCompletionRequest
from vllm_omni.entrypoints.openai.speech import Speech
from vllm_omni.entrypoints.openai.sse import DONE, event
from vllm_omni.errors import InvalidRequest
from vllm_omni.media import find_format
from vllm_omni.media.audio import AUDIO_FORMATS, AudioEncoder
from vllm_omni.messages.outputs import OmniRequestOutput
from vllm_omni.names import suggest
from vllm_omni.unified.params import IMAGE, ImageParams
from vllm_omni.vllm_patches import adopt


def served_in_chats(made: Mapping[str, str]) -> list[str]:
    """Those of a model's modalities (name -> kind) that a chat answer can have: one sound, and no video."""
    return [name for name, kind in made.items() if kind != "video" and (kind != "audio" or name == "audio")]


async def _after_empty_text(
    outputs: AsyncGenerator[OmniRequestOutput, None],
) -> AsyncGenerator[OmniRequestOutput, None]:
    ended = CompletionOutput(0, "", [], None, logprobs=[], finish_reason="stop")
    async with aclosing(outputs):
        is_first = True
        async for output in outputs:
            if is_first:
                output.outputs = [ended]
                is_first = False
            yield output


class OmniServingChat(OpenAIServingChat):
    """vLLM's chat handler, with speech."""

    engine_client: AsyncOmni | EngineWithArguments  # with those of the request, in the copy that serves it
    omni: AsyncOmni
    audio_metrics: AudioMetrics | None
    trusts_media_kwargs = False  # of clients
    kinds: Mapping[str, str]  # of the modalities of the request, in the copy that serves it
    timer: MediaTimer  # likewise
    deadline = Deadline(None)  # likewise

    @classmethod
    def of(cls, upstream: OpenAIServingChat, omni: AsyncOmni, audio_metrics: AudioMetrics | None) -> OmniServingChat:
        """Make a handler with the settings of one that vLLM has made."""
        chat = adopt(cls, upstream)
        chat.engine_client = chat.omni = omni
        chat.audio_metrics = audio_metrics
        # vLLM's renderer rejects keyword arguments of the media's processor; those of clients are checked here.
        chat.trusts_media_kwargs = upstream.online_renderer.trust_request_mm_kwargs
        chat.online_renderer = copy.copy(upstream.online_renderer)
        chat.online_renderer.trust_request_mm_kwargs = True
        # The deployment's defaults for the stage that generates the text hold here, too.
        first = omni.config.stages[0]
        chat.default_sampling_params = {**upstream.default_sampling_params, **first.default_sampling_params}
        return chat

    async def create_chat_completion(
        self, request: ChatCompletionRequest, raw_request: Request | None = None
    ) -> AsyncGenerator[str, None] | ChatCompletionResponse | ErrorResponse:
        """As upstream; errors of the request are raised before the reply starts, streamed or not.

        Raises:
            InvalidRequest: an unknown modality, voice, format, stage or parameter.
            StageUnavailable: a stage that the reply needs is dead.
            DeadlineExceeded: the deadline passed before the reply started.
        """
        request = OmniChatCompletionRequest.of(request)
        self.omni.check_replies()
        validate_request_mm_kwargs(
            mm_processor_kwargs=request.mm_processor_kwargs,
            media_io_kwargs=request.media_io_kwargs,
            trust_request_mm_kwargs=self.trusts_media_kwargs,
        )
        graph = self.omni.graph_of(request.model)
        made = self.omni.orchestrator.modalities_of(graph)
        if request.modalities is None and "text" not in made:
            request = request.model_copy(update={"modalities": served_in_chats(made)})
        self._check(request, made)
        modalities = ["text"] if request.modalities is None else request.modalities
        speaker = request.audio.speaker if request.audio else None
        of_pipeline = self.omni.orchestrator.pipeline.chat_template_kwargs(modalities)
        variables = {**of_pipeline, **(request.chat_template_kwargs or {})}
        of_media = self.omni.orchestrator.pipeline.mm_processor_kwargs(modalities)
        media = {**of_media, **(request.mm_processor_kwargs or {})}
        changed = {"chat_template_kwargs": variables or None, "mm_processor_kwargs": media or None}
        request = request.model_copy(update=changed)
        self.omni.check_available(modalities, speaker, graph)
        stage_params = self.omni.params.check_overrides(request.sampling_params_list)
        if "audio" in modalities:
            self._check_one_sound(stage_params, graph)
        if request.image is not None:
            stage_params = self._with_picture(request.image, stage_params, modalities)
        # Upstream passes its engine the prompt and the text's parameters: the engine itself knows the other arguments.
        serving = copy.copy(self)
        serving.kinds = {name: made[name] for name in modalities if name in made}
        serving.timer = MediaTimer(self.audio_metrics)
        serving.deadline = deadline_of(request.deadline_s, raw_request)
        serving.engine_client = EngineWithArguments(
            self.omni,
            serving.deadline,
            modalities=modalities,
            graph=graph,
            speaker=speaker,
            stage_params=stage_params,
        )
        return await super(OmniServingChat, serving).create_chat_completion(request, raw_request)

    def _with_picture(
        self, given: Mapping[str, Any], stage_params: Mapping[str, Mapping[str, Any]], modalities: Collection[str]
    ) -> dict[str, Mapping[str, Any]]:
        """The parameters of stages, with those of the picture."""
        if not self.omni.draws:
            said = "no language model of this server denoises; a diffusion stage has sampling_params_list"
            raise InvalidRequest(f"image: {said}", param="image")
        if "image" not in modalities:
            said = 'the answer has no picture; ask for it with modalities ["image"]'
            raise InvalidRequest(f"image: {said}", param="image")
        ImageParams.of(given)
        first = self.omni.config.stages[0].name
        of_first = stage_params.get(first, {})
        args = {**of_first.get("extra_args", {}), IMAGE: given}
        return {**stage_params, first: {**of_first, "extra_args": args}}

    def _check_one_sound(self, stage_params: Mapping[str, Mapping[str, Any]], graph: str | None) -> None:
        orchestrator = self.omni.orchestrator
        role = orchestrator.stage_of(orchestrator.pipeline.modalities["audio"], graph)
        if role not in self.omni.config.stage_names or not self.omni.config.stage(role).is_diffusion:
            return
        params = {**self.omni.config.stage(role).default_sampling_params, **stage_params.get(role, {})}
        if (number := params.get("num_outputs_per_prompt", 1)) > 1:
            said = f"stage {role!r}: num_outputs_per_prompt = {number}: a chat answer has one sound; give 1"
            raise InvalidRequest(said, param="sampling_params_list")

    def _check(self, request: OmniChatCompletionRequest, made: Mapping[str, str]) -> None:
        request.check()
        served = served_in_chats(made)
        for modality in request.modalities or ():
            if modality in made and modality not in served:
                raise InvalidRequest(
                    f"modalities: {modality!r} is not served in chat answers: valid: {', '.join(served)}",
                    param="modalities",
                )
            if modality not in made:
                raise InvalidRequest(
                    f"modalities: unknown modality {modality!r}: {suggest(modality, served)}", param="modalities"
                )
        find_format("audio", AUDIO_FORMATS, request.audio_format, "audio.format")
        if request.wants_media and (request.n or 1) > 1:
            raise InvalidRequest(f"n = {request.n}: must be 1 with output beside the text", param="n")
        if request.wants_media and request.use_beam_search:
            said = "use_beam_search: cannot be combined with output beside the text"
            raise InvalidRequest(said, param="use_beam_search")

    async def render_chat_request(
        self, request: ChatCompletionRequest
    ) -> tuple[list[ConversationMessage], list[EngineInput]] | ErrorResponse:
        """As upstream, up to the deadline; errors of media become rejections (400): vLLM takes some for its own."""
        async with self.deadline.limit("the reading of the prompt and its media"):
            try:
                return await super().render_chat_request(request)
            except VLLMError:
                raise
            except Exception as exc:
                raise rejection(exc) from exc

    # -- a whole reply ------------------------------------------------------------------------------------------------

    async def chat_completion_full_generator(
        self,
        request: ChatCompletionRequest,
        result_generator: AsyncIterator[OmniRequestOutput],
        request_id: str,
        *args: Any,
        **kwargs: Any,
    ) -> ErrorResponse | ChatCompletionResponse:
        """As upstream, with ``audio``, ``images`` and ``texts``; without ``content`` if text was not requested."""
        assert isinstance(request, OmniChatCompletionRequest)
        if not request.wants_media:
            return await super().chat_completion_full_generator(request, result_generator, request_id, *args, **kwargs)
        speech = self._speech(request, is_stream=False) if request.wants_audio else None
        media = AnswerMedia(self.kinds)

        async def listen() -> AsyncIterator[OmniRequestOutput]:
            async for output in self._with_text(request, result_generator):
                if speech is not None:
                    await speech.encode(output)
                await media.read(output)
                yield output

        response = await super().chat_completion_full_generator(request, listen(), request_id, *args, **kwargs)
        if isinstance(response, ChatCompletionResponse):
            message = response.choices[0].message
            if speech is not None:
                message.audio = ChatCompletionAudio(
                    id=f"audio-{request_id}",
                    data=base64.b64encode(await speech.finish()).decode(),
                    expires_at=response.created,
                    transcript=message.content or "",
                )
            for name, value in media.fields.items():
                setattr(message, name, value)  # vLLM's messages take further fields
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
        """As upstream; what an answer has beside its text comes before the lines that end the stream, as it is made:
        speech in ``delta.audio``, piece by piece, images in ``delta.images``, further texts in ``delta.texts``.
        """
        assert isinstance(request, OmniChatCompletionRequest)
        assert isinstance(result_generator, AsyncGenerator)
        if not request.wants_media:
            outputs = without_tracebacks(result_generator)
            return super().chat_completion_stream_generator(request, outputs, request_id, *args, **kwargs)
        return self._stream(request, result_generator, request_id, *args, **kwargs)

    async def _stream(
        self,
        request: OmniChatCompletionRequest,
        outputs: AsyncGenerator[OmniRequestOutput, None],
        request_id: str,
        *args: Any,
        **kwargs: Any,
    ) -> AsyncGenerator[str, None]:
        writer = ChatStreamWriter(f"audio-{request_id}", request.wants_text, is_spoken=request.wants_audio)
        speech = self._speech(request, is_stream=True) if request.wants_audio else None
        stream = MediaStream(self._with_text(request, outputs), speech, AnswerMedia(self.kinds), writer)
        texts = without_tracebacks(stream.read_text())
        lines = super().chat_completion_stream_generator(request, texts, request_id, *args, **kwargs)
        async with aclosing(stream.merge(lines)) as merged:
            try:
                async for line in merged:
                    yield line
            except Exception as exc:  # the reply has started: it ends with the error, as upstream's do
                yield event(end_of_stream(exc, f"request {request_id}"))
                yield DONE

    def _with_text(
        self, request: OmniChatCompletionRequest, outputs: AsyncIterator[OmniRequestOutput]
    ) -> AsyncGenerator[OmniRequestOutput, None]:
        """The outputs, with an empty text first where the graph makes none: upstream writes a message of texts."""
        assert isinstance(outputs, AsyncGenerator)
        graph = self.omni.graph_of(request.model)
        if "text" in self.omni.orchestrator.modalities_of(graph):
            return outputs
        return _after_empty_text(outputs)

    def _convert_generation_error_to_streaming_response(self, e: GenerationError) -> str:
        return write_end_of_stream(e, "a chat")

    def _speech(self, request: OmniChatCompletionRequest, *, is_stream: bool) -> Speech:
        sample_rate = self.omni.orchestrator.pipeline.sample_rate
        assert sample_rate, "checked before the start of a model with audio output"
        audio_format = AUDIO_FORMATS[request.audio_format]
        make_encoder = partial(AudioEncoder, audio_format, is_stream=is_stream)
        return Speech(make_encoder, sample_rate, self.timer, self.deadline)
