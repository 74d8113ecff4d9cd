"""Qwen3-Omni: thinker -> talker -> code2wav."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from typing import Any

from transformers import PreTrainedConfig
from vllm.inputs import tokens_input
from vllm.sampling_params import SamplingParams

from vllm_omni.errors import InvalidRequest
from vllm_omni.flow import CallInfo, Chunk
from vllm_omni.messages.payload import encode
from vllm_omni.messages.token_names import encode_names
from vllm_omni.model_executor.codec_model import FrameChunks, decode_frames
from vllm_omni.model_executor.frame_publisher import FRAME
from vllm_omni.model_executor.frame_talker import residual_sampling
from vllm_omni.model_executor.models.qwen2_5_omni.media_check import MediaCheck
from vllm_omni.model_executor.models.qwen3_omni_moe.code2wav import code2wav_hf_config
from vllm_omni.model_executor.models.qwen3_omni_moe.graph import build_graph
from vllm_omni.model_executor.models.qwen3_omni_moe.layout import make_layout, talker_names
from vllm_omni.model_executor.models.qwen3_omni_moe.talker import talker_hf_config
from vllm_omni.model_executor.pipeline import Pipeline, SpeechPrompt, StageOutput, StageRequest, StageSpec
from vllm_omni.names import suggest

OPTIONS = ("speaker", "num_reply_tokens")
DEFAULT_SPEAKER = "ethan"  # of transformers' ``generate``
SECONDS_PER_FRAME_PAIR = 2.0  # of a video whose data do not say
# Defaults of the residual codes, where the talker samples: constants of transformers' ``generate``.
RESIDUAL_SAMPLING = {"temperature": 1.0, "top_k": 50, "top_p": 0.8}

# Rows are published in the step that computes them, so tokens must be final, and inputs must be ids.
PUBLISHER_ARGS = {"speculative_config": None, "async_scheduling": False, "enable_prompt_embeds": False}
# The talker always reads embeddings, and its tokens are no text.
TALKER_ARGS = {
    "enable_prompt_embeds": True,
    "generation_config": "vllm",
    "skip_tokenizer_init": True,
    "speculative_config": None,
    "async_scheduling": False,
}


def thinker_spec(hf_config: PreTrainedConfig, *, has_talker: bool) -> StageSpec:
    """The thinker's stage, whose rows a talker may read."""
    return StageSpec(
        "thinker",
        architecture="Qwen3OmniThinker",
        output_type="latents",
        publishing_fields=frozenset({"rows"} if has_talker else ()),
        engine_args=PUBLISHER_ARGS if has_talker else {},
        check_prompt=MediaCheck(hf_config.thinker_config, SECONDS_PER_FRAME_PAIR).check_prompt,
        weight_prefix="thinker.",
    )


def check_talker_params(params: SamplingParams) -> None:
    """Check the sampling parameters of residual codes.

    Raises:
        InvalidRequest: a value is out of range.
    """
    residual_sampling(RESIDUAL_SAMPLING, params)


