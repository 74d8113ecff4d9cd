"""Bodies of requests are counted while they arrive, and not read beyond their limits."""

import asyncio
import os
import resource
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI, Request
from pydantic import BaseModel
from starlette.datastructures import UploadFile

from tests.entrypoints.openai.filming import FRAMES, Studio, files_dir  # noqa: F401 (a fixture)
from vllm_omni.engine.received import ReceivedBytes
from vllm_omni.entrypoints.openai.bodies import limit_bodies
from vllm_omni.entrypoints.openai.diffusion import Values
from vllm_omni.entrypoints.openai.errors import add_error_handlers

LIMIT = 10_000


class Body(BaseModel):
    text: str


class Upload:
    """A body that arrives in pieces, and without a declared length; the next one once ``more`` is set."""

    def __init__(self, *pieces: bytes) -> None:
        self.pieces = pieces
        self.has_arrived = asyncio.Event()  # the first piece
        self.more = asyncio.Event()

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for piece in self.pieces:
            yield piece
            self.has_arrived.set()
            await self.more.wait()


class Server:
    """An application with each kind of route.

    Attributes:
        held: bytes that were held when each handler ran.
    """

    def __init__(self, max_bytes: int = 3 * LIMIT) -> None:
        self.received = ReceivedBytes(max_bytes, LIMIT, 1)
        self.held: list[int] = []
        self.app = app = FastAPI()
        app.post("/typed")(self._typed)
        app.post("/values")(self._values)
        app.post("/unread")(self._unread)
        limit_bodies(app, self.received)
        add_error_handlers(app)
        self.client = httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://server", timeout=20)

    async def _typed(self, body: Body) -> Any:
        self.held.append(self.received.num_held_bytes)
        return {"num": len(body.text)}

    async def _values(self, values: Values) -> Any:
        self.held.append(self.received.num_held_bytes)
        return {name: one.size if isinstance(one, UploadFile) else one for name, one in values.items()}

    async def _unread(self, raw_request: Request) -> Any:
        return {}


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    one = Server()
    yield one
    await one.client.aclose()
    assert one.received.num_held_bytes == 0


def check_too_large(response: httpx.Response) -> None:
    error = response.json()["error"]
    assert (response.status_code, error["code"], error["type"]) == (413, 413, "RequestEntityTooLargeError")
    assert "at most 10,000 (VLLM_OMNI_MAX_BODY_BYTES)" in error["message"]


async def test_a_body_is_held_until_its_reply_has_been_sent(server: Server) -> None:
    response = await server.client.post("/typed", json={"text": "a" * 9000})
    assert response.json() == {"num": 9000}
    (num_bytes,) = server.held
    assert 9000 < num_bytes < 9050


async def test_a_body_that_is_too_large_is_rejected_in_every_form(server: Server) -> None:
    large = "a" * LIMIT
    check_too_large(await server.client.post("/typed", json={"text": large}))
    check_too_large(await server.client.post("/values", json={"text": large}))
    check_too_large(await server.client.post("/values", data={"text": large}))
    check_too_large(await server.client.post("/values", files={"file": large.encode()}))
    assert not server.held
    assert (await server.client.post("/values", files={"file": b"a" * 9000})).json() == {"file": 9000}


async def test_a_body_that_says_so_is_not_read_at_all(server: Server) -> None:
    upload = Upload(b'{"text": "a', b'"}')
    headers = {"content-type": "application/json", "content-length": "20000"}
    check_too_large(await server.client.post("/typed", content=upload, headers=headers))


async def test_a_body_of_no_declared_length_is_read_up_to_the_limit(server: Server) -> None:
    upload = Upload(b'{"text": "', *[b"a" * 4000] * 3, b'"}')
    upload.more.set()
    headers = {"content-type": "application/json"}
    for path in ("/typed", "/values"):
        check_too_large(await server.client.post(path, content=upload, headers=headers))


async def test_a_client_that_leaves_before_its_body_is_complete_raises_nothing(server: Server) -> None:
    """What left the application would be logged with a traceback."""
    for path in ("/typed", "/values"):
        for kind in ("application/json", "multipart/form-data; boundary=x"):
            arrived = [{"type": "http.request", "body": b"--x", "more_body": True}, {"type": "http.disconnect"}]
            sent: list[Any] = []

            async def receive(arrived: list[Any] = arrived) -> Any:
                return arrived.pop(0)

            async def send(message: Any, sent: list[Any] = sent) -> None:
                sent.append(message)

            headers = [(b"content-type", kind.encode())]
            scope = {"type": "http", "method": "POST", "path": path, "query_string": b"", "headers": headers}
            await server.app(scope, receive, send)
            assert sent[0]["status"] == 400
            assert not arrived


