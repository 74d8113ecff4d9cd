"""Results by URL: whoever has the address may read it until it expires, and nobody else."""

import asyncio
from argparse import Namespace
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI, Request

from tests.entrypoints.openai.filming import files_dir  # noqa: F401 (a fixture)
from vllm_omni.entrypoints.openai.api_keys import require_api_keys
from vllm_omni.entrypoints.openai.errors import add_error_handlers
from vllm_omni.entrypoints.openai.results import FILE_NAME, FILE_ROUTE, Results
from vllm_omni.errors import ConfigError


@pytest.fixture
async def results(files_dir: Path) -> AsyncIterator[Results]:  # noqa: F811
    results = Results()
    results.open()
    yield results
    await results.aclose()


@pytest.fixture
async def client(results: Results) -> AsyncIterator[httpx.AsyncClient]:
    app = FastAPI()
    app.add_api_route(FILE_ROUTE, results.file, methods=["GET"], name=FILE_NAME, response_model=None)

    @app.post("/v1/make")
    async def make(raw_request: Request) -> Any:
        return (await results.keep(b"0123456789", "image/png", raw_request))._asdict()

    add_error_handlers(app)
    require_api_keys(app, Namespace(api_key=["secret"]))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="https://shop.example") as client:
        yield client


async def make(client: httpx.AsyncClient, **headers: str) -> dict[str, Any]:
    response = await client.post("/v1/make", headers={"Authorization": "Bearer secret", **headers})
    made: dict[str, Any] = response.json()
    return made


async def test_the_address_alone_is_enough_to_read_a_result(client: httpx.AsyncClient) -> None:
    made = await make(client)
    assert made["url"].startswith("https://shop.example/v1/files/file-")
    response = await client.get(made["url"])
    assert (response.status_code, response.content) == (200, b"0123456789")
    assert response.headers["content-type"] == "image/png"
    part = await client.get(made["url"], headers={"Range": "bytes=2-3"})
    assert (part.status_code, part.content) == (206, b"23")


async def test_an_address_is_below_the_path_under_which_a_proxy_serves(
    results: Results, client: httpx.AsyncClient
) -> None:
    transport = httpx.ASGITransport(client._transport.app, root_path="/omni")  # type: ignore[attr-defined]
    async with httpx.AsyncClient(transport=transport, base_url="https://shop.example/omni") as behind:
        made = await make(behind)
        assert made["url"].startswith("https://shop.example/omni/v1/files/file-")
        assert (await behind.get(made["url"])).content == b"0123456789"


async def test_an_address_that_was_changed_is_forbidden(client: httpx.AsyncClient) -> None:
    url, other = httpx.URL((await make(client))["url"]), httpx.URL((await make(client))["url"])
    later = url.copy_merge_params({"expires": int(url.params["expires"]) + 1})
    for changed in (later, url.copy_with(path=other.path), url.copy_merge_params({"signature": "0" * 64})):
        response = await client.get(changed)
        error = response.json()["error"]
        assert (response.status_code, error["type"], error["param"]) == (403, "ForbiddenError", "signature")


async def test_an_address_without_its_query_is_rejected_by_name(client: httpx.AsyncClient) -> None:
    url = httpx.URL((await make(client))["url"])
    for changed, message in (
        (url.copy_with(query=None), "expires: is missing; signature: is missing"),
        (url.copy_merge_params({"expires": "soon"}), "expires = 'soon'"),
        (url.copy_merge_params({"signatur": "x"}), "did you mean 'signature'"),
    ):
        response = await client.get(changed)
        assert (response.status_code, message in response.json()["error"]["message"]) == (400, True)


async def test_an_address_expires_with_its_file(client: httpx.AsyncClient, results: Results) -> None:
    made = await make(client)
    results.store.clock = lambda: made["expires_at"]
    response = await client.get(made["url"])
    assert (response.status_code, response.json()["error"]["type"]) == (410, "GoneError")
    await asyncio.to_thread(results.jobs.sweep)
    assert results.store.directory.names() == []


async def test_a_file_that_is_gone_is_a_404(client: httpx.AsyncClient, results: Results) -> None:
    made = await make(client)
    (file_id,) = results.store.directory.names()
    with results.store.directory.locked():
        results.store.directory.remove(file_id)
    assert (await client.get(made["url"])).status_code == 404


async def test_expired_results_are_removed_while_the_server_runs(
    client: httpx.AsyncClient, results: Results, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = await make(client)
    monkeypatch.setattr("vllm_omni.entrypoints.openai.results.SWEEP_S", 0.01)
    async with asyncio.timeout(60), results.kept():
        await asyncio.sleep(0.05)
        assert len(results.store.directory.names()) == 1
        results.store.clock = lambda: made["expires_at"]
        names = results.store.directory.names
        while await asyncio.to_thread(names):  # noqa: ASYNC110 the directory has no event
            await asyncio.sleep(0.01)


def test_a_directory_that_is_named_and_cannot_be_used_is_a_wrong_setting(files_dir: Path) -> None:  # noqa: F811
    files_dir.mkdir(mode=0o755)
    files_dir.chmod(0o755)
    with pytest.raises(ConfigError, match="open to other users"):
        Results().open()
