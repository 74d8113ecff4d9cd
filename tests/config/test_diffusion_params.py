import math

import msgspec
import numpy as np
import pytest

from tests.cases import rejected
from vllm_omni import DiffusionParams
from vllm_omni.config.diffusion_params import OUTPUT_TYPES, DiffusionLimits
from vllm_omni.errors import InvalidRequest

LIMITS = DiffusionLimits(max_pixels=1024 * 1024, max_steps=50, max_outputs=4, max_frames=81)


def test_default_params_are_valid() -> None:
    DiffusionParams().validate(LIMITS)


def test_everything_at_its_limit_is_valid() -> None:
    DiffusionParams(
        negative_prompt="blurred",
        height=1024,
        width=1024,
        num_inference_steps=50,
        guidance_scale=0.0,
        guidance_scale_2=3,
        true_cfg_scale=4.5,
        seed=2**64 - 4,
        num_outputs_per_prompt=4,
        num_frames=81,
        fps=1,
        output_type="float",
        progress=True,
        preview_every=1,
        cache_threshold=0,
        extra_args={"max_sequence_length": 512, "sigmas": [1.0, 0.5], "flags": {"on": True, "of": None}},
    ).validate(LIMITS)


def test_a_wrong_value_is_rejected_with_its_field_and_valid_values() -> None:
    for values, said in [
        ({"num_inference_steps": 0}, "num_inference_steps = 0: must be at least 1"),
        ({"num_inference_steps": -4}, "num_inference_steps = -4: must be at least 1"),
        (
            {"num_inference_steps": 51},
            r"num_inference_steps = 51: at most 50 steps here \(to allow more, raise max_steps of the deployment\)",
        ),
        ({"num_inference_steps": 4.0}, "num_inference_steps = 4.0: must be a whole number"),
        ({"num_inference_steps": True}, "num_inference_steps = True: must be a whole number"),
        ({"num_inference_steps": "4"}, "num_inference_steps = '4': must be a whole number"),
        ({"height": 0}, "height = 0: must be at least 1 pixel"),
        ({"width": -64}, "width = -64: must be at least 1 pixel"),
        ({"height": 1040, "width": 1024}, "height = 1040 with width 1024: at most 1048576 pixels here"),
        ({"height": 2**21}, "height = 2097152: at most 1048576 pixels here"),
        ({"width": 2**21}, "width = 2097152: at most 1048576 pixels here"),
        ({"height": 2**70}, "height = 1180591620717411303424: must be at most 2147483647"),
        ({"height": 64.0}, "height = 64.0: must be a whole number"),
        ({"height": "64"}, "height = '64': must be a whole number"),
        ({"height": np.int64(64)}, "height = .*64.*: must be a whole number"),
        ({"num_outputs_per_prompt": 0}, "num_outputs_per_prompt = 0: must be at least 1"),
        ({"num_outputs_per_prompt": 5}, "num_outputs_per_prompt = 5: at most 4 outputs here"),
        ({"num_outputs_per_prompt": None}, "num_outputs_per_prompt = None: must be a whole number"),
        ({"num_frames": 0}, "num_frames = 0: must be at least 1"),
        ({"num_frames": 82}, "num_frames = 82: at most 81 frames here"),
        ({"fps": 0}, "fps = 0: must be at least 1"),
        ({"fps": 2**31}, "fps = 2147483648: must be at most 2147483647"),
        ({"fps": 23.976}, "fps = 23.976: must be a whole number"),
        ({"guidance_scale": math.nan}, "guidance_scale = nan: must be a finite number, at least 0"),
        ({"guidance_scale": math.inf}, "guidance_scale = inf: must be a finite number"),
        ({"guidance_scale": -1.0}, "guidance_scale = -1.0: must be a finite number, at least 0"),
        ({"guidance_scale_2": math.nan}, "guidance_scale_2 = nan"),
        ({"true_cfg_scale": -math.inf}, "true_cfg_scale = -inf"),
        ({"true_cfg_scale": "4"}, "true_cfg_scale = '4': must be a number"),
        ({"true_cfg_scale": 10**400}, "true_cfg_scale = .*: must be a number"),
        ({"cache_threshold": -0.1}, "cache_threshold = -0.1: must be a finite number, at least 0"),
        ({"seed": 2**64}, r"seed = 18446744073709551616: valid: -2\*\*63 to 2\*\*64 - 1"),
        ({"seed": -(2**63) - 1}, r"seed = -9223372036854775809: valid"),
        ({"seed": 2**64 - 1, "num_outputs_per_prompt": 2}, r"seed = 18446744073709551615: valid: .* 2\*\*64 - 2"),
        ({"seed": 0.5}, "seed = 0.5: must be a whole number"),
        ({"negative_prompt": 3}, "negative_prompt = 3: must be text"),
        ({"negative_prompt": ["a"]}, r"negative_prompt = \['a'\]: must be text"),
        ({"negative_prompt": "\ud800"}, "negative_prompt = .*: invalid Unicode"),
        ({"output_type": "pil"}, "output_type = 'pil': valid: media, float, latents"),
        ({"output_type": None}, "output_type = None: valid: media, float, latents"),
        ({"progress": 1}, "progress = 1: must be true or false"),
        ({"preview_every": -1}, "preview_every = -1: must be at least 0"),
        ({"preview_every": True}, "preview_every = True: must be a whole number"),
        ({"extra_args": None}, "extra_args = None: must be a mapping"),
        ({"extra_args": [1]}, r"extra_args = \[1\]: must be a mapping"),
    ]:
        with rejected(InvalidRequest, f"^{said}", values) as raised:
            DiffusionParams(**values).validate(LIMITS)
        assert raised.error.param in values


