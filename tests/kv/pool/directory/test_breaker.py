from tests.kv.pool.directory.builders import Clock
from vllm_omni.kv.pool.directory.breaker import Breaker


def make_breaker() -> tuple[Breaker, Clock]:
    clock = Clock()
    return Breaker(clock, first_delay_s=0.125, max_delay_s=0.5), clock


def test_one_failure_opens_it_and_the_first_to_fail_probes():
    breaker, _ = make_breaker()
    assert not breaker.is_open
    assert breaker.fail()
    assert breaker.is_open
    assert not breaker.fail()


def test_it_stays_open_until_a_probe_succeeds():
    breaker, clock = make_breaker()
    breaker.fail()
    clock.advance(60.0)
    assert breaker.is_open
    breaker.probe_failed()
    assert breaker.is_open
    breaker.probe_succeeded()
    assert not breaker.is_open


def test_the_delay_of_probes_doubles_up_to_a_limit():
    breaker, clock = make_breaker()
    breaker.fail()
    delays = []
    for _ in range(4):
        delays.append(breaker.seconds_until_probe())
        clock.advance(delays[-1])
        assert breaker.seconds_until_probe() == 0.0
        breaker.probe_failed()
    assert delays == [0.125, 0.25, 0.5, 0.5]


def test_a_server_that_answers_probes_alone_is_asked_less_and_less():
    breaker, _ = make_breaker()
    for delay_s in (0.125, 0.25, 0.5):
        breaker.fail()
        assert breaker.seconds_until_probe() == delay_s
        breaker.probe_succeeded()


def test_a_successful_call_resets_the_delay():
    breaker, _ = make_breaker()
    for _ in range(2):
        breaker.fail()
        breaker.probe_succeeded()
    breaker.succeed()
    breaker.fail()
    assert breaker.seconds_until_probe() == 0.125


def test_a_call_that_was_under_way_when_it_opened_does_not_reset_the_delay():
    breaker, _ = make_breaker()
    breaker.fail()
    breaker.succeed()
    breaker.probe_failed()
    assert breaker.seconds_until_probe() == 0.25


def test_statistics_count_openings_and_their_time():
    breaker, clock = make_breaker()
    assert breaker.statistics() == (False, 0, 0.0)
    breaker.fail()
    clock.advance(2.0)
    assert breaker.statistics() == (True, 1, 2.0)
    breaker.probe_succeeded()
    clock.advance(2.0)
    breaker.fail()
    clock.advance(1.0)
    assert breaker.statistics() == (True, 2, 3.0)
