"""The scheduler against vLLM's own, with real requests and caches; the tokens follow from position and request."""

from collections.abc import Callable

import pytest
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler

from tests.core.sched.drive import (
    LayeredRunner,
    answers,
    assert_is_idle,
    assert_same_steps,
    drive,
    let_time_pass,
    make_scheduler,
    tokens_of,
)
from tests.core.sched.random_requests import (
    Engine,
    Stream,
    make_budgets,
    make_slo_budgets,
    make_stream,
    with_sessions,
    with_slos,
)
from tests.fuzz import seeds
from vllm_omni.config.budgets import EPD_CONFIG
from vllm_omni.core.sched.epd import EPDScheduler
from vllm_omni.core.sched.stream import StreamScheduler


def make_upstream(stream: Stream) -> Scheduler:
    return make_scheduler(Scheduler, stream.engine)


def make_epd(stream: Stream, **epd: object) -> EPDScheduler:
    return make_scheduler(EPDScheduler, stream.engine, {EPD_CONFIG: epd} if epd else None)


# -- without budgets, and with budgets that limit nothing -------------------------------------------------------------


@pytest.mark.fuzz
def test_without_budgets_every_step_is_upstreams() -> None:
    for seed in seeds(100):
        stream = make_stream(seed, text_only=bool(seed % 2))
        upstream = drive(make_upstream(stream), stream)
        for ours in (make_scheduler(StreamScheduler, stream.engine), make_epd(stream)):
            assert_same_steps(upstream, drive(ours, stream))
            assert_is_idle(ours)


SMALL = {"num_blocks": 30, "max_num_seqs": 4, "max_num_batched_tokens": 16}
ENGINES = {
    "priority": Engine(**SMALL, policy="priority"),
    "adapters": Engine(**SMALL, max_adapters=1),
    "drafts": Engine(**SMALL, num_spec_tokens=3),
    "priority, adapters": Engine(**SMALL, policy="priority", max_adapters=1),
    "priority, drafts, adapters": Engine(**SMALL, policy="priority", num_spec_tokens=3, max_adapters=2),
}


@pytest.mark.parametrize("name", ENGINES)
def test_without_budgets_every_step_is_upstreams_whatever_the_engine_does(name: str) -> None:
    num_drafts = 0
    for seed in range(4):
        stream = make_stream(seed, engine=ENGINES[name])
        upstream = drive(make_upstream(stream), stream)
        ours = make_epd(stream)
        assert_same_steps(upstream, drive(ours, stream))
        assert_is_idle(ours)
        num_drafts += sum(len(step.output["scheduled_spec_decode_tokens"]) for step in upstream)
        assert tokens_of(upstream).items() >= answers(stream).items()
    assert bool(num_drafts) == bool(ENGINES[name].num_spec_tokens)


@pytest.mark.parametrize("name", [name for name in ENGINES if "drafts" in name])
def test_drafts_within_budgets(name: str) -> None:
    for seed in range(4):
        stream = make_stream(seed, engine=ENGINES[name])
        scheduler = make_epd(stream, token_budget=8, image_budget=24, num_encode_layers=2)
        tokens = tokens_of(drive(scheduler, stream, runner=LayeredRunner(scheduler)))
        assert tokens.items() >= answers(stream).items()


SESSIONS = {**SMALL, "num_blocks": 50, "max_num_seqs": 8}
SESSION_ENGINES = {
    "synchronous": Engine(**SESSIONS),
    "priority": Engine(**SESSIONS, policy="priority"),
}


@pytest.mark.parametrize("name", SESSION_ENGINES)
def test_without_budgets_every_step_of_a_session_is_upstreams(name: str) -> None:
    for seed in range(4):
        stream = with_sessions(make_stream(seed, num_requests=24, engine=SESSION_ENGINES[name]))
        upstream = drive(make_upstream(stream), stream)
        ours = make_epd(stream)
        assert_same_steps(upstream, drive(ours, stream))
        assert_is_idle(ours)
        assert tokens_of(upstream).items() >= answers(stream).items()


@pytest.mark.parametrize("name", SESSION_ENGINES)
def test_sessions_within_budgets(name: str) -> None:
    for seed in range(4):
        stream = with_sessions(make_stream(seed, num_requests=24, engine=SESSION_ENGINES[name]))
        scheduler = make_epd(stream, token_budget=8, image_budget=24, num_encode_layers=2)
        tokens = tokens_of(drive(scheduler, stream, runner=LayeredRunner(scheduler)))
        assert tokens.items() >= answers(stream).items()


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_text_within_budgets_above_any_batch_takes_upstreams_tokens_and_steps(policy: str) -> None:
    engine = Engine(max_num_batched_tokens=128, policy=policy)
    for seed in range(4):
        stream = make_stream(seed, text_only=True, engine=engine)
        upstream = drive(make_upstream(stream), stream)
        scheduler = make_epd(stream, token_budget=10_000, image_budget=10_000)
        ours = drive(scheduler, stream, runner=LayeredRunner(scheduler))
        assert tokens_of(ours) == tokens_of(upstream)
        assert len(ours) == len(upstream)


# -- no request waits forever -----------------------------------------------------------------------------------------


def check_liveness(seed: int, num_requests: int = 16) -> None:
    """The stream ends, each request that was not aborted has all its tokens, and nothing is left."""
    stream = make_stream(seed, num_requests=num_requests)
    check_end(make_epd(stream, **make_budgets(seed)), stream)
    stream = with_slos(stream)
    scheduler = make_epd(stream, **make_slo_budgets(seed))
    check_end(scheduler, stream, let_time_pass(scheduler, seed))


def check_end(
    scheduler: EPDScheduler, stream: Stream, on_step: Callable[[SchedulerOutput], None] = lambda output: None
) -> None:
    runner = LayeredRunner(scheduler)
    runner.layer_s = lambda num_embeds: 1e-4 * num_embeds
    tokens = tokens_of(drive(scheduler, stream, runner=runner, on_step=on_step))
    assert tokens.items() >= answers(stream).items()
    for identifier in list(scheduler.encoder_cache_manager.in_flight):  # of requests aborted at the end
        scheduler.encoder_cache_manager.finish(identifier)
    assert_is_idle(scheduler)
    assert not len(scheduler.deadlines) and not len(scheduler.needs) and not len(scheduler.iterations)


@pytest.mark.fuzz
@pytest.mark.timeout(0)
def test_random_streams_end_with_all_tokens() -> None:
    for seed in seeds(400):
        try:
            check_liveness(seed, num_requests=16 if seed % 2 else 24)
        except Exception as exc:
            raise AssertionError(f"FUZZ_SEED={seed}: {exc!r}") from exc


@pytest.mark.parametrize("num_encode_layers", [None, 1])
@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_a_cache_of_one_largest_image_is_enough(policy: str, num_encode_layers: int | None) -> None:
    for seed in range(6):
        engine = Engine(encoder_cache_size=24, num_blocks=40, max_num_seqs=4, policy=policy)
        stream = make_stream(seed, engine=engine, max_image=24)
        scheduler = make_epd(stream, token_budget=16, image_budget=8, num_encode_layers=num_encode_layers)
        tokens = tokens_of(drive(scheduler, stream, runner=LayeredRunner(scheduler)))
        assert tokens.items() >= answers(stream).items()