async def test_a_body_that_no_handler_reads_costs_nothing(server: Server) -> None:
    assert (await server.client.post("/unread", content=b"a" * 2 * LIMIT)).status_code == 200


async def test_an_upload_lies_in_a_file_without_a_name_that_only_the_server_can_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    app, found = FastAPI(), []

    def look(values: Values) -> Any:
        file = values["file"].file
        about = os.fstat(file.fileno())
        found.extend([about.st_size, about.st_nlink, about.st_mode & 0o077, about.st_dev == tmp_path.stat().st_dev])
        found.append(list(tmp_path.iterdir()))
        return {}

    app.post("/look")(look)
    received = ReceivedBytes(1 << 22, 1 << 22, 1)
    limit_bodies(app, received)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://server") as client:
        await client.post("/look", files={"file": bytes(3 << 20)})
    assert found == [3 << 20, 0, 0, True, []]
    assert received.num_held_bytes == 0


async def test_an_upload_that_the_disk_has_no_room_for_may_come_again() -> None:
    app = FastAPI()

    async def answer(values: Values) -> Any:
        return {}

    app.post("/values")(answer)
    add_error_handlers(app)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://server") as client:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2 << 20, before[1]))  # a larger file fails as on a full disk
        try:
            response = await client.post("/values", files={"file": bytes(3 << 20)})
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        assert response.status_code == 503
        assert "the files of the form cannot be kept in " in response.json()["error"]["message"]
        assert (await client.post("/values", files={"file": bytes(3 << 20)})).status_code == 200


async def test_bodies_together_are_limited_and_those_beyond_may_come_again(server: Server) -> None:
    headers = {"content-type": "application/json"}
    uploads = [Upload(b'{"text": "' + b"a" * 9000, b'"}') for _ in range(3)]
    waiting = [asyncio.create_task(server.client.post("/typed", content=one, headers=headers)) for one in uploads]
    for one in uploads:
        await one.has_arrived.wait()
    assert 27_000 < server.received.num_held_bytes < 27_100
    response = await server.client.post("/typed", json={"text": "a" * 9000})
    error = response.json()["error"]
    assert (response.status_code, error["type"]) == (429, "TooManyRequestsError")
    assert int(response.headers["Retry-After"]) > 0
    assert "VLLM_OMNI_MAX_RECEIVED_BYTES" in error["message"]
    assert (await server.client.post("/typed", json={"text": "small"})).status_code == 200  # it has room
    for one in uploads:
        one.more.set()
    assert [(await one).status_code for one in waiting] == [200] * 3
    assert (await server.client.post("/typed", json={"text": "a" * 9000})).status_code == 200


async def test_a_client_that_leaves_gives_back_what_it_has_sent(server: Server) -> None:
    upload = Upload(b'{"text": "' + b"a" * 9000, b'"}')
    task = asyncio.create_task(
        server.client.post("/typed", content=upload, headers={"content-type": "application/json"})
    )
    await upload.has_arrived.wait()
    assert server.received.num_held_bytes > 9000
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert server.received.num_held_bytes == 0


async def test_a_job_holds_the_body_of_its_request_until_its_end(files_dir: Any) -> None:  # noqa: F811
    received, studio = ReceivedBytes(10 * LIMIT, LIMIT, 1), Studio()
    limit_bodies(studio.app, received)
    studio.film.put(0)
    form, files = {"prompt": "a tram", "num_frames": "8"}, {"input_reference": b"a" * 5000}
    response = await studio.client.post("/v1/videos", data=form, files=files)
    assert response.status_code == 200, response.text
    assert received.num_held_bytes > 5000
    studio.film.put(FRAMES)
    await asyncio.gather(*studio.results.running.values())
    assert received.num_held_bytes == 0
    await studio.client.post("/v1/videos", data=form, files=files)
    assert received.num_held_bytes > 5000
    for task in list(studio.results.running.values()):
        task.cancel()
    await studio.results.aclose()
    await studio.client.aclose()
    assert received.num_held_bytes == 0


async def test_an_uploaded_picture_of_too_many_bytes_is_no_job(
    files_dir: Any,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("VLLM_MAX_MEDIA_DOWNLOAD_SIZE_MB", "1")
    studio = Studio()
    form, files = {"prompt": "a tram", "num_frames": "8"}, {"input_reference": bytes((1 << 20) + 1)}
    response = await studio.client.post("/v1/videos", data=form, files=files)
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, "input_reference")
    assert "1,048,577 bytes or more: at most 1,048,576 (VLLM_MAX_MEDIA_DOWNLOAD_SIZE_MB)" in error["message"]
    assert not studio.results.running
    await studio.results.aclose()
    await studio.client.aclose()
