"""Room for cache entries: counted, never more than the budget, taken back."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from tests.fuzz import num_cases
from vllm_omni.core.sched.dit_cache import DiTCacheConfig, DiTCacheManager
from vllm_omni.messages.cache_update import DiTCacheUpdate


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def make_manager(num_bytes: int = 100, ttl_s: float = 10.0, clock: Clock | None = None) -> DiTCacheManager:
    return DiTCacheManager(DiTCacheConfig(num_bytes=num_bytes, ttl_s=ttl_s), clock or Clock())


def test_room_is_granted_within_the_budget_and_sent_once():
    manager = make_manager()
    assert manager.allocate_cache("a", 60)
    assert manager.get_cache("a").num_bytes == 60
    assert manager.take_update() == DiTCacheUpdate({"a": 60}, [])
    assert manager.take_update() == DiTCacheUpdate({}, [])


def test_the_same_request_again_changes_nothing():
    manager = make_manager()
    manager.allocate_cache("a", 60)
    manager.take_update()
    assert manager.allocate_cache("a", 60)
    assert manager.take_update() == DiTCacheUpdate({}, [])
    assert manager.statistics().num_bytes == 60


def test_no_room_leaves_the_request_uncached():
    manager = make_manager()
    manager.start_batch(["a", "b"])
    manager.allocate_cache("a", 60)
    assert not manager.allocate_cache("b", 60)
    assert manager.get_cache("b") is None
    assert manager.take_update() == DiTCacheUpdate({"a": 60}, [])
    assert manager.statistics().num_rejections == 1


def test_a_budget_of_zero_caches_nothing():
    assert not make_manager(num_bytes=0).allocate_cache("a", 1)


def test_the_least_recently_used_request_outside_the_batch_is_evicted():
    manager = make_manager()
    for name in "abc":
        manager.allocate_cache(name, 30)
    manager.take_update()
    for batch in (["a"], ["b"], ["a"], ["d"]):
        manager.start_batch(batch)
    assert manager.allocate_cache("d", 40)
    assert manager.take_update() == DiTCacheUpdate({"d": 40}, ["c"])
    assert manager.allocate_cache("d", 41)
    assert manager.take_update() == DiTCacheUpdate({"d": 41}, ["b"])
    assert manager.statistics().num_evictions == 2


def test_a_request_of_the_current_batch_is_not_evicted():
    manager = make_manager()
    manager.allocate_cache("a", 60)
    manager.start_batch(["a", "b"])
    assert not manager.allocate_cache("b", 50)
    manager.start_batch(["b"])
    assert manager.allocate_cache("b", 50)
    assert manager.get_cache("a") is None


def test_no_request_is_evicted_in_vain():
    manager = make_manager()
    manager.allocate_cache("a", 50)
    manager.allocate_cache("b", 50)
    manager.start_batch(["b", "c"])
    assert not manager.allocate_cache("c", 60)
    assert manager.get_cache("a") is not None


def test_a_request_grows_and_shrinks_in_its_place():
    manager = make_manager()
    manager.allocate_cache("a", 40)
    assert manager.allocate_cache("a", 80)
    assert manager.allocate_cache("a", 30)
    assert manager.statistics().num_bytes == 30
    assert manager.take_update() == DiTCacheUpdate({"a": 30}, [])


def test_a_request_that_cannot_grow_keeps_what_it_has():
    manager = make_manager()
    manager.allocate_cache("a", 60)
    assert not manager.allocate_cache("a", 101)
    assert manager.get_cache("a").num_bytes == 60


def test_a_released_request_is_dropped_by_the_runner_that_knows_it():
    manager = make_manager()
    manager.allocate_cache("a", 60)
    manager.take_update()
    manager.release_cache("a")
    manager.release_cache("a")
    assert manager.take_update() == DiTCacheUpdate({}, ["a"])
    assert manager.statistics()[:2] == (0, 0)


def test_a_grant_that_was_never_sent_is_not_sent_when_released():
    manager = make_manager()
    manager.allocate_cache("a", 60)
    manager.release_cache("a")
    assert manager.take_update() == DiTCacheUpdate({}, [])


def test_a_request_that_comes_again_is_first_dropped_and_then_granted():
    manager = make_manager()
    manager.allocate_cache("a", 60)
    manager.take_update()
    manager.release_cache("a")
    manager.allocate_cache("a", 20)
    assert manager.take_update() == DiTCacheUpdate({"a": 20}, ["a"])
    manager.release_cache("a")
    assert manager.take_update() == DiTCacheUpdate({}, ["a"])


def test_a_request_in_no_batch_expires():
    clock = Clock()
    manager = make_manager(ttl_s=10.0, clock=clock)
    manager.allocate_cache("leaked", 10)
    manager.allocate_cache("used", 10)
    clock.now_s += 9.0
    manager.start_batch(["used"])
    manager.start_batch([])
    manager.clear_expired_cache()
    assert manager.statistics().num_requests == 2
    clock.now_s += 1.0
    manager.clear_expired_cache()
    assert (manager.get_cache("leaked"), manager.get_cache("used")) == (None, (10, 109.0))
    assert manager.statistics().num_expired == 1


def test_a_long_step_does_not_expire_its_own_batch():
    clock = Clock()
    manager = make_manager(ttl_s=10.0, clock=clock)
    manager.allocate_cache("a", 10)
    manager.start_batch(["a"])
    clock.now_s += 1000.0
    manager.clear_expired_cache()
    assert manager.get_cache("a") is not None


@pytest.mark.parametrize("arguments", [{"num_bytes": -1}, {"num_bytes": 1, "ttl_s": 0.0}], ids=str)
def test_a_contradictory_configuration_is_rejected(arguments):
    with pytest.raises(ValueError):
        DiTCacheConfig(**arguments)


def test_an_empty_allocation_is_rejected():
    with pytest.raises(ValueError, match=r"num_bytes = .*: must be at least 1"):
        make_manager().allocate_cache("a", 0)


@pytest.mark.parametrize(
    ("attribute", "value"), [("_num_bytes", 1), ("_granted", {}), ("_known_to_runner", {"ghost"})], ids=str
)
def test_broken_books_are_found(attribute, value):
    manager = make_manager()
    manager.allocate_cache("a", 10)
    manager.check_integrity()
    setattr(manager, attribute, value)
    with pytest.raises(AssertionError):
        manager.check_integrity()


def test_neither_torch_nor_vllm_is_imported():
    program = "import sys, vllm_omni.core.sched.dit_cache; print({'torch', 'vllm'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "set()"


NAMES = st.sampled_from("abcdef")


class AnyOrder(RuleBasedStateMachine):
    """Any calls in any order, beside a runner that does what the updates say."""

    @initialize(num_bytes=st.integers(0, 50))
    def start(self, num_bytes: int) -> None:
        self.clock = Clock()
        self.manager = make_manager(num_bytes=num_bytes, ttl_s=5.0, clock=self.clock)
        self.batch: set[str] = set()
        self.runner: dict[str, int] = {}
        self.had_room: set[str] = set()  # of the current batch, before the latest call

    @rule(names=st.sets(NAMES, max_size=4))
    def start_batch(self, names: set[str]) -> None:
        self.batch = names
        self.manager.start_batch(names)

    @rule(name=NAMES, num_bytes=st.integers(1, 40))
    def allocate(self, name: str, num_bytes: int) -> None:
        before = self.manager.get_cache(name)
        if self.manager.allocate_cache(name, num_bytes):
            assert self.manager.get_cache(name).num_bytes == num_bytes
        else:
            assert self.manager.get_cache(name) == before

    @rule(name=NAMES)
    def release(self, name: str) -> None:
        self.manager.release_cache(name)
        self.had_room.discard(name)
        assert self.manager.get_cache(name) is None

    @rule(seconds=st.floats(0, 6))
    def expire(self, seconds: float) -> None:
        self.clock.now_s += seconds
        self.manager.clear_expired_cache()

    @rule()
    def update(self) -> None:
        update = self.manager.take_update()
        for name in update.dropped:
            del self.runner[name]  # a KeyError if it had none
        self.runner |= update.granted
        assert self.runner == {
            name: entry.num_bytes for name in "abcdef" if (entry := self.manager.get_cache(name)) is not None
        }
        assert sum(self.runner.values()) <= self.manager.config.num_bytes

    @invariant()
    def nobody_of_the_batch_has_lost_its_room(self) -> None:
        if not hasattr(self, "manager"):
            return
        held = {name for name in self.batch if self.manager.get_cache(name) is not None}
        assert self.had_room & self.batch <= held
        self.had_room = held

    @invariant()
    def the_books_agree_and_the_budget_holds(self) -> None:
        if hasattr(self, "manager"):
            self.manager.check_integrity()
            assert self.manager.statistics().num_bytes <= self.manager.config.num_bytes

    def teardown(self) -> None:
        if hasattr(self, "manager"):
            for name in "abcdef":
                self.manager.release_cache(name)
            self.update()
            assert self.runner == {}
            assert self.manager.statistics()[:2] == (0, 0)
            self.manager.check_integrity()


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.pytestmark = [pytest.mark.fuzz]
TestAnyOrder.settings = settings(max_examples=num_cases(400), stateful_step_count=40, deadline=None, derandomize=True)
