"""Every format, decoded again: it has the frames that went in, at their times, and the sound."""

import io
from typing import Any

import av
import numpy as np
import pytest
import torch

from tests.cases import case
from vllm_omni.errors import InvalidRequest
from vllm_omni.media import find_format
from vllm_omni.media.video import VIDEO_FORMATS, VIDEO_SUFFIXES, encode_video

RATE = 16000
WITH_SOUND = [name for name, video_format in VIDEO_FORMATS.items() if video_format.audio_codec]


def make_frames(num_frames: int = 7, height: int = 48, width: int = 64) -> torch.Tensor:
    """uint8 [T, H, W, 3]: a bright square that moves to the right on a grey ground."""
    frames = torch.full((num_frames, height, width, 3), 60, dtype=torch.uint8)
    for index in range(num_frames):
        frames[index, 8:24, 8 * index : 8 * index + 16] = torch.tensor([230, 120, 40], dtype=torch.uint8)
    return frames


def make_sound(num_channels: int, seconds: float = 1.0) -> torch.Tensor:
    time_s = torch.arange(round(seconds * RATE)) / RATE
    tones = [0.5 * torch.sin(2 * torch.pi * hertz * time_s) for hertz in (440, 1000)]
    return torch.stack(tones[:num_channels])


def decode(data: bytes) -> tuple[torch.Tensor, list[float]]:
    """Frames, and when each is shown (s)."""
    with av.open(io.BytesIO(data)) as container:
        frames = list(container.decode(video=0))
    pixels = np.stack([frame.to_ndarray(format="rgb24") for frame in frames])
    return torch.from_numpy(pixels), [float(frame.time or 0) for frame in frames]


def decode_sound(data: bytes) -> tuple[np.ndarray[Any, Any], int]:
    """Samples [C, S], and their rate."""
    with av.open(io.BytesIO(data)) as container:
        frames = list(container.decode(audio=0))
    return np.concatenate([frame.to_ndarray() for frame in frames], axis=1), frames[0].sample_rate


def test_a_file_has_the_frames_in_order() -> None:
    for name in VIDEO_FORMATS:
        with case(name):
            frames = make_frames()
            decoded, _ = decode(encode_video(frames, 8, VIDEO_FORMATS[name]))
            assert decoded.shape == frames.shape
            distances = [[(one.int() - other.int()).abs().float().mean().item() for other in frames] for one in decoded]
            assert [int(np.argmin(row)) for row in distances] == list(range(len(frames)))
            assert max(row[index] for index, row in enumerate(distances)) < 5  # of 255; half the colours' resolution


def test_frames_are_shown_at_their_times() -> None:
    for name in ["mp4", "webm"]:
        for fps in [1, 16, 30]:
            with case(name, fps):
                _, times = decode(encode_video(make_frames(), fps, VIDEO_FORMATS[name]))
                np.testing.assert_allclose(times, np.arange(7) / fps, atol=0.001)  # webm counts in milliseconds


def test_the_same_frames_give_the_same_bytes() -> None:
    for name in VIDEO_FORMATS:
        with case(name):
            assert len({encode_video(make_frames(), 8, VIDEO_FORMATS[name]) for _ in range(2)}) == 1


def test_one_frame_is_a_video() -> None:
    for name in VIDEO_FORMATS:
        with case(name):
            decoded, _ = decode(encode_video(make_frames(1), 8, VIDEO_FORMATS[name]))
            assert len(decoded) == 1


def test_floats_give_the_file_of_their_pixels() -> None:
    for name in VIDEO_FORMATS:
        with case(name):
            frames = make_frames(2)
            assert encode_video(frames / 255, 8, VIDEO_FORMATS[name]) == encode_video(frames, 8, VIDEO_FORMATS[name])


def test_odd_sizes_get_one_line_more() -> None:
    for name in ["mp4", "webm"]:
        with case(name):
            frames = make_frames(2, 33, 47)
            decoded, _ = decode(encode_video(frames, 8, VIDEO_FORMATS[name]))
            assert decoded.shape == (2, 34, 48, 3)


def test_a_video_has_its_sound() -> None:
    for name in WITH_SOUND:
        for num_channels in [1, 2]:
            with case(name, num_channels):
                sound = make_sound(num_channels)
                data = encode_video(make_frames(8), 8, VIDEO_FORMATS[name], sound, RATE)
                assert len(decode(data)[0]) == 8
                heard, rate = decode_sound(data)
                assert len(heard) == num_channels
                assert heard.shape[1] == pytest.approx(
                    rate, abs=0.15 * rate
                )  # a second, and the ends of the codec's frames
                for channel, hertz in zip(heard, (440, 1000), strict=False):
                    spectrum = np.abs(np.fft.rfft(channel))
                    assert np.fft.rfftfreq(len(channel), 1 / rate)[spectrum.argmax()] == pytest.approx(hertz, abs=3)


def test_a_gif_drops_the_sound() -> None:
    assert encode_video(make_frames(), 8, VIDEO_FORMATS["gif"], make_sound(2), RATE) == encode_video(
        make_frames(), 8, VIDEO_FORMATS["gif"]
    )


def test_every_suffix_has_a_format() -> None:
    assert set(VIDEO_SUFFIXES.values()) == set(VIDEO_FORMATS)


def test_an_unknown_format_is_rejected_with_the_nearest() -> None:
    with pytest.raises(InvalidRequest, match=r"unknown video format 'mpeg4': did you mean 'mp4'\?"):
        find_format("video", VIDEO_FORMATS, "mpeg4")
