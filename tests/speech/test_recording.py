"""Recordings in the encoders' form."""

import numpy as np
import pytest

from vllm_omni.errors import InvalidRequest
from vllm_omni.speech.recording import SAMPLE_RATE, make_recording


def tone(seconds: float, rate: int) -> np.ndarray:
    return np.sin(2 * np.pi * 300 * np.arange(int(seconds * rate)) / rate).astype(np.float32)


def test_a_recording_at_the_encoders_rate_is_not_changed():
    samples = tone(1.0, SAMPLE_RATE)
    assert np.array_equal(make_recording(samples, 24000.0, 10, "ref_audio"), samples)


@pytest.mark.parametrize("rate", [8000, 16000, 22050, 44100, 48000])
def test_another_rate_is_resampled_to_the_same_sound(rate):
    made = make_recording(tone(1.0, rate)[:-1], rate, 10, "ref_audio")
    assert len(made) == int(np.ceil((rate - 1) * SAMPLE_RATE / rate))
    assert np.abs(made - tone(1.0, SAMPLE_RATE)[: len(made)])[100:-100].max() < 2e-3


@pytest.mark.parametrize(
    ("samples", "message"),
    [
        (np.zeros(0), "lasts 0.00 s: a voice needs at least 0.5 s"),
        (np.zeros(11 * SAMPLE_RATE), "lasts 11.0 s: at most 10 s are read"),
        (np.full(SAMPLE_RATE, np.nan), "NaN"),
        (np.full(SAMPLE_RATE, 1e6), "far beyond"),
    ],
)
def test_what_is_no_recording_of_a_voice_is_rejected(samples, message):
    with pytest.raises(InvalidRequest, match=f"^ref_audio: .*{message}"):
        make_recording(samples, SAMPLE_RATE, 10, "ref_audio")
