"""The registry of several processes and hosts, in Redis (extra ``redis``).

Keys, behind a prefix:

    instances:<role>            hash: instance id -> its JSON
    alive:<role>:<id>           a lease that heartbeats renew; who has none any more is evicted by whoever notices
    session:<role>:<session>    the id of the instance that it belongs to, with a time to live
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
from collections.abc import Awaitable
from typing import Any, TypeVar

import msgspec
from redis.asyncio import Redis
from redis.exceptions import RedisError

from vllm_omni.errors import RegistryUnavailable
from vllm_omni.flow.remote.registry.base import AFFINITY_TTL_S, HEARTBEAT_S, TIMEOUT_S, Instance

logger = logging.getLogger(__name__)

T = TypeVar("T")

ANSWER_TIMEOUT_S = 2.0

# Every instance of the role that is alive; who is not is removed.
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

# The session's instance after the attempt: ARGV is the new one, the one that it was taken from (or ""), the TTL in ms.
BIND = """
local bound = redis.call("GET", KEYS[1])
if (bound or "") == ARGV[2] then
    bound = ARGV[1]
end
redis.call("SET", KEYS[1], bound, "PX", ARGV[3])
return bound
"""


class RedisRegistry:
    """Instances and affinity in one Redis server.

    Heartbeats have a connection of their own, so that neither waits for the other. While the server cannot be reached,
    whoever asks fails; instances go on beating, and are back with it.

    Args:
        url: as redis-py reads it: ``redis://host:port/0``, ``unix:///path``.
        timeout_s: how long after its last heartbeat an instance is evicted.
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
        self._own: dict[Instance, None] = {}
        self._lock = asyncio.Lock()  # a heartbeat under way must not bring back who has just left
        self._heart: asyncio.Task[None] | None = None
        self._stopped = asyncio.Event()

    def _connect(self) -> Redis:
        redis: Redis = Redis.from_url(
            self._url, socket_timeout=ANSWER_TIMEOUT_S, socket_connect_timeout=ANSWER_TIMEOUT_S, decode_responses=True
        )
        return redis

    async def register(self, instance: Instance) -> None:
        async with self._redis.pipeline(transaction=True) as pipe:
            pipe.set(self._lease(instance.role) + instance.instance_id, "", px=self._timeout_ms)
            pipe.hset(self._key(instance.role), instance.instance_id, msgspec.json.encode(instance).decode())
            await self._ask(pipe.execute())
        self._own[instance] = None
        if self._heart is None:
            self._heart = asyncio.get_running_loop().create_task(self._beat(), name="registry-heartbeat")

    async def deregister(self, instance: Instance) -> None:
        self._own.pop(instance, None)
        async with self._lock, self._redis.pipeline(transaction=True) as pipe:
            pipe.hdel(self._key(instance.role), instance.instance_id)
            pipe.delete(self._lease(instance.role) + instance.instance_id)
            await self._ask(pipe.execute())

    async def instances(self, role: str) -> tuple[Instance, ...]:
        found = await self._ask(self._redis.eval(INSTANCES, 1, self._key(role), self._lease(role)))
        return tuple(sorted(msgspec.json.decode(one, type=Instance) for one in found))

    async def affinity(self, role: str, session: str) -> str | None:
        found: str | None = await self._ask(self._redis.getex(self._session(role, session), px=self._affinity_ttl_ms))
        return found

    async def bind(self, role: str, session: str, instance_id: str, *, instead_of: str | None) -> str:
        key, ttl_ms = self._session(role, session), self._affinity_ttl_ms
        bound: str = await self._ask(self._redis.eval(BIND, 1, key, instance_id, instead_of or "", str(ttl_ms)))
        return bound

    async def aclose(self) -> None:
        self._stopped.set()
        if self._heart is not None:
            await self._heart  # not cancelled: the client may swallow that
        with contextlib.suppress(RegistryUnavailable):  # then their leases run out
            for instance in list(self._own):
                await self.deregister(instance)
        await self._redis.aclose()

    async def _beat(self) -> None:
        async with self._connect() as redis:
            while not await self._has_stopped_within(self._heartbeat_s):
                try:
                    async with self._lock, redis.pipeline(transaction=False) as pipe:
                        for instance in self._own:  # the hash again, too: somebody may have evicted us meanwhile
                            pipe.set(self._lease(instance.role) + instance.instance_id, "", px=self._timeout_ms)
                            pipe.hset(self._key(instance.role), instance.instance_id, msgspec.json.encode(instance))
                        await pipe.execute()
                except (RedisError, OSError) as exc:
                    logger.warning("registry: no heartbeat: %s", exc)

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
