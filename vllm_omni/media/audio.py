"""Encode samples as audio files and streams, with FFmpeg's libraries (PyAV)."""

from __future__ import annotations

import io
import math
from collections.abc import Iterator, Mapping
from fractions import Fraction
from typing import Any, NamedTuple

import av
import numpy as np
from torch import Tensor

NUM_SILENT_SAMPLES = 480  # 20 ms at 24 kHz
SPEEDS = (0.25, 4.0)  # OpenAI's limits
LAYOUTS = {1: "mono", 2: "stereo"}  # number of channels -> FFmpeg's name

# Files hold no random serial numbers and no version of the library: the same samples give the same bytes. Encoded data
# is flushed at once, and FLAC's header has no padding of eight kilobytes for tags.
CONTAINER_OPTIONS = {"fflags": "+bitexact", "flush_packets": "1", "metadata_header_padding": "0"}


class AudioFormat(NamedTuple):
    container: str  # FFmpeg's names
    codec: str
    sample_format: str
    media_type: str
    bit_rate: int | None = None  # bits per second; None: lossless
    options: Mapping[str, str] = {}  # of the container


_PCM = AudioFormat("s16le", "pcm_s16le", "s16", "audio/pcm")
AUDIO_FORMATS = {
    "wav": AudioFormat("wav", "pcm_s16le", "s16", "audio/wav"),
    "pcm16": _PCM,  # 16-bit little-endian samples, no header
    "pcm": _PCM,
    "flac": AudioFormat("flac", "flac", "s16", "audio/flac"),
    "mp3": AudioFormat("mp3", "libmp3lame", "fltp", "audio/mpeg", 96_000, {"id3v2_version": "0"}),
    # A page each 100 ms: with the default of one a second, a listener would wait for the first.
    "opus": AudioFormat("ogg", "libopus", "flt", "audio/ogg", 64_000, {"page_duration": "100000"}),
    "aac": AudioFormat("adts", "aac", "fltp", "audio/aac", 96_000),
}
AUDIO_SUFFIXES = {".wav": "wav", ".flac": "flac", ".mp3": "mp3", ".opus": "opus", ".ogg": "opus", ".aac": "aac"}
"""A file's suffix -> the name of its format."""


class AudioEncoder:
    """Encodes samples incrementally.

    The bytes of all calls, joined, are one playable file. For a stream, each call returns the bytes that can be sent,
    and the header has no length; otherwise the last call returns everything, with the length in the header. The calls
    must not overlap, and may come from any thread.

    Args:
        sample_rate: of the samples and of the file, Hz.
        num_channels: 1 or 2.
        speed: playback speed at the same pitch; within ``SPEEDS``.
    """

    def __init__(
        self,
        audio_format: AudioFormat,
        sample_rate: int,
        *,
        num_channels: int = 1,
        is_stream: bool = False,
        speed: float = 1.0,
    ) -> None:
        self._format = audio_format
        self._sample_rate = sample_rate
        self._num_channels = num_channels
        self._tempo = None if speed == 1.0 else _Tempo(sample_rate, num_channels, speed)
        self._num_samples = 0  # encoded
        self._file = _Outlet() if is_stream else io.BytesIO()
        options = {**CONTAINER_OPTIONS, **audio_format.options}
        self._container = av.open(self._file, "w", format=audio_format.container, options=options)
        stream = self._container.add_stream(audio_format.codec, rate=sample_rate)
        assert isinstance(stream, av.AudioStream)
        stream.layout = LAYOUTS[num_channels]
        stream.format = audio_format.sample_format
        if audio_format.bit_rate is not None:
            stream.bit_rate = audio_format.bit_rate
        self._stream = stream

    def encode(self, samples: Tensor) -> bytes:
        """Float samples [num_samples] or [num_channels, num_samples] in [-1, 1]; values beyond are clipped."""
        channels = samples.numpy().reshape(self._num_channels, -1)
        if self._tempo is None:
            self._encode(channels)
        else:
            for changed in self._tempo.change(channels):
                self._encode(changed)
        return self._take()

    def finish(self) -> bytes:
        """The rest of the file. Do not call ``encode`` afterwards."""
        if self._tempo is not None:
            for changed in self._tempo.finish():
                self._encode(changed)
        if not self._num_samples and self._format.codec != "pcm_s16le":
            # These formats cannot represent a file without samples.
            self._encode(np.zeros((self._num_channels, NUM_SILENT_SAMPLES), np.float32))
        self._container.start_encoding()  # writes the header if no samples were encoded
        self._container.mux(self._stream.encode(None))
        self._container.close()
        return self._take() if isinstance(self._file, _Outlet) else self._file.getvalue()

    def _encode(self, samples: np.ndarray[Any, Any]) -> None:
        if not samples.size:
            return
        samples = samples.clip(-1.0, 1.0)
        if self._format.sample_format == "s16":
            samples = (samples * 32767).round().astype(np.int16)  # the same rounding for every lossless format
        frame = make_audio_frame(samples, self._format.sample_format, self._sample_rate, self._num_samples)
        self._num_samples += samples.shape[1]
        self._container.mux(self._stream.encode(frame))

    def _take(self) -> bytes:
        return self._file.take() if isinstance(self._file, _Outlet) else b""


