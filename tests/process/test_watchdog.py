"""When an engine counts as stuck. Real ones: tests/entrypoints/openai/test_stage_death.py."""

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Callable

import pytest

from vllm_omni.process.proc import cpu_s
from vllm_omni.process.watchdog import BUSY_FACTOR, TICK_S, Watchdog

STUCK_S = 5.0


class Engine:
    """An engine in a world in which a second passes with each sleep of the watchdog.

    Args:
        answers: whether it answers in its n-th second.
        cores: that it uses.
    """

    def __init__(self, answers: Callable[[int], bool], cores: float = 0.0, num_seconds: int = 100) -> None:
        self.now = 0
        self.cores = cores
        self.num_seconds = num_seconds  # of its last request
        self.ends: list[float] = []  # after how many seconds it was ended
        self.ended_at: int | None = None
        self._answers = answers

    def has_requests(self) -> bool:
        return self.now < self.num_seconds and not self.ends

    async def answer(self) -> None:
        while not self._answers(self.now):  # noqa: ASYNC110 - the world's own time
            await asyncio.sleep(0)

    def cpu_s(self) -> float:
        return self.cores * self.now

    def end_stuck(self, after_s: float) -> None:
        self.ends.append(after_s)
        self.ended_at = self.now

    async def sleep(self, seconds: float) -> None:
        assert seconds == TICK_S == 1.0
        self.now += 1
        await asyncio.sleep(0)

    async def live(self) -> None:
        watchdog = Watchdog(self, self.sleep)
        watchdog.start()
        task = watchdog._task
        watchdog.start()  # with another request
        assert watchdog._task is task is not None
        await task


@pytest.fixture(autouse=True)
def stuck_s(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_OMNI_STAGE_STUCK_S", f"{STUCK_S}")


async def test_an_engine_that_answers_between_steps_is_left_alone() -> None:
    engine = Engine(lambda second: second % 4 == 0)
    await engine.live()
    assert not engine.ends and engine.now >= engine.num_seconds


async def test_an_engine_that_stops_is_ended_after_the_limit() -> None:
    engine = Engine(lambda second: second < 20)
    await engine.live()
    assert engine.ends == [5.0]
    assert engine.ended_at is not None and 19 + STUCK_S <= engine.ended_at <= 21 + STUCK_S


async def test_an_engine_that_computes_is_given_longer_and_not_for_ever() -> None:
    engine = Engine(lambda second: second < 20, cores=1.0)
    await engine.live()
    assert engine.ended_at is not None and 19 + BUSY_FACTOR * STUCK_S <= engine.ended_at <= 21 + BUSY_FACTOR * STUCK_S


async def test_the_processes_of_an_engine_that_answers_are_not_looked_at() -> None:
    class Measured(Engine):
        num_calls = 0

        def cpu_s(self) -> float:
            self.num_calls += 1
            return 0.0

    engine = Measured(lambda second: True)
    await engine.live()
    assert engine.now >= engine.num_seconds and engine.num_calls == 0


async def test_a_request_that_gives_up_does_not_hide_an_engine_that_is_stuck() -> None:
    engine = Engine(lambda second: second < 20, num_seconds=22)
    await engine.live()
    assert engine.ends


async def test_an_engine_is_watched_again_after_a_moment_without_file_descriptors() -> None:
    class Unknown(Engine):
        def cpu_s(self) -> float:
            if self.now < 10:
                raise OSError(24, "Too many open files")
            return super().cpu_s()

    engine = Unknown(lambda second: False)
    await engine.live()
    assert engine.ended_at is not None and 10 + STUCK_S <= engine.ended_at <= 12 + STUCK_S


async def test_an_engine_that_dies_is_watched_no_longer() -> None:
    class Dead(Engine):
        async def answer(self) -> None:
            raise RuntimeError("died")

    engine = Dead(lambda second: True)
    await engine.live()
    assert engine.now == 1 and not engine.ends


def test_cpu_time_of_children_counts() -> None:
    busy = "import time\nwhile time.process_time() < 0.3: pass"
    parent = f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {busy!r}])\ninput()"
    before_s = cpu_s([os.getpid()])
    with subprocess.Popen([sys.executable, "-c", parent], stdin=subprocess.PIPE) as process:
        deadline = time.monotonic() + 30
        while cpu_s([process.pid]) < 0.3:
            assert time.monotonic() < deadline
        assert cpu_s([os.getpid()]) - before_s >= 0.3
        process.communicate(b"\n")
    assert cpu_s([process.pid]) == 0
