"""``BudgetedConnector``: media are fetched within a deadline, and decoded within a budget of bytes."""

from __future__ import annotations

import asyncio
import io
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import aiohttp
import av
import pybase64
import soundfile
import vllm.envs
from PIL import Image
from vllm.connections import HTTPConnection
from vllm.multimodal.media import AudioMediaIO, ImageMediaIO, MediaConnector, MediaIO, VideoMediaIO
from vllm.multimodal.media.connector import global_thread_pool

from vllm_omni import envs
from vllm_omni.engine.media_budget import HOLDING

M = TypeVar("M")

# Bytes that decoding and processing take at their peak, by decoded bytes, as measured with the processor of Qwen's
# models: 15.3 for a video that need not be shrunk, 5.1 for a sound of ten minutes.
PROCESSING_FACTOR = 16
SOUND_FACTOR = 6
MAX_CONNECTIONS = 256  # to all hosts
MAX_CONNECTIONS_PER_HOST = 32  # a host that sends nothing delays fetches from itself alone


class DeadlineConnection(HTTPConnection):
    """vLLM's client, with one deadline for all attempts to fetch a file; vLLM's alone may take 111 s for an image."""

    _session: aiohttp.ClientSession | None = None

    async def get_async_client(self) -> aiohttp.ClientSession:
        if self._session is None:
            connector = aiohttp.TCPConnector(limit=MAX_CONNECTIONS, limit_per_host=MAX_CONNECTIONS_PER_HOST)
            self._session = aiohttp.ClientSession(connector=connector, trust_env=True)
        return self._session

    async def async_get_bytes(self, url: str, **kwargs: Any) -> bytes:
        deadline_s = envs.VLLM_OMNI_MEDIA_FETCH_TIMEOUT_S
        try:
            async with asyncio.timeout(deadline_s):
                data: bytes = await super().async_get_bytes(url, **kwargs)
        except TimeoutError as exc:
            raise TimeoutError(f"it could not be fetched within {deadline_s:g} s") from exc
        return data


CONNECTION = DeadlineConnection()


class BudgetedConnector(MediaConnector):
    """vLLM's connector, which fetches and decodes in one step; here, a prompt waits for its budget in between.

    A file that waits is held as it was sent. Decoding runs in vLLM's pool of threads; of an aborted prompt, what a
    thread has started is decoded to its end, and dropped.

    Args:
        factor: how many times its decoded bytes an image or a video takes until the engine has it.
    """

    def __init__(
        self,
        media_io_kwargs: dict[str, dict[str, Any]] | None = None,
        connection: HTTPConnection = CONNECTION,
        *,
        factor: int = PROCESSING_FACTOR,
        **kwargs: Any,
    ) -> None:
        super().__init__(media_io_kwargs, connection, **kwargs)
        self._factor = factor

    async def load_from_url_async(self, url: str, media_io: MediaIO[M], *, fetch_timeout: int | None = None) -> M:
        file = await super().load_from_url_async(url, _Files(media_io), fetch_timeout=fetch_timeout)
        return await self._decode(media_io, file)

    async def decode_image(self, data: bytes) -> Any:
        """Decode an image that came with the request."""
        media_io = ImageMediaIO()
        return await self._decode(media_io, _Files(media_io).load_bytes(data))

    async def decode_audio(self, data: bytes) -> tuple[Any, float]:
        """Decode a sound that came with the request: samples, [n], and their rate."""
        media_io = AudioMediaIO()
        sound: tuple[Any, float] = await self._decode(media_io, _Files(media_io).load_bytes(data))
        return sound

    async def _decode(self, media_io: MediaIO[Any], file: File) -> Any:
        run = partial(asyncio.get_running_loop().run_in_executor, global_thread_pool)
        if (holding := HOLDING.get()) is not None:
            factor = SOUND_FACTOR if isinstance(media_io, AudioMediaIO) else self._factor
            num_bytes = await run(num_decoded_bytes, media_io, file)
            await holding.budget.reserve(holding, factor * num_bytes)
        return await run(file.decode)


class File(NamedTuple):
    data: bytes
    decode: Callable[[], Any]
    is_frames: bool = False  # images in base 64, joined by commas: the frames of a video


