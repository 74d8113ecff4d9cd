"""Replicas on two hosts read each other's pages: a conversation continues with them where it has not been."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.engines import MARKS
from tests.e2e.test_kv_pool import ENGINE
from tests.e2e.test_kv_pool_replicas import Conversation, homes
from tests.hosts.deployments import TIMEOUT_S, Deployment, deploy
from tests.redis_server import run_redis
from vllm_omni import OmniLLM
from vllm_omni.testing import llava as llava

pytestmark = [*MARKS, pytest.mark.timeout(400), pytest.mark.long]  # units: tests/kv/pool/offload/test_hosts.py

HOSTS = {"language/0": "box-b", "language/1": "box-c"}
SETTINGS = ["language.replicas=2", "language.balance=affinity", "language.host=[box-b, box-c]"]
NUM_TURNS = 3
NUM_CONVERSATIONS = 6


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return llava.build(tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture(scope="module")
def expected(checkpoint: Path) -> list[list[list[int]]]:
    """The replies of one engine without a pool, by conversation."""
    with OmniLLM(checkpoint, **ENGINE) as omni:
        conversations = [Conversation(number) for number in range(NUM_CONVERSATIONS)]
        return [[one.ask(omni).ids for _ in range(NUM_TURNS)] for one in conversations]


@pytest.fixture(scope="module")
def deployment(
    checkpoint: Path, expected: list[list[list[int]]], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Deployment]:
    """Redis is reached by a socket in the file system, which these hosts share, and pages by their networks alone."""
    places = tmp_path_factory.mktemp("logs"), tmp_path_factory.mktemp("h")
    with run_redis(tmp_path_factory.mktemp("redis")) as url:
        pool = {"memory_bytes": 8 << 20, "staging_bytes": 4 << 20, "redis": url}
        engine = {**ENGINE, "kv_pool": pool}
        with deploy(checkpoint, places[0], HOSTS, *SETTINGS, hosts_dir=places[1], engine=engine) as made:
            yield made


def test_conversations_continue_on_another_host_with_their_pages(
    deployment: Deployment, expected: list[list[list[int]]]
) -> None:
    omni = deployment.omni
    conversations = [Conversation(number) for number in range(NUM_CONVERSATIONS)]
    replies, origins = [], []
    for one in conversations:
        before = homes(omni)
        replies.append([one.ask(omni).ids for _ in range(NUM_TURNS - 1)])
        ((origin, num_turns),) = homes(omni).items() - before.items()
        assert num_turns == before.get(origin, 0) + NUM_TURNS - 1, "it stays at home"
        origins.append(origin)
    drained = origins[0]
    omni.run(omni.engine.drain(HOSTS[drained], TIMEOUT_S))
    last = [one.ask(omni) for one in conversations]
    assert set(homes(omni)) == set(HOSTS)
    assert [[*ids, answer.ids] for ids, answer in zip(replies, last, strict=True)] == expected
    # The other host has computed nothing of these. On a busy machine an answer of Redis may come too late for some.
    assert any(answer.num_cached >= 128 for answer, origin in zip(last, origins, strict=True) if origin == drained)
