"""Media are fetched within a deadline, without a part of the budget, and decoded within it."""

import asyncio
import base64
import io
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
from vllm.multimodal.media import AudioMediaIO, ImageMediaIO, MediaIO, VideoMediaIO

from tests.processes import few_file_descriptors
from tests.reference.media import make_audio, make_image, make_video, write_mp4, write_wav
from vllm_omni.engine.media_budget import Holding, MediaBudget
from vllm_omni.engine.media_connector import BudgetedConnector, DeadlineConnection, File, inspect, media_limits
from vllm_omni.engine.rejection import rejection
from vllm_omni.errors import InvalidRequest, Overloaded


def png(width: int, height: int) -> bytes:
    file = io.BytesIO()
    make_image(width, height).save(file, "PNG")
    return file.getvalue()


def record(codec: str, container_format: str, seconds: float, **options: str) -> bytes:
    """A sound that is written as it is recorded: nothing can be added to its header at the end."""

    class Pipe:
        data = b""

        def write(self, data: bytes) -> int:
            self.data += bytes(data)
            return len(data)

    pipe = Pipe()
    with av.open(pipe, "w", format=container_format, options=options) as container:
        stream = container.add_stream(codec, rate=48000, layout="mono")
        kind = stream.codec_context.format.name
        for start in range(0, round(48000 * seconds), 960):
            block = np.zeros((1, 960), {"s16": np.int16}.get(kind, np.float32))
            frame = av.AudioFrame.from_ndarray(block, format=kind, layout="mono")
            frame.sample_rate, frame.pts, frame.time_base = 48000, start, Fraction(1, 48000)
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return pipe.data


def data_url(kind: str, data: bytes) -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


@asynccontextmanager
async def started(
    picture: bytes, connection: DeadlineConnection | None = None
) -> AsyncIterator[tuple[BudgetedConnector, str]]:
    """A connector, and a host that has a picture at /good, and never sends the rest of any other."""
    stopped = asyncio.Event()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        request = await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(picture) + picture[:9])
        if request.startswith(b"GET /good"):
            writer.write(picture[9:])
        else:
            await stopped.wait()
        writer.close()

    connection = connection or DeadlineConnection()
    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        yield BudgetedConnector(connection=connection), f"http://127.0.0.1:{port}"
        stopped.set()
        await connection.aclose()


async def test_what_is_being_fetched_holds_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_OMNI_MEDIA_FETCH_TIMEOUT_S", "60")
    budget = MediaBudget(160_000, 100)

    async def read(url: str) -> Any:
        with budget.hold() as holding:
            return (await connector.fetch_image_async(url)).size, holding.num_bytes

    async with started(png(40, 50)) as (connector, host):
        trickles = [asyncio.ensure_future(read(f"{host}/trickle")) for _ in range(16)]
        assert await read(f"{host}/good") == ((40, 50), 16 * 40 * 50 * 4)
        assert budget.num_held_bytes == 0
        for one in trickles:
            one.cancel()
        await asyncio.gather(*trickles, return_exceptions=True)


def test_each_event_loop_has_connections_of_its_own() -> None:
    connection = DeadlineConnection()

    async def fetch() -> tuple[bytes, bool]:
        async with started(b"picture with a frame", connection) as (_, host):
            data = await connection.async_get_bytes(f"{host}/good")
            session = await connection.get_async_client()
        return data, session.closed

    assert [asyncio.run(fetch()) for _ in range(2)] == [(b"picture with a frame", True)] * 2


async def test_a_fetch_ends_at_its_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_OMNI_MEDIA_FETCH_TIMEOUT_S", "0.2")
    async with started(png(8, 8)) as (connector, host):
        with pytest.raises(TimeoutError, match=r"could not be fetched within 0\.2 s"):
            await connector.fetch_image_async(f"{host}/trickle")


