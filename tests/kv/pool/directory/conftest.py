from collections.abc import Callable, Iterator

import pytest
from redis import Redis

from tests.kv.pool.directory.builders import World, make_memory, make_redis
from tests.redis_server import run_redis
from vllm_omni.kv.pool.directory import listener
from vllm_omni.kv.pool.directory.redis import RedisServer


@pytest.fixture(scope="session")
def redis_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with run_redis(tmp_path_factory.mktemp("redis")) as url:
        yield url


@pytest.fixture(scope="session")
def redis_server(redis_url: str) -> Iterator[RedisServer]:
    server = RedisServer(redis_url, timeout_s=10.0)  # a test that waits for its core is no failure of Redis
    yield server
    server.close()


@pytest.fixture(scope="session")
def redis_client(redis_url: str) -> Iterator[Redis]:
    with Redis.from_url(redis_url) as client:
        yield client


@pytest.fixture(autouse=True)
def subscribers_hear_what_follows(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine their thread may start later than the directory waits for it."""
    monkeypatch.setattr(listener, "START_TIMEOUT_S", 30.0)


MakeWorld = Callable[..., World]


@pytest.fixture(params=["memory", "redis"])
def make_world(request: pytest.FixtureRequest) -> Iterator[MakeWorld]:
    """Makes a directory of each kind; afterwards, all of them are consistent."""
    worlds: list[World] = []

    def make(num_parts: int = 1) -> World:
        if request.param == "memory":
            worlds.append(make_memory(num_parts))
        else:
            server, client = request.getfixturevalue("redis_server"), request.getfixturevalue("redis_client")
            worlds.append(make_redis(server, client, num_parts))
        return worlds[-1]

    yield make
    for world in worlds:
        world.directory.check_integrity()
        world.directory.close()


@pytest.fixture
def world(make_world: MakeWorld) -> World:
    """A directory whose pages have one part."""
    return make_world()


@pytest.fixture
def halves(make_world: MakeWorld) -> World:
    """A directory whose pages have two parts."""
    return make_world(2)
