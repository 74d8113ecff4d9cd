"""Qwen3-Omni by transformers, in float32 and greedy: what the intended model answers.

The stages are driven one by one, in the steps of ``Qwen3OmniMoeForConditionalGeneration.generate``, because that method
returns neither hidden states nor codes. The arithmetic is the library's own, with these defects of transformers 5.19
corrected:

1. *Audio in, speech out.* The talker looks for its positions in an audio configuration that only the thinker has, and
   raises. ``Reference`` gives it the thinker's.
2. *Audio in video.* ``generate`` does not pass ``use_audio_in_video`` to the talker, whose positions are then those of
   a video without sound. So they are here: the model was published with this code.
3. *A reply of one token* leaves no text for the talker, and the library raises. Here it has no speech.
4. *Speech that ends at once* has no frame, and the library raises. Here it has no samples.
5. *The vocoder's pieces.* ``chunked_decode`` decodes 300 frames at a time with 25 frames of context, and loses samples
   at each boundary. Here the whole speech is decoded at once.
"""

import warnings
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import Qwen3OmniMoeForConditionalGeneration, Qwen3OmniMoeProcessor

from tests.reference.media import Case
from tests.reference.qwen2_5_omni import PositionRecorder, compute_margins

# Placeholders of Qwen2.5-Omni, in which the cases are written, and those of Qwen3-Omni.
PLACEHOLDERS = {
    "<|IMAGE|>": "<|image_pad|>", "<|AUDIO|>": "<|audio_pad|>", "<|VIDEO|>": "<|video_pad|>",
    "<|vision_bos|>": "<|vision_start|>", "<|vision_eos|>": "<|vision_end|>",
    "<|audio_bos|>": "<|audio_start|>", "<|audio_eos|>": "<|audio_end|>",
}  # fmt: skip


def as_qwen3(case: Case) -> Case:
    """The case with the placeholders of Qwen3-Omni."""
    prompt = case.prompt
    for old, new in PLACEHOLDERS.items():
        prompt = prompt.replace(old, new)
    return replace(case, prompt=prompt)


@dataclass(frozen=True)
class Reply:
    """The thinker's reply of N tokens to P prompt tokens."""

    prompt_ids: Tensor  # [P]
    positions: Tensor  # [3, P]
    token_ids: list[int]  # N, the end token included if there was one
    embeddings: Tensor  # [P + N - 1, H], those of media included
    accepted: Tensor  # [P + N - 1, H], after the layer that the talker reads, without a norm
    hidden_states: Tensor  # [P + N - 1, H], after the final norm
    margins: Tensor  # [N], logit of the best minus that of the second best


@dataclass(frozen=True)
class Speech:
    prefill: Tensor  # [T, talker's H]: the user's turns and the start of the reply
    prefill_positions: Tensor  # [3, T]
    tail: Tensor  # [N - 1, talker's H], added to the rows of the frames; then the padding's row
    codes: Tensor  # [frames, num_groups]
    finished: bool  # by the end code rather than by the limit
    margins: Tensor  # [frames + 1], of the first codes
    waveform: Tensor  # [frames * 1920 - 555]


@dataclass(frozen=True)
class Answer:
    reply: Reply
    speech: Speech | None  # None for a reply of one token


