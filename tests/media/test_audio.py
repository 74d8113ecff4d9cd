"""Every format, whole and as a stream, decoded again by FFmpeg: it has the samples that went in."""

import io
import wave
from typing import Any, NamedTuple

import av
import numpy as np
import pytest
import soundfile
import torch
from numpy.typing import NDArray

from tests.cases import case
from vllm_omni.errors import InvalidRequest
from vllm_omni.media import find_format
from vllm_omni.media.audio import AUDIO_FORMATS, AudioEncoder, encode_audio

RATE = 24000
LOSSLESS = ("wav", "flac", "pcm", "pcm16")


class Loss(NamedTuple):
    """What a format that loses something keeps, on the sound of ``make_sound``."""

    delay: int  # samples before the sound in a stream: the encoder looks ahead
    whole_delay: int  # the same in a file whose header says how many of its samples to leave out
    padding: int  # samples behind the sound, at most
    snr_db: float  # at least


LOSSY = {
    "mp3": Loss(delay=1105, whole_delay=0, padding=1152, snr_db=22),
    "opus": Loss(delay=0, whole_delay=0, padding=0, snr_db=25),
    "aac": Loss(delay=1024, whole_delay=1024, padding=1024, snr_db=28),
}

Samples = NDArray[np.float64]


def make_sound(seconds: float = 3.03) -> torch.Tensor:
    time_s = np.arange(round(seconds * RATE)) / RATE
    chirp = 0.4 * np.sin(2 * np.pi * (200 * time_s + 60 * time_s**2))
    return torch.from_numpy((chirp + 0.1 * np.sin(2 * np.pi * 1234 * time_s)).astype(np.float32))


def stream(name: str, pieces: Any, **kwargs: Any) -> list[bytes]:
    encoder = AudioEncoder(AUDIO_FORMATS[name], RATE, is_stream=True, **kwargs)
    return [encoder.encode(piece) for piece in pieces] + [encoder.finish()]


def encode(name: str, sound: torch.Tensor, is_stream: bool, **kwargs: Any) -> bytes:
    if is_stream:
        return b"".join(stream(name, sound.split(3333), **kwargs))
    return encode_audio(sound, RATE, AUDIO_FORMATS[name], **kwargs)


def decode(name: str, data: bytes) -> Samples:
    """At the sample rate that it was encoded from."""
    if name.startswith("pcm"):
        return np.frombuffer(data, "<i2") / 32768
    parts = []
    with av.open(io.BytesIO(data)) as container:
        for frame in container.decode(audio=0):
            samples = frame.to_ndarray().reshape(-1).astype(np.float64)
            parts.append(samples / 32768 if frame.format.name.startswith("s16") else samples)
            sample_rate = frame.sample_rate
    joined = np.concatenate(parts) if parts else np.zeros(0)
    if not parts:
        return joined
    assert sample_rate == (48000 if name == "opus" else RATE)  # opus decodes to nothing else
    return joined[::2] if name == "opus" else joined


def to_16_bits(sound: torch.Tensor) -> Samples:
    rounded: Samples = (sound.numpy().clip(-1, 1) * 32767).round() / 32768
    return rounded


def test_lossless_formats_keep_the_samples_to_16_bits() -> None:
    for is_stream in [False, True]:
        for name in LOSSLESS:
            with case(is_stream, name):
                sound = make_sound() * 2.5  # beyond 1, too
                assert sound.abs().max() > 1
                np.testing.assert_array_equal(decode(name, encode(name, sound, is_stream)), to_16_bits(sound))


def test_lossy_formats_keep_the_whole_sound_with_little_noise() -> None:
    for is_stream in [False, True]:
        for name in LOSSY:
            with case(is_stream, name):
                sound, loss = make_sound(), LOSSY[name]
                decoded = decode(name, encode(name, sound, is_stream))
                delay = loss.delay if is_stream else loss.whole_delay
                assert 0 <= len(decoded) - delay - len(sound) <= loss.padding
                heard = decoded[delay : delay + len(sound)]
                noise = heard - sound.numpy()
                snr_db = 10 * np.log10(np.mean(sound.numpy() ** 2) / np.mean(noise**2))
                assert snr_db > loss.snr_db


