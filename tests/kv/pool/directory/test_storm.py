"""Four processes on one Redis, some of them killed at any moment: no page in use is evicted or overwritten."""

import os
import random
import signal
import subprocess
import sys
import time
from ast import literal_eval
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.fuzz import num_cases, seeds
from tests.kv.pool.directory import storm
from tests.kv.pool.directory.builders import make_layout
from tests.processes import paused
from tests.redis_server import start_redis
from vllm_omni.kv.pool.directory.redis import RedisDirectory, RedisServer

DEADLINE_S = 600.0
FULL_SIZE = 100_000
KILL_EVERY = 1_000  # operations
END_TIMEOUT_S = 30.0
SIZES = [pytest.param(FULL_SIZE, marks=pytest.mark.long, id="long"), pytest.param(FULL_SIZE // 5, id="short")]


class Storm:
    def __init__(self, url: str, directory: Path, seed: int, timeout_s: float):
        self.layout = make_layout()
        self.board = storm.Board(directory)
        self._url = url
        self._timeout_s = timeout_s
        self._directory = directory
        self._deadline = time.monotonic() + DEADLINE_S
        self._rng = random.Random(seed)
        storm.make_slabs(directory)
        self._processes = [self._start(number) for number in range(storm.NUM_NODES)]

    def _start(self, number: int) -> subprocess.Popen[str]:
        seed = self._rng.getrandbits(32)
        arguments = [self._url, self.layout.id, number, self._directory, seed, self._timeout_s]
        command = [sys.executable, "-m", "tests.kv.pool.directory.storm", *map(str, arguments)]
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def kill_one(self) -> None:
        number = self._rng.randrange(storm.NUM_NODES)
        process = self._processes[number]
        os.kill(process.pid, signal.SIGKILL)
        process.communicate(timeout=20)
        self._processes[number] = self._start(number)

    def is_running(self, num_operations: int) -> bool:
        """Whether operations are left to do; fails if a node has ended by itself."""
        for process in self._processes:
            if process.poll() is not None:
                pytest.fail(process.communicate()[1])
        assert time.monotonic() < self._deadline, f"{self.board.num_operations} operations"
        return self.board.num_operations < num_operations

    def finish(self) -> Counter[str]:
        """Stop, and return what the nodes that were not killed have counted."""
        self.board.stop()
        counts: Counter[str] = Counter()
        for process in self._processes:
            out, err = process.communicate(timeout=60)
            assert process.returncode == 0, err
            counts += Counter(literal_eval(out))
        return counts

    def close(self) -> None:
        for process in self._processes:
            if process.poll() is None:
                process.kill()
            process.communicate()
        self.board.close()


def wait_until_nothing_is_left(directory: RedisDirectory) -> None:
    deadline = time.monotonic() + END_TIMEOUT_S
    while any(directory.statistics()) or directory.sweep():
        assert time.monotonic() < deadline, f"left: {directory.statistics()}"
        time.sleep(0.02)
    directory.check_integrity()


@pytest.fixture
def report(capsys: pytest.CaptureFixture[str]) -> Callable[[str], None]:
    def report(line: str) -> None:
        with capsys.disabled():
            print(f"\n{line}")

    return report


@pytest.mark.timeout(0)
@pytest.mark.parametrize("full_size", SIZES)
def test_no_page_in_use_is_evicted_or_overwritten(
    redis_url: str, redis_server: RedisServer, tmp_path: Path, full_size: int, report: Callable[[str], None]
) -> None:
    seed, num_operations, num_kills = seeds(1).start, num_cases(full_size), 0
    nodes = Storm(redis_url, tmp_path, seed, timeout_s=20.0)
    watcher = RedisDirectory(redis_server, nodes.layout)
    try:
        while nodes.is_running(num_operations):
            if nodes.board.num_operations >= (num_kills + 1) * KILL_EVERY:
                nodes.kill_one()
                num_kills += 1
                watcher.check_integrity()
            time.sleep(0.02)
        num_done, counts = nodes.board.num_operations, nodes.finish()
    finally:
        nodes.close()
    wait_until_nothing_is_left(watcher)
    assert counts["pages read"] and counts["kept IN_USE"] and counts["pages evicted"]
    report(f"storm of seed {seed}: {num_done} operations, {num_kills} kills; of the last nodes: {dict(counts)}")


@pytest.mark.timeout(0)
@pytest.mark.parametrize("full_size", SIZES)
def test_no_page_that_stands_is_overwritten_while_redis_is_stopped_and_killed(
    tmp_path: Path, full_size: int, report: Callable[[str], None]
) -> None:
    seed, num_operations, faults = seeds(1).start, num_cases(full_size // 2), Counter[str]()
    rng = random.Random(seed)
    redis, url = start_redis(tmp_path)
    nodes = Storm(url, tmp_path, seed, timeout_s=0.05)
    try:
        while nodes.is_running(num_operations):
            time.sleep(rng.uniform(0.05, 0.5))
            fault = rng.choice(["stop", "stop", "stop", "kill Redis", "kill a node"])
            faults[fault] += 1
            if fault == "stop":
                with paused(redis.pid):
                    time.sleep(rng.choice([0.02, 0.1, 0.3, 1.5]))
            elif fault == "kill Redis":
                redis.kill()
                redis.wait(10)
                redis, _ = start_redis(tmp_path)
            else:
                nodes.kill_one()
        num_done, counts = nodes.board.num_operations, nodes.finish()
        server = RedisServer(url, timeout_s=10.0)
        wait_until_nothing_is_left(RedisDirectory(server, nodes.layout))
        server.close()
    finally:
        nodes.close()
        redis.kill()
        redis.wait(10)
    assert counts["pages read"] and counts["pages evicted"]
    report(f"storm of seed {seed}: {num_done} operations, {dict(faults)}; of the last nodes: {dict(counts)}")
