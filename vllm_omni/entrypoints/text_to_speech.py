"""``TextToSpeech``: speak a text, in a named or a cloned voice; one that arrives in pieces, sentence by sentence."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any, TypeAlias
from uuid import uuid4

from vllm.config import ModelConfig
from vllm.outputs import RequestOutput
from vllm.sampling_params import SamplingParams

from vllm_omni import envs
from vllm_omni.config import OmniConfig
from vllm_omni.engine.orchestrator import Orchestrator
from vllm_omni.entrypoints.deadline import Deadline
from vllm_omni.entrypoints.speech_prompt import SpeechPrompts
from vllm_omni.entrypoints.stage_params import ParamsList, StageParamsResolver
from vllm_omni.entrypoints.voice_cloning import Recording, RecordingReader, VoiceCloner, VoiceFeatures
from vllm_omni.errors import InvalidRequest
from vllm_omni.messages.outputs import OmniRequestOutput, collect
from vllm_omni.model_executor.pipeline import ENCODES_VOICE
from vllm_omni.speech.recording import Samples
from vllm_omni.speech.sentences import read_sentences
from vllm_omni.speech.voices import Quota, VoiceStore

Outputs: TypeAlias = AsyncGenerator[OmniRequestOutput, None]


@dataclass(frozen=True)
class Voice:
    """The voice that a request gives; none of the fields: the model's own."""

    speaker: str | None = None
    ref_audio: Recording | None = None
    ref_text: str | None = None
    speaker_embedding: Sequence[float] | None = None


@dataclass(frozen=True)
class Speaking:
    """How all sentences of one request are spoken."""

    request_id: str
    params: ParamsList
    instructions: str | None
    options: Mapping[str, Any]
    deadline: Deadline
    arguments: Mapping[str, Any]  # of ``AsyncOmni.generate``: modalities, graph and others
    recording: Recording | None = None  # of a voice, for a model that hears it in the prompt


