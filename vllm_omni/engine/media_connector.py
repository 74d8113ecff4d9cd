"""``BudgetedConnector``: media are fetched within limits, checked by their headers, and decoded within a budget."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar
from weakref import WeakKeyDictionary

import aiohttp
import pybase64
import vllm.envs
from vllm.connections import HTTPConnection, _async_retry
from vllm.exceptions import VLLMUnprocessableEntityError
from vllm.multimodal.media import AudioMediaIO, ImageMediaIO, MediaConnector, MediaIO, VideoMediaIO
from vllm.multimodal.media.connector import global_thread_pool

from vllm_omni import envs
from vllm_omni.engine.decoded_media import DecodedMedia, key_of
from vllm_omni.engine.media_budget import HOLDING
from vllm_omni.engine.media_redirects import ALLOWED_HOSTS, watch_redirects
from vllm_omni.errors import InvalidRequest
from vllm_omni.media.headers import read_image_header, read_sound_header, read_video_header
from vllm_omni.media.limits import MediaLimits, param_of, unreadable

M = TypeVar("M")

# Bytes that decoding and processing take at their peak, by decoded bytes, as measured with the processor of Qwen's
# models: 15.3 for a video that need not be shrunk, 5.1 for a sound of ten minutes.
PROCESSING_FACTOR = 16
SOUND_FACTOR = 6
MAX_CONNECTIONS = 256  # to all hosts
MAX_CONNECTIONS_PER_HOST = 32  # a host that sends nothing delays fetches from itself alone
CHUNK_BYTES = 64 << 10  # of a file that is fetched, decompressed


def media_limits() -> MediaLimits:
    """The limits of one file: vLLM's where it has one, which here hold for every file, wherever it comes from."""
    return MediaLimits(
        file_bytes=max(vllm.envs.VLLM_MAX_MEDIA_DOWNLOAD_SIZE_MB, 0) << 20,
        sound_file_bytes=vllm.envs.VLLM_MAX_AUDIO_CLIP_FILESIZE_MB << 20,
        image_pixels=max(vllm.envs.VLLM_MAX_IMAGE_PIXELS, 0),
        sound_seconds=vllm.envs.VLLM_MAX_AUDIO_DECODE_DURATION_S,
        sound_bytes=vllm.envs.VLLM_MAX_AUDIO_DECODE_BYTES,
        video_seconds=envs.VLLM_OMNI_MAX_VIDEO_SECONDS,
        video_frames=envs.VLLM_OMNI_MAX_VIDEO_FRAMES,
        video_pixels=envs.VLLM_OMNI_MAX_VIDEO_PIXELS,
    )