def test_wrong_extra_args_are_rejected() -> None:
    for extra_args, said in [
        ({"height": 64}, "'height' is a field of its own"),
        ({"generator": 1}, "'generator' is set by the server: seed"),
        ({"num_images_per_prompt": 2}, "num_outputs_per_prompt"),
        ({"callback_on_step_end": 1}, "progress"),
        ({"mask": object()}, "a value of type object cannot be sent"),
        ({"mask": np.zeros(2)}, "a value of type ndarray cannot be sent"),
        ({"much": 2**70}, "can.t serialize ints"),
    ]:
        with rejected(InvalidRequest, f"extra_args: .*{said}", extra_args):
            DiffusionParams(extra_args=extra_args).validate(LIMITS)


def test_without_limits_large_values_are_valid() -> None:
    DiffusionParams(height=10**6, width=10**6 + 1, num_inference_steps=10**4, num_outputs_per_prompt=999).validate()


def test_fields_by_name_make_the_same_params() -> None:
    values = {"height": 64, "guidance_scale": 4.0, "extra_args": {"a": 1}}
    assert DiffusionParams.of(values) == DiffusionParams(**values)


def test_an_unknown_field_is_rejected_with_the_nearest() -> None:
    for name, nearest in [
        ("heigth", "height"),
        ("steps", "num_inference_steps"),
        ("guidance", "guidance_scale"),
        ("negative", "negative_prompt"),
        ("num_images_per_prompt", "num_outputs_per_prompt"),
    ]:
        with pytest.raises(InvalidRequest, match=f"unknown diffusion parameter {name!r}: did you mean {nearest!r}"):
            DiffusionParams.of({name: 1})


def test_a_wrong_type_is_rejected_by_name() -> None:
    with pytest.raises(InvalidRequest, match="height = 'tall': must be a whole number"):
        DiffusionParams.of({"height": "tall"}).validate()


def test_params_travel_as_msgpack() -> None:
    params = DiffusionParams(height=64, seed=2**63, extra_args={"a": [1, {"b": None}]})
    encoded = msgspec.msgpack.encode(params)
    assert msgspec.msgpack.decode(encoded, type=DiffusionParams) == params
    assert msgspec.msgpack.decode(encoded) == {"height": 64, "seed": 2**63, "extra_args": {"a": [1, {"b": None}]}}


def test_the_output_types_are_those_of_the_field() -> None:
    for name in OUTPUT_TYPES:
        DiffusionParams.of({"output_type": name}).validate()
