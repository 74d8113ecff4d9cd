"""Qwen2.5-Omni: thinker -> talker -> token2wav."""

from __future__ import annotations

import logging
import random
from collections.abc import AsyncIterator, Mapping
from functools import partial
from typing import Any

from transformers import PreTrainedConfig
from vllm.inputs import tokens_input

from vllm_omni.errors import InvalidRequest
from vllm_omni.flow import CallInfo, Chunk
from vllm_omni.messages.payload import encode
from vllm_omni.messages.token_names import encode_names
from vllm_omni.model_executor.models.qwen2_5_omni.graph import build_graph
from vllm_omni.model_executor.models.qwen2_5_omni.media_check import MediaCheck
from vllm_omni.model_executor.models.qwen2_5_omni.speakers import load_speakers
from vllm_omni.model_executor.models.qwen2_5_omni.talker import talker_hf_config
from vllm_omni.model_executor.models.qwen2_5_omni.token2wav import token2wav_hf_config
from vllm_omni.model_executor.models.qwen2_5_omni.windows import Window, WindowCutter, WindowSizes
from vllm_omni.model_executor.pipeline import Pipeline, SpeechPrompt, StageOutput, StageRequest, StageSpec
from vllm_omni.names import suggest

logger = logging.getLogger(__name__)

OPTIONS = ("speaker", "num_reply_tokens")

# The talker was trained with this system turn; the model's authors support speech with no other.
SYSTEM_PROMPT = (
    "You are Qwen, a virtual human developed by the Qwen Team, Alibaba Group, capable of perceiving auditory and "
    "visual inputs, as well as generating text and speech."
)

# Rows are published in the step that computes them, so tokens must be final, and inputs must be ids.
PUBLISHER_ARGS = {"speculative_config": None, "async_scheduling": False, "enable_prompt_embeds": False}