class Reference:
    """The model of a directory, ready to answer one case at a time."""

    def __init__(self, path: Path) -> None:
        self.processor = Qwen3OmniMoeProcessor.from_pretrained(path)
        self.model = Qwen3OmniMoeForConditionalGeneration.from_pretrained(path, dtype=torch.float32).eval()
        self.config = self.model.config
        if self.config.enable_audio_output:
            self.model.talker.config.audio_config = self.config.thinker_config.audio_config

    def answer(
        self,
        case: Case,
        *,
        max_tokens: int = 12,
        max_codes: int = 200,
        repetition_penalty: float = 1.05,
        speaker: str = "Ethan",
        min_codes: int = 0,
    ) -> Answer:
        """Text, codes and waveform for one case."""
        inputs = self.process(case)
        reply = self.think(inputs, max_tokens)
        if len(reply.token_ids) < 2:
            return Answer(reply, None)
        return Answer(reply, self.speak(inputs, reply, max_codes, repetition_penalty, speaker, min_codes))

    def process(self, case: Case) -> dict[str, Any]:
        """The processor's tensors for one case, and ``use_audio_in_video``."""
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="__array__ implementation", category=DeprecationWarning)
            tensors = self.processor(**as_qwen3(case).processor_kwargs)
        return {**tensors, "use_audio_in_video": case.use_audio_in_video}

    @torch.no_grad()
    def think(self, inputs: dict[str, Any], max_tokens: int) -> Reply:
        thinker = self.model.thinker
        prompt_ids = inputs["input_ids"]
        with PositionRecorder(thinker.model) as positions:
            result = thinker.generate(
                **inputs,
                max_new_tokens=max_tokens,
                do_sample=False,
                eos_token_id=self.config.im_end_token_id,
                output_hidden_states=True,
                output_logits=True,
                return_dict_in_generate=True,
            )
        accept = self.config.talker_config.accept_hidden_layer
        return Reply(
            prompt_ids=prompt_ids[0],
            positions=positions.first,
            token_ids=result.sequences[0, prompt_ids.shape[1] :].tolist(),
            embeddings=torch.cat([step[0][0] for step in result.hidden_states]),
            accepted=torch.cat([step[accept][0] for step in result.hidden_states]),
            hidden_states=torch.cat([step[-1][0] for step in result.hidden_states]),
            margins=compute_margins(result.logits),
        )

    @torch.no_grad()
    def speak(
        self,
        inputs: dict[str, Any],
        reply: Reply,
        max_codes: int = 200,
        repetition_penalty: float = 1.05,
        speaker: str = "Ethan",
        min_codes: int = 0,
    ) -> Speech:
        """Speech for a reply of at least two tokens."""
        talker, config = self.model.talker, self.config.talker_config
        prefill, ids, tail = self.make_talker_inputs(reply, speaker)
        end = config.codec_eos_token_id
        suppressed = range(config.text_config.vocab_size - 1024, config.text_config.vocab_size)
        media = {name: inputs[name] for name in ("image_grid_thw", "video_grid_thw") if name in inputs}
        if "video_second_per_grid" in inputs:
            media["video_second_per_grid"] = inputs["video_second_per_grid"]
        if "feature_attention_mask" in inputs:
            media["audio_feature_lengths"] = inputs["feature_attention_mask"].sum(dim=1)
        with PositionRecorder(talker.model) as positions:
            result = talker.generate(
                inputs_embeds=prefill[None],
                trailing_text_hidden=tail[None],
                tts_pad_embed=self.text_rows([self.config.tts_pad_token_id])[None],
                talker_input_ids=ids[None],
                attention_mask=torch.ones(1, len(ids), dtype=torch.long),
                max_new_tokens=max_codes,
                min_new_tokens=min_codes or None,
                do_sample=False,
                repetition_penalty=repetition_penalty,
                eos_token_id=end,
                suppress_tokens=[one for one in suppressed if one != end],
                output_hidden_states=True,
                output_scores=True,
                return_dict_in_generate=True,
                **media,
            )
        # A step carries the codes of the frame before it; the last sampled first code has no frame.
        frames = [step[-1] for step in result.hidden_states if step[-1] is not None]
        codes = torch.cat(frames) if frames else torch.zeros(0, config.num_code_groups, dtype=torch.long)
        return Speech(
            prefill=prefill,
            prefill_positions=positions.first,
            tail=tail,
            codes=codes,
            finished=int(result.sequences[0, -1]) == end,
            margins=compute_margins(result.scores),
            waveform=self.vocode(codes),
        )

    def text_rows(self, ids: list[int]) -> Tensor:
        """Token ids to rows of the talker's width."""
        return self.model.talker.text_projection(self.model.thinker.get_input_embeddings()(torch.tensor(ids)))

    @torch.no_grad()
    def make_talker_inputs(self, reply: Reply, speaker: str) -> tuple[Tensor, Tensor, Tensor]:
        """Rows of the prefill [T, H], the ids that give their positions [T], and the rows that follow [N - 1, H].

        The user's turns are read as text embeddings, and at media as the thinker's rows after the accepted layer; other
        turns are left out. Of the reply the talker reads embeddings only.
        """
        config, talker = self.config, self.model.talker
        ids = reply.prompt_ids
        roles = torch.cummax(torch.where(ids == config.im_start_token_id, torch.arange(len(ids)), -1), 0).values
        is_user = ids[(roles + 1).clamp(max=len(ids) - 1)] == config.user_token_id
        thinker = config.thinker_config
        is_media = torch.isin(
            ids, torch.tensor([thinker.audio_token_id, thinker.image_token_id, thinker.video_token_id])
        )
        rows = talker.text_projection(reply.embeddings[: len(ids)])
        rows[is_media] = talker.hidden_projection(reply.accepted[: len(ids)][is_media])
        text = torch.cat(
            [
                self.text_rows(ids[-3:].tolist()),  # the head of the reply's turn
                self.text_rows([config.tts_pad_token_id] * 4 + [config.tts_bos_token_id]),
                self.text_rows(reply.token_ids[:1]),
            ]
        )
        codec = config.talker_config
        tags = [codec.codec_nothink_id, codec.codec_think_bos_id, codec.codec_think_eos_id]
        tags += [codec.speaker_id[speaker.lower()], codec.codec_pad_id, codec.codec_bos_id]
        text[3:] += talker.get_input_embeddings()(torch.tensor(tags))
        tail = self.text_rows([*reply.token_ids[1:-1], config.tts_eos_token_id])
        position_ids = torch.cat([ids[is_user], torch.full((len(text),), config.tts_pad_token_id)])
        return torch.cat([rows[is_user], text]), position_ids, tail

    @torch.no_grad()
    def vocode(self, codes: Tensor) -> Tensor:
        """Codes [frames, num_groups] to samples."""
        if not len(codes):
            return torch.zeros(0)
        return self.model.code2wav(codes.T[None]).flatten()