async def test_media_that_no_file_descriptor_is_free_for_are_not_the_requests_fault(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("VLLM_MEDIA_FETCH_MAX_RETRIES", "1")
    async with started(png(40, 50)) as (connector, host):
        with few_file_descriptors(os.getpid()), pytest.raises(OSError) as error:
            await connector.fetch_image_async(f"{host}/good")
        with pytest.raises(Overloaded, match="Too many open files"):
            rejection(error.value)
        assert (await connector.fetch_image_async(f"{host}/good")).size == (40, 50)


async def test_an_item_waits_as_a_file_until_it_fits(tmp_path: Path) -> None:
    class Budget(MediaBudget):
        asked = asyncio.Event()

        async def reserve(self, holding: Holding, num_bytes: int) -> None:
            if self.num_held_bytes:
                self.asked.set()
            await super().reserve(holding, num_bytes)

    budget, connector, picture = Budget(160_000, 100), BudgetedConnector(), data_url("image/png", png(40, 50))

    async def read() -> Any:
        with budget.hold():
            return (await connector.fetch_image_async(picture)).size

    with budget.hold() as other:
        await budget.reserve(other, 90_000)
        waits = asyncio.ensure_future(read())
        await budget.asked.wait()
        assert budget.num_held_bytes == 90_000
    assert await waits == (40, 50)
    with pytest.raises(InvalidRequest, match="take 230,400 bytes to decode"), budget.hold():
        await connector.fetch_image_async(data_url("image/png", png(60, 60)))


@pytest.mark.parametrize("room", [1, 3])
async def test_so_many_videos_are_decoded_at_a_time_as_the_budget_has_room_for(tmp_path: Path, room: int) -> None:
    films = [write_mp4(tmp_path / f"{n}.mp4", make_video(6, 64, 48, seed=n), fps=4).read_bytes() for n in range(3)]
    budget, connector = MediaBudget(16 * 6 * 64 * 48 * 3 * room, 100), BudgetedConnector()
    together, num_decoded, most = asyncio.Barrier(room), 0, 0

    async def read(film: bytes) -> None:
        nonlocal num_decoded, most
        with budget.hold():
            frames, _ = (await connector.fetch_video_async(data_url("video/mp4", film))).media
            assert frames.shape == (6, 48, 64, 3)
            num_decoded += 1
            most = max(most, num_decoded)
            await together.wait()
            num_decoded -= 1

    async with asyncio.timeout(60):
        await asyncio.gather(*map(read, films))
    assert most == room


async def test_a_sound_is_charged_less_than_a_picture_of_its_size(tmp_path: Path) -> None:
    sound = write_wav(tmp_path / "sound.wav", make_audio(0.5)).read_bytes()
    with MediaBudget(1_000_000, 1).hold() as holding:
        await BudgetedConnector().fetch_audio_async(data_url("audio/wav", sound))
        assert holding.num_bytes == 6 * 8000 * 4


def size_of(media_io: MediaIO[Any], data: bytes, *, is_frames: bool = False) -> int:
    return inspect(media_io, File(data, bytes, is_frames), media_limits())


def test_the_size_of_decoded_media_is_that_of_their_headers(tmp_path: Path) -> None:
    images = ImageMediaIO()
    video = write_mp4(tmp_path / "film.mp4", make_video(12, width=64, height=48), fps=4).read_bytes()
    sound = write_wav(tmp_path / "sound.wav", make_audio(0.5)).read_bytes()
    for media_io, data, expected in [
        (images, png(40, 50), 40 * 50 * 4),
        (VideoMediaIO(images, num_frames=5), video, 5 * 64 * 48 * 3),
        (VideoMediaIO(images, num_frames=-1), video, 12 * 64 * 48 * 3),
        # As for Qwen's models: two frames a second.
        (VideoMediaIO(images, video_backend="qwen2_vl"), video, 6 * 64 * 48 * 3),
        (AudioMediaIO(), sound, 8000 * 4),
    ]:
        assert size_of(media_io, data) == expected, (media_io, expected)
    recording = record("libopus", "webm", 2.0, live="1")
    with av.open(io.BytesIO(recording)) as container:
        assert container.duration is None
    # The header of the last one has no length, either, which libsndfile takes for the longest possible.
    kinds = {"adts": "aac", "ogg": "libopus", "flac": "flac"}
    for data in (recording, *(record(codec, kind, 2.0) for kind, codec in kinds.items())):
        assert size_of(AudioMediaIO(), data) == pytest.approx(2 * 48000 * 4, rel=0.03)
    frames = b",".join(base64.b64encode(png(8, 4)) for _ in range(3))
    assert size_of(VideoMediaIO(images), frames, is_frames=True) == 3 * 8 * 4 * 4
    assert size_of(VideoMediaIO(images, num_frames=2), frames, is_frames=True) == 2 * 8 * 4 * 4


def test_the_largest_stream_of_a_video_counts(tmp_path: Path) -> None:
    path = tmp_path / "film.mp4"
    with av.open(str(path), "w") as container:
        streams = [container.add_stream("mpeg4", rate=4) for _ in range(3)]
        for stream, (width, height) in zip(streams, [(16, 16), (64, 48), (32, 32)], strict=True):
            stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        for stream in streams:
            for image in make_video(4, stream.width, stream.height):
                container.mux(stream.encode(av.VideoFrame.from_ndarray(image, format="rgb24")))
            container.mux(stream.encode())
    video = VideoMediaIO(ImageMediaIO(), num_frames=-1)
    assert size_of(video, path.read_bytes()) == 4 * 64 * 48 * 3
    assert video.load_bytes(path.read_bytes()).media[0].nbytes <= 4 * 64 * 48 * 3


def test_all_frames_count_where_the_loader_does_not_say_which_it_decodes(tmp_path: Path) -> None:
    class Loader:
        @classmethod
        def load_bytes(cls, data: bytes, **kwargs: Any) -> Any:
            return None

    video = VideoMediaIO(ImageMediaIO())
    video.video_loader = Loader()
    film = write_mp4(tmp_path / "film.mp4", make_video(7, 64, 48), fps=4).read_bytes()
    assert size_of(video, film) == 7 * 64 * 48 * 3
