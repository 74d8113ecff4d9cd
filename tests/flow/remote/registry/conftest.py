from collections.abc import Iterator

import pytest

from tests.redis_server import run_redis


@pytest.fixture(scope="session")
def redis_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with run_redis(tmp_path_factory.mktemp("redis")) as url:
        yield url
