"""The routes of the page: what answers without a key, and what the page says of itself."""

import httpx
import pytest
from fastapi import FastAPI
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser

from tests.entrypoints.openai.test_schema import check_operations
from vllm_omni.entrypoints.openai.api_keys import require_api_keys
from vllm_omni.entrypoints.openai.errors import add_error_handlers
from vllm_omni.entrypoints.openai.page import page_router
from vllm_omni.entrypoints.openai.schema import describe_app
from vllm_omni.entrypoints.page.files import HEADERS, page_files


def make_app(*flags: str) -> FastAPI:
    app = FastAPI()
    app.include_router(page_router)
    add_error_handlers(app)
    app.state.needs_key = require_api_keys(app, make_arg_parser(FlexibleArgumentParser()).parse_args(flags))
    describe_app(app, "tiny")
    return app


async def get(app: FastAPI, path: str) -> httpx.Response:
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
        return await client.get(path)


@pytest.mark.parametrize("flags", [(), ("--api-key", "secret")])
async def test_the_page_and_its_files_need_no_key(flags: tuple[str, ...]) -> None:
    app = make_app(*flags)
    for path in ("/omni", *(f"/omni/static/{name}" for name in page_files())):
        response = await get(app, path)
        assert response.status_code == 200, path
        assert response.headers.items() >= {name.lower(): value for name, value in HEADERS.items()}.items()


async def test_what_the_page_says_of_the_server_needs_the_key() -> None:
    app = make_app("--api-key", "secret")
    for path in ("/omni/model", "/omni/state"):
        assert (await get(app, path)).status_code == 401, path


async def test_the_document_says_whether_a_key_is_needed() -> None:
    assert 'data-key="open"' in (await get(make_app(), "/omni")).text
    assert 'data-key="required"' in (await get(make_app("--api-key", "secret"), "/omni")).text


async def test_scripts_and_styles_have_their_media_types() -> None:
    app = make_app()
    types = {name: (await get(app, f"/omni/static/{name}")).headers["content-type"] for name in page_files()}
    assert types["app.js"] == "text/javascript; charset=utf-8"
    assert types["style.css"] == "text/css; charset=utf-8"
    assert types["icon.svg"] == "image/svg+xml"


@pytest.mark.parametrize("name", ["ap.js", "..%2Ffiles.py", "../files.py"])
async def test_another_file_is_not_found(name: str) -> None:
    assert (await get(make_app(), f"/omni/static/{name}")).status_code == 404


async def test_an_unknown_file_is_rejected_with_the_nearest_name() -> None:
    error = (await get(make_app(), "/omni/static/ap.js")).json()["error"]
    assert "did you mean 'app.js'?" in error["message"]


def test_the_routes_are_described() -> None:
    schema = make_app().openapi()
    check_operations(schema, ["GET /omni/model", "GET /omni/state"])
    assert set(schema["paths"]) == {"/omni/model", "/omni/state"}
