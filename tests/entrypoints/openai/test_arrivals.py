"""Which requests a server that ends still answers: those that had arrived, even if they had not been read."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from fastapi import FastAPI, Request
from starlette.requests import HTTPConnection

from vllm_omni.engine.running import RunningRequests
from vllm_omni.entrypoints.openai.arrivals import count_arrivals, priority_of
from vllm_omni.entrypoints.openai.errors import add_error_handlers
from vllm_omni.errors import InvalidRequest

REJECTED = {"message": "the server is shutting down", "type": "ServiceUnavailableError", "param": None, "code": 503}


class Upload:
    """A body of which a part comes only once ``may_end`` is set."""

    def __init__(self) -> None:
        self.has_started = asyncio.Event()
        self.may_end = asyncio.Event()

    async def __aiter__(self) -> AsyncIterator[bytes]:
        yield b"some"
        self.has_started.set()
        await self.may_end.wait()
        yield b"thing"


@pytest.fixture
def requests() -> RunningRequests:
    return RunningRequests()


@pytest.fixture
async def client(requests: RunningRequests) -> AsyncIterator[httpx.AsyncClient]:
    app = FastAPI()

    async def echo(raw_request: Request) -> Any:
        body = await raw_request.body()
        requests.check()  # as the engines do
        return {"read": body.decode()}

    async def answer() -> None:
        pass

    app.post("/v1/chat/completions")(echo)
    app.post("/resume")(answer)
    app.get("/v1/models")(answer)
    count_arrivals(app, requests)
    add_error_handlers(app)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://server") as client:
        yield client


async def test_a_request_that_is_uploaded_when_the_server_drains_is_answered(
    client: httpx.AsyncClient, requests: RunningRequests
) -> None:
    upload = Upload()
    answer = asyncio.ensure_future(client.post("/v1/chat/completions", content=upload))
    await upload.has_started.wait()
    requests.drain()
    drained = asyncio.ensure_future(requests.wait_until_none())
    rejected = await client.post("/v1/chat/completions", content=b"")
    assert (rejected.status_code, rejected.json()["error"]) == (503, REJECTED)
    for method, path in (("GET", "/v1/models"), ("POST", "/resume")):
        assert (await client.request(method, path)).status_code == 200
    assert not drained.done()
    upload.may_end.set()
    assert (await answer).json() == {"read": "something"}
    await drained


async def test_an_upload_that_is_too_slow_for_a_server_that_ends_is_rejected(
    client: httpx.AsyncClient, requests: RunningRequests
) -> None:
    upload = Upload()
    answer = asyncio.ensure_future(client.post("/v1/chat/completions", content=upload))
    await upload.has_started.wait()
    requests.end()
    answer.cancel()  # as uvicorn does
    rejected = await answer
    assert (rejected.status_code, rejected.json()["error"]) == (503, REJECTED)
    await requests.wait_until_none()


async def test_a_client_that_leaves_gets_no_answer(client: httpx.AsyncClient, requests: RunningRequests) -> None:
    upload = Upload()
    answer = asyncio.ensure_future(client.post("/v1/chat/completions", content=upload))
    await upload.has_started.wait()
    answer.cancel()
    with pytest.raises(asyncio.CancelledError):
        await answer
    await requests.wait_until_none()


def with_priority(given: str | None) -> HTTPConnection:
    headers = [] if given is None else [(b"x-vllm-priority", given.encode())]
    return HTTPConnection({"type": "http", "headers": headers})


def test_a_header_gives_the_priority_as_it_does_for_texts() -> None:
    assert priority_of(7, with_priority(None)) == 7
    assert [priority_of(7, with_priority(given)) for given in ("-3", "0", str(2**63 - 1))] == [-3, 0, 2**63 - 1]


@pytest.mark.parametrize("given", ["soon", "1.5", "", str(2**63), str(-(2**63) - 1)])
def test_a_priority_that_is_no_64_bit_integer_is_rejected(given: str) -> None:
    with pytest.raises(InvalidRequest, match=r"header X-Vllm-Priority: .* must be an integer from -2\*\*63 to 2\*\*63"):
        priority_of(0, with_priority(given))
