"""What the scheduler is for: tokens under image load, beside vLLM's own on a machine that takes what a cost model says.

Both schedulers are the real ones, the arrivals the same, and every iteration takes what its batch costs, and noise.
"""

import random
import statistics
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import pairwise

import pytest
from vllm.v1.core.sched.scheduler import Scheduler

from tests.core.sched.drive import LayeredRunner, SynthesisedRunner, make_request, make_scheduler
from tests.core.sched.random_requests import IMAGE_TOKEN, Engine, Image, PlannedRequest
from vllm_omni.config.budgets import EPD_CONFIG
from vllm_omni.core.sched.epd import EPDScheduler
from vllm_omni.epd.cost import CostModel, LanguageLoad
from vllm_omni.messages.slo import Slo, SloReport, SloState

# Alone an encode takes 15 decode steps, and a prompt 5: the ratios of a LLaVA-1.5.
NUM_EMBEDS, NUM_TEXT = 60, 8
COST = CostModel(
    step_s=3e-3,
    decode_s=9e-5,
    decode_context_s=4e-7,
    prefill_token_s=2e-4,
    prefill_pair_s=2e-7,
    encode_s=0.0,
    embed_s=45e-3 / NUM_EMBEDS,
)
NUM_LAYERS = 24
BETWEEN_S = 4e-4  # two iterations
ENGINE = Engine(
    num_blocks=2000,
    max_num_seqs=32,
    max_num_batched_tokens=80,
    encoder_cache_size=80,
    encoder_budget=80,
    prefix_caching=False,
)
SLO = Slo(ttft_ms=320.0, tpot_ms=11.0)  # 5 and 3 times the unloaded
STRICT_SLO = replace(SLO, tpot_share=0.99)  # by the other, one gap in ten may be spent
NOTHING_TO_PROTECT = Slo(ttft_ms=1e9, tpot_ms=1e9)


@dataclass
class Outcome:
    seconds: float = 0.0
    token_s: dict[str, list[float]] = field(default_factory=dict)  # after the arrival

    def gap_p99(self) -> float:
        gaps = sorted(after - before for times in self.token_s.values() for before, after in pairwise(times))
        return gaps[int(0.99 * len(gaps))]

    def attainment(self, is_strict: bool) -> float:
        reports = [report(times) for times in self.token_s.values()]
        return statistics.mean(one.is_met_strictly if is_strict else one.is_met for one in reports)


def report(token_s: list[float]) -> SloReport:
    state = SloState(SLO, arrived_at=0.0)
    for at in token_s:
        state.add_tokens(1, at)
    return state.report()


class Layers(LayeredRunner):
    NUM_LAYERS = NUM_LAYERS