def test_two_channels_stay_apart() -> None:
    for speed in [1.0, 2.0]:
        for name in AUDIO_FORMATS:
            with case(speed, name):
                sound = torch.stack([make_sound(1.0), torch.zeros(RATE)])
                data = encode_audio(sound, RATE, AUDIO_FORMATS[name], speed=speed)
                if name.startswith("pcm"):
                    left, right = np.frombuffer(data, "<i2").reshape(-1, 2).T / 32768
                else:
                    with av.open(io.BytesIO(data)) as container:
                        resampler = av.AudioResampler("fltp", "stereo", RATE)
                        pieces = [piece for frame in container.decode(audio=0) for piece in resampler.resample(frame)]
                    left, right = np.concatenate([piece.to_ndarray() for piece in pieces], axis=1)
                assert len(left) == pytest.approx(RATE / speed, abs=2500)
                assert left.std() > 0.2
                assert right.std() < 0.01


def test_a_stream_is_the_same_however_it_is_cut() -> None:
    for name in AUDIO_FORMATS:
        with case(name):
            sound = make_sound(1.0)
            joined = {b"".join(stream(name, sound.split(size))) for size in (480, 5000, len(sound))}
            assert len(joined) == 1
            whole = encode(name, sound, is_stream=False)
            if name == "mp3":
                assert whole.endswith(*joined)  # behind a frame that tells of the length
            elif name not in ("wav", "flac"):  # whose header tells of the length in a file, and not in a stream
                assert joined == {whole}


def test_a_stream_is_sent_before_its_sound_ends() -> None:
    for name in AUDIO_FORMATS:
        with case(name):
            sent = np.cumsum(
                [len(piece) for piece in stream(name, make_sound(2.0).split(2400))]
            )  # a tenth of a second each
            assert sent[2] > 0
            assert sent[9] > sent[-1] / 4
            assert (np.diff(sent) > 0).sum() > len(sent) / 2


def test_the_header_of_a_whole_wav_has_its_length_and_that_of_a_stream_does_not() -> None:
    sound = make_sound(1.0)
    with wave.open(io.BytesIO(encode("wav", sound, is_stream=False))) as file:
        assert (file.getnframes(), file.getframerate(), file.getnchannels(), file.getsampwidth()) == (RATE, RATE, 1, 2)
    streamed = encode("wav", sound, is_stream=True)
    assert streamed[4:8] == streamed[40:44] == b"\xff" * 4
    assert streamed[44:] == encode("wav", sound, is_stream=False)[44:]
    samples, _ = soundfile.read(io.BytesIO(streamed))  # a reader that knows the convention
    np.testing.assert_array_equal(samples, to_16_bits(sound))


def test_no_samples_make_a_file_that_is_silent_for_a_moment_at_most() -> None:
    for is_stream in [False, True]:
        for name in AUDIO_FORMATS:
            with case(is_stream, name):
                decoded = decode(name, encode(name, torch.zeros(0), is_stream))
                assert len(decoded) <= 2048
                assert not decoded.any()


def test_speed_changes_the_length_and_not_the_pitch() -> None:
    for is_stream in [False, True]:
        for speed in [0.25, 0.5, 0.9, 1.5, 2.0, 3.0, 4.0]:
            with case(is_stream, speed):
                tone = 0.5 * torch.sin(torch.arange(4 * RATE) * 2 * np.pi * 440 / RATE)
                changed = decode("wav", encode("wav", tone, is_stream, speed=speed))
                assert len(changed) * speed == pytest.approx(len(tone), rel=0.02)
                spectrum = np.abs(np.fft.rfft(changed * np.hanning(len(changed))))
                assert np.argmax(spectrum) * RATE / len(changed) == pytest.approx(440, abs=1.5)
                assert changed.std() == pytest.approx(tone.std().item(), rel=0.01)
                # A sine stays one: what overlapping pieces add is small.
                near = np.arange(len(spectrum)) * RATE / len(changed)
                power = spectrum**2
                assert power[abs(near - 440) > 20].sum() < 0.01 * power.sum()


def test_speed_one_changes_nothing() -> None:
    sound = make_sound(1.0)
    assert encode("wav", sound, True, speed=1.0) == encode("wav", sound, True)


def test_an_unknown_format_is_rejected_with_the_valid_ones() -> None:
    with pytest.raises(InvalidRequest, match=r"'wave'.*wav"):
        find_format("audio", AUDIO_FORMATS, "wave")
