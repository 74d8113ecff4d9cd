"""``Qwen2_5OmniToken2Wav``: the vocoder, transformers' DiT and BigVGAN on windows of codes, batched across requests."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedConfig, Qwen2_5OmniToken2WavConfig, Qwen2_5OmniToken2WavModel
from transformers.models.qwen2_5_omni.modeling_qwen2_5_omni import RungeKutta4ODESolver
from vllm.config import VllmConfig

from vllm_omni.model_executor.generation_model import GenerationConfig, GenerationModel
from vllm_omni.model_executor.models.qwen2_5_omni.speakers import load_speakers

WEIGHT_PREFIX = "token2wav."

# Constants of transformers' Qwen2_5OmniToken2WavDiTModel.sample.
NUM_TIME_POINTS = 10
GUIDANCE_SCALE = 0.5
SWAY_COEFFICIENT = -1.0

WAVE_CONTEXT = 28  # mel frames on either side that BigVGAN reads: its receptive field is 27
NO_BLOCK = 1 << 20  # block of padding frames: too far away for any other block to attend to


def token2wav_hf_config(config: PreTrainedConfig) -> PreTrainedConfig:
    """``hf_overrides`` of the vocoder stage."""
    if config.model_type != "qwen2_5_omni":  # vLLM also passes a dummy, to ask whether the model type changes
        return config
    return GenerationConfig(
        architectures=["Qwen2_5OmniToken2Wav"], model_config=config.token2wav_config.to_dict(), dtype="float32"
    )


@dataclass(frozen=True)
class Decode:
    """One window to decode. Positions are mel frames of the utterance, ``repeats`` (2) per code."""

    codes: Tensor  # int64 [num_codes]
    start: int  # its first frame
    keep: range  # frames whose sound is returned
    num_frames: int
    num_blocks: int  # of the DiT's attention
    speaker: str
    seed: int

    @property
    def context(self) -> range:
        """Frames that BigVGAN reads for the sound of ``keep``."""
        end = self.start + self.num_frames
        return range(max(self.keep.start - WAVE_CONTEXT, self.start), min(self.keep.stop + WAVE_CONTEXT, end))

    def cut_context(self, mel: Tensor) -> Tensor:
        """Cut the context out of a window's mel: [mel_dim, num_frames] -> [mel_dim, len(context)]."""
        return mel[:, self.context.start - self.start : self.context.stop - self.start]

    def make_noise(self, mel_dim: int) -> Tensor:
        """Make the window's part of the utterance's noise, [num_frames, mel_dim].

        On the CPU, where the first numbers of a generator do not depend on their count (in blocks of 16, which divide a
        frame): overlapping windows then have the same noise where they overlap.
        """
        generator = torch.Generator().manual_seed(self.seed)
        return torch.randn(self.start + self.num_frames, mel_dim, generator=generator)[self.start :]


