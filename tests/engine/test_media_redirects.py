"""Redirects of files that requests name by URL."""

from collections.abc import AsyncIterator

import aiohttp
import pytest
from aiohttp import web
from yarl import URL

from vllm_omni.engine import media_redirects
from vllm_omni.engine.media_connector import DeadlineConnection
from vllm_omni.engine.media_redirects import addresses_of, check_redirect

HOSTS = {"public.example": ["93.184.216.34"], "other.example": ["2606:2800:220:1::1"], "inside.example": ["10.1.2.3"]}


async def resolve(host: str) -> list[str]:
    return HOSTS.get(host, [host])


@pytest.mark.parametrize(
    "location",
    [
        *("http://127.0.0.1:8000/", "http://[::1]/", "http://169.254.169.254/latest/meta-data", "http://10.0.0.1/x"),
        *("//inside.example/x", "http://[::ffff:127.0.0.1]/", "http://[fe80::1%25eth0]/", "http://0.0.0.0/"),
    ],
)
async def test_no_public_host_redirects_into_a_private_network(location: str) -> None:
    with pytest.raises(ValueError, match=r"public\.example redirects to .*, which is not a public host"):
        await check_redirect(URL("https://public.example/picture.png"), location, resolve)


@pytest.mark.parametrize(
    ("url", "location"),
    [
        ("https://public.example/a", "https://other.example/b"),
        ("https://public.example/a", "/b"),
        ("http://inside.example/a", "http://127.0.0.1/b"),
        ("http://10.0.0.1/a", "http://10.0.0.2/b"),
        ("http://10.0.0.1/a", "https://public.example/b"),
    ],
)
async def test_other_redirects_are_followed(url: str, location: str) -> None:
    await check_redirect(URL(url), location, resolve)


async def test_a_host_without_an_address_is_no_private_one() -> None:
    assert await addresses_of("does-not-exist.invalid") == []
    assert await addresses_of("127.0.0.1") == ["127.0.0.1"]


@pytest.fixture
async def redirecting() -> AsyncIterator[str]:
    """A server that redirects, with a file behind it."""

    async def redirect(request: web.Request) -> web.Response:
        raise web.HTTPFound(f"http://127.0.0.1:{request.url.port}/file")

    async def file(request: web.Request) -> web.Response:
        return web.Response(body=b"picture")

    app = web.Application()
    app.add_routes([web.get("/redirect", redirect), web.get("/file", file)])
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    yield f"http://localhost:{port}/redirect"
    await runner.cleanup()


async def fetch(url: str) -> bytes:
    connection = DeadlineConnection()
    try:
        return await connection.async_get_bytes(url)
    finally:
        session: aiohttp.ClientSession = await connection.get_async_client()
        await session.close()


async def test_a_file_is_fetched_through_a_redirect_within_the_network(redirecting: str) -> None:
    assert await fetch(redirecting) == b"picture"


async def test_a_file_is_not_fetched_through_a_redirect_into_the_network(
    redirecting: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first host counts as a public one here."""

    async def is_private(host: str, resolve: object = None) -> bool:
        return host != "localhost"

    monkeypatch.setattr(media_redirects, "is_private", is_private)
    with pytest.raises(ValueError, match=r"localhost redirects to 127\.0\.0\.1, which is not a public host"):
        await fetch(redirecting)