@cache
def simulate(is_ours: bool, rate: float | None, number: int = 120, slo: Slo = SLO) -> Outcome:
    """So many requests with an image each, by Poisson arrivals of ``rate`` per second; None: all at once."""
    rng = random.Random(f"{rate} {number}")
    times = [0.0] * number
    for index in range(number if rate is not None else 0):
        times[index] = (times[index - 1] if index else 0.0) + rng.expovariate(rate or 1.0)
    arriving = [
        PlannedRequest(
            str(index),
            tuple([IMAGE_TOKEN] * NUM_EMBEDS + [10] * NUM_TEXT),
            (Image(f"image-{index}", 0, NUM_EMBEDS),),
            rng.randint(20, 40),
            arrival_time=at,
        )
        for index, at in enumerate(times)
    ]
    now, outcome = 0.0, Outcome()
    scheduler: Scheduler
    if is_ours:
        epd = {"ttft_ms": slo.ttft_ms, "tpot_ms": slo.tpot_ms, "tpot_share": slo.share, "cost": vars(COST)}
        scheduler = make_scheduler(EPDScheduler, ENGINE, {EPD_CONFIG: epd})
        scheduler.clock = lambda: now  # type: ignore[method-assign]
        runner: SynthesisedRunner = Layers(scheduler)
    else:
        scheduler = make_scheduler(Scheduler, ENGINE)
        runner = SynthesisedRunner(scheduler)
    arriving.reverse()
    while arriving or scheduler.has_requests():
        if not scheduler.has_requests():
            now = max(now, arriving[-1].arrival_time)
        while arriving and arriving[-1].arrival_time <= now:
            scheduler.add_request(make_request(arriving.pop(), ENGINE))
        output = scheduler.schedule()
        load = LanguageLoad()
        for request_id, num_tokens in output.num_scheduled_tokens.items():
            request = scheduler.requests[request_id]
            context = request.num_computed_tokens - num_tokens
            is_decode = context >= request.num_prompt_tokens
            load = (load.with_decode if is_decode else load.with_prefill)(num_tokens, context)
        language_s = COST.language_s(load) * rng.lognormvariate(0, 0.08)
        if isinstance(runner, Layers):
            noise = rng.lognormvariate(0, 0.08)
            runner.language_s = language_s
            runner.layer_s = lambda num_embeds, noise=noise: COST.images_s(num_embeds) / NUM_LAYERS * noise  # type: ignore[misc]
        runner_output = runner.execute(output)
        report = getattr(runner_output, "encode_report", None)
        num_images = sum(map(len, output.scheduled_encoder_inputs.values()))
        encode_s = report.seconds if report else COST.images_s(NUM_EMBEDS * num_images) * rng.lognormvariate(0, 0.08)
        now += language_s + encode_s
        for of_client in scheduler.update_from_output(output, runner_output).values():
            for one in of_client.outputs:
                arrived_at = times[int(one.request_id)]
                outcome.token_s.setdefault(one.request_id, []).extend([now - arrived_at] * len(one.new_token_ids))
        now += BETWEEN_S
    outcome.seconds = now
    return outcome


@pytest.mark.parametrize("rate", [3.0, pytest.param(5.0, marks=pytest.mark.long)])
def test_with_a_strict_slo_the_99th_percentile_of_gaps_is_a_third_of_upstreams(rate: float) -> None:
    assert 3 * simulate(True, rate, slo=STRICT_SLO).gap_p99() < simulate(False, rate).gap_p99()


def test_nearly_all_requests_keep_their_slo_at_a_rate_at_which_upstream_misses_a_quarter() -> None:
    assert simulate(False, 3.0).attainment(is_strict=True) < 0.75
    assert simulate(True, 3.0, slo=STRICT_SLO).attainment(is_strict=True) > 0.95


@pytest.mark.parametrize("rate", [3.0, 7.0, *(pytest.param(rate, marks=pytest.mark.long) for rate in (5.0, 9.0))])
def test_by_the_paper_s_rule_it_is_no_worse_than_upstream(rate: float) -> None:
    ours, stock = (simulate(is_ours, rate).attainment(is_strict=False) for is_ours in (True, False))
    assert ours > 0.95 or ours > 1.1 * stock


def test_a_strict_slo_has_more_gaps_in_time_and_a_later_first_token() -> None:
    strict, paper = (simulate(True, 7.0, slo=slo) for slo in (STRICT_SLO, SLO))
    assert strict.attainment(is_strict=True) > 1.2 * paper.attainment(is_strict=True)
    assert strict.attainment(is_strict=False) < paper.attainment(is_strict=False)
    first = [sorted(times[0] for times in one.token_s.values()) for one in (strict, paper)]
    assert first[0][108] > first[1][108]  # of 120: it is the last tenth that waits for others' gaps


def test_unloaded_an_answer_takes_no_longer() -> None:
    ours, stock = (simulate(is_ours, 0.2, 20) for is_ours in (True, False))
    mean = [statistics.mean(times[-1] for times in one.token_s.values()) for one in (ours, stock)]
    assert mean[0] < 1.1 * mean[1]


def test_with_nothing_to_protect_it_loses_no_throughput() -> None:
    ours, stock = simulate(True, None, 60, NOTHING_TO_PROTECT), simulate(False, None, 60)
    assert ours.seconds < stock.seconds / 0.97


def test_overload_costs_little_throughput() -> None:
    assert simulate(True, None).seconds < simulate(False, None).seconds / 0.9
