"""MiMo-Audio: language model -> decoder. One language model hears, writes and speaks."""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection, Mapping
from functools import partial
from typing import Any

from transformers import PreTrainedConfig
from vllm.inputs import tokens_input
from vllm.sampling_params import SamplingParams
from vllm.tokenizers import cached_get_tokenizer

from vllm_omni.errors import InvalidRequest
from vllm_omni.flow import CallInfo, Chunk
from vllm_omni.model_executor.frame_publisher import FRAME
from vllm_omni.model_executor.models.mimo_audio.audio_tokenizer import (
    DIRECTORY,
    FRAMES_PER_PIECE,
    SAMPLE_RATE,
    codec_directory,
    read_codec_config,
)
from vllm_omni.model_executor.models.mimo_audio.config import EMPTY, SPOKEN_END, SPOKEN_START, code_sampling
from vllm_omni.model_executor.models.mimo_audio.decoder import ARCHITECTURE, decoder_hf_config
from vllm_omni.model_executor.models.mimo_audio.graph import build_graph
from vllm_omni.model_executor.models.mimo_audio.prompt import (
    CHAT_TEMPLATE,
    check_instructions,
    instructed_speech,
    plain_speech,
)
from vllm_omni.model_executor.pipeline import Pipeline, SpeechPrompt, StageOutput, StageRequest, StageSpec
from vllm_omni.names import suggest

OPTIONS = ("speaker",)
STOP_TOKENS = ("<|im_end|>", "<|endoftext|>", SPOKEN_END)


class MiMoAudioPipeline(Pipeline):
    """Text and sound in; text and speech out."""

    modalities = {"text": "text", "audio": "audio"}
    extra_outputs = {"codec_ids": "codec_ids"}
    sample_rate = SAMPLE_RATE
    speakers = ("default",)
    speech_stage = "language_model"
    converses = True
    hears_voices = True
    chat_template = CHAT_TEMPLATE

    def __init__(self, model: str, hf_config: PreTrainedConfig, revision: str | None = None) -> None:
        read_codec_config(codec_directory(model))  # before any engine starts
        vocabulary = cached_get_tokenizer(model, revision=revision).get_added_vocab()
        self.empty_id, self.start_id = vocabulary[EMPTY], vocabulary[SPOKEN_START]
        self.num_channels: int = hf_config.audio_channels
        self.codes_per_piece = FRAMES_PER_PIECE * self.num_channels
        self.graph = build_graph(self.speech_to_decoder)
        self.stages = (
            StageSpec(
                "language_model",
                architecture="MiMoAudioLanguageModel",
                output_type="text",
                frame_fields=frozenset({"codes"}),
                engine_args={
                    # All groups of sound have the same token: ids do not say what a prefix is.
                    "enable_prefix_caching": False,
                    "enable_prompt_embeds": False,
                    "speculative_config": None,
                    "async_scheduling": False,
                },
                sampling_params={"stop_token_ids": [vocabulary[token] for token in STOP_TOKENS]},
                check_params=check_code_params,
            ),
            StageSpec(
                "decoder",
                architecture=ARCHITECTURE,
                output_type="audio",
                hf_overrides=partial(decoder_hf_config, num_channels=self.num_channels),
                weight_prefix="decoder.",
                weight_folder=DIRECTORY,
                weight_dtype="float32",
            ),
        )

    def validate(self, options: Mapping[str, Any]) -> dict[str, Any]:
        for name in options:
            if name not in OPTIONS:
                raise InvalidRequest(f"unknown option {name!r}: {suggest(name, OPTIONS)}")
        speaker = options.get("speaker") or self.speakers[0]
        if speaker not in self.speakers:
            known = [*self.speakers, *self.voices]
            raise InvalidRequest(f"unknown voice {speaker!r}: {suggest(str(speaker), known)}", param="voice")
        return {"speaker": speaker}

    def inputs(self, prompt: Any, options: Mapping[str, Any]) -> Mapping[str, Any]:
        return {"prompt": StageRequest(prompt, {"payloads": []})}

    def speech_prompt(self, text: str, instructions: str | None = None) -> SpeechPrompt:
        if instructions and instructions.strip():
            return instructed_speech(text, instructions, has_voice=False)
        return plain_speech(text)

    def voice_prompt(self, text: str, instructions: str | None = None) -> SpeechPrompt:
        return instructed_speech(text, check_instructions(instructions), has_voice=True)

    def chat_template_kwargs(self, modalities: Collection[str]) -> Mapping[str, Any]:
        return {"is_spoken": "audio" in modalities}

    async def speech_to_decoder(self, chunks: AsyncIterator[Chunk], call: CallInfo) -> AsyncIterator[Chunk]:
        """Let the decoder have each minute of a reply when it is complete, and the rest at the end: as the original
        decodes. A reply without sound yields nothing: the sound is empty.

        What was made before the first ``<|sostm|>`` of the reply itself is no speech.
        """
        codes: list[int] = []
        has_started, seq = False, 0
        async for chunk in chunks:
            if chunk.payload is None:
                continue
            output: StageOutput = chunk.payload
            frames = iter(output.payloads)
            for token in output.outputs[0].token_ids if output.outputs else ():
                if token == self.empty_id:
                    codes += next(frames).values[FRAME]
                elif token == self.start_id and not has_started:
                    codes.clear()
                    has_started = True
            while len(codes) > self.codes_per_piece:
                yield Chunk(self._decoder_request(codes[: self.codes_per_piece]), seq=seq, last=False)
                del codes[: self.codes_per_piece]
                seq += 1
        if codes:
            yield Chunk(self._decoder_request(codes), seq=seq, last=True)

    @staticmethod
    def _decoder_request(codes: list[int]) -> StageRequest:
        return StageRequest(tokens_input([0]), {"codes": list(codes)})

    def extra_output(self, name: str, output: StageOutput) -> Any:
        """The frames of all groups of sound, 25 a second, each with the codes of all channels."""
        codes = [code for payload in output.payloads for code in payload.values[FRAME]]
        return [codes[start : start + self.num_channels] for start in range(0, len(codes), self.num_channels)]


def check_code_params(params: SamplingParams) -> None:
    """Check the sampling parameters of codes.

    Raises:
        InvalidRequest: one of them is wrong.
    """
    code_sampling(params)
