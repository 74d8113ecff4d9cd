"""What a request may say of its picture."""

from typing import Any

import msgspec
import pytest

from tests.cases import rejected
from vllm_omni.config.diffusion_params import DiffusionParams
from vllm_omni.errors import InvalidRequest
from vllm_omni.unified.params import IMAGE, MAX_OUTPUTS, ImageParams, image_fields, params_of
from vllm_omni.unified.plan import Guidance


def test_a_request_that_says_nothing_has_the_defaults() -> None:
    cases: list[dict[str, Any] | None] = [None, {}, {"other": 1}, {IMAGE: None}, {IMAGE: {}}]
    for extra_args in cases:
        assert params_of(extra_args) == ImageParams()
    assert ImageParams().guidance == Guidance()


def test_parameters_are_read_by_name() -> None:
    given: dict[str, Any] = {
        "output_type": "latents",
        "num_outputs_per_prompt": 2,
        "width": 64,
        "height": 48,
        "num_inference_steps": 4,
        "seed": 5,
        "shift": 2,
        "negative_prompt": "blurred",
        "guidance_scale": 2,
        "image_guidance_scale": 3.0,
        "guidance_interval": [0, 0.9],
        "guidance_renorm": "channel",
        "guidance_renorm_min": 0.5,
        "progress": True,
        "preview_every": 3,
    }
    made = params_of({IMAGE: given})
    assert given.keys() == set(ImageParams.__struct_fields__)
    assert {name: getattr(made, name) for name in given} == {**given, "guidance_interval": (0.0, 0.9)}
    assert made.guidance == Guidance(2.0, 3.0, (0.0, 0.9), "channel", 0.5)


def test_parameters_of_none_are_the_models_own() -> None:
    assert ImageParams.of({"width": None, "height": None, "seed": None, "negative_prompt": None}) == ImageParams()


def test_what_is_no_dictionary_is_rejected() -> None:
    for given in ([1], "a boat", 4, True):
        with rejected(InvalidRequest, "^image = .*: must be a dictionary of its parameters$", given) as raised:
            params_of({IMAGE: given})
        assert raised.error.param == IMAGE


def test_an_unknown_name_is_rejected_with_the_nearest() -> None:
    for name, said in [
        ("widht", r"^image\.widht: did you mean 'width'"),
        ("num_inference_step", r"did you mean 'num_inference_steps'"),
        ("scale", r"did you mean 'guidance_scale'"),
        ("renorm", r"did you mean 'guidance_renorm'"),
        ("steps", r"did you mean 'num_inference_steps'"),
        (7, r"^image\.7: valid: output_type, "),
        ("", r"^image\.: valid: output_type, "),
    ]:
        with rejected(InvalidRequest, said, name) as raised:
            ImageParams.of({name: 1})
        assert raised.error.param == IMAGE


def test_an_unknown_choice_is_rejected_with_the_nearest() -> None:
    for name, value, said in [
        ("output_type", "latent", "^output_type = 'latent': did you mean 'latents'. valid: media, latents$"),
        ("output_type", None, "^output_type = None: valid: media, latents$"),
        ("output_type", ["media"], r"^output_type = \['media'\]: .*valid: media, latents$"),
        ("guidance_renorm", "globel", "did you mean 'global'. valid: global, channel, text_channel$"),
        ("guidance_renorm", 3, "^guidance_renorm = 3: valid: global, channel, text_channel$"),
    ]:
        with rejected(InvalidRequest, said, (name, value)) as raised:
            ImageParams.of({name: value})
        assert raised.error.param == name


def test_a_value_of_another_type_is_rejected_with_its_name() -> None:
    for name, value, said in [
        ("width", "64", "Expected `int | null`, got `str`"),
        ("height", 64.5, "Expected `int | null`, got `float`"),
        ("num_inference_steps", "many", "Expected `int`, got `str`"),
        ("num_inference_steps", True, "Expected `int`, got `bool`"),
        ("num_inference_steps", None, "Expected `int`, got `null`"),
        ("seed", 0.5, "Expected `int | null`, got `float`"),
        ("shift", "3", "Expected `float`, got `str`"),
        ("guidance_scale", 10**400, "Number out of range"),
        ("guidance_interval", 0.4, "Expected `array`, got `float`"),
        ("guidance_interval", [0.4], "Expected `array` of length 2, got 1"),
        ("guidance_interval", [0.4, 1.0, 1.0], "Expected `array` of length 2, got 3"),
        ("guidance_interval", [0.4, "1"], "Expected `float`, got `str`"),
        ("negative_prompt", 3, "Expected `str | null`, got `int`"),
    ]:
        with rejected(InvalidRequest, rf"^image: {said.replace('|', '.')} .*\.{name}\b", (name, value)) as raised:
            ImageParams.of({name: value})
        assert raised.error.param == IMAGE


