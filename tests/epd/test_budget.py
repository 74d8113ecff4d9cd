import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.core.sched.costs import TRUE, scaled
from vllm_omni.config.budgets import EPDConfig
from vllm_omni.epd.budget import BATCH_GRID, STEP, Budgets, SloBudgets, largest
from vllm_omni.epd.cost import CostModel, LanguageLoad
from vllm_omni.errors import ConfigError

DECODES = LanguageLoad().with_decode(8, 250)
loads = st.builds(lambda n, context: LanguageLoad().with_decode(n, context), st.integers(0, 64), st.integers(0, 2000))
tpots = st.floats(1e-3, 0.2)


def make_budgets(margin: float = 1.0) -> SloBudgets:
    budgets = SloBudgets(TRUE, margin, max_tokens=2048, max_embeds=4000)
    budgets.num_layers_of_batch = 8
    return budgets


@given(limit=st.integers(0, 1000), bound=st.integers(-5, 1005))
def test_the_search_finds_the_largest_that_fits(limit: int, bound: int) -> None:
    assert largest(lambda n: n <= bound, limit) == max([0, *(n for n in range(limit + 1) if n <= bound)])


@given(load=loads, context=st.integers(0, 2000), tpot_s=tpots, num_encoding=st.sampled_from([0, 196, 4000]))
def test_a_chunk_of_the_next_size_would_exceed_the_tpot(
    load: LanguageLoad, context: int, tpot_s: float, num_encoding: int
) -> None:
    budgets = make_budgets()
    num_tokens = budgets.num_tokens(load, context, tpot_s, num_encoding)

    def seconds(num_tokens: int) -> float:
        return budgets.language_s(load.with_prefill(num_tokens, context)) + budgets.layer_s(num_encoding)

    assert num_tokens == 0 or seconds(num_tokens) <= tpot_s + 1e-12
    # The next size that has kernels.
    assert num_tokens == 2048 or seconds(num_tokens + BATCH_GRID) > tpot_s - 1e-12


@given(load=loads, tpot_s=tpots)
def test_the_layers_and_the_language_batch_together_keep_the_tpot(load: LanguageLoad, tpot_s: float) -> None:
    budgets = make_budgets()
    num_layers = budgets.num_layers(load, 196, tpot_s)
    assert num_layers is not None and num_layers >= 1
    assert num_layers == 1 or budgets.language_s(load) + num_layers * budgets.layer_s(196) <= tpot_s + 1e-12
    assert budgets.language_s(load) + (num_layers + 1) * budgets.layer_s(196) > tpot_s - 1e-12


@given(load=loads, tpot_s=tpots)
def test_one_layer_of_a_largest_batch_keeps_the_tpot(load: LanguageLoad, tpot_s: float) -> None:
    budgets = make_budgets()
    num_embeds = budgets.num_embeds(load, tpot_s)
    assert num_embeds == 1 or budgets.language_s(load) + budgets.layer_s(num_embeds) <= tpot_s + 1e-12
    assert num_embeds == 4000 or budgets.language_s(load) + budgets.layer_s(num_embeds + 1) > tpot_s - 1e-12


def test_an_encode_in_flight_takes_from_the_prefill() -> None:
    budgets = make_budgets()
    assert budgets.num_tokens(DECODES, 0, 0.2, 196) < budgets.num_tokens(DECODES, 0, 0.2, 0)


def test_where_nothing_is_to_protect_nothing_is_held_back() -> None:
    budgets = make_budgets()
    assert budgets.num_tokens(LanguageLoad(), 0, None, 196) == 2048
    assert budgets.num_embeds(LanguageLoad(), None) == 4000
    assert budgets.num_layers(LanguageLoad(), 196, None) is None


def test_a_margin_leaves_a_part_of_the_tpot() -> None:
    assert make_budgets(0.5).limit_s(0.04) == pytest.approx(0.02)
    assert make_budgets().limit_s(None) is None


@given(load=loads, limit_s=tpots)
def test_a_batch_that_is_cut_has_a_size_for_which_there_are_kernels(load: LanguageLoad, limit_s: float) -> None:
    num_tokens = make_budgets().num_tokens(load, 0, limit_s, 0)
    assert num_tokens < BATCH_GRID or (load.num_decodes + num_tokens) % BATCH_GRID == 0


