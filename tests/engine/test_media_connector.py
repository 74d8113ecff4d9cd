"""Media are fetched within a deadline, without a part of the budget, and decoded within it."""

import asyncio
import base64
import io
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from vllm.multimodal.media import AudioMediaIO, ImageMediaIO, VideoMediaIO

from tests.processes import few_file_descriptors
from tests.reference.media import make_audio, make_image, make_video, write_mp4, write_wav
from vllm_omni.engine.media_budget import Holding, MediaBudget
from vllm_omni.engine.media_connector import BudgetedConnector, DeadlineConnection, File, num_decoded_bytes
from vllm_omni.engine.rejection import rejection
from vllm_omni.errors import InvalidRequest, Overloaded


def png(width: int, height: int) -> bytes:
    file = io.BytesIO()
    make_image(width, height).save(file, "PNG")
    return file.getvalue()


def data_url(kind: str, data: bytes) -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


@asynccontextmanager
async def started(picture: bytes) -> AsyncIterator[tuple[BudgetedConnector, str]]:
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

    connection = DeadlineConnection()
    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        yield BudgetedConnector(connection=connection), f"http://127.0.0.1:{port}"
        stopped.set()
        await (await connection.get_async_client()).close()


async def test_what_is_being_fetched_holds_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_OMNI_MEDIA_FETCH_TIMEOUT_S", "60")
    budget = MediaBudget(160_000)

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

    budget, connector, picture = Budget(160_000), BudgetedConnector(), data_url("image/png", png(40, 50))

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
        (images, b"no image", 0),
        (VideoMediaIO(images), b"no film", 0),
    ]:
        assert num_decoded_bytes(media_io, File(data, bytes)) == expected, (media_io, expected)
    frames = b",".join(base64.b64encode(png(8, 4)) for _ in range(3))
    assert num_decoded_bytes(VideoMediaIO(images), File(frames, bytes, is_frames=True)) == 3 * 8 * 4 * 4
