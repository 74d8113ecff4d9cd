"""``--api-key`` guards every route of vLLM's application but those that only report."""

from collections.abc import Iterator

import httpx
import pytest
from fastapi import FastAPI
from fastapi.routing import APIRoute
from vllm.entrypoints.launchers.app import build_app
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser

from vllm_omni.entrypoints.openai.api_keys import OPEN_ROUTES, require_api_keys
from vllm_omni.entrypoints.openai.errors import add_error_handlers


def make_app(*flags: str) -> FastAPI:
    args = make_arg_parser(FlexibleArgumentParser()).parse_args(flags)
    app = build_app(args, ("generate",))
    add_error_handlers(app)
    require_api_keys(app, args)
    return app


def operations(app: FastAPI) -> Iterator[tuple[str, str]]:
    for route in app.routes:
        if isinstance(route, APIRoute):
            yield from ((method, route.path) for method in route.methods)


async def ask(app: FastAPI, method: str, path: str, key: str | None = None) -> httpx.Response:
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
        return await client.request(method, path, headers=headers)


async def test_no_route_that_runs_a_model_answers_without_the_key() -> None:
    app = make_app("--api-key", "secret", "other")
    guarded = [(method, path) for method, path in operations(app) if path not in OPEN_ROUTES]
    assert {("POST", "/invocations"), ("POST", "/tokenize"), ("POST", "/v1/completions")} <= set(guarded)
    for method, path in guarded:
        for key in (None, "wrong"):
            response = await ask(app, method, path, key)
            assert response.status_code == 401, f"{method} {path}"
            assert "--api-key" in response.json()["error"]["message"]


@pytest.mark.parametrize("key", ["secret", "other"])
async def test_each_key_opens_the_routes(key: str) -> None:
    app = make_app("--api-key", "secret", "other")
    assert (await ask(app, "POST", "/invocations", key)).status_code != 401


async def test_a_signed_address_needs_no_key() -> None:
    """Its route checks the signature; here, there is none."""
    app = make_app("--api-key", "secret")
    assert (await ask(app, "GET", "/v1/files/file-1")).status_code == 404
    assert (await ask(app, "GET", "/v1/files")).status_code == 401


async def test_probes_and_documentation_need_no_key() -> None:
    app = make_app("--api-key", "secret")
    for path in ("/metrics/", "/docs", "/openapi.json", "/version"):
        assert (await ask(app, "GET", path)).status_code == 200, path


async def test_without_keys_every_route_is_open() -> None:
    assert (await ask(make_app(), "POST", "/invocations")).status_code != 401
