"""Recordings of voices: which are accepted, and in which form the encoders read them."""

from __future__ import annotations

from typing import Any

import numpy as np
import soxr

from vllm_omni.errors import InvalidRequest

SAMPLE_RATE = 24000  # of the encoders

MIN_SECONDS = 0.5  # the speaker encoder reflects the ends, and a voice is not heard in less
MAX_AMPLITUDE = 2.0  # of samples that are meant to be within [-1, 1]

Samples = np.ndarray[Any, np.dtype[np.float32]]


def make_recording(samples: np.ndarray[Any, Any], sample_rate: float, max_seconds: float, param: str) -> Samples:
    """Convert decoded samples into the encoders' rate; neither loudness nor silence is changed.

    Args:
        samples: [num_samples], one channel.
        max_seconds: a longer recording is rejected.
        param: the field of the request that has it.

    Raises:
        InvalidRequest: it is too short or too long, or has samples that are no sound.
    """
    seconds = len(samples) / sample_rate
    if seconds < MIN_SECONDS:
        raise InvalidRequest(
            f"{param}: the recording lasts {seconds:.2f} s: a voice needs at least {MIN_SECONDS:g} s", param=param
        )
    if seconds > max_seconds:
        raise InvalidRequest(
            f"{param}: the recording lasts {seconds:.1f} s: at most {max_seconds:g} s are read; 5 to 15 s are enough",
            param=param,
        )
    samples = np.ascontiguousarray(samples, np.float32)
    if not np.isfinite(samples).all() or np.abs(samples).max() > MAX_AMPLITUDE:
        said = "the recording has samples that are NaN, infinite or far beyond [-1, 1]"
        raise InvalidRequest(f"{param}: {said}", param=param)
    return _resampled(samples, round(sample_rate))


def _resampled(samples: Samples, sample_rate: int) -> Samples:
    """As ``librosa.resample`` does, which the package ``qwen-tts`` calls: the same quality, and the length rounded up.

    A constant number of samples short or long would shift no sound, but could add or drop the last frame.
    """
    if sample_rate == SAMPLE_RATE:
        return samples
    num_samples = -(-len(samples) * SAMPLE_RATE // sample_rate)
    made = soxr.resample(samples, sample_rate, SAMPLE_RATE, quality="HQ")[:num_samples]
    return np.pad(made, (0, num_samples - len(made)))