class Qwen3OmniPipeline(Pipeline):
    """Text, images, audio and video in; text and speech out."""

    modalities = {"text": "text", "audio": "audio"}
    extra_outputs = {"codec_ids": "codec_ids"}
    sample_rate = 24000
    chunks = {("talker", "code2wav"): FrameChunks()}
    speech_stage = "talker"

    def __init__(self, model: str, hf_config: PreTrainedConfig, revision: str | None = None) -> None:
        self.config = hf_config
        self.talker_config = talker = hf_config.talker_config
        self.speaker_ids: Mapping[str, int] = talker.speaker_id
        self.speakers = sorted(self.speaker_ids, key=lambda name: name != DEFAULT_SPEAKER)  # the others in their order
        self.graph = build_graph(self.thinker_to_talker, self.talker_to_code2wav)
        self.stages = (
            thinker_spec(hf_config, has_talker=True),
            StageSpec(
                "talker",
                architecture="Qwen3OmniTalker",
                output_type="text",
                hf_overrides=talker_hf_config,
                publishing_fields=frozenset({"codes"}),
                publishes_frames=True,
                engine_args=TALKER_ARGS,
                sampling_params={"stop_token_ids": [talker.codec_eos_token_id], "detokenize": False},
                check_params=check_talker_params,
                weight_prefix="talker.",
            ),
            StageSpec(
                "code2wav",
                architecture="Qwen3OmniCode2Wav",
                output_type="audio",
                hf_overrides=code2wav_hf_config,
                weight_prefix="code2wav.",
                weight_dtype="float32",
            ),
        )

    def validate(self, options: Mapping[str, Any]) -> dict[str, Any]:
        for name in options:
            if name not in OPTIONS:
                raise InvalidRequest(f"unknown option {name!r}: {suggest(name, OPTIONS)}")
        speaker = str(options.get("speaker") or self.speakers[0])
        if speaker.lower() not in self.speaker_ids:
            raise InvalidRequest(f"unknown speaker {speaker!r}: {suggest(speaker, self.speakers)}")
        num_reply_tokens = options.get("num_reply_tokens", 0)
        if type(num_reply_tokens) is not int or num_reply_tokens < 0:
            raise InvalidRequest(f"num_reply_tokens = {num_reply_tokens!r}: must be a number of tokens")
        return {"speaker": speaker.lower(), "num_reply_tokens": num_reply_tokens}

    def speech_prompt(self, text: str, instructions: str | None = None) -> SpeechPrompt:
        request = f"{instructions}\n\n" if instructions else ""
        return SpeechPrompt(
            before="<|im_start|>user\n",
            request=f"{request}Say the following, word for word, and nothing else:\n{text}",
            after="<|im_end|>\n<|im_start|>assistant\n",
            reply=text,
        )

    async def thinker_to_talker(self, chunks: AsyncIterator[Chunk], call: CallInfo) -> AsyncIterator[Chunk]:
        """Send references to the thinker's rows as soon as the reply has one; later rows follow in the stream that the
        first payload names. Without a stream, send all of them when the reply is complete.

        A reply of fewer than two tokens yields nothing: its only token was never processed and has no row, so the audio
        has no samples. In text to speech the prompt ends with the reply, whose rows come with the prompt's; the one
        token that the thinker generates has no row, as the end token of a reply of its own.
        """
        payloads, num_rows, is_streamed, layout, names = [], 0, False, None, None
        async for chunk in chunks:
            if chunk.payload is None:
                continue
            output: StageOutput = chunk.payload
            layout = layout or make_layout(output.prompt_token_ids or (), self.config)
            names = names or output.row_names
            for payload in output.payloads:
                is_streamed |= bool(payload.streams)
                num_rows += payload.values["num_rows"]
                if payload.tensors:
                    payloads.append(encode(payload))
            if is_streamed and num_rows > layout.reply_start:
                break
        if layout is None or num_rows <= layout.reply_start:
            return
        args = {
            "payloads": payloads,
            # The talker computes its token k from the rows of the reply up to k.
            "num_own_tokens": layout.num_prompt_tokens - (layout.reply_start + 1),
            "layout": layout._asdict(),
            "speaker_id": self.speaker_ids[call.context.options["speaker"]],
            "sampling": RESIDUAL_SAMPLING,
        }
        if names is not None:
            args["row_names"] = encode_names(talker_names(names, layout))
        ids = [self.talker_config.codec_pad_id] * layout.num_prompt_tokens
        yield Chunk(StageRequest(tokens_input(ids), args), seq=0, last=True)

    async def talker_to_code2wav(self, chunks: AsyncIterator[Chunk], call: CallInfo) -> AsyncIterator[Chunk]:
        """One request decodes all frames: the decoder keeps its state between them."""
        async for chunk in decode_frames(chunks, self.chunks["talker", "code2wav"]):
            yield chunk

    def extra_output(self, name: str, output: StageOutput) -> Any:
        """The frames, each with the codes of all groups."""
        return [payload.values[FRAME] for payload in output.payloads]
