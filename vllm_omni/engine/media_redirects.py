"""Redirects of files that requests name by URL: none leads to a host that may not be asked, or into our own network."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import Awaitable, Callable, Sequence
from contextvars import ContextVar
from typing import Any

import aiohttp
from yarl import URL

from vllm_omni.errors import InvalidRequest

ALLOWED_HOSTS: ContextVar[Sequence[str]] = ContextVar("ALLOWED_HOSTS", default=())
"""Those of ``--allowed-media-domains`` for the fetch that the current task makes; none: any host."""

Resolve = Callable[[str], Awaitable[list[str]]]


async def addresses_of(host: str) -> list[str]:
    """The addresses of a host; none if it has none.

    A name that changes its address between this and the connection is not noticed: ``--allowed-media-domains`` is for
    networks in which that matters.
    """
    try:
        found = await asyncio.get_running_loop().getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return []
    return [str(address[4][0]) for address in found]


async def is_private(host: str, resolve: Resolve = addresses_of) -> bool:
    """Whether one of a host's addresses is not on the public internet: loopback, link-local, a private network."""
    addresses = await resolve(host)
    return any(not ipaddress.ip_address(one.partition("%")[0]).is_global for one in addresses)


async def check_redirect(url: URL, location: str, resolve: Resolve = addresses_of) -> None:
    """Check where a file's URL is redirected to. Redirects within a private network are allowed.

    Raises:
        InvalidRequest: from a public host to one that is not, or to one that may not be asked at all.
    """
    target = url.join(URL(location))
    if (allowed := ALLOWED_HOSTS.get()) and target.host not in allowed:
        said = f"{url.host} redirects to {target.host}, which is none of --allowed-media-domains"
        raise InvalidRequest(f"{said}: {', '.join(allowed)}")
    if target.host is None or url.host is None or target.host == url.host:
        return
    if await is_private(target.host, resolve) and not await is_private(url.host, resolve):
        raise InvalidRequest(f"{url.host} redirects to {target.host}, which is not a public host")


def watch_redirects() -> aiohttp.TraceConfig:
    """What a session needs to check each redirect before it is followed."""
    config = aiohttp.TraceConfig()

    async def on_redirect(session: Any, context: Any, params: aiohttp.TraceRequestRedirectParams) -> None:
        if (location := params.response.headers.get("Location")) is not None:
            await check_redirect(params.url, location)

    config.on_request_redirect.append(on_redirect)
    return config