def encode_audio(samples: Tensor, sample_rate: int, audio_format: AudioFormat, *, speed: float = 1.0) -> bytes:
    """Encode samples as one file; see ``AudioEncoder``."""
    num_channels = 1 if samples.ndim == 1 else len(samples)
    encoder = AudioEncoder(audio_format, sample_rate, num_channels=num_channels, speed=speed)
    return encoder.encode(samples) + encoder.finish()


class _Outlet:
    """A file that can only be appended to, like a connection, so that FFmpeg does not seek back to a header."""

    def __init__(self) -> None:
        self._written = bytearray()

    def write(self, data: bytes) -> int:
        self._written += data
        return len(data)

    def take(self) -> bytes:
        """The bytes written since the last call."""
        taken = bytes(self._written)
        self._written.clear()
        return taken


class _Tempo:
    """Changes the speed at the same pitch with FFmpeg's ``atempo``, which overlaps pieces of the waveform."""

    def __init__(self, sample_rate: int, num_channels: int, speed: float) -> None:
        self._sample_rate = sample_rate
        self._num_channels = num_channels
        self._num_samples = 0
        # One filter reaches down to 0.5, and above 2 it drops samples instead of blending them: chain two there.
        tempos = [speed] if 0.5 <= speed <= 2 else [math.sqrt(speed)] * 2
        self._graph = av.filter.Graph()
        nodes = [
            self._graph.add_abuffer(
                sample_rate=sample_rate,
                format="flt",
                layout=LAYOUTS[num_channels],
                time_base=Fraction(1, sample_rate),
            ),
            *(self._graph.add("atempo", f"{tempo:.6f}") for tempo in tempos),
            self._graph.add("abuffersink"),
        ]
        self._graph.link_nodes(*nodes).configure()

    def change(self, samples: np.ndarray[Any, Any]) -> Iterator[np.ndarray[Any, Any]]:
        if samples.size:
            self._graph.push(make_audio_frame(samples, "flt", self._sample_rate, self._num_samples))
            self._num_samples += samples.shape[1]
            yield from self._pull()

    def finish(self) -> Iterator[np.ndarray[Any, Any]]:
        if self._num_samples:
            self._graph.push(None)
            yield from self._pull()

    def _pull(self) -> Iterator[np.ndarray[Any, Any]]:
        while True:
            try:
                yield self._graph.pull().to_ndarray().reshape(-1, self._num_channels).T
            except (BlockingIOError, EOFError):  # more samples are needed; the end is reached
                return


def make_audio_frame(samples: np.ndarray[Any, Any], sample_format: str, sample_rate: int, start: int) -> Any:
    """Make an FFmpeg frame from samples [num_channels, num_samples]; the first is at the time of sample ``start``."""
    layout = LAYOUTS[len(samples)]
    if not sample_format.endswith("p"):
        samples = samples.T.reshape(1, -1)  # packed: the channels of one moment side by side
    frame = av.AudioFrame.from_ndarray(np.ascontiguousarray(samples), format=sample_format, layout=layout)
    frame.sample_rate, frame.time_base, frame.pts = sample_rate, Fraction(1, sample_rate), start
    return frame
