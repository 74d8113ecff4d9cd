"""Headers of media files, read without decoding."""

import io
import socket
import struct
from pathlib import Path

import pytest
import soundfile
from PIL import Image

from tests.media import oversized
from vllm_omni.media.headers import (
    ImageHeader,
    SoundHeader,
    VideoHeader,
    read_image_header,
    read_sound_header,
    read_video_header,
)


@pytest.mark.parametrize("image_format", ["PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "TGA", "AVIF", "QOI"])
def test_an_image_of_any_format_says_its_size(image_format: str) -> None:
    assert read_image_header(oversized.plain(40, 30, image_format)) == ImageHeader(40, 30, 1200)


@pytest.mark.parametrize("image_format", ["GIF", "WEBP", "PNG", "TIFF"])
def test_of_an_animation_the_first_picture_counts(image_format: str) -> None:
    data = oversized.animation(300, image_format)
    with Image.open(io.BytesIO(data)) as image:
        assert getattr(image, "n_frames", 1) == 300
    assert read_image_header(data) == ImageHeader(16, 16, 256)


def test_an_image_without_pixels_is_as_large_as_it_says() -> None:
    assert read_image_header(oversized.png_that_says(9_000, 9_000)).num_pixels == 81_000_000


def test_a_tile_counts_where_it_is_larger_than_the_image() -> None:
    data = oversized.tiled_tiff(16, 2048)
    with Image.open(io.BytesIO(data)) as image:
        assert image.size == (16, 16)
        image.load()  # it is a valid file
    assert read_image_header(data).num_pixels == 2048**2


@pytest.mark.parametrize("data", [oversized.icon(16, 300), oversized.plain(32, 32, "ICNS"), b"GIF89", b""])
def test_an_image_whose_header_says_nothing_about_its_size_is_not_read(data: bytes) -> None:
    with pytest.raises(ValueError, match="cannot identify image file: it is none of AVIF, BMP"):
        read_image_header(data)


def test_a_gif_whose_first_picture_is_larger_than_its_screen_says_so() -> None:
    data = bytearray(oversized.plain(300, 200, "GIF"))
    struct.pack_into("<HH", data, 6, 1, 1)
    assert read_image_header(bytes(data)).num_pixels == 60_000


@pytest.mark.parametrize("kind", ["WAV", "FLAC", "OGG", "MP3", "AIFF"])
def test_a_sound_of_any_format_says_its_length(kind: str) -> None:
    file = io.BytesIO()
    soundfile.write(file, [[0.1, 0.2]] * 16_000, 16_000, format=kind)
    header = read_sound_header(file.getvalue())
    assert (header.num_channels, header.sample_rate) == (2, 16_000)
    assert header.seconds == pytest.approx(1.0, abs=0.2)


def test_a_wav_is_as_long_as_its_file_where_its_header_says_more() -> None:
    assert read_sound_header(oversized.wav(1000, 8000, says=2**32 - 1)) == SoundHeader(1000, 1, 8000)
    assert read_sound_header(oversized.wav(1000, 8000)[:544]) == SoundHeader(500, 1, 8000)


@pytest.mark.parametrize("container", ["mp4", "matroska", "mpegts", "avi", "m4v"])
def test_a_video_of_any_container_says_its_size_and_length(container: str) -> None:
    """The last one is a bare stream without a header, whose packets are counted."""
    header = read_video_header(oversized.film(20, container=container))
    assert header[:3] == (64, 48, 20)
    assert header.seconds == pytest.approx(2.0)


def test_a_video_has_as_many_frames_as_it_says() -> None:
    assert read_video_header(oversized.film_that_says(2**23)) == VideoHeader(64, 48, 2**23, 0.5)


def test_an_animated_gif_is_a_video() -> None:
    assert read_video_header(oversized.animation(25, "GIF")) == VideoHeader(16, 16, 25, 1.0)


@pytest.mark.parametrize("name", oversized.PLAYLISTS)
def test_no_file_opens_another(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file that a playlist names is there, and the port of the session is not waited for."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "other.wav").write_bytes(oversized.wav(8000, 8000))
    for read in (read_sound_header, read_video_header):
        with pytest.raises(ValueError, match="a format that is not read"):
            read(oversized.PLAYLISTS[name])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as free:
        free.bind(("127.0.0.1", 5004))


@pytest.mark.parametrize("data", [b"", b"nothing", oversized.film(5)[:600], oversized.plain(8, 8)])
def test_what_is_no_sound_and_no_video_is_not_read(data: bytes) -> None:
    for read in (read_sound_header, read_video_header):
        with pytest.raises(ValueError, match="invalid or corrupted"):
            read(data)


def test_a_film_without_a_sound_is_no_sound() -> None:
    with pytest.raises(ValueError, match="it has no sound"):
        read_sound_header(oversized.film(3))
