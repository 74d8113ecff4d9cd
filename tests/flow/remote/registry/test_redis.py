"""The registry in Redis, against a real server of it."""

import asyncio
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack

import pytest

from vllm_omni.errors import ConfigError, RegistryUnavailable
from vllm_omni.flow.remote.registry import Replica
from vllm_omni.flow.remote.registry.redis import RedisRegistry

A = Replica("one", "talker/0", "http://one:8000", "tiny", "running", None, 2, 40.0)
B = Replica("one", "talker/1", "http://one:8000", "tiny", "restarting", "killed", num_restarts=1)
C = Replica("two", "talker", "http://two:8000", "tiny", "running")

Make = Callable[..., RedisRegistry]


@pytest.fixture
async def make(redis_url: str) -> AsyncIterator[Make]:
    """Clients as of separate servers."""
    prefix = f"{uuid.uuid4()}:"
    async with AsyncExitStack() as stack:

        def make(timeout_s: float = 60.0) -> RedisRegistry:
            registry = RedisRegistry(redis_url, prefix=prefix, timeout_s=timeout_s)
            stack.push_async_callback(registry.aclose)
            return registry

        yield make


async def until(condition: Callable[[], Awaitable[bool]], timeout_s: float = 60.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not await condition():  # noqa: ASYNC110 - another process decides
            await asyncio.sleep(0.01)


async def test_what_servers_publish_is_listed_by_server(make: Make) -> None:
    one, two = make(), make()
    assert await one.replicas() == ()
    await two.publish("two", (C,))
    await one.publish("one", (A, B))
    assert await one.replicas() == await two.replicas() == (A, B, C)


async def test_a_heartbeat_replaces_what_the_server_has_published(make: Make) -> None:
    one, two = make(), make()
    await one.publish("one", (A, B))
    await one.publish("one", (B,))
    assert await two.replicas() == (B,)


async def test_a_server_that_leaves_is_removed(make: Make) -> None:
    one, two = make(), make()
    await one.publish("one", (A, B))
    await two.publish("two", (C,))
    await one.withdraw("one")
    await one.withdraw("unknown")
    assert await two.replicas() == (C,)


async def test_a_server_without_heartbeats_is_evicted_and_may_return(make: Make) -> None:
    dead, other = make(timeout_s=0.05), make()
    await other.publish("two", (C,))
    await dead.publish("one", (A,))

    async def is_evicted() -> bool:
        return await other.replicas() == (C,)

    await until(is_evicted)
    await make().publish("one", (A,))
    assert await other.replicas() == (A, C)


async def test_what_no_server_has_written_is_reported(make: Make) -> None:
    registry = make()
    await registry.publish("one", (A,))
    await registry._redis.set(registry._key("one"), "[1]")
    with pytest.raises(RegistryUnavailable, match="holds what no server has written"):
        await registry.replicas()


async def test_a_registry_that_does_not_answer_is_named_without_its_password() -> None:
    registry = RedisRegistry("redis://user:secret@127.0.0.1:1/0")
    with pytest.raises(RegistryUnavailable, match=r"at redis://127\.0\.0\.1:1/0 does not answer") as raised:
        await registry.replicas()
    assert "secret" not in str(raised.value)
    await registry.aclose()


@pytest.mark.parametrize("url", ["localhost", "http://localhost:6379", "redis://h:x"])
def test_what_is_no_url_of_redis_is_rejected(url: str) -> None:
    with pytest.raises(ConfigError, match=f"'{url}' is no URL of Redis, such as redis://HOST:6379/0"):
        RedisRegistry(url)
