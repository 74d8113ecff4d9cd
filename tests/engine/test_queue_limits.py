"""How many requests a stage may have."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.reference import llama
from vllm_omni.config import load_config
from vllm_omni.engine.queue_limits import LONGEST_RETRY_S, QueueLimits
from vllm_omni.engine.replicas import make_replicas
from vllm_omni.engine.stage import StageEngine
from vllm_omni.errors import Overloaded
from vllm_omni.model_executor.pipeline import StageSpec

Enter = Callable[..., object]


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def limits(clock: Clock) -> QueueLimits:
    return QueueLimits({"thinker": 3, "talker": 1}, clock)


@pytest.fixture
def enter(limits: QueueLimits) -> Iterator[Enter]:
    """Begins requests, which run until the end of the test."""
    with ExitStack() as stack:
        yield lambda *stages: stack.enter_context(limits.hold(stages))


def test_a_full_stage_rejects_with_its_name_and_its_limit(limits: QueueLimits, enter: Enter) -> None:
    enter("thinker", "talker", "token2wav")
    with pytest.raises(Overloaded, match=r"stage 'talker' has 1 of at most 1 requests \(max_num_queued_reqs\)"):
        limits.check(["thinker", "talker"])
    limits.check(["thinker"])  # a text needs no talker


def test_a_rejected_request_is_counted_nowhere(limits: QueueLimits, enter: Enter) -> None:
    enter("talker")
    with pytest.raises(Overloaded):
        enter("thinker", "talker")
    assert limits.num_rejected == {"thinker": 0, "talker": 1}
    assert limits.num_open() == {"thinker": (0, 3), "talker": (1, 1)}


def make_engine(name: str, limit: int | None) -> Any:
    scheduler = SimpleNamespace(max_num_queued_reqs=limit)
    return SimpleNamespace(
        name=name, config=SimpleNamespace(name=name[:-2]), vllm_config=SimpleNamespace(scheduler_config=scheduler)
    )


def test_a_replica_brings_its_limit_and_takes_it_along(clock: Clock) -> None:
    engines = [make_engine(f"talker/{number}", 2) for number in range(2)]
    limits = QueueLimits.of(engines[:1])
    assert limits.num_open() == {"talker": (0, 2)}
    limits.add(engines[1])
    assert limits.num_open() == {"talker": (0, 4)}
    limits.remove(engines[1])
    with limits.hold(["talker"], 2), pytest.raises(Overloaded, match="has 2 of at most 2"):
        limits.check(["talker"])
    unlimited = make_engine("thinker/1", None)
    limits.add(unlimited)
    limits.remove(unlimited)
    limits.check(["thinker"], 100)


def test_answers_count(limits: QueueLimits) -> None:
    with pytest.raises(Overloaded, match=r"has 0 of at most 3 requests .*, and this one counts 4"):
        limits.check(["thinker"], n=4)
    with limits.hold(["thinker"], n=3), pytest.raises(Overloaded):
        limits.check(["thinker"])
    limits.check(["thinker"], n=3)


def test_a_stage_without_a_limit_takes_all(limits: QueueLimits, enter: Enter) -> None:
    for _ in range(1000):
        enter("token2wav")


def retry_after_s(limits: QueueLimits) -> int:
    with pytest.raises(Overloaded) as raised:
        limits.check(["talker"])
    assert raised.value.retry_after_s is not None
    return raised.value.retry_after_s


def test_it_is_said_when_the_next_request_is_likely_to_end(limits: QueueLimits, clock: Clock, enter: Enter) -> None:
    for _ in range(3):  # one every 7 seconds
        with limits.hold(["talker"]):
            clock.now += 7
    enter("talker")
    assert retry_after_s(limits) == 7
    clock.now += 4.5
    assert retry_after_s(limits) == 3
    clock.now += 100
    assert retry_after_s(limits) == 1


def test_without_measurements_it_is_a_second_and_never_more_than_a_minute(
    limits: QueueLimits, clock: Clock, enter: Enter
) -> None:
    with limits.hold(["talker"]):
        assert retry_after_s(limits) == 1
    for _ in range(2):
        with limits.hold(["talker"]):
            clock.now += 1000
    enter("talker")
    assert retry_after_s(limits) == LONGEST_RETRY_S


def test_the_limits_of_engines_add_up_and_are_taken_over(tmp_path: Path) -> None:
    """An engine's own check would end a request whose earlier stages have run."""
    config = load_config(
        llama.build(tmp_path), max_num_queued_reqs=3, skip_tokenizer_init=True, stage_overrides=["0.replicas=2"]
    )
    (stage,) = config.stages
    engines = [StageEngine(stage, StageSpec(stage.name, "", "text"), instance=one) for one in make_replicas(stage)]
    assert QueueLimits.of(engines).num_open() == {stage.name: (0, 6)}
    assert [engine.vllm_config.scheduler_config.max_num_queued_reqs for engine in engines] == [None, None]


def test_each_change_of_a_count_is_reported_once_and_no_other() -> None:
    limits = QueueLimits({"talker": 2})
    reported: list[int] = []
    limits.on_change = lambda: reported.append(limits.num_open()["talker"][0])
    with limits.hold(["thinker", "talker"]), limits.hold(["thinker"]):
        pass
    assert reported == [1, 0]
