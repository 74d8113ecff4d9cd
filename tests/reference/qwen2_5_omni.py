"""Qwen2.5-Omni by transformers, in float32 and greedy: what the intended model answers.

The three stages are driven one by one, in the steps of ``Qwen2_5OmniForConditionalGeneration.generate``, because that
method returns neither hidden states nor codes. The arithmetic is the library's own, with these defects of transformers
5.19 corrected:

1. *The talker's prefill.* ``GenerationMixin`` drops an attention mask of ones, and the talker computes its 3-D
   positions and adds the codec pad and start embeddings only when it sees a mask. An unpadded request therefore runs on
   plain positions and without these embeddings, and answers otherwise than the same request in a padded batch, which
   keeps its mask. ``require_attention_mask`` gives the talker its mask back.
2. *Pixels.* ``generate`` passes ``pixel_values`` to the talker, too, which rejects them. Here they go to the thinker
   alone (``generate`` accepts ``thinker_pixel_values``, which is what ``generate_kwargs`` makes of them).
3. *End ids.* The default ``talker_eos_token_id`` is a constant of the published checkpoint; here it comes from the
   configuration, as does the padding id.
4. *A reply of one token* leaves no hidden state for the talker, and the library raises. Here it has no speech.

One property to know when calling the talker directly: its forward adds to ``inputs_embeds`` in place.
"""

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from transformers import Qwen2_5OmniForConditionalGeneration, Qwen2_5OmniProcessor

from tests.reference.media import Case

PIXEL_INPUTS = ("pixel_values", "pixel_values_videos")


@dataclass(frozen=True)
class Reply:
    """The thinker's reply of N tokens to P prompt tokens."""

    prompt_ids: Tensor  # [P]
    positions: Tensor  # [3, P], as the decoder layers saw them
    token_ids: list[int]  # N, the end token included if there was one
    hidden_states: Tensor  # [P + N - 1, H], after the final norm; the last token is never processed
    margins: Tensor  # [N], logit of the best minus that of the second best


@dataclass(frozen=True)
class Speech:
    """The talker's C codes and the vocoder's waveform of them."""

    codes: list[int]  # C, without the end code
    finished: bool  # ended by an end code rather than by the limit
    margins: Tensor  # [number of sampled ids], of the scores after suppression and repetition penalty
    prefill_inputs: Tensor  # [P + 2, H], before projection and before the codec embeddings are added
    prefill_positions: Tensor  # [3, P + 2]
    stream: Tensor  # [N, H], added to the code embeddings: reply rows, text end, text pad
    vocode: Callable[[], Tensor]

    @cached_property
    def waveform(self) -> Tensor:
        """[samples], 24 kHz; empty for no codes."""
        return self.vocode()


@dataclass(frozen=True)
class Answer:
    reply: Reply
    speech: Speech | None  # None for a reply of one token


