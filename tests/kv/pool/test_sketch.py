"""The sketch counts at least what was counted, and not much more."""

import hashlib
import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_omni.kv.pool.sketch import MAX_COUNT, FrequencySketch


def key_of(number: int, group: int = 0) -> bytes:
    return hashlib.sha256(str(number).encode()).digest() + group.to_bytes(4, "big")


@given(st.lists(st.integers(0, 40), max_size=300))
def test_an_estimate_is_at_least_the_count(numbers: list[int]) -> None:
    sketch = FrequencySketch(8)
    returned = {number: sketch.add(key_of(number)) for number in numbers}
    for number, count in Counter(numbers).items():
        assert min(count, MAX_COUNT) <= sketch.estimate(key_of(number)) <= MAX_COUNT
        assert returned[number] <= sketch.estimate(key_of(number))


def test_estimates_of_a_skewed_trace_are_close() -> None:
    rng, sketch = random.Random(1), FrequencySketch(1000)
    numbers = [min(int(rng.paretovariate(0.9)), 5000) for _ in range(10_000)]
    for number in numbers:
        sketch.add(key_of(number))
    counts = Counter(numbers)
    errors = [sketch.estimate(key_of(number)) - min(count, MAX_COUNT) for number, count in counts.items()]
    assert sum(errors) / len(errors) < 0.02, "mean overestimate"
    assert sum(sketch.estimate(key_of(-number)) > 0 for number in range(1, 1001)) < 20, "unknown keys that seem known"


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(1, 20)), min_size=1, max_size=20))
def test_halving_halves_every_counter_by_itself(adds: list[tuple[int, int]]) -> None:
    sketch = FrequencySketch(8)
    for number, times in adds:
        for _ in range(times):
            sketch.add(key_of(number))
    before = {number: sketch.estimate(key_of(number)) for number in range(50)}
    sketch.halve()
    assert {number: sketch.estimate(key_of(number)) for number in range(50)} == {
        number: count // 2 for number, count in before.items()
    }
    assert sketch.num_halved == 1


def test_halving_is_due_after_a_sample_and_again_after_half_of_one() -> None:
    sketch = FrequencySketch(10, sample_factor=2)
    due = []
    for number in range(30):
        sketch.add(key_of(number))
        if sketch.is_due:
            due.append(number + 1)
            sketch.halve()
    assert due == [20, 30]


def test_groups_of_one_block_are_counted_apart() -> None:
    sketch = FrequencySketch(1000)
    for _ in range(5):
        sketch.add(key_of(1, group=0))
    sketch.add(key_of(1, group=1))
    assert [sketch.estimate(key_of(1, group)) for group in (0, 1, 2)] == [5, 1, 0]


def test_clear_forgets_all() -> None:
    sketch = FrequencySketch(4)
    sketch.add(key_of(1))
    sketch.clear()
    assert sketch.estimate(key_of(1)) == 0


def test_a_page_costs_eight_to_sixteen_bytes() -> None:
    for num_keys in (100, 1000, 4096, 100_000):
        assert 8 <= FrequencySketch(num_keys).num_bytes / num_keys <= 16


def test_a_sketch_without_keys_is_rejected() -> None:
    with pytest.raises(ValueError, match="at least 1 key, not 0"):
        FrequencySketch(0)