class _Files(MediaIO[File]):
    """Stands for a decoder: returns files with the call that decodes them."""

    def __init__(self, media_io: MediaIO[Any]) -> None:
        self._media_io = media_io

    def get_max_bytes(self) -> int | None:
        max_bytes: int | None = self._media_io.get_max_bytes()
        return max_bytes

    def load_bytes(self, data: bytes) -> File:
        return File(data, partial(self._media_io.load_bytes, data))

    def load_base64(self, media_type: str, data: str) -> File:
        if isinstance(self._media_io, VideoMediaIO) and media_type.lower() == "video/jpeg":
            return File(data.encode(), partial(self._media_io.load_base64, media_type, data), is_frames=True)
        return self.load_bytes(pybase64.b64decode(data, validate=True))

    def load_file(self, filepath: Path) -> File:
        return self.load_bytes(filepath.read_bytes())


def num_decoded_bytes(media_io: MediaIO[Any], file: File) -> int:
    """How many bytes a file takes when decoded, read without decoding it; 0 for what the decoder will reject."""
    try:
        if file.is_frames:
            return sum(_num_image_bytes(pybase64.b64decode(frame)) for frame in file.data.split(b","))
        if isinstance(media_io, ImageMediaIO):
            return _num_image_bytes(file.data)
        if isinstance(media_io, VideoMediaIO):
            return _num_video_bytes(media_io, file.data)
        if isinstance(media_io, AudioMediaIO):
            return min(4 * _num_samples(file.data), vllm.envs.VLLM_MAX_AUDIO_DECODE_BYTES)
    except Exception:  # the decoder says what is wrong
        return 0
    return len(file.data)


def _num_image_bytes(data: bytes) -> int:
    with Image.open(io.BytesIO(data)) as image:
        return int(image.width * image.height * 4)


def _num_samples(data: bytes) -> int:
    """Of all channels. vLLM reads a sound with libsndfile if that knows the format, otherwise with FFmpeg."""
    try:
        with soundfile.SoundFile(io.BytesIO(data)) as sound:
            return int(sound.frames * sound.channels)
    except soundfile.LibsndfileError:
        with av.open(io.BytesIO(data), "r") as container:
            stream = container.streams.audio[0]
            return round(_num_seconds(container, stream) * stream.rate * stream.channels)


def _num_seconds(container: av.container.InputContainer, stream: av.AudioStream) -> float:
    """The length of a sound: a recording of a browser has none in its header, but its packets do.

    Where neither says it, as much as vLLM decodes.
    """
    in_header = (container.duration or 0) / av.time_base
    ticks = sum(packet.duration or 0 for packet in container.demux(stream))
    in_packets = float(ticks * (stream.time_base or 0))
    return max(in_header, in_packets) or vllm.envs.VLLM_MAX_AUDIO_DECODE_DURATION_S


def _num_video_bytes(media_io: VideoMediaIO, data: bytes) -> int:
    """Of the largest stream: FFmpeg decides by more than the size which one it decodes."""
    num_frames = _num_sampled_frames(media_io, data)
    with av.open(io.BytesIO(data), "r") as container:
        streams = container.streams.video
        if num_frames is None:
            num_frames = sum(1 for packet in container.demux(streams) if packet.size)
        return max(stream.width * stream.height for stream in streams) * 3 * num_frames


class _Counted(Exception):
    def __init__(self, num_frames: int) -> None:
        self.num_frames = num_frames


def _num_sampled_frames(media_io: VideoMediaIO, data: bytes) -> int | None:
    """How many frames vLLM's loader will decode: it computes them between the video's header and its frames.

    None: this loader, of another package, does not.
    """

    class Counting(type(media_io.video_loader)):  # type: ignore[misc]  # one of many loaders, known at run time
        @classmethod
        def compute_frames_index_to_sample(cls, *args: Any, **kwargs: Any) -> Any:
            raise _Counted(len(super().compute_frames_index_to_sample(*args, **kwargs)))

    try:
        Counting.load_bytes(data, num_frames=media_io.num_frames, **media_io.kwargs)
    except _Counted as counted:
        return counted.num_frames
    return None
