"""Bodies of requests to a diffusion pipeline, without an engine."""

import io
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from PIL import Image

from vllm_omni.engine.media_budget import MediaBudget
from vllm_omni.engine.media_connector import BudgetedConnector
from vllm_omni.entrypoints.openai.diffusion import Values
from vllm_omni.entrypoints.openai.errors import add_error_handlers
from vllm_omni.entrypoints.openai.images import usage_of


@pytest.fixture
def app() -> FastAPI:
    app = FastAPI()
    app.state.media_budget = MediaBudget(160_000)
    add_error_handlers(app)

    @app.post("/")
    async def held(values: Values) -> dict[str, Any]:
        image = await BudgetedConnector().decode_image(await values["image"].read())
        return {"size": image.size, "held": app.state.media_budget.num_held_bytes}

    return app


async def post(app: FastAPI, **body: Any) -> httpx.Response:
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://server") as client:
        return await client.post("/", **body)


def png(width: int, height: int) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (width, height)).save(file, "PNG")
    return file.getvalue()


async def test_an_uploaded_image_holds_a_part_of_the_budget_until_the_answer(app: FastAPI) -> None:
    response = await post(app, files={"image": png(40, 50)})
    assert response.json() == {"size": [40, 50], "held": 16 * 40 * 50 * 4}
    assert app.state.media_budget.num_held_bytes == 0
    response = await post(app, files={"image": png(60, 60)})
    assert response.status_code == 400
    assert "take 230,400 bytes to decode and process: at most 160,000" in response.json()["error"]["message"]


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
    made, given = [Image.new("RGB", (64, 64)), Image.new("RGB", (17, 16))], [Image.new("RGB", (16, 32))]
    usage = usage_of(given, made)
    assert (usage["input_tokens"], usage["output_tokens"], usage["total_tokens"]) == (2, 18, 20)
    assert usage["input_tokens_details"] == {"image_tokens": 2, "text_tokens": 0}
