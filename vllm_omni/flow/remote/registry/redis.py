"""The registry of several processes and hosts, in Redis (extra ``redis``).

Keys, behind a prefix:

    servers            set: the servers that have joined
    server:<server>    its replicas as JSON, with a time to live that heartbeats renew; without it the server has left
"""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Any

import msgspec

from vllm_omni.errors import ConfigError, MissingDependency, RegistryUnavailable, how_to_install
from vllm_omni.flow.remote.registry import TIMEOUT_S, Replica
from vllm_omni.names import hide_password

try:
    from redis.asyncio import Redis
    from redis.exceptions import RedisError
except ImportError as exc:
    raise MissingDependency(f"a registry in Redis needs redis; {how_to_install('redis')} ({exc})") from exc

ANSWER_TIMEOUT_S = 2.0

_decoder = msgspec.json.Decoder(tuple[Replica, ...])


class RedisRegistry:
    """The replicas of all servers that share a Redis server.

    All methods belong to one event loop. Each is one exchange or two, bounded by ``ANSWER_TIMEOUT_S`` each, and never
    tries again: the next heartbeat does. They raise ``RegistryUnavailable`` when Redis does not answer.

    Args:
        url: a URL of redis-py: ``redis://host:port/0``, ``unix:///path``.
        timeout_s: the time after its last heartbeat at which a server is evicted.

    Raises:
        ConfigError: not a URL of Redis.
    """

    def __init__(self, url: str, *, prefix: str = "vllm_omni:", timeout_s: float = TIMEOUT_S) -> None:
        self._prefix = prefix
        self._timeout_ms = int(timeout_s * 1000)
        self.where = hide_password(url)
        timeouts: dict[str, Any] = {"socket_timeout": ANSWER_TIMEOUT_S, "socket_connect_timeout": ANSWER_TIMEOUT_S}
        try:
            self._redis: Redis = Redis.from_url(url, decode_responses=True, retry=None, **timeouts)
        except ValueError as exc:
            raise ConfigError(f"{self.where!r} is no URL of Redis, such as redis://HOST:6379/0: {exc}") from exc

    async def publish(self, server: str, replicas: tuple[Replica, ...]) -> None:
        """Join, or renew the lease, with the server's replicas as they are now."""
        async with self._redis.pipeline(transaction=True) as pipe:
            pipe.set(self._key(server), msgspec.json.encode(replicas).decode(), px=self._timeout_ms)
            pipe.sadd(f"{self._prefix}servers", server)
            await self._ask(pipe.execute())

    async def withdraw(self, server: str) -> None:
        """Leave; an unknown server is ignored."""
        async with self._redis.pipeline(transaction=True) as pipe:
            pipe.delete(self._key(server))
            pipe.srem(f"{self._prefix}servers", server)
            await self._ask(pipe.execute())

    async def replicas(self) -> tuple[Replica, ...]:
        """Those of all servers whose lease has not expired, by server."""
        servers: list[str] = sorted(await self._ask(self._redis.smembers(f"{self._prefix}servers")))
        if not servers:
            return ()
        found = await self._ask(self._redis.mget([self._key(server) for server in servers]))
        evicted = [server for server, data in zip(servers, found, strict=True) if data is None]
        if evicted:  # one of them that returns adds itself with its next heartbeat
            await self._ask(self._redis.srem(f"{self._prefix}servers", *evicted))
        return tuple(one for data in found if data is not None for one in self._decode(data))

    async def aclose(self) -> None:
        """Close the connections. What was published stays until its lease ends: ``withdraw`` removes it."""
        await self._redis.aclose()

    def _decode(self, data: str) -> tuple[Replica, ...]:
        try:
            return _decoder.decode(data)
        except msgspec.MsgspecError as exc:
            raise RegistryUnavailable(f"the registry at {self.where} holds what no server has written: {exc}") from exc

    async def _ask(self, answer: Awaitable[Any]) -> Any:
        try:
            return await answer
        except (RedisError, OSError) as exc:
            raise RegistryUnavailable(f"the registry at {self.where} does not answer: {exc}") from exc

    def _key(self, server: str) -> str:
        return f"{self._prefix}server:{server}"
