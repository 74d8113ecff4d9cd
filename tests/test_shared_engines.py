from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest

from tests import shared_engines
from tests.shared_engines import Kind, SharedEngines


class FakeEngine:
    """An engine that counts its starts and stops."""

    def __init__(self) -> None:
        self.num_starts = self.num_stops = 0
        self.is_idle = True
        self.error: Exception | None = None
        self.kind = Kind("fake", self.start, lambda engine: engine.is_idle)

    @contextmanager
    def run(self) -> Iterator["FakeEngine"]:
        if self.error is not None:
            raise self.error
        yield self
        self.num_stops += 1

    def start(self, directory: Path) -> AbstractContextManager["FakeEngine"]:
        self.num_starts += 1
        return self.run()


@pytest.fixture
def shared(tmp_path_factory: pytest.TempPathFactory) -> SharedEngines:
    return SharedEngines(tmp_path_factory)


def test_an_engine_is_started_once(shared: SharedEngines) -> None:
    fake = FakeEngine()
    for _ in range(2):
        assert shared.get(fake.kind) is fake
        shared.check()
        shared.end_test(has_failed=False)
    assert (fake.num_starts, fake.num_stops) == (1, 0)
    shared.stop()
    assert fake.num_stops == 1


def test_a_failed_test_stops_the_engines_that_it_used(shared: SharedEngines) -> None:
    used, unused = FakeEngine(), FakeEngine()
    shared.get(unused.kind)
    shared.end_test(has_failed=False)
    shared.get(used.kind)
    shared.end_test(has_failed=True)
    assert (used.num_stops, unused.num_stops) == (1, 0)
    assert shared.get(used.kind) is used
    assert used.num_starts == 2


def test_an_engine_that_holds_a_request_fails_its_test(shared: SharedEngines, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_engines, "IDLE_TIMEOUT_S", 0.0)
    fake = FakeEngine()
    shared.get(fake.kind)
    fake.is_idle = False
    with pytest.raises(AssertionError, match="fake still holds a request"):
        shared.check()


def test_an_engine_that_does_not_start_is_tried_once(shared: SharedEngines) -> None:
    fake = FakeEngine()
    fake.error = ValueError("no memory")
    with pytest.raises(ValueError, match="no memory"):
        shared.get(fake.kind)
    with pytest.raises(pytest.fail.Exception, match="fake did not start for an earlier test: no memory"):
        shared.get(fake.kind)
    assert fake.num_starts == 1
