"""Qwen3-TTS (12 Hz) in plain float32: no cache, no batch, every step computed from the start.

From: the description of the model in its package (``qwen-tts`` 0.1.1), written anew; ``test_qwen3_tts.py`` compares it
with what that package answers. Two deliberate differences, both at the package's edges: the whole speech is decoded at
once (the package decodes pieces of 300 frames with 25 frames of context), and the samples of a cloned voice are cut at
the end of the reference's frames (the package cuts a sample early for some lengths).
"""

import json
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional
from transformers import AutoTokenizer, MimiConfig, MimiModel
from transformers.audio_utils import mel_filter_bank
from transformers.models.qwen2_5_omni.modeling_qwen2_5_omni import ECAPA_TimeDelayNet

from tests.reference.qwen3_tts_codec import decode_whole
from vllm_omni.speech.codec_config import CodecConfig

NUM_GROUPS = 16
SAMPLES_PER_FRAME = 1920


@dataclass(frozen=True)
class Voice:
    """What a reference recording gives."""

    x_vector: Tensor  # [hidden_size]
    codes: Tensor | None = None  # [frames, 16]; None: the x-vector alone is used
    text: str = ""


@dataclass(frozen=True)
class Speech:
    prompt_rows: Tensor  # [P, hidden_size]
    tail: Tensor  # [T, hidden_size], added to the rows of the frames; then the padding's row
    hidden: Tensor  # [frames + 1, hidden_size], after the last norm; row k chose the first code of frame k
    codes: Tensor  # [frames, 16]
    wave: Tensor  # [frames * 1920]
    finished: bool  # by the end code
    margins: Tensor  # [frames + 1], the best first code over the second best


