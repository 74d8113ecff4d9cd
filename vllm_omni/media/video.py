"""Encode frames as video files, with FFmpeg's libraries (PyAV), and as GIF animations, with Pillow."""

from __future__ import annotations

import io
from collections.abc import Mapping
from fractions import Fraction
from typing import NamedTuple

import av
import numpy as np
from PIL import Image
from torch import Tensor

from vllm_omni.media.audio import CONTAINER_OPTIONS, make_audio_frame
from vllm_omni.media.image import to_pixels

DEFAULT_FPS = 16
"""Frames per second of a video if neither the request nor the pipeline sets them."""


class VideoFormat(NamedTuple):
    container: str  # FFmpeg's names
    codec: str
    audio_codec: str | None  # None: the format has no sound
    media_type: str
    options: Mapping[str, str] = {}  # of the codec


VIDEO_FORMATS = {
    "mp4": VideoFormat("mp4", "libx264", "aac", "video/mp4", {"crf": "17", "preset": "medium"}),
    "webm": VideoFormat("webm", "libvpx-vp9", "libopus", "video/webm", {"crf": "24", "b": "0", "cpu-used": "4"}),
    "gif": VideoFormat("gif", "gif", None, "image/gif"),
}
VIDEO_SUFFIXES = {".mp4": "mp4", ".webm": "webm", ".gif": "gif"}
"""A file's suffix -> the name of its format."""

_OPUS_RATE = 48_000  # Hz; Opus supports few others


def encode_video(
    frames: Tensor,
    fps: int,
    video_format: VideoFormat,
    audio: Tensor | None = None,
    sample_rate: int | None = None,
) -> bytes:
    """Encode frames as a file; the same frames give the same bytes.

    An odd height or width is made even by repeating the last line: the codecs halve the resolution of colours.

    Args:
        frames: [T, H, W, 3], uint8 or float in [0, 1].
        fps: frames per second; a gif's frames last whole hundredths of a second.
        audio: its sound, float [C, S] in [-1, 1]; a gif has none.
        sample_rate: of the sound, Hz.
    """
    frames = to_pixels(frames)
    if video_format.codec == "gif":
        return _encode_gif(frames, fps)
    pixels = np.pad(frames.numpy(), [(0, 0), (0, frames.shape[1] % 2), (0, frames.shape[2] % 2), (0, 0)], "edge")
    file = io.BytesIO()
    with av.open(file, "w", format=video_format.container, options=dict(CONTAINER_OPTIONS)) as container:
        stream = container.add_stream(video_format.codec, rate=fps, options=dict(video_format.options))
        assert isinstance(stream, av.VideoStream)
        stream.height, stream.width = pixels.shape[1:3]
        stream.pix_fmt = "yuv420p"  # supported by every player
        stream.codec_context.thread_count = 1  # the bytes must not depend on the machine
        sound: av.AudioStream | None = None
        if audio is not None and video_format.audio_codec is not None:
            assert sample_rate is not None, "sound has a rate"
            rate = _OPUS_RATE if video_format.audio_codec == "libopus" else sample_rate
            added = container.add_stream(video_format.audio_codec, rate=rate)
            assert isinstance(added, av.AudioStream)
            sound = added
            sound.layout = "mono" if len(audio) == 1 else "stereo"
        for index, picture in enumerate(pixels):
            frame = av.VideoFrame.from_ndarray(np.ascontiguousarray(picture), format="rgb24")
            frame.pts, frame.time_base = index, Fraction(1, fps)
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
        if sound is not None:
            assert audio is not None and sample_rate is not None
            _encode_sound(container, sound, audio, sample_rate)
    return file.getvalue()


def _encode_sound(
    container: av.container.OutputContainer, stream: av.AudioStream, audio: Tensor, sample_rate: int
) -> None:
    """Encode the sound after the frames; the muxer sorts both by time."""
    samples = audio.detach().cpu().float().clamp(-1, 1).numpy()
    resampler = av.AudioResampler(stream.codec_context.format, stream.layout, stream.rate)
    for frame in (make_audio_frame(samples, "fltp", sample_rate, 0), None):
        for resampled in resampler.resample(frame):
            container.mux(stream.encode(resampled))
    container.mux(stream.encode(None))


def _encode_gif(frames: Tensor, fps: int) -> bytes:
    first, *rest = [Image.fromarray(pixels) for pixels in frames.contiguous().numpy()]
    file = io.BytesIO()
    duration_ms = max(round(100 / fps), 2) * 10  # players do not honour less than 20 ms
    first.save(file, "GIF", save_all=True, append_images=rest, duration=duration_ms, loop=0)
    return file.getvalue()
