"""Qwen3-TTS (12 Hz): talker -> codec. The prompt is the text to speak.

``Qwen3TTSPipeline.inputs`` makes the talker's request of a text and of the request's options.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from functools import partial
from typing import Any

from transformers import PreTrainedConfig
from vllm.inputs import tokens_input
from vllm.sampling_params import SamplingParams
from vllm.transformers_utils.config import get_hf_file_to_dict

from vllm_omni.errors import ConfigError, InvalidRequest
from vllm_omni.flow import CallInfo, Chunk
from vllm_omni.model_executor.codec_model import FrameChunks, decode_frames
from vllm_omni.model_executor.frame_publisher import FRAME
from vllm_omni.model_executor.frame_talker import residual_sampling
from vllm_omni.model_executor.models.qwen3_tts.codec import (
    FOLDER,
    check_tokenizer,
    codec_hf_config,
    load_codec_config,
)
from vllm_omni.model_executor.models.qwen3_tts.graph import BASE, build_graph
from vllm_omni.model_executor.models.qwen3_tts.hf_config import talker_hf_config
from vllm_omni.model_executor.models.qwen3_tts.prompt import AUTO, ClonedVoice, PromptMaker
from vllm_omni.model_executor.models.qwen3_tts.text import TextReader
from vllm_omni.model_executor.models.qwen3_tts.voice_encoder import encode_voice
from vllm_omni.model_executor.pipeline import (
    ENCODES_VOICE,
    FunctionSpec,
    Pipeline,
    StageOutput,
    StageRequest,
    StageSpec,
)
from vllm_omni.names import suggest

OPTIONS = ("speaker", "language", "instructions", "cloned_voice", "non_streaming_mode")
VOICE = "voice"  # the output with the features of a recording
CUSTOM_VOICE, VOICE_DESIGN = "custom_voice", "voice_design"
SMALL = "0b6"  # the size that was not trained to follow instructions
MIN_FRAMES = 2  # as its package generates
MAX_PROMPT_MARKUP = 64  # positions of a prompt beside its texts


class Qwen3TTSPipeline(Pipeline):
    """Text in, speech out: in a named voice, in one that is described, or in a cloned one, by the checkpoint."""

    modalities = {"audio": "audio"}
    extra_outputs = {"codec_ids": "codec_ids"}
    chunks = {("talker", "codec"): FrameChunks()}
    speech_stage = "talker"

    def __init__(self, model: str, hf_config: PreTrainedConfig, revision: str | None = None) -> None:
        config = hf_config.to_dict()
        self.model, self.revision = model, revision
        self.kind, self.size = config.get("tts_model_type"), config.get("tts_model_size")
        if self.kind not in (CUSTOM_VOICE, VOICE_DESIGN, BASE):
            raise ConfigError(f"{model}: tts_model_type = {self.kind!r}: {suggest(str(self.kind), (CUSTOM_VOICE,))}")
        check_tokenizer(model, config.get("tokenizer_type"))
        codec = load_codec_config(model, revision)
        self.sample_rate = codec["output_sample_rate"]
        self.talker_config = config["talker_config"]
        self.prompts = PromptMaker(config)
        self.speakers = list(self.prompts.speakers)
        room = self.talker_config["max_position_embeddings"] - MAX_PROMPT_MARKUP
        self.texts = TextReader(model, revision, room)
        self.sampling = _residual_defaults(get_hf_file_to_dict("generation_config.json", model, revision or "main"))
        clones = self.kind == BASE
        self.graph = build_graph(self.talker_to_codec, clones=clones)
        if clones:
            self.extra_outputs = {**self.extra_outputs, VOICE: VOICE}
            self.functions = (FunctionSpec("voice_encoder", encode_voice, processes=1),)
            self.voice_output, self.x_vector_size = VOICE, config["speaker_encoder_config"]["enc_dim"]
        self.stages = (
            StageSpec(
                "talker",
                architecture="Qwen3TTSTalker",
                output_type="text",
                publishing_fields=frozenset({"codes"}),
                publishes_frames=True,
                hf_overrides=talker_hf_config,
                engine_args={
                    # The model always reads embeddings, and its rows do not follow from the prompt's ids.
                    "enable_prompt_embeds": True,
                    "enable_prefix_caching": False,
                    "skip_tokenizer_init": True,
                    "speculative_config": None,
                    "async_scheduling": False,
                },
                sampling_params={
                    "stop_token_ids": [self.talker_config["codec_eos_token_id"]],
                    "min_tokens": MIN_FRAMES,
                    "detokenize": False,
                },
                check_params=check_talker_params,
                weight_prefix="talker.",
            ),
            StageSpec(
                "codec",
                architecture="Qwen3TTSCodec",
                output_type="audio",
                hf_overrides=partial(codec_hf_config, section=codec["decoder_config"]),
                weight_prefix="decoder.",
                weight_folder=FOLDER,
                weight_dtype="float32",
            ),
        )

    def validate(self, options: Mapping[str, Any]) -> dict[str, Any]:
        if ENCODES_VOICE in options:
            return {ENCODES_VOICE: True}
        for name in options:
            if name not in OPTIONS:
                raise InvalidRequest(f"unknown option {name!r}: {suggest(name, OPTIONS)}")
        language = _text(options, "language").lower() or AUTO
        if language not in self.prompts.languages:
            raise InvalidRequest(
                f"unknown language {language!r}: {suggest(language, self.prompts.languages)}", param="language"
            )
        is_whole = options.get("non_streaming_mode")
        if not isinstance(is_whole, bool | None):
            raise InvalidRequest(f"non_streaming_mode = {is_whole!r}: must be true or false")
        voice = options.get("cloned_voice")
        return {
            "speaker": self._speaker(_text(options, "speaker"), is_cloned=voice is not None),
            "language": language,
            "instructions": self._instructions(_text(options, "instructions")),
            "cloned_voice": voice,
            "non_streaming_mode": voice is None if is_whole is None else is_whole,
        }

    def _speaker(self, speaker: str, *, is_cloned: bool) -> str | None:
        if is_cloned and self.kind != BASE:
            raise InvalidRequest("this checkpoint clones no voices: only those of the kind Base do")
        if self.kind == BASE:
            if not is_cloned:
                named = f"unknown voice {speaker!r}" if speaker else "no voice"
                raise InvalidRequest(
                    f"{named}: this checkpoint speaks in cloned voices alone: give a recording of one (ref_audio, and "
                    "its transcript in ref_text), a speaker_embedding, or the name of an uploaded voice",
                    param="voice",
                )
            return None
        if self.kind == VOICE_DESIGN:
            if speaker:
                said = "this checkpoint has no named voices: leave it out, and describe the voice in instructions"
                raise InvalidRequest(f"voice = {speaker!r}: {said}", param="voice")
            return None
        if not speaker:
            return self.speakers[0]
        if speaker.lower() not in self.speakers:
            known = [*self.speakers, *self.voices]
            raise InvalidRequest(f"unknown voice {speaker!r}: {suggest(speaker.lower(), known)}", param="voice")
        return speaker.lower()

    def _instructions(self, instructions: str) -> str:
        is_ignored = self.kind == BASE or (self.kind == CUSTOM_VOICE and self.size == SMALL)
        if instructions.strip() and is_ignored:
            raise InvalidRequest(
                "instructions: this checkpoint follows none: leave them out, or serve CustomVoice or VoiceDesign of "
                "the size 1.7B",
                param="instructions",
            )
        return instructions

    def inputs(self, prompt: Any, options: Mapping[str, Any]) -> Mapping[str, Any]:
        """Make the talker's request; rejects a text that cannot be spoken. Or pass a recording to its encoder."""
        if ENCODES_VOICE in options:
            return {"recording": {"model": self.model, "revision": self.revision, **prompt}}
        text = prompt.get("prompt") if isinstance(prompt, Mapping) else prompt
        if not isinstance(text, str):
            raise InvalidRequest(f"the prompt is a {type(text).__name__}: give the text to speak", param="input")
        voice, known = options["cloned_voice"], None
        args: dict[str, Any] = {"payloads": [], "sampling": self.sampling}
        if voice is not None:
            transcript_ids = self.texts.ids(voice.transcript, "ref_text") if voice.transcript else ()
            known = ClonedVoice(transcript_ids, voice.features.num_frames if transcript_ids else 0)
            args |= {
                "x_vector": voice.features.x_vector,
                "voice_codes": voice.features.codes if transcript_ids else b"",
            }
        made = self.prompts.make(
            self.texts.role_ids,
            self.texts.ids(text, "the text to speak"),
            language=options["language"],
            speaker=options["speaker"],
            voice=known,
            instruction_ids=self.texts.instruction_ids(options["instructions"]),
            is_streamed=not options["non_streaming_mode"],
        )
        # An id that is never sampled: the model reads the rows alone.
        ids = [self.talker_config["codec_pad_id"]] * len(made.text_ids)
        return {"prompt": StageRequest(tokens_input(ids), {**args, **made._asdict()})}

    async def talker_to_codec(self, chunks: AsyncIterator[Chunk], call: CallInfo) -> AsyncIterator[Chunk]:
        """Let the codec decode the frames while they are made; of a cloned voice, behind its recording's."""
        voice = call.context.options["cloned_voice"]
        context = voice.features.codes if voice is not None and voice.transcript else b""
        args = {"context": context} if context else {}
        async for chunk in decode_frames(chunks, self.chunks["talker", "codec"], args):
            yield chunk

    def extra_output(self, name: str, output: StageOutput) -> Any:
        """Frames of codes, each with those of all groups; or the features of a recording, as the one item of a list."""
        if name == VOICE:
            return [output.multimodal_output]
        return [payload.values[FRAME] for payload in output.payloads]


def check_talker_params(params: SamplingParams) -> None:
    """Check the sampling parameters of residual codes, and the number of frames.

    Raises:
        InvalidRequest: one of them is wrong.
    """
    if params.max_tokens is not None and params.max_tokens < MIN_FRAMES:
        raise InvalidRequest(
            f"max_tokens = {params.max_tokens}: speech has at least {MIN_FRAMES} frames", param="max_tokens"
        )
    residual_sampling({}, params)


def _text(options: Mapping[str, Any], name: str) -> str:
    value = options.get(name)
    if not isinstance(value, str | None):
        raise InvalidRequest(f"{name} = {value!r}: must be a text", param=name)
    return value or ""


def _residual_defaults(generation: Any) -> dict[str, Any]:
    """How residual codes are sampled, by the checkpoint's generation_config.json, or else by its package."""
    given = generation if isinstance(generation, Mapping) else {}
    defaults = {"temperature": 0.9, "top_k": 50, "top_p": 1.0}
    values = {name: given.get(f"subtalker_{name}", value) for name, value in defaults.items()}
    return values if given.get("subtalker_dosample", True) else {**values, "temperature": 0.0}