class Qwen2_5OmniPipeline(Pipeline):
    """Text, images, audio and video in; text and speech out."""

    modalities = {"text": "text", "audio": "audio"}
    extra_outputs = {"codec_ids": "codec_ids"}
    sample_rate = 24000
    chunks = {("talker", "token2wav"): WindowSizes()}
    speech_stage = "talker"

    def __init__(self, model: str, hf_config: PreTrainedConfig, revision: str | None = None) -> None:
        speakers = load_speakers(model, revision)
        self.speakers = list(speakers)
        self.thinker_config = hf_config.thinker_config
        self.talker_config = talker = hf_config.talker_config
        dit = hf_config.token2wav_config.dit_config
        self.codes_per_block = dit.block_size // dit.repeats
        self.graph = build_graph(self.thinker_to_talker, self.talker_to_token2wav)
        end_codes = [talker.tts_codec_pad_token_id, talker.tts_codec_end_token_id]
        self.stages = (
            StageSpec(
                "thinker",
                architecture="Qwen2_5OmniThinker",
                output_type="latents",
                publishing_fields=frozenset({"rows"}),
                engine_args=PUBLISHER_ARGS,
                check_prompt=MediaCheck(self.thinker_config).check_prompt,
                weight_prefix="thinker.",
            ),
            StageSpec(
                "talker",
                architecture="Qwen2_5OmniTalker",
                output_type="text",
                hf_overrides=partial(
                    talker_hf_config, speaker_bos_ids=tuple(speaker.bos_token for speaker in speakers.values())
                ),
                engine_args={
                    # The model always reads embeddings, and its tokens are no text.
                    "enable_prompt_embeds": True,
                    "generation_config": "vllm",
                    "skip_tokenizer_init": True,
                    "speculative_config": None,
                    "async_scheduling": False,
                },
                sampling_params={"stop_token_ids": end_codes, "detokenize": False},
                weight_prefix="talker.",
            ),
            StageSpec(
                "token2wav",
                architecture="Qwen2_5OmniToken2Wav",
                output_type="audio",
                hf_overrides=token2wav_hf_config,
                weight_prefix="token2wav.",
                weight_dtype="float32",
            ),
        )
        self.end_codes = frozenset(end_codes)

    def validate(self, options: Mapping[str, Any]) -> dict[str, Any]:
        for name in options:
            if name not in OPTIONS:
                raise InvalidRequest(f"unknown option {name!r}: {suggest(name, OPTIONS)}")
        speaker = options.get("speaker") or self.speakers[0]
        if speaker not in self.speakers:
            raise InvalidRequest(f"unknown speaker {speaker!r}: {suggest(str(speaker), self.speakers)}")
        num_reply_tokens = options.get("num_reply_tokens", 0)
        if type(num_reply_tokens) is not int or num_reply_tokens < 0:
            raise InvalidRequest(f"num_reply_tokens = {num_reply_tokens!r}: must be a number of tokens")
        return {"speaker": speaker, "num_reply_tokens": num_reply_tokens}

    def speech_prompt(self, text: str, instructions: str | None = None) -> SpeechPrompt:
        # Instructions are part of the user's turn, because the system turn is fixed.
        request = f"{instructions}\n\n" if instructions else ""
        return SpeechPrompt(
            before=f"<|im_start|>system\n{SYSTEM_PROMPT}<|im_end|>\n<|im_start|>user\n",
            request=f"{request}Say the following, word for word, and nothing else:\n{text}",
            after="<|im_end|>\n<|im_start|>assistant\n",
            reply=text,
        )

    async def thinker_to_talker(self, chunks: AsyncIterator[Chunk], call: CallInfo) -> AsyncIterator[Chunk]:
        """Send references to the thinker's rows as soon as the reply has one; later rows follow in the stream that the
        first payload names. Without a stream, send all of them when the reply is complete.

        A reply of fewer than two tokens yields nothing: its only token was never processed and has no row, so the audio
        has no samples.

        In text to speech, the given reply (``num_reply_tokens``) is the end of the thinker's prompt. The one token that
        the thinker generates replaces the end token of a reply of its own: neither is ever processed, so the rows are
        the same.
        """
        payloads, num_rows, num_prompt_tokens, is_streamed, names = [], 0, 0, False, None
        async for chunk in chunks:
            if chunk.payload is None:
                continue
            output: StageOutput = chunk.payload
            num_prompt_tokens = len(output.prompt_token_ids or ()) - call.context.options["num_reply_tokens"]
            names = names or output.row_names
            for payload in output.payloads:
                is_streamed |= bool(payload.streams)
                num_rows += payload.values["num_rows"]
                if payload.tensors:
                    payloads.append(encode(payload))
            if is_streamed and num_rows > num_prompt_tokens:
                break
        if num_rows <= num_prompt_tokens:
            return
        talker, speaker = self.talker_config, call.context.options["speaker"]
        ids = [talker.tts_codec_mask_token_id] * num_prompt_tokens
        ids += [talker.tts_codec_pad_token_id, talker.tts_codec_start_token_id]
        # The talker itself adds the row of the speaker's token.
        args = {"payloads": payloads, "num_own_tokens": 1, "speaker_index": self.speakers.index(speaker)}
        if names is not None:
            args["row_names"] = encode_names(names.first(num_prompt_tokens))
        yield Chunk(StageRequest(tokens_input(ids), args), seq=0, last=True)

    async def talker_to_token2wav(self, chunks: AsyncIterator[Chunk], call: CallInfo) -> AsyncIterator[Chunk]:
        """Send windows of codes, each as soon as it is complete; the last one ends the utterance."""
        seed = call.context.params["token2wav"].seed
        args = {
            "speaker": call.context.options["speaker"],
            "seed": random.getrandbits(63) if seed is None else seed,  # one noise for all windows of an utterance
        }
        cutter = WindowCutter(self.chunks["talker", "token2wav"], self.codes_per_block)
        seq = 0
        async for chunk in chunks:
            if chunk.payload is None:
                continue
            if chunk.payload.outputs[0].finish_reason == "length":
                logger.info("request %s: its speech is truncated at the talker's max_tokens", call.context.request_id)
            for window in cutter.push(self.codec_ids(chunk.payload)):
                yield Chunk(_vocoder_request(window, args), seq, last=False)
                seq += 1
        yield Chunk(_vocoder_request(cutter.finish(), args), seq, last=True)

    def extra_output(self, name: str, output: StageOutput) -> Any:
        return self.codec_ids(output)

    def codec_ids(self, output: StageOutput) -> list[int]:
        """Codes of a talker's output, without the stop token, which vLLM includes."""
        completion = output.outputs[0]
        ends = self.end_codes | {completion.stop_reason}  # the user may have given more of them
        return [token for token in completion.token_ids if token not in ends]


def _vocoder_request(window: Window, args: Mapping[str, Any]) -> StageRequest:
    return StageRequest(tokens_input([0]), {**window._asdict(), **args})
