"""Limits of one file of a request, each with its setting and the field at fault."""

from dataclasses import replace
from typing import Any

import pytest

from vllm_omni.errors import InvalidRequest
from vllm_omni.media.headers import ImageHeader, SoundHeader, VideoHeader
from vllm_omni.media.limits import SETTINGS, MediaLimits

LIMITS = MediaLimits(
    file_bytes=1000,
    sound_file_bytes=500,
    image_pixels=600,
    sound_seconds=10,
    sound_bytes=400_000,
    video_seconds=20,
    video_frames=100,
    video_pixels=30_000,
)
NONE = MediaLimits(0, 0, 0, 0, 0, 0, 0, 0)


def test_what_is_at_a_limit_is_read_and_its_decoded_bytes_are_known() -> None:
    LIMITS.check_file(1000, "image")
    LIMITS.check_file(500, "audio")
    assert LIMITS.check_image(ImageHeader(30, 20, 600)) == 600 * 4
    assert LIMITS.check_sound(SoundHeader(100_000, 1, 10_000)) == 160_000 * 4  # as a model hears it
    assert LIMITS.check_sound(SoundHeader(50_000, 2, 48_000)) == 400_000
    assert LIMITS.check_video(VideoHeader(30, 10, 100, 20.0)) == 300 * 3


def test_a_sound_that_does_not_say_its_length_takes_what_is_decoded_at_most() -> None:
    assert LIMITS.check_sound(SoundHeader(None, 2, 48_000)) == 400_000


CASES: list[tuple[str, Any, str | None, str]] = [
    ("check_file", (1001, "video"), "video_url", "the video has 1,001 bytes or more: at most 1,000 (FILE_BYTES)"),
    ("check_file", (501, "audio"), "audio_url", "the audio has 501 bytes or more: at most 500 (SOUND_FILE_BYTES)"),
    ("check_file", (1001,), None, "the file has 1,001 bytes or more: at most 1,000 (FILE_BYTES)"),
    (
        "check_image",
        (ImageHeader(601, 1, 601),),
        "image_url",
        "the image has 601 pixels (601x1): at most 600 (IMAGE_PIXELS)",
    ),
    (
        "check_image",
        (ImageHeader(2, 2, 1024),),
        "image_url",
        "the image has 1,024 pixels (2x2 in larger tiles): at most 600 (IMAGE_PIXELS)",
    ),
    (
        "check_sound",
        (SoundHeader(80_080, 1, 8000),),
        "audio_url",
        "the audio lasts 10.0 s: at most 10 s (SOUND_SECONDS)",
    ),
    (
        "check_sound",
        (SoundHeader(50_001, 2, 48_000),),
        "audio_url",
        "the audio takes 400,008 bytes to decode: at most 400,000 (SOUND_BYTES)",
    ),
    (
        "check_sound",
        (SoundHeader(5, 1, 999),),
        "audio_url",
        "the audio has 999 samples a second: 1,000 to 768,000 are read",
    ),
    (
        "check_sound",
        (SoundHeader(5, 1, 2_000_000_000),),
        "audio_url",
        "the audio has 2,000,000,000 samples a second: 1,000 to 768,000 are read",
    ),
    (
        "check_video",
        (VideoHeader(30, 21, 1, 0.1),),
        "video_url",
        "the video has 630 pixels (30x21): at most 600 (IMAGE_PIXELS)",
    ),
    (
        "check_video",
        (VideoHeader(3, 2, 1, 20.5),),
        "video_url",
        "the video lasts 20.5 s: at most 20 s (VIDEO_SECONDS)",
    ),
    (
        "check_video",
        (VideoHeader(3, 2, 101, 1.0),),
        "video_url",
        "the video has 101 frames: at most 100 (VIDEO_FRAMES)",
    ),
    (
        "check_video",
        (VideoHeader(30, 20, 51, 1.0),),
        "video_url",
        "the video has 51 frames of 600 pixels: at most 30,000 pixels in all frames (VIDEO_PIXELS)",
    ),
]


@pytest.mark.parametrize(("check", "given", "param", "said"), CASES)
def test_what_is_beyond_a_limit_is_rejected_with_its_setting(
    check: str, given: Any, param: str | None, said: str
) -> None:
    for name, setting in SETTINGS.items():
        said = said.replace(f"({name.upper()})", f"({setting})")
    with pytest.raises(InvalidRequest) as error:
        getattr(LIMITS, check)(*given)
    assert (str(error.value), error.value.param) == (said, param)


@pytest.mark.parametrize(("check", "given", "param", "said"), [case for case in CASES if "are read" not in case[3]])
def test_a_limit_of_0_is_none(check: str, given: Any, param: str | None, said: str) -> None:
    getattr(NONE, check)(*given)


def test_each_limit_has_a_setting() -> None:
    assert set(SETTINGS) == set(MediaLimits.__dataclass_fields__)
    assert replace(LIMITS, file_bytes=2000).file_bytes == 2000
