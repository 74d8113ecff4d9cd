"""Pictures that are written as tokens: what a plan rejects, and the guided logits."""

from typing import Any

import msgspec
import pytest
import torch
from transformers import ClassifierFreeGuidanceLogitsProcessor

from vllm_omni.errors import InvalidRequest
from vllm_omni.unified.tokens import TokenPlan, guided

ROOM = {"max_model_len": 100, "max_num_seqs": 2, "num_blocks": 12, "block_size": 4}


def make_plan(**fields: Any) -> TokenPlan:
    """Two sequences of up to 24 tokens."""
    return TokenPlan(**{"num_tokens": 16, "scale": 5.0, "unconditional": (1,) * 8, **fields})


@pytest.mark.parametrize("scale", [0.0, 1.0, 1.7, 5.0])
def test_guided_logits_are_transformers(scale: float) -> None:
    own, unconditional = torch.randn(2, 3, 10, generator=torch.Generator().manual_seed(0))
    made = guided(own, unconditional, scale)
    if scale == 1.0:
        torch.testing.assert_close(made, own)
    elif scale > 1:
        both = torch.cat([own, unconditional])
        expected = ClassifierFreeGuidanceLogitsProcessor(scale)(torch.zeros(3, 1), both)
        torch.testing.assert_close(made, expected)
    else:
        torch.testing.assert_close(made, unconditional)


@pytest.mark.parametrize("scale", [-1.0, float("nan"), float("inf")])
def test_a_scale_without_meaning_is_rejected(scale: float) -> None:
    with pytest.raises(InvalidRequest, match=r"guidance_scale = .*: must be a number of 0 or more"):
        make_plan(scale=scale)


def test_a_plan_survives_its_way_to_the_engine() -> None:
    plan = make_plan(seed=3)
    assert msgspec.convert(msgspec.to_builtins(plan), TokenPlan) == plan


@pytest.mark.parametrize(
    ("num_prompt_tokens", "room", "said"),
    [
        (8, {"max_model_len": 23}, "its 8 tokens and the picture's 16 are more than max_model_len = 23; it may have 7"),
        (8, {"max_num_seqs": 1}, "guidance_scale = 5.0: .* max_num_seqs is 1; give 1"),
        (8, {"num_blocks": 11}, "two sequences of 24 tokens, and the engine's KV cache has room for 44 tokens"),
        (9, {}, "two sequences of 25 tokens"),
    ],
)
def test_a_picture_without_room_is_rejected(num_prompt_tokens: int, room: dict[str, int], said: str) -> None:
    with pytest.raises(InvalidRequest, match=said):
        make_plan().check_fits(num_prompt_tokens, **{**ROOM, **room})


def test_a_picture_with_just_enough_room_is_not() -> None:
    make_plan().check_fits(8, **{**ROOM, "max_model_len": 24})
    make_plan(scale=1.0).check_fits(84, **{**ROOM, "max_num_seqs": 1, "num_blocks": 1})
