"""Plans of pictures: what they reject, and which branches their steps have."""

import itertools
import math
from typing import Any, get_args

import msgspec
import pytest
import torch

from tests.cases import case, rejected
from vllm_omni.errors import InvalidRequest
from vllm_omni.unified.flow import timesteps
from vllm_omni.unified.plan import MAX_STEPS, WITHOUT_IMAGES, WITHOUT_TEXT, Guidance, ImagePlan, Renorm

GRID = (3, 4)
NUM_PROMPT = 20
WHOLE_PROMPT = ((0, NUM_PROMPT),)


def make_plan(**fields: Any) -> ImagePlan:
    return ImagePlan(**{"grid": GRID, **fields})


# -- guidance ---------------------------------------------------------------------------------------------------------


def test_a_wrong_value_of_the_guidance_is_rejected_with_the_valid_ones() -> None:
    scale = r"must be a number of 0 or more; 1: no guidance"
    interval = r"must be \[low, high\] with 0 <= low <= high <= 1"
    cases: list[tuple[dict[str, Any], str, str]] = [
        ({"text_scale": -1.0}, "guidance_scale", f"guidance_scale = -1.0: {scale}"),
        ({"text_scale": math.nan}, "guidance_scale", f"guidance_scale = nan: {scale}"),
        ({"image_scale": -0.1}, "image_guidance_scale", f"image_guidance_scale = -0.1: {scale}"),
        ({"image_scale": math.inf}, "image_guidance_scale", f"image_guidance_scale = inf: {scale}"),
        ({"interval": (-0.1, 1.0)}, "guidance_interval", rf"guidance_interval = \[-0.1, 1.0\]: {interval}"),
        ({"interval": (0.0, 1.1)}, "guidance_interval", rf"guidance_interval = \[0.0, 1.1\]: {interval}"),
        ({"interval": (0.9, 0.8)}, "guidance_interval", rf"guidance_interval = \[0.9, 0.8\]: {interval}"),
        ({"interval": (math.nan, 1.0)}, "guidance_interval", rf"guidance_interval = \[nan, 1.0\]: {interval}"),
        ({"renorm": "globel"}, "guidance_renorm", "guidance_renorm = 'globel': did you mean 'global'"),
        ({"renorm": "text"}, "guidance_renorm", "did you mean 'text_channel'.* valid: global, channel, text_channel"),
        ({"renorm_min": -0.1}, "guidance_renorm_min", "guidance_renorm_min = -0.1: must be a number from 0 to 1"),
        ({"renorm_min": 1.1}, "guidance_renorm_min", "guidance_renorm_min = 1.1: must be a number from 0 to 1"),
        ({"renorm_min": math.nan}, "guidance_renorm_min", "guidance_renorm_min = nan: must be a number from 0 to 1"),
    ]
    for values, param, said in cases:
        with rejected(InvalidRequest, said, values) as raised:
            Guidance(**values)
        assert raised.error.param == param


def test_guidance_at_its_limits_is_valid() -> None:
    for renorm in get_args(Renorm):
        Guidance(0.0, 0.0, (0.0, 0.0), renorm, 0.0)
        Guidance(1e6, 1e6, (1.0, 1.0), renorm, 1.0)


def test_a_step_is_guided_above_the_low_time_and_up_to_the_high_one() -> None:
    given = Guidance(interval=(0.25, 0.75))
    assert [given.is_on(time) for time in (1.0, 0.76, 0.75, 0.5, 0.26, 0.25, 0.0)] == [0, 0, 1, 1, 1, 0, 0]


def test_a_text_scale_of_one_guides_no_step() -> None:
    for scale in (0.0, 0.5, 1.0):
        assert not Guidance(text_scale=scale, image_scale=4.0).is_on(0.9)
    assert Guidance(text_scale=1.01, image_scale=1.0).is_on(0.9)


