import io

import pytest
import soundfile
import torch

from vllm_omni.entrypoints.openai.audio_format import AUDIO_FORMATS, encode_audio, find_audio_format
from vllm_omni.errors import InvalidRequest


@pytest.mark.parametrize("name", [name for name in AUDIO_FORMATS if not name.startswith("pcm")])
@pytest.mark.parametrize("num_samples", [0, 480, 24000])
def test_what_is_encoded_can_be_played(name: str, num_samples: int) -> None:
    data = encode_audio(torch.sin(torch.arange(num_samples) * 0.1) * 0.5, 24000, AUDIO_FORMATS[name])
    samples, sample_rate = soundfile.read(io.BytesIO(data))
    assert sample_rate == 24000
    assert abs(len(samples) - num_samples) <= 1200  # a frame of the format, at most


def test_pcm_is_two_bytes_a_sample() -> None:
    assert len(encode_audio(torch.zeros(100), 24000, AUDIO_FORMATS["pcm16"])) == 200


def test_an_unknown_format_is_refused_with_those_there_are() -> None:
    with pytest.raises(InvalidRequest, match=r"'wave'.*wav"):
        find_audio_format("wave")
