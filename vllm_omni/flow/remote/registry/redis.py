"""The registry of several processes and hosts, in Redis (extra ``redis``).

Keys, behind a prefix:

    instances:<role>            hash: replica id -> its JSON
    alive:<role>:<id>           a key with a time to live that heartbeats renew; without it the replica is evicted
    session:<role>:<session>    the id of the replica that the session is bound to, with a time to live
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
from collections.abc import Awaitable
from typing import Any, TypeVar

import msgspec

from vllm_omni.errors import MissingDependency, RegistryUnavailable, how_to_install
from vllm_omni.flow.remote.registry.base import AFFINITY_TTL_S, HEARTBEAT_S, TIMEOUT_S, Replica

try:
    from redis.asyncio import Redis
    from redis.exceptions import RedisError
except ImportError as exc:
    raise MissingDependency(f"a registry in Redis needs redis; {how_to_install('redis')} ({exc})") from exc

logger = logging.getLogger(__name__)

T = TypeVar("T")

ANSWER_TIMEOUT_S = 2.0

# The live replicas of the role; the others are removed.
INSTANCES = """
local alive = {}
local all = redis.call("HGETALL", KEYS[1])
for i = 1, #all, 2 do
    if redis.call("EXISTS", ARGV[1] .. all[i]) == 1 then
        alive[#alive + 1] = all[i + 1]
    else
        redis.call("HDEL", KEYS[1], all[i])
    end
end
return alive
"""

# The session's replica after the attempt; ARGV: the new one, the expected old one (or ""), the TTL in ms.
BIND = """
local bound = redis.call("GET", KEYS[1])
if (bound or "") == ARGV[2] then
    bound = ARGV[1]
end
redis.call("SET", KEYS[1], bound, "PX", ARGV[3])
return bound
"""


class RedisRegistry:
    """Replicas and sessions in one Redis server.

    Heartbeats use a separate connection, so they and requests do not wait for each other. While the server cannot be
    reached, requests fail; heartbeats continue, and register the replicas again when the server is back.

    Args:
        url: a URL of redis-py: ``redis://host:port/0``, ``unix:///path``.
        timeout_s: the time after its last heartbeat at which a replica is evicted.
    """

    def __init__(
        self,
        url: str,
        *,
        prefix: str = "vllm_omni:",
        heartbeat_s: float = HEARTBEAT_S,
        timeout_s: float = TIMEOUT_S,
        affinity_ttl_s: float = AFFINITY_TTL_S,
    ) -> None:
        self._url = url
        self._prefix = prefix
        self._heartbeat_s = heartbeat_s
        self._timeout_ms = int(timeout_s * 1000)
        self._affinity_ttl_ms = int(affinity_ttl_s * 1000)
        self._redis = self._connect()
        self._own: dict[Replica, None] = {}
        self._lock = asyncio.Lock()  # a heartbeat in flight must not bring back a replica that has just left
        self._heart: asyncio.Task[None] | None = None
        self._stopped = asyncio.Event()

    def _connect(self) -> Redis:
        redis: Redis = Redis.from_url(
            self._url, socket_timeout=ANSWER_TIMEOUT_S, socket_connect_timeout=ANSWER_TIMEOUT_S, decode_responses=True
        )
        return redis

    async def register(self, replica: Replica) -> None:
        async with self._redis.pipeline(transaction=True) as pipe:
            pipe.set(self._lease(replica.role) + replica.replica_id, "", px=self._timeout_ms)
            pipe.hset(self._key(replica.role), replica.replica_id, msgspec.json.encode(replica).decode())
            await self._ask(pipe.execute())
        self._own[replica] = None
        if self._heart is None:
            self._heart = asyncio.get_running_loop().create_task(self._beat(), name="registry-heartbeat")

    async def deregister(self, replica: Replica) -> None:
        self._own.pop(replica, None)
        async with self._lock, self._redis.pipeline(transaction=True) as pipe:
            pipe.hdel(self._key(replica.role), replica.replica_id)
            pipe.delete(self._lease(replica.role) + replica.replica_id)
            await self._ask(pipe.execute())

    async def replicas(self, role: str) -> tuple[Replica, ...]:
        found = await self._ask(self._redis.eval(INSTANCES, 1, self._key(role), self._lease(role)))
        return tuple(sorted(msgspec.json.decode(one, type=Replica) for one in found))

    async def affinity(self, role: str, session: str) -> str | None:
        found: str | None = await self._ask(self._redis.getex(self._session(role, session), px=self._affinity_ttl_ms))
        return found

    async def bind(self, role: str, session: str, replica_id: str, *, instead_of: str | None) -> str:
        key, ttl_ms = self._session(role, session), self._affinity_ttl_ms
        bound: str = await self._ask(self._redis.eval(BIND, 1, key, replica_id, instead_of or "", str(ttl_ms)))
        return bound

    async def aclose(self) -> None:
        self._stopped.set()
        if self._heart is not None:
            await self._heart  # not cancelled: the client may swallow the cancellation
        with contextlib.suppress(RegistryUnavailable):  # their keys expire
            for replica in list(self._own):
                await self.deregister(replica)
        await self._redis.aclose()

    async def _beat(self) -> None:
        async with self._connect() as redis:
            while not await self._has_stopped_within(self._heartbeat_s):
                try:
                    async with self._lock, redis.pipeline(transaction=False) as pipe:
                        for replica in self._own:  # the hash, too: the replica may have been evicted meanwhile
                            pipe.set(self._lease(replica.role) + replica.replica_id, "", px=self._timeout_ms)
                            pipe.hset(self._key(replica.role), replica.replica_id, msgspec.json.encode(replica))
                        await pipe.execute()
                except (RedisError, OSError) as exc:
                    logger.warning("registry: heartbeat failed: %s", exc)

    async def _has_stopped_within(self, seconds: float) -> bool:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._stopped.wait(), seconds)
        return self._stopped.is_set()

    async def _ask(self, answer: Awaitable[T] | Any) -> Any:
        try:
            return await answer
        except (RedisError, OSError) as exc:
            where = re.sub("//[^@/]*@", "//", self._url)  # without a password
            raise RegistryUnavailable(f"the registry at {where} does not answer: {exc}") from exc

    def _key(self, role: str) -> str:
        return f"{self._prefix}instances:{role}"

    def _lease(self, role: str) -> str:
        return f"{self._prefix}alive:{role}:"

    def _session(self, role: str, session: str) -> str:
        return f"{self._prefix}session:{role}:{session}"
