from collections.abc import Iterator

import pytest
from torch import get_num_threads

from vllm_omni.model_executor.step_threads import MANY_TOKENS, NUM_STAGES, StepThreads, set_num_threads


@pytest.fixture(autouse=True)
def six_cores(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    before = get_num_threads()
    set_num_threads(6)
    yield
    set_num_threads(before)


def test_a_step_of_few_tokens_uses_the_share_of_the_stage() -> None:
    threads = StepThreads({NUM_STAGES: 3})
    threads.set_for(MANY_TOKENS - 1)
    assert get_num_threads() == 2


def test_a_step_of_many_tokens_uses_every_core() -> None:
    threads = StepThreads({NUM_STAGES: 3})
    threads.set_for(1)
    threads.set_for(MANY_TOKENS)
    assert get_num_threads() == 6


def test_more_stages_than_cores_leave_one_for_each() -> None:
    StepThreads({NUM_STAGES: 7}).set_for(1)
    assert get_num_threads() == 1


def test_a_single_stage_always_uses_every_core() -> None:
    StepThreads({}).set_for(1)
    assert get_num_threads() == 6


def test_omp_num_threads_applies_to_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "6")
    StepThreads({NUM_STAGES: 3}).set_for(1)
    assert get_num_threads() == 6
