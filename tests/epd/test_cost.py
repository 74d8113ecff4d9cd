import random

import pytest

from tests.core.sched.costs import TRUE
from vllm_omni.epd.cost import CostModel, LanguageLoad, Sample, SampleLog, medians


def samples(noise: float = 0.0, seed: int = 0, num: int = 60) -> list[Sample]:
    rng = random.Random(seed)
    made = []
    for _ in range(num):
        load = LanguageLoad().with_decode(rng.randrange(9), rng.randrange(500))
        load = load.with_prefill(rng.choice([0, 16, 64, 256]), rng.randrange(200))
        if load.num_decodes or load.num_prefill_tokens:
            made.append(Sample(TRUE.language_s(load) * rng.uniform(1 - noise, 1 + noise), load))
        num_embeds = rng.choice([196, 392, 784])
        made.append(Sample(TRUE.images_s(num_embeds) * rng.uniform(1 - noise, 1 + noise), num_embeds=num_embeds))
    return made


def test_a_fit_to_exact_samples_finds_the_costs_again() -> None:
    assert vars(CostModel.fit(samples())) == pytest.approx(vars(TRUE), rel=1e-6)


def test_a_fit_to_noisy_samples_predicts_other_batches_within_the_noise() -> None:
    fitted = CostModel.fit(samples(noise=0.1))
    for sample in samples(seed=1):
        cost = fitted.images_s(sample.num_embeds) if sample.num_embeds else fitted.language_s(sample.load)
        assert cost == pytest.approx(sample.seconds, rel=0.1)


def test_a_larger_batch_never_costs_less() -> None:
    # Measured on a CPU: a line through these has a negative intercept.
    images = [Sample(seconds, num_embeds=196 * n) for n, seconds in enumerate([25e-3, 53e-3, 81e-3], 1)]
    language = [Sample(seconds, LanguageLoad(n, n * 32)) for n, seconds in [(1, 3.0e-3), (2, 3.6e-3), (4, 2.9e-3)]]
    fitted = CostModel.fit([*images, *language])
    assert min(vars(fitted).values()) >= 0
    assert fitted.images_s(392) == pytest.approx(53e-3, rel=0.1)
    assert fitted.language_s(LanguageLoad(3, 96)) == pytest.approx(3.1e-3, rel=0.1)


def test_what_was_never_measured_costs_nothing() -> None:
    fitted = CostModel.fit([Sample(3e-3, LanguageLoad(1, 10)), Sample(4e-3, LanguageLoad(2, 500))])
    assert fitted.prefill_token_s == fitted.prefill_pair_s == fitted.images_s(196) == 0


def test_nothing_measured_is_an_error() -> None:
    with pytest.raises(ValueError, match="at least one measured batch"):
        CostModel.fit([])


def test_images_alone_give_their_own_costs() -> None:
    fitted = CostModel.fit([Sample(TRUE.images_s(n), num_embeds=n) for n in (196, 392)])
    assert fitted.images_s(784) == pytest.approx(TRUE.images_s(784))
    assert fitted.language_s(LanguageLoad(1, 10)) == 0


def test_images_of_one_size_cost_in_proportion() -> None:
    fitted = CostModel.fit([Sample(0.05, num_embeds=196), Sample(0.05, num_embeds=196)])
    assert fitted.images_s(392) == pytest.approx(0.1)


def test_an_iteration_that_stood_still_is_not_among_the_medians() -> None:
    load = LanguageLoad(4, 1000)
    alike = [Sample(3e-3, load), Sample(900e-3, load), Sample(3.1e-3, load)]
    assert medians([*alike, Sample(50e-3, num_embeds=196)]) == [Sample(3.1e-3, load), Sample(50e-3, num_embeds=196)]


def test_slices_of_an_encode_are_one_sample() -> None:
    log = SampleLog()
    for num_layers in (3, 3, 2):
        log.add_encode(196, num_layers, 8, num_layers * 1e-3)
    assert log.samples == [Sample(pytest.approx(8e-3), num_embeds=196)]
    assert log.num_layers_of_batch == 8


def test_an_empty_batch_costs_nothing() -> None:
    assert TRUE.language_s(LanguageLoad()) == TRUE.images_s(0) == 0


def test_a_chunk_attends_to_what_is_before_it_and_to_itself() -> None:
    assert LanguageLoad().with_prefill(3, 10).prefill_pairs == 11 + 12 + 13


def test_two_chunks_of_a_prompt_cost_a_step_more_than_one() -> None:
    whole = TRUE.language_s(LanguageLoad().with_prefill(64, 0))
    parts = [TRUE.language_s(LanguageLoad().with_prefill(32, context)) for context in (0, 32)]
    assert sum(parts) == pytest.approx(whole + TRUE.step_s)