def test_as_many_pictures_are_rejected_as_one_request_may_not_have() -> None:
    for number in (0, -1, MAX_OUTPUTS + 1):
        with rejected(InvalidRequest, f"^num_outputs_per_prompt = {number}: must be from 1 to 64", number) as raised:
            ImageParams.of({"num_outputs_per_prompt": number})
        assert raised.error.param == "num_outputs_per_prompt"
    assert ImageParams.of({"num_outputs_per_prompt": MAX_OUTPUTS}).num_outputs_per_prompt == MAX_OUTPUTS


def test_previews_after_fewer_than_no_steps_are_rejected() -> None:
    with rejected(InvalidRequest, "^preview_every = -1: must be at least 0$", -1) as raised:
        ImageParams.of({"preview_every": -1})
    assert raised.error.param == "preview_every"


def test_a_seed_leaves_room_for_those_of_all_pictures() -> None:
    for seed, number, last in [
        (-(2**63) - 1, 1, 2**64 - 1),
        (2**64, 1, 2**64 - 1),
        (2**64 - 1, 2, 2**64 - 2),
        (2**70, 4, 2**64 - 4),
    ]:
        with rejected(InvalidRequest, rf"^seed = {seed}: must be from -2\*\*63 to {last}$", (seed, number)) as raised:
            ImageParams.of({"seed": seed, "num_outputs_per_prompt": number})
        assert raised.error.param == "seed"
    for seed in (-(2**63), 2**64 - 4):
        assert ImageParams.of({"seed": seed, "num_outputs_per_prompt": 4}).seed == seed


def test_guidance_out_of_its_range_is_rejected_with_the_name_that_was_given() -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"guidance_scale": -1}, "^guidance_scale = -1.0: must be a number of 0 or more"),
        ({"image_guidance_scale": float("nan")}, "^image_guidance_scale = nan: must be a number of 0 or more"),
        ({"guidance_interval": [0.5, 0.4]}, r"^guidance_interval = \[0.5, 0.4\]: must be"),
        ({"guidance_renorm_min": 2}, "^guidance_renorm_min = 2.0: must be a number from 0 to 1"),
    ]
    for given, said in cases:
        with rejected(InvalidRequest, said, given) as raised:
            assert ImageParams.of(given).guidance
        assert raised.error.param in given


# -- parameters of diffusion pipelines --------------------------------------------------------------------------------


def test_fields_of_diffusion_pipelines_are_those_of_a_picture() -> None:
    fields = {"height": 64, "seed": 1, "guidance_scale": 4.0, "num_outputs_per_prompt": 2, "negative_prompt": "blurred"}
    given = {**fields, "extra_args": {"shift": 2.0, "guidance_renorm": "channel"}}
    assert image_fields(given) == {**fields, "shift": 2.0, "guidance_renorm": "channel"}
    assert image_fields({}) == {}
    assert "extra_args" in given


def test_a_field_that_has_no_effect_on_a_picture_is_rejected() -> None:
    for name, value in (("num_frames", 8), ("fps", 24), ("true_cfg_scale", 4.0), ("guidance_scale_2", 2.0)):
        with rejected(InvalidRequest, f"^{name} = {value} has no effect: .*: leave it out$", name) as raised:
            image_fields({"height": 64, name: value})
        assert raised.error.param == name


def test_a_field_that_has_its_default_is_not_given() -> None:
    given = msgspec.structs.asdict(DiffusionParams(height=64, guidance_scale=4.0))
    assert image_fields(given) == {"height": 64, "guidance_scale": 4.0}


def test_a_name_that_no_pipeline_has_is_left_to_the_check_of_a_pictures() -> None:
    fields = image_fields({"extra_args": {"shfit": 2.0}})
    with pytest.raises(InvalidRequest, match=r"image\.shfit: did you mean 'shift'"):
        ImageParams.of(fields)
