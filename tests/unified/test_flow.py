"""The arithmetic of pictures, against plain loops and against outputs of the original."""

import itertools
import math
from typing import get_args

import pytest
import torch
from torch import Tensor

from tests.cases import case
from tests.reference.test_bagel import FLOWS, GOLDEN, PICTURES, assert_close, golden
from vllm_omni.unified.flow import advance, combine, start_noise, timesteps
from vllm_omni.unified.plan import Guidance, Renorm

needs_golden = pytest.mark.skipif(not FLOWS, reason=f"no outputs of the original at {GOLDEN}")

ROUNDING = 1e-5  # relative, of float32 against sums in float64


def noise(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def length_of(rows: list[list[float]]) -> float:
    return math.sqrt(sum(one * one for row in rows for one in row))


# -- times ------------------------------------------------------------------------------------------------------------


def test_times_are_shifted_even_ones() -> None:
    for num_steps, shift in itertools.product((1, 2, 7, 49), (0.5, 1.0, 3.0)):
        even = [1 - step / num_steps for step in range(num_steps + 1)]
        expected = [shift * one / (1 + (shift - 1) * one) for one in even]
        made = timesteps(num_steps, shift)
        with case(num_steps, shift):
            assert made.dtype == torch.float32
            assert made.tolist() == pytest.approx(expected, abs=1e-6)


def test_times_fall_from_one_to_zero() -> None:
    for num_steps, shift in itertools.product((1, 2, 49, 1000), (0.01, 1.0, 3.0, 100.0)):
        made = timesteps(num_steps, shift)
        with case(num_steps, shift):
            assert made[0] == pytest.approx(1) and made[-1] == 0
            assert (made.diff() < 0).all()


# -- guidance ---------------------------------------------------------------------------------------------------------


def combine_by_rows(
    velocity: Tensor, without_text: Tensor, without_images: Tensor | None, given: Guidance
) -> list[list[float]]:
    """Equations (2) to (4), number by number."""
    rows, text = velocity.tolist(), without_text.tolist()

    def shorten(guided: list[list[float]]) -> list[list[float]]:
        if given.renorm == "global":
            ratios = [length_of(rows) / length_of(guided)] * len(rows)
        else:
            ratios = [length_of([one]) / length_of([two]) for one, two in zip(rows, guided, strict=True)]
        kept = [min(max(ratio, given.renorm_min), 1.0) for ratio in ratios]
        return [[factor * one for one in row] for factor, row in zip(kept, guided, strict=True)]

    def mix(origin: list[list[float]], scale: float, aims: list[list[float]]) -> list[list[float]]:
        return [
            [start + scale * (end - start) for start, end in zip(one, two, strict=True)]
            for one, two in zip(origin, aims, strict=True)
        ]

    guided = mix(text, given.text_scale, rows)
    if given.renorm == "text_channel":
        guided = shorten(guided)
    if without_images is not None:
        guided = mix(without_images.tolist(), given.image_scale, guided)
    return guided if given.renorm == "text_channel" else shorten(guided)


@pytest.mark.parametrize("renorm", get_args(Renorm))
def test_guidance_follows_its_equations(renorm: Renorm) -> None:
    velocity, without_text, without_images = (noise(5, 3, seed=seed) for seed in range(3))
    for text_scale, image_scale, renorm_min in itertools.product((0.0, 0.5, 1.5, 4.0), (0.5, 1.0, 2.0), (0.0, 0.6, 1)):
        given = Guidance(text_scale, image_scale, renorm=renorm, renorm_min=renorm_min)
        for images in (None, without_images):
            made = combine(velocity, without_text, images, given)
            expected = torch.tensor(combine_by_rows(velocity, without_text, images, given))
            with case(given, images is None):
                assert (made - expected).abs().max() <= ROUNDING * expected.abs().max()


def test_scales_of_one_without_images_leave_the_velocity() -> None:
    velocity, without_text = noise(5, 3, seed=0), noise(5, 3, seed=1)
    for renorm in get_args(Renorm):
        made = combine(velocity, without_text, None, Guidance(1.0, 1.0, renorm=renorm))
        torch.testing.assert_close(made, velocity)


def test_a_guided_velocity_is_no_longer_than_the_unguided_one() -> None:
    velocity, without_text = noise(5, 3, seed=0), noise(5, 3, seed=1)
    whole = combine(velocity, without_text, None, Guidance(8.0, renorm="global"))
    assert whole.norm() <= velocity.norm() * (1 + ROUNDING)
    by_token = combine(velocity, without_text, None, Guidance(8.0, renorm="channel"))
    assert (by_token.norm(dim=1) <= velocity.norm(dim=1) * (1 + ROUNDING)).all()


def test_a_guided_velocity_is_shortened_to_the_least_factor_at_most() -> None:
    velocity, without_text = noise(5, 3, seed=0), noise(5, 3, seed=1)
    guided = combine(velocity, without_text, None, Guidance(8.0, renorm_min=1.0))
    torch.testing.assert_close(guided, without_text + 8 * (velocity - without_text))
    for renorm in get_args(Renorm):
        made = combine(velocity, without_text, None, Guidance(8.0, renorm=renorm, renorm_min=0.9))
        assert (made.norm(dim=1) >= 0.9 * (1 - ROUNDING) * guided.norm(dim=1)).all(), renorm


def test_velocities_of_zero_give_zero() -> None:
    zeros = torch.zeros(2, 3)
    for renorm in get_args(Renorm):
        assert torch.equal(combine(zeros, zeros, zeros, Guidance(renorm=renorm)), zeros)


# -- steps ------------------------------------------------------------------------------------------------------------


def test_a_step_is_as_long_as_the_time_between_steps() -> None:
    latents, velocity = torch.tensor([[1.0, 2.0]]), torch.tensor([[4.0, -8.0]])
    assert advance(latents, velocity, torch.tensor(0.75), torch.tensor(0.5)).tolist() == [[0.0, 4.0]]


def test_steps_along_a_straight_line_end_at_its_end() -> None:
    start, end = noise(4, 2, seed=0), noise(4, 2, seed=1)
    for num_steps, shift in itertools.product((1, 3, 49), (1.0, 3.0)):
        times, latents = timesteps(num_steps, shift), start
        for now, after in itertools.pairwise(times):
            latents = advance(latents, start - end, now, after)
        with case(num_steps, shift):
            torch.testing.assert_close(latents, end)


def test_noise_is_that_of_its_seed() -> None:
    for seed in (0, 1, -1, -(2**63), 2**64 - 1):
        expected = torch.randn(6, 4, generator=torch.Generator().manual_seed(seed))
        made = start_noise(6, 4, seed)
        with case(seed):
            assert torch.equal(made, expected)
            assert (made.dtype, made.device) == (torch.float32, torch.device("cpu"))


def test_noise_without_a_seed_differs_from_time_to_time() -> None:
    assert not torch.equal(start_noise(6, 4, None), start_noise(6, 4, None))


def test_noise_leaves_the_generator_of_the_process() -> None:
    before = torch.get_rng_state()
    start_noise(6, 4, None)
    start_noise(6, 4, 1)
    assert torch.equal(torch.get_rng_state(), before)


# -- outputs of the original ------------------------------------------------------------------------------------------


def guidance_of(name: str) -> Guidance:
    given = FLOWS[name]["denoise"]
    return Guidance(
        given["cfg_text_scale"],
        given["cfg_img_scale"],
        tuple(given["cfg_interval"]),
        given["cfg_renorm_type"],
        given["cfg_renorm_min"],
    )


def times_of(name: str) -> Tensor:
    given = FLOWS[name]["denoise"]
    return timesteps(given["num_timesteps"] - 1, given["timestep_shift"])


@needs_golden
@pytest.mark.parametrize("name", PICTURES)
def test_times_are_the_originals_bit_by_bit(name: str) -> None:
    assert torch.equal(times_of(name)[:-1], golden(name)["denoise.timesteps"])


@needs_golden
@pytest.mark.parametrize("name", PICTURES)
def test_the_steps_that_are_guided_are_the_originals(name: str) -> None:
    times = golden(name)["denoise.timesteps"].tolist()
    assert [guidance_of(name).is_on(time) for time in times] == golden(name)["denoise.guided"].tolist()


@needs_golden
@pytest.mark.parametrize("name", PICTURES)
def test_guided_velocities_are_the_originals(name: str) -> None:
    given, recorded = FLOWS[name]["denoise"], golden(name)
    guided = recorded["denoise.guided"].nonzero().flatten().tolist()
    assert len(guided) == given["guided_steps"]
    for row, step in enumerate(guided):
        images = recorded["denoise.v_img"][row] if "img" in given["branches_when_guided"] else None
        made = combine(recorded["denoise.v_gen"][step], recorded["denoise.v_text"][row], images, guidance_of(name))
        assert_close(made, recorded["denoise.v"][step])


@needs_golden
@pytest.mark.parametrize("name", PICTURES)
def test_latents_of_each_step_are_the_originals(name: str) -> None:
    recorded, times = golden(name), times_of(name)
    latents = recorded["denoise.noise"]
    for step, velocity in enumerate(recorded["denoise.v"]):
        latents = advance(latents, velocity, times[step], times[step + 1])
        assert_close(latents, recorded["denoise.latents"][step + 1])


@needs_golden
@pytest.mark.parametrize("name", PICTURES)
def test_noise_is_the_originals_where_its_seed_draws_nothing_else(name: str) -> None:
    recorded = golden(name)["denoise.noise"]
    num_tokens, num_channels = recorded.shape
    made = start_noise(num_tokens, num_channels, FLOWS[name]["seed"])
    draws_images = any("vae_noise" in key and tensor.any() for key, tensor in golden(name).items())
    assert torch.equal(made, recorded) != draws_images