class Reference:
    """The checkpoint in a directory, ready to speak."""

    def __init__(self, path: Path) -> None:
        self.config = json.loads((path / "config.json").read_text())
        self.talker_config = self.config["talker_config"]
        self.weights = load_file(path / "model.safetensors")
        self.tokenizer = AutoTokenizer.from_pretrained(path)
        codec = json.loads((path / "speech_tokenizer" / "config.json").read_text())
        self.codec_weights = load_file(path / "speech_tokenizer" / "model.safetensors")
        self.decoder_config = CodecConfig.of(codec["decoder_config"])
        self.encoder_config = codec["encoder_config"]

    # -- rows of the prompt -------------------------------------------------------------------------------------------

    def text_rows(self, ids: list[int]) -> Tensor:
        """Token ids to rows of the talker's width, [n, hidden_size]."""
        rows = self.weights["talker.model.text_embedding.weight"][ids]
        rows = functional.silu(self.linear("talker.text_projection.linear_fc1", rows))
        return self.linear("talker.text_projection.linear_fc2", rows)

    def codec_rows(self, ids: list[int]) -> Tensor:
        return self.weights["talker.model.codec_embedding.weight"][ids]

    def frame_rows(self, codes: Tensor) -> Tensor:
        """Sum of the embeddings of all groups, [n, 16] -> [n, hidden_size]."""
        rows = self.weights["talker.model.codec_embedding.weight"][codes[:, 0]]
        for group in range(1, NUM_GROUPS):
            rows = rows + self.predictor_table(group - 1)[codes[:, group]]
        return rows

    def predictor_table(self, index: int) -> Tensor:
        return self.weights[f"talker.code_predictor.model.codec_embedding.{index}.weight"]

    def linear(self, name: str, x: Tensor) -> Tensor:
        return functional.linear(x, self.weights[f"{name}.weight"], self.weights.get(f"{name}.bias"))

    def tts_row(self, name: str) -> Tensor:
        return self.text_rows([self.config[f"tts_{name}_token_id"]])

    def ids(self, text: str) -> list[int]:
        return self.tokenizer(text)["input_ids"]

    def language_id(self, language: str, speaker: str | None) -> int | None:
        config = self.talker_config
        languages = config["codec_language_id"]
        dialect = config["spk_is_dialect"].get(speaker) if speaker else None
        if language in ("auto", "chinese") and dialect:
            return languages[dialect]
        return None if language == "auto" else languages[language]

    def prompt(
        self,
        text: str,
        *,
        language: str = "auto",
        speaker: str | None = None,
        instruct: str | None = None,
        voice: Voice | None = None,
        streaming: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """Rows of the prompt, [P, hidden_size], and those that follow one by one, [T, hidden_size]."""
        config = self.talker_config
        language, speaker = language.lower(), speaker.lower() if speaker else None
        codec = {
            name: config[f"codec_{name}_id"] for name in ("pad", "bos", "think", "nothink", "think_bos", "think_eos")
        }
        ids = self.ids(f"<|im_start|>assistant\n{text}<|im_end|>\n<|im_start|>assistant\n")
        body = ids[3:-5]
        rows = []
        is_small = self.config["tts_model_size"] == "0b6" and self.config["tts_model_type"] == "custom_voice"
        if instruct and not is_small:
            rows.append(self.text_rows(self.ids(f"<|im_start|>user\n{instruct}<|im_end|>\n")))
        rows.append(self.text_rows(ids[:3]))
        language_id = self.language_id(language, speaker)
        if language_id is None:
            tags = [codec["nothink"], codec["think_bos"], codec["think_eos"]]
        else:
            tags = [codec["think"], codec["think_bos"], language_id, codec["think_eos"]]
        rows.append(self.tts_row("pad") + self.codec_rows(tags))
        if speaker:
            rows.append(self.tts_row("pad") + self.codec_rows([config["spk_id"][speaker]]))
        elif voice:
            rows.append(self.tts_row("pad") + voice.x_vector)
        rows.append(self.tts_row("bos") + self.codec_rows([codec["pad"]]))
        none = rows[0][:0]
        if voice and voice.codes is not None:
            reference = self.ids(f"<|im_start|>assistant\n{voice.text}<|im_end|>\n")[3:-2]
            text_part = torch.cat([self.text_rows(reference + body), self.tts_row("eos")])
            codec_part = torch.cat([self.codec_rows([codec["bos"]]), self.frame_rows(voice.codes)])
            if not streaming:
                rows += [text_part + self.codec_rows([codec["pad"]]), codec_part + self.tts_row("pad")]
                return torch.cat(rows), none
            length = len(codec_part)
            padding = self.tts_row("pad").expand(max(0, length - len(text_part)), -1)
            rows.append(torch.cat([text_part[:length], padding]) + codec_part)
            return torch.cat(rows), text_part[length:]
        if streaming:
            rows.append(self.text_rows(body[:1]) + self.codec_rows([codec["bos"]]))
            return torch.cat(rows), torch.cat([self.text_rows(body[1:]), self.tts_row("eos")])
        rows.append(torch.cat([self.text_rows(body), self.tts_row("eos")]) + self.codec_rows([codec["pad"]]))
        rows.append(self.tts_row("pad") + self.codec_rows([codec["bos"]]))
        return torch.cat(rows), none

    # -- the talker ---------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def speak(
        self, text: str, *, max_tokens: int, repetition_penalty: float = 1.05, min_tokens: int = 2, **prompt: object
    ) -> Speech:
        """Greedy speech; arguments of ``prompt`` choose voice and language."""
        prompt_rows, tail = self.prompt(text, **prompt)  # type: ignore[arg-type]
        rows, pad = prompt_rows, self.tts_row("pad")
        hidden, firsts, frames, margins = [], [], [], []
        end = self.talker_config["codec_eos_token_id"]
        while len(firsts) < max_tokens:
            hidden.append(self.transform("talker.model", self.talker_config, rows)[-1])
            scores = self.first_scores(hidden[-1], firsts, repetition_penalty, end, may_end=len(firsts) >= min_tokens)
            best = scores.topk(2).values
            margins.append(best[0] - best[1])
            firsts.append(int(scores.argmax()))
            if firsts[-1] == end or len(firsts) == max_tokens:
                break
            codes = self.residual_codes(hidden[-1], firsts[-1])
            added = tail[len(frames)] if len(frames) < len(tail) else pad[0]
            frames.append(codes)
            rows = torch.cat([rows, self.frame_rows(codes[None]) + added])
        codes = torch.stack(frames)
        voice = prompt.get("voice")
        wave = self.decode(codes, voice.codes if isinstance(voice, Voice) else None)
        return Speech(prompt_rows, tail, torch.stack(hidden), codes, wave, firsts[-1] == end, torch.stack(margins))

    def first_scores(self, hidden: Tensor, earlier: list[int], penalty: float, end: int, *, may_end: bool) -> Tensor:
        logits = self.linear("talker.codec_head", hidden)
        seen = logits[earlier]
        logits[earlier] = torch.where(seen < 0, seen * penalty, seen / penalty)
        end_logit = logits[end].clone()
        logits[-1024:] = float("-inf")
        logits[end] = end_logit if may_end else float("-inf")
        return logits

    def residual_codes(self, hidden: Tensor, first: int) -> Tensor:
        """All 16 codes of a frame."""
        name, config = "talker.code_predictor", self.talker_config["code_predictor_config"]
        inputs, codes = [hidden, self.codec_rows([first])[0]], [first]
        for group in range(NUM_GROUPS - 1):
            rows = torch.stack(inputs)
            if f"{name}.small_to_mtp_projection.weight" in self.weights:
                rows = self.linear(f"{name}.small_to_mtp_projection", rows)
            last = self.transform(f"{name}.model", config, rows)[-1]
            codes.append(int(self.linear(f"{name}.lm_head.{group}", last).argmax()))
            inputs.append(self.predictor_table(group)[codes[-1]])
        return torch.tensor(codes)

    def transform(self, name: str, config: dict, x: Tensor) -> Tensor:
        """Qwen3's decoder over a whole sequence, [n, size]; the three position axes of the talker are equal."""
        dim, count = config["head_dim"], len(x)
        positions = torch.arange(count)
        angles = positions[:, None] / config["rope_theta"] ** (torch.arange(0, dim, 2) / dim)
        angles = torch.cat((angles, angles), dim=-1)
        mask = positions[:, None] < positions

        def norm(layer: str, y: Tensor) -> Tensor:
            scale = (y.pow(2).mean(-1, keepdim=True) + config["rms_norm_eps"]).rsqrt()
            return y * scale * self.weights[f"{layer}.weight"]

        def rotate(y: Tensor) -> Tensor:
            half = dim // 2
            return y * angles.cos() + torch.cat((-y[..., half:], y[..., :half]), dim=-1) * angles.sin()

        for index in range(config["num_hidden_layers"]):
            layer = f"{name}.layers.{index}"
            y = norm(f"{layer}.input_layernorm", x)
            query, key, value = (
                self.linear(f"{layer}.self_attn.{one}_proj", y).unflatten(-1, (-1, dim)).transpose(0, 1)
                for one in "qkv"
            )
            query = rotate(norm(f"{layer}.self_attn.q_norm", query))
            key = rotate(norm(f"{layer}.self_attn.k_norm", key))
            repeats = len(query) // len(key)
            key, value = (one.repeat_interleave(repeats, dim=0) for one in (key, value))
            scores = (query @ key.transpose(1, 2) * dim**-0.5).masked_fill(mask, float("-inf"))
            x = x + self.linear(f"{layer}.self_attn.o_proj", (scores.softmax(-1) @ value).transpose(0, 1).flatten(1))
            y = norm(f"{layer}.post_attention_layernorm", x)
            y = functional.silu(self.linear(f"{layer}.mlp.gate_proj", y)) * self.linear(f"{layer}.mlp.up_proj", y)
            x = x + self.linear(f"{layer}.mlp.down_proj", y)
        return norm(f"{name}.norm", x)

    # -- sound --------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def decode(self, codes: Tensor, reference_codes: Tensor | None = None) -> Tensor:
        """Samples of the frames, [n * 1920], spoken behind the reference's frames."""
        num_reference = 0 if reference_codes is None else len(reference_codes)
        if reference_codes is not None:
            codes = torch.cat([reference_codes, codes])
        weights = {
            name.removeprefix("decoder."): one
            for name, one in self.codec_weights.items()
            if name.startswith("decoder.")
        }
        return decode_whole(weights, self.decoder_config, codes.T[None])[0, num_reference * SAMPLES_PER_FRAME :]

    @torch.no_grad()
    def voice(self, wave: Tensor, text: str | None) -> Voice:
        """A voice from a recording, [samples] at 24 kHz, and its transcript; without one, the x-vector alone."""
        return Voice(self.x_vector(wave), None if text is None else self.encode(wave), text or "")

    def x_vector(self, wave: Tensor) -> Tensor:
        encoder = ECAPA_TimeDelayNet(SimpleNamespace(**self.config["speaker_encoder_config"])).eval()  # type: ignore[arg-type]
        prefix = "speaker_encoder."
        encoder.load_state_dict({k.removeprefix(prefix): v for k, v in self.weights.items() if k.startswith(prefix)})
        padded = functional.pad(wave[None, None], (384, 384), mode="reflect")[0, 0]
        spectrum = torch.stft(padded, 1024, 256, 1024, torch.hann_window(1024), center=False, return_complex=True)
        magnitude = torch.sqrt(spectrum.real**2 + spectrum.imag**2 + 1e-9)
        filters = mel_filter_bank(513, 128, 0, 12000, 24000, norm="slaney", mel_scale="slaney")
        mel = torch.from_numpy(filters).float().T @ magnitude
        return encoder(mel.clamp(min=1e-5).log().T[None])[0]

    def encode(self, wave: Tensor) -> Tensor:
        """Codes of a recording, [frames, 16]. The package's Mimi attends without a window, so this one does."""
        values = {
            name: value for name, value in self.encoder_config.items() if name not in ("model_type", "frame_rate")
        }
        mimi = MimiModel(MimiConfig(**values | {"sliding_window": 1_000_000})).eval()
        prefix = "encoder."
        mimi.load_state_dict(
            {k.removeprefix(prefix): v for k, v in self.codec_weights.items() if k.startswith(prefix)}, strict=False
        )
        num_frames = -(-len(wave) // SAMPLES_PER_FRAME)
        return mimi.encode(wave[None, None]).audio_codes[0, :NUM_GROUPS, :num_frames].T
