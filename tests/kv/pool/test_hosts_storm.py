"""Nodes that store, evict and read each other's pages at the same time, over one Redis: no wrong page is ever read."""

import random
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kv.pool.nodes import PATIENT, Node, wait_until
from tests.kv.pool.stores import page_of
from tests.redis_server import run_redis
from vllm_omni.kv.pool.directory import Layout
from vllm_omni.kv.pool.directory.redis import RedisDirectory, RedisServer

NUM_NODES, NUM_SLOTS, NUM_PAGES = 3, 6, 24
SECONDS = 3.0


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    with run_redis(tmp_path) as url:
        server = RedisServer(url, timeout_s=10.0)
        yield server
        server.close()


@pytest.mark.parametrize("claim_s", [5.0, 0.002])
def test_every_page_that_is_read_is_the_right_one(
    server: RedisServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, claim_s: float
) -> None:
    """With claims that last, and with claims that end before the copy does, so that pages are evicted under it."""
    monkeypatch.setattr("vllm_omni.kv.pool.remote_pages.CLAIM_S", claim_s)
    directory = RedisDirectory(server, Layout("storm"))
    limits = PATIENT._replace(pull_bytes=8192)
    nodes = [Node(tmp_path / str(index), directory, NUM_SLOTS, limits=limits) for index in range(NUM_NODES)]
    expected = [page_of(number) for number in range(NUM_PAGES)]
    deadline = time.monotonic() + SECONDS
    errors: list[object] = []

    def store(node: Node, seed: int) -> None:
        rng = random.Random(seed)
        while time.monotonic() < deadline:
            node.store(rng.randrange(NUM_PAGES))

    def read(node: Node, seed: int) -> None:
        rng, turn = random.Random(seed), 0
        while time.monotonic() < deadline:
            turn += 1
            numbers = rng.sample(range(NUM_PAGES), 3)
            found = node.found(*numbers, request_id=str(turn))
            copies = node.load(*numbers, request_id=str(turn)) if any(found) else []
            node.pages.forget(str(turn))
            errors.extend(
                number for number, copy in zip(numbers, copies, strict=False) if copy not in (None, expected[number])
            )

    threads = [
        threading.Thread(target=run, args=(node, index)) for index, node in enumerate(nodes) for run in (store, read)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    num_hits = sum(node.pages.num_hits for node in nodes)
    assert not errors
    assert num_hits or claim_s < 1, "all were evicted meanwhile"
    assert not any(node.pages.num_failures for node in nodes)
    wait_until(lambda: directory.statistics().num_claims == 0)
    directory.check_integrity()
    for node in nodes:
        node.publish()
        node.slab.check_integrity()
    held = sum(len(node.slab) for node in nodes)
    wait_until(lambda: directory.statistics().num_replicas == held)
    print(f"\n{num_hits} pages read, {sum(node.pages.num_damaged for node in nodes)} evicted meanwhile")
    for node in nodes:
        node.close()
    while directory.sweep():
        pass
    assert not any(directory.statistics())