class Reference:
    """The model of a directory, ready to answer one case at a time."""

    def __init__(self, path: Path) -> None:
        self.processor = Qwen2_5OmniProcessor.from_pretrained(path)
        self.model = Qwen2_5OmniForConditionalGeneration.from_pretrained(path, dtype=torch.float32).eval()
        self.config = self.model.config
        require_attention_mask(self.model.talker)

    def answer(
        self,
        case: Case,
        *,
        max_tokens: int = 12,
        max_codes: int = 200,
        repetition_penalty: float = 1.0,
        speaker: str = "Chelsie",
        seed: int = 0,
    ) -> Answer:
        """Text, codes and waveform for one case. ``seed`` is that of the vocoder's noise."""
        inputs = self.process(case)
        reply = self.think(inputs, max_tokens)
        if len(reply.token_ids) < 2:
            return Answer(reply, None)
        return Answer(reply, self.speak(inputs, reply, max_codes, repetition_penalty, speaker, seed))

    def process(self, case: Case) -> dict[str, Any]:
        """The processor's tensors for one case, and ``use_audio_in_video``."""
        with warnings.catch_warnings():
            # the processor gives numpy torch's scalars where a video carries its audio
            warnings.filterwarnings("ignore", message="__array__ implementation", category=DeprecationWarning)
            tensors = self.processor(**case.processor_kwargs)
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
                output_hidden_states=True,
                output_logits=True,
                return_dict_in_generate=True,
            )
        return Reply(
            prompt_ids=prompt_ids[0],
            positions=positions.first,
            token_ids=result.sequences[0, prompt_ids.shape[1] :].tolist(),
            hidden_states=torch.cat([step[-1][0] for step in result.hidden_states]),
            margins=compute_margins(result.logits),
        )

    @torch.no_grad()
    def speak(
        self,
        inputs: dict[str, Any],
        reply: Reply,
        max_codes: int = 200,
        repetition_penalty: float = 1.0,
        speaker: str = "Chelsie",
        seed: int = 0,
    ) -> Speech:
        """Speech for a reply of at least two tokens.

        Row k of the reply part belongs to token k: its embedding and the hidden state computed from it. So N tokens
        give N - 1 rows; the last token, usually the end, is represented by the text end embedding.
        """
        talker = self.model.talker
        prefill_inputs, stream = self.make_talker_inputs(reply, speaker)
        prompt_ids = reply.prompt_ids
        bos_id = self.model.speaker_map[speaker]["bos_token"]
        num_prompt_tokens = prompt_ids.numel()
        codec_ids = [talker.codec_mask_token] * num_prompt_tokens + [talker.codec_pad_token, talker.codec_bos_token]
        end_ids = [talker.codec_pad_token, talker.codec_eos_token]
        media = {key: value for key, value in inputs.items() if key in ("image_grid_thw", "video_grid_thw")}
        if "video_second_per_grid" in inputs:
            media["video_second_per_grid"] = inputs["video_second_per_grid"]
        if "feature_attention_mask" in inputs:
            media["audio_feature_lengths"] = inputs["feature_attention_mask"].sum(dim=1)
        with PositionRecorder(talker.model) as positions:
            result = talker.generate(
                input_ids=torch.tensor([codec_ids]),
                input_text_ids=torch.cat([prompt_ids, torch.tensor([bos_id, reply.token_ids[0]])])[None],
                inputs_embeds=prefill_inputs[None].clone(),
                thinker_reply_part=stream[None],
                attention_mask=torch.ones(1, num_prompt_tokens + 2, dtype=torch.long),
                use_audio_in_video=inputs["use_audio_in_video"],
                suppress_tokens=[talker.codec_bos_token],
                max_new_tokens=max_codes,
                do_sample=False,
                repetition_penalty=repetition_penalty,
                eos_token_id=end_ids,
                pad_token_id=talker.codec_pad_token,
                output_scores=True,
                return_dict_in_generate=True,
                **media,
            )
        codes = result.sequences[0, len(codec_ids) :].tolist()
        finished = codes[-1] in end_ids
        if finished:
            codes.pop()
        return Speech(
            codes=codes,
            finished=finished,
            margins=compute_margins(result.scores),
            prefill_inputs=prefill_inputs,
            prefill_positions=positions.first,
            stream=stream,
            vocode=partial(self.vocode, codes, speaker, seed),
        )

    @torch.no_grad()
    def vocode(self, codes: list[int], speaker: str = "Chelsie", seed: int = 0) -> Tensor:
        """The waveform, [samples]; its noise is generated right after ``torch.manual_seed(seed)``."""
        if not codes:
            return torch.zeros(0)
        voice = self.model.speaker_map[speaker]
        torch.manual_seed(seed)
        waveform = self.model.token2wav(
            torch.tensor([codes]), conditioning=voice["cond"].float(), reference_mel=voice["ref_mel"].float()
        )
        return waveform.reshape(-1).float()

    @torch.no_grad()
    def vocode_windows(
        self,
        codes: list[int],
        speaker: str = "Chelsie",
        seed: int = 0,
        *,
        first: int = 12,
        size: int = 96,
        past: int = 36,
        future: int = 24,
    ) -> Tensor:
        """The same in windows: chunks of ``first`` codes, then twice as many each time up to ``size``, with context.

        The library decodes each window as if it were an utterance, but from its part of the utterance's noise.
        """
        voice = self.model.speaker_map[speaker]
        dit, bigvgan = self.model.token2wav.code2wav_dit_model, self.model.token2wav.code2wav_bigvgan_model
        torch.manual_seed(seed)
        noise = torch.randn(1, 2 * len(codes), dit.mel_dim)
        pieces, begin, length = [], 0, first
        while begin < len(codes):
            is_last = begin + length + future > len(codes)
            end = len(codes) if is_last else begin + length
            start, stop = max(begin - past, 0) // 12 * 12, min(end + future, len(codes))
            with mock.patch.object(torch, "randn", lambda *_, a=2 * start, b=2 * stop, **__: noise[:, a:b]):
                mel = dit.sample(voice["cond"].float(), voice["ref_mel"].float(), torch.tensor([codes[start:stop]]))
            low, high = max(2 * begin - 28, 2 * start), min(2 * end + 28, 2 * stop)  # what BigVGAN reads
            wave = bigvgan(mel[:, :, low - 2 * start : high - 2 * start]).reshape(-1)
            pieces.append(wave[(2 * begin - low) * 240 :][: (end - begin) * 480])
            begin, length = end, min(2 * length, size)
        return torch.cat(pieces)

    @torch.no_grad()
    def make_talker_inputs(self, reply: Reply, speaker: str) -> tuple[Tensor, Tensor]:
        """Prefill rows [P + 2, H] and the stream [N, H] for the codes that follow."""
        embed = self.model.thinker.get_input_embeddings()
        config = self.config.thinker_config
        num_prompt_tokens = reply.prompt_ids.numel()
        is_media = torch.isin(
            reply.prompt_ids,
            torch.tensor([config.audio_token_index, config.image_token_index, config.video_token_index]),
        )
        prompt_rows = reply.hidden_states[:num_prompt_tokens] + embed(reply.prompt_ids).masked_fill(
            is_media[:, None], 0.0
        )
        reply_rows = reply.hidden_states[num_prompt_tokens:] + embed(torch.tensor(reply.token_ids[:-1]))
        bos_id = self.model.speaker_map[speaker]["bos_token"]
        talker = self.model.talker
        bos_row, end_row, pad_row = embed(torch.tensor([bos_id, talker.text_eos_token, talker.text_pad_token]))[:, None]
        return torch.cat([prompt_rows, bos_row, reply_rows[:1]]), torch.cat([reply_rows[1:], end_row, pad_row])

    def generate_kwargs(self, inputs: dict[str, Any], speaker: str = "Chelsie") -> dict[str, Any]:
        """Arguments with which ``model.generate`` does the same greedy run (see the module's points 2 and 3)."""
        talker = self.model.talker
        renamed = {f"thinker_{key}" if key in PIXEL_INPUTS else key: value for key, value in inputs.items()}
        return renamed | {
            "speaker": speaker,
            "thinker_do_sample": False,
            "talker_do_sample": False,
            "talker_eos_token_id": [talker.codec_pad_token, talker.codec_eos_token],
        }


