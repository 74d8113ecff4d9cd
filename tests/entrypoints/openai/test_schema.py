"""The OpenAPI schema names what it serves, and the valid values of fields."""

import re
from collections.abc import AsyncIterator, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI

from tests.entrypoints.openai.filming import Film, Studio, files_dir  # noqa: F401 (a fixture)
from vllm_omni.entrypoints.openai.diffusion_protocol import ImageRequest
from vllm_omni.entrypoints.openai.protocol import OmniChatCompletionRequest, SpeechRequest
from vllm_omni.entrypoints.openai.schema import describe_app
from vllm_omni.media.audio import AUDIO_FORMATS
from vllm_omni.media.image import IMAGE_FORMATS


def test_schema_has_a_title_and_a_description() -> None:
    app = FastAPI()
    describe_app(app, "tiny")
    info = app.openapi()["info"]
    assert info["title"] == "vllm_omni: tiny"
    assert "/v1/audio/voices" in info["description"]


def test_formats_and_bounds_are_in_the_schema() -> None:
    speech, image = SpeechRequest.model_json_schema(), ImageRequest.model_json_schema()
    assert speech["properties"]["response_format"]["enum"] == list(AUDIO_FORMATS)
    assert speech["properties"]["speed"]["minimum"] == 0.25
    assert image["properties"]["output_format"]["enum"] == list(IMAGE_FORMATS)
    assert image["properties"]["n"]["minimum"] == 1
    chat = OmniChatCompletionRequest.model_json_schema()
    assert set(chat["properties"]["slo"]["properties"]) == {"ttft_ms", "tpot_ms", "tpot_share"}
    assert chat["$defs"]["AudioOutput"]["properties"]["format"]["enum"] == list(AUDIO_FORMATS)


def test_every_field_of_ours_is_described() -> None:
    for body in (SpeechRequest, ImageRequest):
        undescribed = [name for name, field in body.model_fields.items() if not field.description]
        assert set(undescribed) <= NO_EFFECT | {"response_format", "stream"}, body


def check_operations(schema: dict[str, Any], routes: Iterable[str]) -> None:
    """Each route has the body or the parameters that it reads, what it answers, and errors of the usual shape."""
    for route in routes:
        method, path = route.split()
        operation = schema["paths"][path][method.lower()]
        responses = operation["responses"]
        assert operation.get("description") or operation.get("summary"), route
        assert responses["200"]["content"], route
        assert "422" not in responses, route
        if operation.get("parameters") or method == "POST":
            error = responses["400"]["content"]["application/json"]["schema"]
            assert error["$ref"].endswith("/ErrorResponse"), route
        if method == "POST":
            assert operation["requestBody"]["content"], route
        in_path = {one["name"] for one in operation.get("parameters", ()) if one["in"] == "path"}
        assert in_path == set(re.findall(r"{(\w+)}", path)), route


def references_in(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        if isinstance(reference := value.get("$ref"), str):
            yield reference
        value = list(value.values())
    if isinstance(value, list):
        for one in value:
            yield from references_in(one)


def check_references(schema: dict[str, Any]) -> None:
    """Each leads to a class of the document."""
    known = {f"#/components/schemas/{name}" for name in schema["components"]["schemas"]}
    assert set(references_in(schema)) <= known


MEDIA_ROUTES = (
    "POST /v1/images/generations",
    "POST /v1/images/edits",
    "POST /v1/videos",
    "POST /v1/videos/sync",
    "POST /v1/audio/generate",
    "GET /v1/videos",
    "GET /v1/videos/{video_id}",
    "GET /v1/videos/{video_id}/content",
    "GET /v1/files/{file_id}",
    "DELETE /v1/videos/{video_id}",
)


@pytest.fixture
async def media_schema(files_dir: Path) -> AsyncIterator[dict[str, Any]]:  # noqa: F811
    studio = Studio()
    yield (await studio.get("/openapi.json")).json()
    await studio.results.aclose()


async def test_every_route_of_media_is_described(media_schema: dict[str, Any]) -> None:
    check_operations(media_schema, MEDIA_ROUTES)
    check_references(media_schema)
    described = {f"{method.upper()} {path}" for path, methods in media_schema["paths"].items() for method in methods}
    assert described == set(MEDIA_ROUTES)


async def test_the_schema_has_the_files_queries_and_answers_of_videos(media_schema: dict[str, Any]) -> None:
    paths = media_schema["paths"]
    for path in ("/v1/videos", "/v1/videos/sync"):
        for kind in ("application/json", "multipart/form-data"):
            fields = paths[path]["post"]["requestBody"]["content"][kind]["schema"]["properties"]
            assert {"prompt", "seconds", "input_reference", "image_reference"} <= fields.keys()
    query = {one["name"]: one["schema"] for one in paths["/v1/videos"]["get"]["parameters"]}
    assert (query.keys(), query["limit"]["maximum"]) == ({"limit", "after", "order"}, 100)
    created = paths["/v1/videos"]["post"]["responses"]
    assert created["200"]["content"]["application/json"]["schema"] == {"$ref": "#/components/schemas/Video"}
    assert {"429", "503"} <= created.keys()
    content = paths["/v1/videos/{video_id}/content"]["get"]["responses"]
    assert {"206", "409", "416"} <= content.keys()


async def test_every_route_of_media_rejects_an_unknown_field_in_the_same_way(files_dir: Path) -> None:  # noqa: F811
    for route in (one.removeprefix("POST ") for one in MEDIA_ROUTES if one.startswith("POST")):
        modality = {"images": "image", "videos": "video", "audio": "audio"}[route.split("/")[2]]
        studio = Studio(Film(modality))
        body = {"prompt": "x", "input": "x", "image": "data:,x", "sede": 1}
        for name in ("input", "image"):
            if not (name == "input" and modality == "audio") and not (name == "image" and route.endswith("edits")):
                del body[name]
        response = await studio.client.post(route, json=body)
        error = response.json()["error"]
        assert (response.status_code, error["type"]) == (400, "BadRequestError"), route
        assert "unknown field 'sede': did you mean 'seed'?" in error["message"], (route, error)
        await studio.results.aclose()


NO_EFFECT = {"background", "quality", "style", "moderation", "user", "safety_identifier", "input_fidelity"}