@functools.cache
def video_threads() -> ThreadPoolExecutor:
    """The threads that decode videos in this process."""
    return ThreadPoolExecutor(max(global_thread_pool._max_workers // 2, 1), thread_name_prefix="video")


@functools.cache
def decoded_media() -> DecodedMedia:
    """The decoded files that this process keeps."""
    return DecodedMedia(envs.VLLM_OMNI_MEDIA_CACHE_BYTES)


class DeadlineConnection(HTTPConnection):
    """vLLM's client, with one deadline for all attempts to fetch a file; vLLM's alone may take 111 s for an image."""

    def __init__(self) -> None:
        super().__init__()
        self._sessions: WeakKeyDictionary[asyncio.AbstractEventLoop, aiohttp.ClientSession] = WeakKeyDictionary()

    async def get_async_client(self) -> aiohttp.ClientSession:
        """The client of the running event loop: a program may have one server after another."""
        loop = asyncio.get_running_loop()
        if (session := self._sessions.get(loop)) is None:
            connector = aiohttp.TCPConnector(limit=MAX_CONNECTIONS, limit_per_host=MAX_CONNECTIONS_PER_HOST)
            session = aiohttp.ClientSession(connector=connector, trust_env=True, trace_configs=[watch_redirects()])
            self._sessions[loop] = session
        return session

    async def aclose(self) -> None:
        """Close this event loop's connections. A fetch that runs, of another server, tries again with new ones."""
        if (session := self._sessions.pop(asyncio.get_running_loop(), None)) is not None:
            await session.close()

    async def async_get_bytes(self, url: str, **kwargs: Any) -> bytes:
        """As upstream; a file that is too large is not read to its end.

        Raises:
            InvalidRequest: it is.
            Overloaded: the files of all prompts are.
            TimeoutError: it has not arrived by the deadline.
        """
        deadline_s = envs.VLLM_OMNI_MEDIA_FETCH_TIMEOUT_S
        try:
            async with asyncio.timeout(deadline_s):
                data: bytes = await self._fetch(url, **kwargs)
        except TimeoutError as exc:
            said = f"it could not be fetched within {deadline_s:g} s (VLLM_OMNI_MEDIA_FETCH_TIMEOUT_S)"
            raise TimeoutError(said) from exc
        return data

    @_async_retry
    async def _fetch(
        self,
        url: str,
        *,
        timeout: float | None = None,  # noqa: ASYNC109  # the decorator's: of one attempt
        allow_redirects: bool = True,
        max_bytes: int | None = None,
    ) -> bytes:
        holding, limits, data = HOLDING.get(), media_limits(), bytearray()
        kind = None if max_bytes is None else "audio"  # which alone has a limit of its own
        request = await self.get_async_response(url, timeout=timeout, allow_redirects=allow_redirects)
        try:
            async with request as response:
                response.raise_for_status()
                limits.check_file(response.content_length or 0, kind)  # compressed, it may be larger
                async for chunk in response.content.iter_chunked(CHUNK_BYTES):
                    limits.check_file(len(data) + len(chunk), kind)
                    if holding is not None:
                        holding.files.add(len(chunk))
                    data += chunk
        except BaseException:
            if holding is not None:
                holding.files.take_back(len(data))
            raise
        return bytes(data)


CONNECTION = DeadlineConnection()


class BudgetedConnector(MediaConnector):
    """vLLM's connector, which fetches and decodes in one step; here, a prompt waits for its budget in between.

    A file that waits is held as it was sent. Decoding runs in vLLM's pool of threads, that of videos, which may take
    minutes, in one of half the size; of an aborted prompt, what a thread has started is decoded to its end, and
    dropped.

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

    def load_from_url(self, url: str, media_io: MediaIO[Any], *, fetch_timeout: int | None = None) -> Any:
        """As upstream, which offline callers wait for; without a budget."""
        file: File = super().load_from_url(url, _Files(media_io), fetch_timeout=fetch_timeout)
        inspect(media_io, file, media_limits())
        return file.decode()

    async def load_from_url_async(self, url: str, media_io: MediaIO[M], *, fetch_timeout: int | None = None) -> M:
        token = ALLOWED_HOSTS.set(self.allowed_media_domains)
        try:
            file = await super().load_from_url_async(url, _Files(media_io), fetch_timeout=fetch_timeout)
        except VLLMUnprocessableEntityError as exc:
            cause = exc.__cause__
            if isinstance(cause, InvalidRequest):  # ours, which upstream takes for that of a malformed URL
                raise type(cause)(str(cause), param=cause.param or param_of(kind_of(media_io))) from exc
            raise
        finally:
            ALLOWED_HOSTS.reset(token)
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
        pool = video_threads() if isinstance(media_io, VideoMediaIO) else global_thread_pool
        run = partial(asyncio.get_running_loop().run_in_executor, pool)
        num_bytes = await run(inspect, media_io, file, media_limits())
        if (holding := HOLDING.get()) is not None:
            factor = SOUND_FACTOR if isinstance(media_io, AudioMediaIO) else self._factor
            await holding.budget.reserve(holding, factor * num_bytes)
        kept = decoded_media()
        if not kept.max_bytes:
            return await run(file.decode)
        key = await run(key_of, file.data, media_io)
        return await kept.get(key, num_bytes + len(file.data), lambda: run(file.decode))


class File(NamedTuple):
    data: bytes
    decode: Callable[[], Any]
    is_frames: bool = False  # images in base 64, joined by commas: the frames of a video


class _Files(MediaIO[File]):
    """Stands for a decoder: returns files with the call that decodes them.

    Raises:
        InvalidRequest: a file has too many bytes.
    """

    def __init__(self, media_io: MediaIO[Any]) -> None:
        self._media_io = media_io
        self._kind = kind_of(media_io)

    def get_max_bytes(self) -> int | None:
        max_bytes: int | None = self._media_io.get_max_bytes()
        return max_bytes

    def load_bytes(self, data: bytes) -> File:
        media_limits().check_file(len(data), self._kind)
        return File(data, partial(self._media_io.load_bytes, data))

    def load_base64(self, media_type: str, data: str) -> File:
        media_limits().check_file(len(data) * 3 // 4 - 2, self._kind)  # before it is held a second time
        if isinstance(self._media_io, VideoMediaIO) and media_type.lower() == "video/jpeg":
            return File(data.encode(), partial(self._media_io.load_base64, media_type, data), is_frames=True)
        return self.load_bytes(pybase64.b64decode(data, validate=True))

    def load_file(self, filepath: Path) -> File:
        if not filepath.is_file():
            raise FileNotFoundError(f"{filepath} is not a file")
        media_limits().check_file(filepath.stat().st_size, self._kind)
        return self.load_bytes(filepath.read_bytes())


def kind_of(media_io: MediaIO[Any]) -> str:
    kinds = {ImageMediaIO: "image", AudioMediaIO: "audio", VideoMediaIO: "video"}
    return next((kind for cls, kind in kinds.items() if isinstance(media_io, cls)), "file")


def inspect(media_io: MediaIO[Any], file: File, limits: MediaLimits) -> int:
    """Check a file by its header, without decoding it, and return how many bytes it takes when decoded.

    Raises:
        InvalidRequest: it is too large, or has no header that could be read.
    """
    kind = kind_of(media_io)
    try:
        if file.is_frames:
            return _check_frames(media_io, file.data, limits)
        if kind == "image":
            return limits.check_image(read_image_header(file.data))
        if kind == "audio":
            return limits.check_sound(read_sound_header(file.data))
        if kind == "video":
            return _check_video(media_io, file.data, limits)
    except InvalidRequest:
        raise
    except Exception as exc:  # of four libraries, without a class in common
        raise unreadable(kind, exc) from exc
    return len(file.data)


def check_recording(data: bytes) -> None:
    """Check the sound of a form's field ``file``.

    Raises:
        InvalidRequest: see ``inspect``.
    """
    try:
        inspect(AudioMediaIO(), File(data, bytes), media_limits())
    except InvalidRequest as exc:
        raise InvalidRequest(f"file: {exc}", param="file") from exc


def _check_frames(media_io: VideoMediaIO, data: bytes, limits: MediaLimits) -> int:
    """Check pictures in base 64; vLLM decodes the first ``num_frames`` of them."""
    frames = data.split(b",")
    if media_io.num_frames > 0:
        frames = frames[: media_io.num_frames]
    limits.check_length(len(frames), 0)
    return sum(limits.check_image(read_image_header(pybase64.b64decode(frame))) for frame in frames)


def _check_video(media_io: VideoMediaIO, data: bytes, limits: MediaLimits) -> int:
    header = read_video_header(data)
    frame_bytes = limits.check_video(header)
    num_frames = _num_sampled_frames(media_io, data, limits)
    return frame_bytes * (header.num_frames if num_frames is None else num_frames)


class _Counted(Exception):
    def __init__(self, num_frames: int) -> None:
        self.num_frames = num_frames


def _num_sampled_frames(media_io: VideoMediaIO, data: bytes, limits: MediaLimits) -> int | None:
    """How many frames vLLM's loader will decode: it computes them between the video's header and its frames.

    It reads the header with another library, which may believe another length; that is checked, too.

    None: this loader, of another package, does not.
    """

    class Counting(type(media_io.video_loader)):  # type: ignore[misc]  # one of many loaders, known at run time
        @classmethod
        def compute_frames_index_to_sample(cls, source: Any, *args: Any, **kwargs: Any) -> Any:
            limits.check_length(source.total_frames_num, source.duration)
            raise _Counted(len(super().compute_frames_index_to_sample(source, *args, **kwargs)))

    try:
        Counting.load_bytes(data, num_frames=media_io.num_frames, **media_io.kwargs)
    except _Counted as counted:
        return counted.num_frames
    return None
