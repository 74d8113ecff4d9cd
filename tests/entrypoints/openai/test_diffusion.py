"""Bodies of requests to a diffusion pipeline, without an engine."""

from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from PIL import Image

from vllm_omni.entrypoints.openai.diffusion import InputImages, Values
from vllm_omni.entrypoints.openai.errors import add_error_handlers
from vllm_omni.entrypoints.openai.images import usage_of


@pytest.fixture
def app() -> FastAPI:
    app = FastAPI()
    add_error_handlers(app)

    @app.post("/")
    async def answer(values: Values) -> dict[str, Any]:
        return values

    return app


async def post(app: FastAPI, **body: Any) -> httpx.Response:
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://server") as client:
        return await client.post("/", **body)


async def test_a_body_that_cannot_be_read_is_rejected(app: FastAPI) -> None:
    for body, message in [
        ({"content": b"[" * 100_000}, "nested too deeply"),
        ({"content": b"{"}, "the body is not valid JSON"),
        ({"content": b"[]"}, "the body must be an object"),
        ({"content": b"x", "headers": {"content-type": "text/plain"}}, "'text/plain': must be application/json"),
    ]:
        response = await post(app, **body)
        assert response.status_code == 400
        assert message in response.json()["error"]["message"]


def test_usage_counts_squares_of_pixels() -> None:
    made = [Image.new("RGB", (64, 64)), Image.new("RGB", (17, 16))]
    usage = usage_of(InputImages(sizes=[(16, 32)]), made)
    assert (usage["input_tokens"], usage["output_tokens"], usage["total_tokens"]) == (2, 18, 20)
    assert usage["input_tokens_details"] == {"image_tokens": 2, "text_tokens": 0}