@pytest.mark.parametrize("times", [2.0, 0.5], ids=["slower", "faster"])
def test_budgets_follow_a_machine_that_becomes_twice_as_slow_or_fast(times: float) -> None:
    budgets = make_budgets()
    fitting = SloBudgets(scaled(times), 1.0, max_tokens=2048, max_embeds=4000)
    fitting.num_layers_of_batch = 8
    for _ in range(50):
        budgets.observe_language(DECODES, times * TRUE.language_s(DECODES))
        budgets.observe_encode(196, 2, 8, times * TRUE.images_s(196) * 2 / 8)
    assert budgets.language_factor == pytest.approx(times, rel=STEP)
    assert budgets.encode_factor == pytest.approx(times, rel=STEP)
    for num_encoding in (0, 196):
        expected = fitting.num_tokens(DECODES, 0, 0.05, num_encoding)
        assert budgets.num_tokens(DECODES, 0, 0.05, num_encoding) == pytest.approx(expected, rel=0.15)
    assert budgets.num_layers(DECODES, 196, 0.05) == pytest.approx(fitting.num_layers(DECODES, 196, 0.05), abs=1)


def test_half_of_the_iterations_take_no_longer_than_expected() -> None:
    rng = random.Random(0)
    budgets = make_budgets()
    over = []
    for _ in range(5000):
        seconds = TRUE.language_s(DECODES) * rng.lognormvariate(0, 0.2)
        over.append(seconds > budgets.language_s(DECODES))
        budgets.observe_language(DECODES, seconds)
    assert sum(over[1000:]) / 4000 == pytest.approx(0.5, abs=0.02)


def test_one_iteration_that_stood_still_counts_as_any_other_that_took_too_long() -> None:
    still, late = make_budgets(), make_budgets()
    still.observe_language(DECODES, 1000 * TRUE.language_s(DECODES))
    late.observe_language(DECODES, 1.1 * TRUE.language_s(DECODES))
    assert still.language_factor == late.language_factor < 1.05


def test_the_first_encode_tells_how_many_layers_there_are() -> None:
    budgets = SloBudgets(TRUE, 1.0, max_tokens=2048, max_embeds=4000)
    assert budgets.num_layers(DECODES, 196, 0.01) == 1
    whole_s = budgets.layer_s(196)
    budgets.observe_encode(196, 1, 8, TRUE.images_s(196) / 8)
    assert budgets.layer_s(196) == pytest.approx(whole_s / 8, rel=STEP)


def test_a_fixed_token_budget_counts_the_decodes() -> None:
    assert Budgets(100, 10).num_tokens(DECODES, 0, None, 0) == 92
    assert Budgets(5, 10).num_tokens(DECODES, 0, None, 0) == 0


# -- configuration ----------------------------------------------------------------------------------------------------


def test_no_budget_is_off() -> None:
    assert not EPDConfig.parse({}).is_on
    assert not EPDConfig.parse({"patience": 3}).is_on
    assert EPDConfig.parse({"tpot_ms": 30}).is_on


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"token_budget": 10}, "give both token_budget and image_budget, or tpot_ms"),
        ({"tpot_ms": 0}, r"epd.tpot_ms = 0: must be above 0"),
        ({"tpot_ms": 30, "tpot_share": 1.1}, r"epd.tpot_share = 1.1: must be at most 1"),
        ({"tpot_ms": "fast"}, r"epd.tpot_ms = 'fast': must be a number"),
        ({"tpot_ms": 30, "tpot_share": "most"}, r"epd.tpot_share = 'most': must be a number"),
        ({"tpot_ms": 30, "profile_s": False}, r"epd.profile_s = False: must be a number"),
        ({"tpot_ms": 30, "tpot_share": 0}, r"epd.tpot_share = 0: must be above 0"),
        ({"tpot_ms": 30, "cost": 3}, r"epd.cost = 3: must be a mapping"),
        ({"tpot_ms": 30, "cost": {"step_s": 1}}, r"epd.cost = \{'step_s': 1\}: must be a mapping with step_s"),
        ({"tpot_ms": 30, "cost": {**vars(TRUE), "step_s": "x"}}, r"epd.cost.step_s = 'x': must be a number"),
        ({"tpot_ms": 30, "cost": {**vars(TRUE), "step_s": -1}}, r"epd.cost.step_s = -1: must be at least 0"),
        ({"tokens": 3}, "epd.tokens = 3: unknown key: did you mean"),
    ],
)
def test_a_wrong_configuration_is_rejected_with_its_key(values: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        EPDConfig.parse(values)


def test_a_measured_cost_travels_as_plain_values() -> None:
    assert CostModel.of(EPDConfig.parse({"tpot_ms": 30, "cost": vars(TRUE)}).cost) == TRUE
