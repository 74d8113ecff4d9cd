"""Samples as a client can play them."""

import io
from typing import NamedTuple

import soundfile
import torch
from torch import Tensor

from vllm_omni.errors import InvalidRequest
from vllm_omni.names import suggest

NUM_SILENT_SAMPLES = 480  # 20 ms at 24 kHz


class AudioFormat(NamedTuple):
    container: str  # libsndfile's names
    subtype: str | None
    can_be_cut: bool = False  # pieces that are encoded one by one make the whole when joined


_PCM = AudioFormat("RAW", "PCM_16", can_be_cut=True)
AUDIO_FORMATS = {
    "wav": AudioFormat("WAV", "PCM_16"),
    "pcm16": _PCM,  # 16-bit little-endian samples, no header
    "pcm": _PCM,
    "flac": AudioFormat("FLAC", "PCM_16"),
    "mp3": AudioFormat("MP3", None),
    "opus": AudioFormat("OGG", "OPUS"),
}


def find_audio_format(name: str) -> AudioFormat:
    """Raises ``InvalidRequest`` for a name that there is not, with those that there are."""
    if name not in AUDIO_FORMATS:
        raise InvalidRequest(f"unknown audio format {name!r}: {suggest(name, AUDIO_FORMATS)}")
    return AUDIO_FORMATS[name]


def encode_audio(samples: Tensor, sample_rate: int, audio_format: AudioFormat) -> bytes:
    """Samples (float [num_samples], in [-1, 1]; what is beyond is clipped) as a file in memory."""
    if not len(samples) and audio_format.container not in ("RAW", "WAV"):
        samples = torch.zeros(NUM_SILENT_SAMPLES)  # these formats have no file of no samples
    data = samples.numpy()
    if audio_format.subtype == "PCM_16":
        # Here rather than in libsndfile, which rounds differently for each container.
        data = (data.clip(-1.0, 1.0) * 32767).round().astype("<i2")
    file = io.BytesIO()
    soundfile.write(
        file,
        data,
        sample_rate,
        format=audio_format.container,
        subtype=audio_format.subtype,
        endian="LITTLE" if audio_format.container == "RAW" else None,
    )
    return file.getvalue()