class TextToSpeech:
    """Speaks texts with one model.

    Args:
        model_config, renderer: of the first stage.
        generate: ``AsyncOmni.generate``.
    """

    def __init__(
        self,
        config: OmniConfig,
        orchestrator: Orchestrator,
        params: StageParamsResolver,
        model_config: ModelConfig,
        renderer: Any,
        generate: Callable[..., Outputs],
    ) -> None:
        self._config = config
        self._orchestrator = orchestrator
        self._params = params
        self._prompts = SpeechPrompts(orchestrator, config, renderer)
        self._generate = generate
        self.voices = self._make_cloner(model_config)  # None: the model clones no voices

    async def speak(self, text: str | AsyncIterable[str], voice: Voice, speaking: Speaking) -> Outputs:
        """Speak a whole text as one request of the engines, or one that arrives in pieces; see ``AsyncOmni.speak``."""
        if not isinstance(text, str | AsyncIterable):
            raise InvalidRequest(f"the text to speak is a {type(text).__name__}: must be a str, or an async iterable")
        async with speaking.deadline.limit("the encoding of the voice"):
            chosen = await self._voice_options(voice)
        heard = voice.ref_audio if self._orchestrator.pipeline.hears_voices else None
        speaking = replace(speaking, options={**speaking.options, **chosen}, recording=heard)
        outputs = self._speak_one(text, speaking) if isinstance(text, str) else self._speak_each(text, speaking)
        async with aclosing(outputs):
            async for output in outputs:
                yield output

    # -- sentences ----------------------------------------------------------------------------------------------------

    async def _speak_each(self, pieces: AsyncIterable[str], speaking: Speaking) -> Outputs:
        """Speak the sentences one after the other, each as a request of its own under the same id."""
        num_spoken = 0
        ids: list[int] = []  # of the prompts of all sentences so far
        async with aclosing(read_sentences(pieces)) as sentences:
            while (sentence := await self._next(sentences, speaking.deadline)) is not None:
                num_spoken, earlier = num_spoken + 1, ids
                async with aclosing(self._speak_one(sentence, speaking)) as outputs:
                    async for output in outputs:
                        if output.prompt_token_ids:
                            ids = [*earlier, *output.prompt_token_ids]
                        output.prompt_token_ids, output.finished = ids, False
                        yield output
        if not num_spoken:
            raise InvalidRequest("the text to speak is empty")
        yield OmniRequestOutput.of(RequestOutput(speaking.request_id, None, ids, None, outputs=[], finished=True))

    @staticmethod
    async def _next(sentences: AsyncIterator[str], deadline: Deadline) -> str | None:
        async with deadline.limit("the wait for text"):
            return await anext(sentences, None)

    async def _speak_one(self, text: str, speaking: Speaking) -> Outputs:
        if self._orchestrator.pipeline.speaks_prompts:
            outputs = self._speak_prompt(text, speaking)
        elif self._orchestrator.pipeline.converses:
            outputs = self._ask_for(text, speaking)
        else:
            outputs = self._speak_reply(text, speaking)
        async with aclosing(outputs):
            async for output in outputs:
                yield output

    def _speak_prompt(self, text: str, speaking: Speaking) -> Outputs:
        told = speaking.instructions
        options = {**speaking.options, **({} if told is None else {"instructions": told})}
        deadline_s = speaking.deadline.left_s()
        return self._generate(
            text, speaking.params, speaking.request_id, options=options, deadline_s=deadline_s, **speaking.arguments
        )

    async def _ask_for(self, text: str, speaking: Speaking) -> Outputs:
        """Ask a model that converses to speak the text."""
        async with speaking.deadline.limit("the reading of the text and the voice"):
            prompt = await self._prompts.asking_for(text, speaking.instructions, speaking.recording)
        deadline_s, request_id = speaking.deadline.left_s(), speaking.request_id
        outputs = self._generate(
            prompt, speaking.params, request_id, options=speaking.options, deadline_s=deadline_s, **speaking.arguments
        )
        async with aclosing(outputs):
            async for output in outputs:
                output.prompt_token_ids = prompt["prompt_token_ids"]
                yield output

    async def _speak_reply(self, text: str, speaking: Speaking) -> Outputs:
        """Give the text to the language model in front as its reply, which it then need not sample."""
        params = self._reply_params(speaking.params, speaking.arguments["modalities"], speaking.arguments["graph"])
        async with speaking.deadline.limit("the reading of the text"):
            prompt_token_ids, num_reply_tokens = await self._prompts.with_reply(text, speaking.instructions)
        outputs = self._orchestrator.generate(
            {"prompt_token_ids": prompt_token_ids},
            params,
            speaking.request_id,
            options={**speaking.options, "num_reply_tokens": num_reply_tokens},
            deadline_s=speaking.deadline.left_s(),
            **speaking.arguments,
        )
        async with aclosing(outputs):
            async for output in outputs:
                if output.multimodal_output or output.finished:  # otherwise it is text of the first stage
                    output.prompt_token_ids = prompt_token_ids
                    yield output

    def _reply_params(
        self, sampling_params: ParamsList, modalities: Sequence[str], graph: str | None
    ) -> dict[str, Any]:
        """The parameters of every stage for a reply that is given."""
        first = self._config.stages[0].name
        speech_stage = self._orchestrator.pipeline.speech_stage
        if speech_stage is None:
            raise InvalidRequest(f"this model ({self._config.model_type}) does not support text to speech")
        outputs = self._orchestrator.outputs_of(modalities, graph).values()
        if speech_stage not in self._orchestrator.stages_of(outputs, graph):
            said = f"graph {graph!r} does not speak a text: stage {speech_stage!r} takes no part in it"
            raise InvalidRequest(said, param="model")
        if "text" in modalities:
            raise InvalidRequest("modalities: text to speech has no text output; ask for audio alone")
        if self._params.by_stage(sampling_params).get(first):
            raise InvalidRequest(f"stage {first!r}: sampling parameters have no effect: the text is fixed")
        params = self._params.resolve(sampling_params)
        params[first] = SamplingParams(temperature=0.0, max_tokens=1, detokenize=False)
        return params

    # -- voices -------------------------------------------------------------------------------------------------------

    def _make_cloner(self, model_config: ModelConfig) -> VoiceCloner | None:
        """None: the model clones no voices."""
        pipeline = self._orchestrator.pipeline
        if pipeline.voice_output is None:
            return None
        reader = RecordingReader(model_config, self._orchestrator.media_budget)
        quota = Quota(envs.VLLM_OMNI_MAX_VOICES, envs.VLLM_OMNI_MAX_VOICE_BYTES)
        store = VoiceStore(envs.VLLM_OMNI_VOICES_DIR, quota)
        return VoiceCloner(reader, self._encode_voice, pipeline.x_vector_size, store)

    async def _encode_voice(self, samples: Samples, with_codes: bool) -> VoiceFeatures:
        name = self._orchestrator.pipeline.voice_output
        assert name is not None
        outputs = self._orchestrator.generate(
            {"samples": samples.tobytes(), "with_codes": with_codes},
            self._params.resolve(None),
            f"voice-{uuid4().hex}",
            modalities=(name,),
            options={ENCODES_VOICE: True},
        )
        (features,) = (await collect(outputs)).multimodal_output[name]
        return VoiceFeatures(**features)

    async def _voice_options(self, voice: Voice) -> dict[str, Any]:
        """Options of a request for the voice that it gives, or that was uploaded under the name it gives.

        Raises:
            InvalidRequest: the model clones no voices, or the fields are wrong.
        """
        if self._orchestrator.pipeline.hears_voices:
            for name in ("ref_text", "speaker_embedding"):
                if getattr(voice, name) is not None:
                    said = f"{name}: this model hears a voice in its recording alone: leave it out, and give ref_audio"
                    raise InvalidRequest(said, param=name)
            return speaker_option(voice.speaker)
        if self.voices is None:
            for name in ("ref_audio", "ref_text", "speaker_embedding"):
                if getattr(voice, name) is not None:
                    said = f"{name}: this model clones no voices: leave it out, and name one of its own (voice)"
                    raise InvalidRequest(said, param=name)
            return speaker_option(voice.speaker)
        cloned = await self.voices.clone(
            voice.speaker,
            ref_audio=voice.ref_audio,
            ref_text=voice.ref_text,
            speaker_embedding=voice.speaker_embedding,
        )
        if cloned is not None:
            return {"cloned_voice": cloned}
        if voice.speaker is not None:
            await self.voices.check_known(voice.speaker, self._orchestrator.pipeline.speakers)
        return speaker_option(voice.speaker)


def speaker_option(speaker: str | None) -> dict[str, Any]:
    return {} if speaker is None else {"speaker": speaker}
