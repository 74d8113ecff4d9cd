"""Headers of image, audio and video files: how much decoding them would take, read without decoding anything.

A header may lie. Therefore only formats are read whose decoders stop where the header says: a picture has the size of
its header, a sound ends after the number of samples, and of a video no more frames are read than it is said to have.
"""

from __future__ import annotations

import io
from typing import NamedTuple

import av
import soundfile
from PIL import Image, UnidentifiedImageError

# Pillow knows more. Of those, some contain a picture whose size differs from the header's (ICO, ICNS, BLP, IPTC), or
# compress a whole file (FITS).
IMAGE_FORMATS = ("AVIF", "BMP", "DIB", "GIF", "JPEG", "JPEG2000", "PNG", "PPM", "QOI", "TGA", "TIFF", "WEBP")

# FFmpeg's names of demuxers. Others read what their file names: playlists (hls, dash, concat) open files and addresses,
# and a description of a session (sdp) opens ports and waits.
CONTAINERS = (
    "aac,ac3,aiff,amr,ape,asf,au,avi,caf,eac3,flac,flv,gif,h264,hevc,ivf,loas,m4v,matroska,mov,mp3,mpeg,mpegts,"
    "mpegvideo,obu,ogg,tta,w64,wav,webm,wv"
)
_TIFF_TILE = (322, 323)  # tags with the width and height of a tile, which the decoder reads whole
_UNKNOWN_LENGTH = 1 << 62  # samples; libsndfile reports more than this where a header has no length


class ImageHeader(NamedTuple):
    width: int
    height: int
    num_pixels: int  # that are decoded: of the picture, or of a tile that is larger


class SoundHeader(NamedTuple):
    num_samples: int | None  # of one channel; None: the file does not say
    num_channels: int
    sample_rate: int  # Hz

    @property
    def seconds(self) -> float | None:
        return None if self.num_samples is None else self.num_samples / self.sample_rate


class VideoHeader(NamedTuple):
    """Of the largest of its streams: FFmpeg decides by more than the size which one it decodes."""

    width: int
    height: int
    num_frames: int
    seconds: float


def read_image_header(data: bytes) -> ImageHeader:
    """Read the size of a picture, or of the first one of an animation, which is the one that is decoded.

    Raises:
        ValueError: it is none, or in a format that is not read.
        OSError: it is broken.
        DecompressionBombError: Pillow's, for a size beyond its own limit.
    """
    try:
        opened = Image.open(io.BytesIO(data), formats=IMAGE_FORMATS)
    except UnidentifiedImageError:
        raise ValueError(f"cannot identify image file: it is none of {', '.join(IMAGE_FORMATS)}") from None
    with opened as image:
        num_pixels = image.width * image.height
        if image.format == "TIFF":
            tile = [int(image.tag_v2.get(tag, 0)) for tag in _TIFF_TILE]  # type: ignore[attr-defined]
            num_pixels = max(num_pixels, tile[0] * tile[1])
        return ImageHeader(image.width, image.height, num_pixels)


def read_sound_header(data: bytes) -> SoundHeader:
    """Read the length of a sound, or of the sound of a video.

    libsndfile reads what it knows, otherwise FFmpeg, as vLLM's decoder does. A recording of a browser has no length in
    its header, but its packets have.

    Raises:
        ValueError: it has no sound that could be read.
    """
    try:
        with soundfile.SoundFile(io.BytesIO(data)) as sound:
            if sound.frames < _UNKNOWN_LENGTH:
                return SoundHeader(sound.frames, sound.channels, sound.samplerate)
    except soundfile.LibsndfileError:
        pass
    try:
        with _open(data) as container:
            stream = next(iter(container.streams.audio), None)
            if stream is None:
                raise ValueError("it has no sound")
            seconds = max(_seconds(container), _packets(container, stream)[1])
            num_samples = round(seconds * stream.rate) if seconds else None
            return SoundHeader(num_samples, stream.channels, stream.rate)
    except av.error.FFmpegError as exc:
        raise ValueError("invalid or corrupted audio data, or a format that is not read") from exc


def read_video_header(data: bytes) -> VideoHeader:
    """Read size and length of a video; from its packets if the header has no length.

    Raises:
        ValueError: it has no pictures that could be read.
    """
    try:
        with _open(data) as container:
            streams = container.streams.video
            if not streams:
                raise ValueError("it has no pictures")
            largest = max(streams, key=lambda stream: stream.width * stream.height)
            seconds = _seconds(container)
            num_frames = max(max(stream.frames, round(seconds * (stream.average_rate or 0))) for stream in streams)
            if not num_frames or not seconds:
                num_packets, in_packets = _packets(container, *streams)
                num_frames, seconds = max(num_frames, num_packets), max(seconds, in_packets)
            return VideoHeader(largest.width, largest.height, num_frames, seconds)
    except av.error.FFmpegError as exc:
        raise ValueError("invalid or corrupted video data, or a format that is not read") from exc


def _open(data: bytes) -> av.container.InputContainer:
    return av.open(io.BytesIO(data), "r", options={"format_whitelist": CONTAINERS})


def _seconds(container: av.container.InputContainer) -> float:
    """As the header has it; 0: it does not say."""
    return max(container.duration or 0, 0) / av.time_base


def _packets(container: av.container.InputContainer, *streams: av.VideoStream | av.AudioStream) -> tuple[int, float]:
    """The number of packets of some streams with anything in them, and the length in seconds that the packets have."""
    num_packets, seconds = 0, 0.0
    for packet in container.demux(*streams):
        num_packets += packet.size > 0
        seconds += float((packet.duration or 0) * (packet.time_base or 0))
    return num_packets, seconds / len(streams)