def test_times_at_a_bound_are_compared_in_float32() -> None:
    """As the original does: 0.4 and 0.8 as float32 are greater than as float64, and 0.7 is less."""
    bounds = [number / 10 for number in range(11)]
    for low, high in itertools.combinations_with_replacement(bounds, 2):
        for num_steps, shift in ((5, 1.0), (10, 1.0), (4, 2.0), (7, 4.0)):
            for time in timesteps(num_steps, shift)[:-1]:
                with case(low, high, time):
                    assert Guidance(interval=(low, high)).is_on(time.item()) == bool(low < time <= high)
    assert not Guidance(interval=(0.4, 1.0)).is_on(torch.tensor(0.4).item())


# -- plans ------------------------------------------------------------------------------------------------------------


def test_a_wrong_value_of_a_plan_is_rejected_with_the_valid_ones() -> None:
    cases: list[tuple[dict[str, Any], str, str]] = [
        ({"grid": (0, 4)}, "size", r"size = \[0, 4\]: must be at least one token in each direction"),
        ({"grid": (4, -1)}, "size", r"size = \[4, -1\]: must be at least one token in each direction"),
        ({"num_steps": 0}, "num_inference_steps", f"num_inference_steps = 0: must be from 1 to {MAX_STEPS}"),
        ({"num_steps": -4}, "num_inference_steps", f"num_inference_steps = -4: must be from 1 to {MAX_STEPS}"),
        ({"num_steps": MAX_STEPS + 1}, "num_inference_steps", f"must be from 1 to {MAX_STEPS}"),
        ({"shift": 0.0}, "shift", "shift = 0.0: must be a number from 0.01 to 100.0"),
        ({"shift": -1.0}, "shift", "shift = -1.0: must be a number from 0.01 to 100.0"),
        ({"shift": math.inf}, "shift", "shift = inf: must be a number from 0.01 to 100.0"),
        ({"shift": math.nan}, "shift", "shift = nan: must be a number from 0.01 to 100.0"),
        ({"seed": 2**64}, "seed", r"seed = 18446744073709551616: must be from -2\*\*63 to 2\*\*64 - 1"),
        ({"seed": -(2**63) - 1}, "seed", r"seed = -9223372036854775809: must be from -2\*\*63 to 2\*\*64 - 1"),
    ]
    for values, param, said in cases:
        with rejected(InvalidRequest, said, values) as raised:
            make_plan(**values)
        assert raised.error.param == param


def test_a_plan_at_its_limits_is_valid() -> None:
    make_plan(grid=(1, 1), num_steps=1, shift=0.01, seed=-(2**63))
    make_plan(num_steps=MAX_STEPS, seed=2**64 - 1)


def test_a_canvas_has_the_latents_and_two_markers() -> None:
    plan = make_plan()
    assert (plan.num_latents, plan.num_canvas_tokens) == (12, 14)


def test_a_plan_survives_the_way_to_the_scheduler() -> None:
    plan = make_plan(
        seed=3,
        guidance=Guidance(2.0, 3.0, (0.0, 0.9), "channel", 0.5),
        negative=(7, 8),
        without_text=((0, 5),),
        without_images=((0, 2), (9, 20)),
        end_of_text=4,
    )
    sent = msgspec.msgpack.decode(msgspec.msgpack.encode(msgspec.to_builtins(plan)))
    assert msgspec.convert(sent, ImagePlan) == plan


# -- branches ---------------------------------------------------------------------------------------------------------


def branches(time: float = 0.9, **fields: Any) -> tuple[str, ...]:
    return make_plan(without_text=((0, 5),), **fields).branches(time, NUM_PROMPT)


def test_a_guided_step_of_a_prompt_with_images_has_both_branches() -> None:
    assert branches(without_images=((15, 20),)) == (WITHOUT_TEXT, WITHOUT_IMAGES)


def test_a_step_that_is_not_guided_has_no_branches() -> None:
    assert branches(0.4, without_images=((15, 20),)) == ()
    assert branches(without_images=((15, 20),), guidance=Guidance(1.0, 4.0)) == ()


def test_an_image_scale_of_one_needs_no_branch_without_images() -> None:
    for scale in (0.0, 1.0):
        assert branches(without_images=((15, 20),), guidance=Guidance(4.0, scale)) == (WITHOUT_TEXT,)


