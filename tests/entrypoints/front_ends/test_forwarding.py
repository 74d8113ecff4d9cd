"""A front end answers requests to the model by itself, and has the rest answered where the engines are."""

from typing import Any

import httpx
import pytest
from fastapi import FastAPI, Request

from tests.entrypoints.front_ends.link_ends import Engines, connected
from vllm_omni.entrypoints.front_ends.forwarding import forward_the_rest
from vllm_omni.entrypoints.front_ends.messages import Answered


def make_app() -> FastAPI:
    app = FastAPI()

    async def answer(raw_request: Request) -> dict[str, Any]:
        return {"here": raw_request.url.path}

    for path in ("/v1/models", "/health", "/traces/{request_id}", "/version", "/omni/static/page.css", "/omni/state"):
        app.get(path)(answer)
    app.post("/drain")(answer)
    return app


@pytest.mark.parametrize("path", ["/v1/models", "/version", "/omni/static/page.css", "/openapi.json"])
async def test_it_answers_for_itself(path: str) -> None:
    async with connected(Engines()) as ends:
        app = make_app()
        forward_the_rest(app, ends.link)
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://server") as client:
            assert (await client.get(path)).status_code == 200


async def test_the_rest_is_answered_by_the_engines_with_status_headers_and_body() -> None:
    class Server(Engines):
        async def answer(self, method: str, url: str, headers: Any, body: bytes) -> Answered:
            key = dict(headers)["authorization"]
            return Answered(0, 503, [("retry-after", "3"), ("x-key", key)], f"{method} {url} {body!r}".encode())

    async with connected(Server()) as ends:
        app = make_app()
        forward_the_rest(app, ends.link)
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://server") as client:
            key = {"Authorization": "Bearer x"}
            for method, url, body in [
                ("GET", "/health", b""),
                ("GET", "/traces/chatcmpl-1?format=x", b""),
                ("GET", "/omni/state", b""),
                ("POST", "/drain", b'{"name": "talker/1"}'),
            ]:
                response = await client.request(method, url, content=body, headers=key)
                assert response.status_code == 503
                assert response.text == f"{method} {url} {body!r}"
                assert response.headers["retry-after"] == "3"
                assert response.headers["x-key"] == "Bearer x"
            assert (await client.get("/nothing")).status_code == 404