class Qwen2_5OmniToken2Wav(GenerationModel):
    """Codec ids -> waveform at 24 kHz, always in float32 (transformers converts the vocoder before it runs it)."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        model_config = vllm_config.model_config
        config = Qwen2_5OmniToken2WavConfig(**model_config.hf_config.model_config)
        self.num_codes = config.dit_config.num_embeds + 1
        self.repeats = config.dit_config.repeats
        self.block_size = config.dit_config.block_size
        self.max_frames = config.dit_config.max_position_embeddings
        self.token2wav = Qwen2_5OmniToken2WavModel(config).float()
        self.speakers = load_speakers(model_config.model, model_config.revision)
        self._encodings: dict[str, Tensor] = {}

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        state = {
            name.removeprefix(WEIGHT_PREFIX): tensor.float()
            for name, tensor in weights
            if name.startswith(WEIGHT_PREFIX)
        }
        self.token2wav.load_state_dict(state, strict=True)
        return {WEIGHT_PREFIX + name for name in state}

    def read(self, args: Mapping[str, Any]) -> Decode:
        """Check one request and convert it into a window.

        Args:
            args: ``codec_ids`` (list[int], without the end token), ``start`` and ``keep`` (in codes, see ``Window``),
                ``speaker`` (name), ``seed`` (int: the noise is that of ``torch.manual_seed(seed)`` before decoding the
                whole utterance on the CPU, for any device).

        Raises:
            ValueError: a code outside the codebook, or more codes than the DiT has positions.
        """
        codec_ids = args["codec_ids"]
        if codec_ids and not 0 <= min(codec_ids) <= max(codec_ids) < self.num_codes:
            raise ValueError(f"codec ids must lie in [0, {self.num_codes}), got {min(codec_ids)}..{max(codec_ids)}")
        if len(codec_ids) * self.repeats > self.max_frames:
            raise ValueError(
                f"{len(codec_ids)} codes in one window: the vocoder has positions for {self.max_frames // self.repeats}"
            )
        first, end = args["keep"]
        num_frames = len(codec_ids) * self.repeats
        return Decode(
            codes=torch.tensor(codec_ids, dtype=torch.int64),
            start=args["start"] * self.repeats,
            keep=range(first * self.repeats, end * self.repeats),
            num_frames=num_frames,
            num_blocks=math.ceil(num_frames / self.block_size),
            speaker=args["speaker"],
            seed=args["seed"],
        )

    def generate(self, batch: Sequence[Decode]) -> list[dict[str, Tensor]]:
        """Decode windows.

        Windows with the same number of attention blocks share a run of the DiT; with the same number of frames, a run
        of BigVGAN.

        Returns:
            For each, ``audio``: float32 [num_samples], 480 samples per kept code; empty for no codes.
        """
        audio = {index: torch.zeros(0) for index, one in enumerate(batch) if not one.num_frames}
        decoded = [index for index in range(len(batch)) if index not in audio]
        for same_blocks in _group(decoded, lambda index: batch[index].num_blocks):
            mels = dict(zip(same_blocks, self._decode_mel([batch[index] for index in same_blocks]), strict=True))
            for same_frames in _group(same_blocks, lambda index: len(batch[index].context)):
                context = [batch[index].cut_context(mels[index]) for index in same_frames]
                waves = self.token2wav.code2wav_bigvgan_model(torch.stack(context)).reshape(len(context), -1)
                frame = waves.shape[1] // context[0].shape[1]  # samples per frame
                for index, wave in zip(same_frames, waves, strict=True):
                    one = batch[index]
                    first = (one.keep.start - one.context.start) * frame
                    audio[index] = wave[first : first + len(one.keep) * frame].float()
        return [{"audio": audio[index]} for index in range(len(batch))]

    def _decode_mel(self, batch: Sequence[Decode]) -> list[Tensor]:
        """Compute the mel spectrogram of each window, [mel_dim, num_frames]. All have the same number of blocks.

        As ``Qwen2_5OmniToken2WavDiTModel.sample``, on the same modules, with three differences: shorter rows are
        masked, each row has its own voice and noise, and what the 36 evaluations share (mainly the voice's encoding) is
        computed once.
        """
        dit = self.token2wav.code2wav_dit_model
        device = next(dit.parameters()).device
        num_frames = max(one.num_frames for one in batch)
        noise = pad_sequence([one.make_noise(dit.mel_dim) for one in batch], batch_first=True).to(device)
        codes = pad_sequence([one.codes for one in batch], batch_first=True).to(device)
        # Rows with guidance, then the same rows without: no codes (0), no voice, no reference sample.
        codes = dit.text_embed(torch.cat([codes, torch.zeros_like(codes)]))
        voice = torch.cat([self.speakers[one.speaker].cond for one in batch]).to(device)
        voice = torch.cat([voice, torch.zeros_like(voice)])
        sample = torch.cat([self._sample_encodings(one.speaker) for one in batch], dim=1).flatten(0, 1)
        common = torch.cat([_repeat(sample, num_frames), codes, _repeat(voice, num_frames)], dim=-1)
        block_diff = _block_diff(batch, num_frames, dit.block_size).to(device)
        rotary = dit.rotary_embed(common, torch.arange(num_frames, device=device)[None])

        def velocity(time: Tensor, mel: Tensor) -> Tensor:
            hidden_states = dit.input_embed.proj(torch.cat([mel.repeat(2, 1, 1), common], dim=-1))
            time_embedding = dit.time_embed(time.repeat(len(common)))
            for layer in dit.transformer_blocks:
                hidden_states = layer(hidden_states, time_embedding, position_embeddings=rotary, block_diff=block_diff)
            guided, unguided = dit.proj_out(dit.norm_out(hidden_states, time_embedding)).chunk(2)
            return guided + (guided - unguided) * GUIDANCE_SCALE

        times = torch.linspace(0, 1, NUM_TIME_POINTS, device=device)
        times += SWAY_COEFFICIENT * (torch.cos(torch.pi / 2 * times) - 1 + times)
        mels = RungeKutta4ODESolver(function=velocity, initial_value=noise).integrate(times)[-1]
        return [mel[: one.num_frames].T for one, mel in zip(batch, mels, strict=True)]

    def _sample_encodings(self, speaker: str) -> Tensor:
        """Encodings of a voice's sample and of silence, [2, 1, enc_dim], computed once for each voice."""
        if speaker not in self._encodings:
            encoder = self.token2wav.code2wav_dit_model.input_embed.spk_encoder
            sample = self.speakers[speaker].ref_mel.to(next(encoder.parameters()).device)
            self._encodings[speaker] = encoder(torch.cat([sample, torch.zeros_like(sample)]))[:, None]
        return self._encodings[speaker]


def _repeat(rows: Tensor, num_frames: int) -> Tensor:
    """[num_rows, size] -> [num_rows, num_frames, size]"""
    return rows[:, None].expand(-1, num_frames, -1)


def _block_diff(batch: Sequence[Decode], num_frames: int, block_size: int) -> Tensor:
    """Block of the key minus block of the query, as the DiT's layers compare it; int32 [rows, 1, frames, frames]."""
    places = torch.arange(num_frames, dtype=torch.int32)
    blocks = [torch.where(places < one.num_frames, places // block_size, NO_BLOCK) for one in batch]
    if all(one.num_frames == num_frames for one in batch):
        rows = blocks[0][None]  # the same for all of them
    else:
        rows = torch.stack(blocks).repeat(2, 1)
    return (rows[:, None, :] - rows[:, :, None])[:, None]


def _group(indices: Iterable[int], key: Callable[[int], int]) -> Iterable[list[int]]:
    groups: dict[int, list[int]] = {}
    for index in indices:
        groups.setdefault(key(index), []).append(index)
    return groups.values()