def test_a_prompt_without_images_needs_no_branch_without_them() -> None:
    assert branches(without_images=WHOLE_PROMPT) == (WITHOUT_TEXT,)


def test_a_text_that_the_picture_reads_needs_a_branch_without_images() -> None:
    """The branch does not read that text."""
    assert branches(without_images=WHOLE_PROMPT, end_of_text=4) == (WITHOUT_TEXT, WITHOUT_IMAGES)


def test_a_context_reads_no_images_where_nothing_is_left_out_and_no_text_is_written() -> None:
    for ranges, end_of_text, expected in [
        (WHOLE_PROMPT, None, True),
        (WHOLE_PROMPT, 4, False),
        ((), None, False),
        (((0, 5), (10, NUM_PROMPT)), None, False),
        (((0, NUM_PROMPT - 1),), None, False),
        (((1, NUM_PROMPT),), None, False),
    ]:
        plan = make_plan(without_images=ranges, end_of_text=end_of_text)
        with case(ranges, end_of_text):
            assert plan.reads_no_images(NUM_PROMPT) == expected


def test_a_negative_text_stands_behind_what_the_branch_without_text_reads() -> None:
    plan = make_plan(negative=(7, 8), without_text=((0, 5),), without_images=((15, 20),))
    assert (plan.ranges(WITHOUT_TEXT), plan.added(WITHOUT_TEXT)) == (((0, 5),), (7, 8))
    assert (plan.ranges(WITHOUT_IMAGES), plan.added(WITHOUT_IMAGES)) == (((15, 20),), ())


def test_steps_are_reported_for_their_progress_and_for_their_previews() -> None:
    for progress, every, reported, previews in [
        (False, 0, [], []),
        (True, 0, [1, 2, 3, 4, 5], []),
        (False, 2, [2, 4], [2, 4]),
        (True, 3, [1, 2, 3, 4, 5], [3]),
        (False, 9, [], []),
    ]:
        plan = make_plan(num_steps=6, progress=progress, preview_every=every)
        with case(progress, every):
            assert [step for step in range(1, 6) if plan.is_reported(step)] == reported
            assert [step for step in range(1, 6) if plan.has_preview(step)] == previews


# -- room -------------------------------------------------------------------------------------------------------------


def test_a_picture_that_just_fits_is_accepted() -> None:
    make_plan().check_fits(NUM_PROMPT, 14, 35)


def test_a_canvas_that_no_step_has_room_for_is_rejected() -> None:
    with pytest.raises(InvalidRequest, match=r"its 14 tokens are computed in one step, which has at most 13") as raised:
        make_plan().check_fits(NUM_PROMPT, 13, 1000)
    assert raised.value.param == "size"
    assert "max_num_batched_tokens" in str(raised.value)


def test_a_canvas_that_does_not_fit_behind_its_prompt_is_rejected_with_the_number_that_does() -> None:
    for max_model_len, left in ((34, 11), (24, 1), (23, 0), (10, 0)):
        said = f"its 12 tokens do not fit behind the prompt's 20: {left} do .max_model_len {max_model_len}"
        with rejected(InvalidRequest, said, max_model_len) as raised:
            make_plan().check_fits(NUM_PROMPT, 14, max_model_len)
        assert raised.error.param == "size"
        if left:
            make_plan(grid=(1, left)).check_fits(NUM_PROMPT, 14, max_model_len)


def test_a_text_that_the_request_writes_first_has_room_for_a_token() -> None:
    plan = make_plan(end_of_text=4)
    plan.check_fits(NUM_PROMPT, 14, 36)
    with pytest.raises(InvalidRequest, match="do not fit"):
        plan.check_fits(NUM_PROMPT, 14, 35)


def test_the_longest_context_of_a_branch_decides() -> None:
    plan = make_plan(negative=(7,) * 18, without_text=((0, 5),))
    plan.check_fits(NUM_PROMPT, 14, 38)
    with pytest.raises(InvalidRequest, match="do not fit behind the prompt's 23: 11 do"):
        plan.check_fits(NUM_PROMPT, 14, 37)
