"""When a stage is restarted. Restarts of real engines: tests/e2e/test_lifecycle.py."""

from vllm_omni.process.supervisor import FIRST_DELAY_S, MAX_DELAY_S, RestartBudget


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_delays_double_up_to_a_limit() -> None:
    budget = RestartBudget(8, window_s=1000.0, clock=Clock())
    delays = [budget.next_delay_s() for _ in range(9)]
    assert delays[:4] == [FIRST_DELAY_S, 2 * FIRST_DELAY_S, 4 * FIRST_DELAY_S, 8 * FIRST_DELAY_S]
    assert delays[7] == MAX_DELAY_S
    assert delays[8] is None


def test_an_attempt_does_not_count_after_the_window() -> None:
    clock = Clock()
    budget = RestartBudget(2, window_s=10.0, clock=clock)
    assert budget.next_delay_s() == FIRST_DELAY_S
    clock.now = 9.0
    assert budget.next_delay_s() == 2 * FIRST_DELAY_S
    assert budget.next_delay_s() is None
    clock.now = 10.0
    assert budget.next_delay_s() == 2 * FIRST_DELAY_S
    clock.now = 30.0
    assert budget.next_delay_s() == FIRST_DELAY_S


def test_a_budget_of_zero_allows_no_restart() -> None:
    assert RestartBudget(0, window_s=10.0, clock=Clock()).next_delay_s() is None
