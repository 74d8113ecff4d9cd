"""``VoiceEncoder``: a recording of a voice -> what a talker reads of it, with transformers' modules.

From: the published Qwen3-TTS checkpoints and their code (package ``qwen-tts`` 0.1.1).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import MimiConfig, MimiModel
from transformers.audio_utils import mel_filter_bank
from transformers.models.qwen2_5_omni.modeling_qwen2_5_omni import ECAPA_TimeDelayNet

from vllm_omni.speech.recording import SAMPLE_RATE

NUM_FFT, HOP = 1024, 256
NUM_REFLECTED = (NUM_FFT - HOP) // 2  # samples on either side of a recording
MAX_FREQUENCY = 12000
SMALLEST_POWER, SMALLEST_MEL = 1e-9, 1e-5

# Mimi's attention has a window of 10 s. The package's version of transformers ignores it, and so do the models that
# were made with it: codes behind the first 10 s of a recording depend on this.
NO_WINDOW = 1_000_000


@dataclass(frozen=True)
class VoiceFeatures:
    """What a talker reads of a recording; on the CPU."""

    x_vector: Tensor  # [enc_dim] float32, the timbre
    codes: Tensor | None = None  # [num_frames, num_groups] int64, the recording itself; None: not asked for


class SpeakerEncoder(ECAPA_TimeDelayNet):
    """ECAPA-TDNN behind a mel spectrogram.

    Args:
        section: ``speaker_encoder_config`` of the checkpoint.
    """

    def __init__(self, section: Mapping[str, Any]) -> None:
        super().__init__(SimpleNamespace(**section))  # it reads these fields
        filters = mel_filter_bank(
            1 + NUM_FFT // 2, section["mel_dim"], 0, MAX_FREQUENCY, SAMPLE_RATE, norm="slaney", mel_scale="slaney"
        )
        self.register_buffer("filters", torch.from_numpy(filters).float(), persistent=False)  # [bins, mel_dim]
        self.register_buffer("window", torch.hann_window(NUM_FFT), persistent=False)
        self.filters: Tensor
        self.window: Tensor

    def mel(self, waves: Tensor) -> Tensor:
        """Logarithmic mel spectrogram, [B, samples] -> [B, num_frames, mel_dim]."""
        padded = functional.pad(waves[:, None], (NUM_REFLECTED, NUM_REFLECTED), mode="reflect")[:, 0]
        spectrum = torch.stft(padded, NUM_FFT, HOP, NUM_FFT, self.window, center=False, return_complex=True)
        magnitude = torch.sqrt(spectrum.real**2 + spectrum.imag**2 + SMALLEST_POWER)
        return (magnitude.transpose(1, 2) @ self.filters).clamp(min=SMALLEST_MEL).log()

    def encode(self, waves: Tensor) -> Tensor:
        """The x-vectors of recordings, [B, samples] -> [B, enc_dim]."""
        vectors: Tensor = self(self.mel(waves)).reshape(len(waves), -1)
        return vectors


class CodecEncoder(MimiModel):
    """The encoder half of Mimi.

    Args:
        section: ``encoder_config`` of the tokenizer's checkpoint.
        num_groups: codes of a frame that are used, of those that Mimi has.
        samples_per_frame: of the recording.
    """

    def __init__(self, section: Mapping[str, Any], num_groups: int, samples_per_frame: int) -> None:
        # The checkpoints have both names, which are properties in transformers 5.
        values = {name: value for name, value in section.items() if name not in ("model_type", "frame_rate")}
        super().__init__(MimiConfig(**{**values, "sliding_window": NO_WINDOW}))
        del self.decoder, self.decoder_transformer, self.upsample
        self._num_groups = num_groups
        self._samples_per_frame = samples_per_frame

    def encode_voice(self, waves: Tensor) -> Tensor:
        """The codes of recordings, [B, samples] -> [B, num_frames, num_groups].

        Recordings of a batch have the same length: padding would change the last frame.
        """
        num_frames = -(-waves.shape[1] // self._samples_per_frame)
        encoded = self.encode(waves[:, None], num_quantizers=self._num_groups, return_dict=True)
        codes: Tensor = encoded.audio_codes[:, :, :num_frames].transpose(1, 2)
        return codes


class VoiceEncoder(nn.Module):
    """Both encoders of a checkpoint, under the names that their tensors have there."""

    def __init__(self, speaker_encoder: SpeakerEncoder, encoder: CodecEncoder) -> None:
        super().__init__()
        self.speaker_encoder = speaker_encoder
        self.encoder = encoder

    def forward(self, waves: Tensor, *, with_codes: bool) -> list[VoiceFeatures]:
        """Features of recordings of the same length, [B, samples] float32 at 24 kHz."""
        vectors = self.speaker_encoder.encode(waves).float().cpu()
        if not with_codes:
            return [VoiceFeatures(vector) for vector in vectors]
        codes = self.encoder.encode_voice(waves).cpu()
        return [VoiceFeatures(vector, one) for vector, one in zip(vectors, codes, strict=True)]
