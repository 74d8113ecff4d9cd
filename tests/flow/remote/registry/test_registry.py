"""The contract, over every backend."""

import asyncio
import uuid
from collections.abc import AsyncIterator, Callable

import pytest

from tests.flow.builders import ManualClock
from vllm_omni.errors import RegistryUnavailable
from vllm_omni.flow.remote.registry import MemoryRegistry, Replica, ServiceRegistry
from vllm_omni.flow.remote.registry.redis import RedisRegistry

A, B = Replica("llm", "a", "ipc://a"), Replica("llm", "b")
OTHER = Replica("vocoder", "a")


@pytest.fixture(params=["memory", "redis"])
async def make_registry(
    request: pytest.FixtureRequest,
) -> AsyncIterator[Callable[[], ServiceRegistry]]:
    """Registries of one backend; those of Redis act as separate processes."""
    made: list[ServiceRegistry] = []
    prefix = f"{uuid.uuid4()}:"

    def make() -> ServiceRegistry:
        if request.param == "redis":
            made.append(RedisRegistry(request.getfixturevalue("redis_url"), prefix=prefix))
        elif not made:
            made.append(MemoryRegistry())
        return made[-1]

    yield make
    for registry in made:
        await registry.aclose()


async def test_registered_replicas_are_listed_by_role_in_order(make_registry):
    registry = make_registry()
    for instance in (B, A, OTHER):
        await registry.register(instance)
    assert await registry.replicas("llm") == (A, B)
    assert await registry.replicas("vocoder") == (OTHER,)


async def test_role_without_replicas_is_empty(make_registry):
    assert await make_registry().replicas("llm") == ()


async def test_replica_that_leaves_is_removed(make_registry):
    registry = make_registry()
    await registry.register(A)
    await registry.register(B)
    await registry.deregister(A)
    await registry.deregister(Replica("llm", "unknown"))
    assert await registry.replicas("llm") == (B,)


async def test_registering_again_changes_the_address(make_registry):
    registry = make_registry()
    await registry.register(A)
    await registry.register(Replica("llm", "a", "ipc://elsewhere"))
    assert await registry.replicas("llm") == (Replica("llm", "a", "ipc://elsewhere"),)


async def test_unbound_session_has_no_replica(make_registry):
    assert await make_registry().affinity("llm", "s") is None


async def test_first_to_bind_a_session_has_it(make_registry):
    one, other = make_registry(), make_registry()
    assert await one.bind("llm", "s", "a", instead_of=None) == "a"
    assert await other.bind("llm", "s", "b", instead_of=None) == "a"
    assert await other.affinity("llm", "s") == "a"


async def test_session_is_rebound_only_from_the_expected_replica(make_registry):
    registry = make_registry()
    await registry.bind("llm", "s", "a", instead_of=None)
    assert await registry.bind("llm", "s", "b", instead_of="a") == "b"
    assert await registry.bind("llm", "s", "c", instead_of="a") == "b"


async def test_affinity_is_of_one_role(make_registry):
    registry = make_registry()
    await registry.bind("llm", "s", "a", instead_of=None)
    assert await registry.affinity("vocoder", "s") is None


async def test_closing_leaves_no_instance(make_registry):
    one, other = make_registry(), make_registry()
    await one.register(A)
    await one.aclose()
    assert await other.replicas("llm") == ()


async def test_session_is_forgotten_after_its_time_to_live():
    clock = ManualClock()
    registry = MemoryRegistry(clock=clock, affinity_ttl_s=10)
    await registry.bind("llm", "kept", "a", instead_of=None)
    await registry.bind("llm", "lost", "a", instead_of=None)
    clock.advance(6)
    assert await registry.affinity("llm", "kept") == "a"
    clock.advance(6)
    assert await registry.affinity("llm", "lost") is None
    assert await registry.affinity("llm", "kept") == "a"


# ---- Redis alone ----


async def wait_until(condition, timeout_s=20.0):
    async with asyncio.timeout(timeout_s):
        while not await condition():  # noqa: ASYNC110 - another process decides
            await asyncio.sleep(0.01)


async def test_instance_without_heartbeat_is_evicted(redis_url):
    prefix = f"{uuid.uuid4()}:"
    dead = RedisRegistry(redis_url, prefix=prefix, heartbeat_s=3600, timeout_s=0.05)
    watcher = RedisRegistry(redis_url, prefix=prefix)
    await dead.register(A)

    async def is_gone():
        return await watcher.replicas("llm") == ()

    await wait_until(is_gone)
    assert await watcher._redis.hlen(f"{prefix}instances:llm") == 0
    await watcher.aclose()
    await dead.aclose()


async def test_heartbeats_keep_an_instance_and_bring_an_evicted_one_back(redis_url):
    prefix = f"{uuid.uuid4()}:"
    registry = RedisRegistry(redis_url, prefix=prefix, heartbeat_s=0.01)
    await registry.register(A)
    await registry._redis.delete(f"{prefix}alive:llm:a", f"{prefix}instances:llm")

    async def is_back():
        return await registry.replicas("llm") == (A,)

    await wait_until(is_back)
    await registry.aclose()


async def test_heartbeat_does_not_bring_back_a_replica_that_left(redis_url):
    prefix = f"{uuid.uuid4()}:"
    registry = RedisRegistry(redis_url, prefix=prefix, heartbeat_s=0.001)
    for _ in range(20):
        await registry.register(A)
        await asyncio.sleep(0.002)
        await registry.deregister(A)
        assert await registry.replicas("llm") == ()
    await registry.aclose()


async def test_server_that_does_not_answer_is_named_without_its_password(tmp_path):
    registry = RedisRegistry("redis://user:secret@127.0.0.1:1/0")
    with pytest.raises(RegistryUnavailable, match=r"127\.0\.0\.1:1/0") as raised:
        await registry.replicas("llm")
    assert "secret" not in str(raised.value)
    await registry.aclose()