def require_attention_mask(talker: nn.Module) -> None:
    """Pass an attention mask to every call of the talker, of ones where ``generate`` dropped it."""

    def add_mask(module: nn.Module, args: tuple[()], kwargs: dict[str, Any]) -> tuple[tuple[()], dict[str, Any]]:
        if kwargs.get("attention_mask") is None:
            inputs = kwargs["inputs_embeds"] if kwargs.get("inputs_embeds") is not None else kwargs["input_ids"]
            cache = kwargs.get("past_key_values")
            length = inputs.shape[1] + (cache.get_seq_length() if cache is not None else 0)
            kwargs["attention_mask"] = torch.ones(inputs.shape[0], length, dtype=torch.long)
        return args, kwargs

    talker.register_forward_pre_hook(add_mask, with_kwargs=True)


class PositionRecorder:
    """Keeps the positions of the first forward of a decoder, as its rotary embedding gets them."""

    first: Tensor  # [3, sequence]

    def __init__(self, decoder: nn.Module) -> None:
        self._decoder = decoder

    def __enter__(self) -> "PositionRecorder":
        self._hook = self._decoder.rotary_emb.register_forward_pre_hook(self._record)
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._hook.remove()

    def _record(self, module: nn.Module, args: tuple[Tensor, Tensor]) -> None:
        if not hasattr(self, "first"):
            self.first = args[1][:, 0].clone()


def compute_margins(steps: tuple[Tensor, ...]) -> Tensor:
    """Best minus second best, for each step's scores [1, vocab]."""
    best = torch.cat(steps).topk(2, dim=-1).values
    return best[:, 0] - best[:, 1]
