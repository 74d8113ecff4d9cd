"""Sections of prompts as the original cuts them, and whose tokens are the user's."""

from typing import Any

import pytest
from vllm.tokenizers import cached_get_tokenizer

from tests.reference.test_hunyuan_image_3 import FLOWS, GOLDEN, golden
from vllm_omni.model_executor.models.hunyuan_image_3.config import BOS, IMAGE, MASK
from vllm_omni.model_executor.models.hunyuan_image_3.prompt import (
    ASSISTANT,
    BLANK,
    CUT,
    USER,
    Roles,
    picture_prompt,
    sections_of,
)

needs_golden = pytest.mark.skipif(not FLOWS, reason=f"no outputs of the original at {GOLDEN}")
TEXTS = [name for name, flow in FLOWS.items() if all(isinstance(one, str) for one in flow.get("messages", ("",)))]


@pytest.mark.parametrize(
    ("text", "sections"),
    [
        (f"{BOS}a boat", [BOS, "a boat"]),
        (f"{BOS}{USER}a boat{BLANK}{ASSISTANT}", [BOS, USER, "a boat", BLANK, ASSISTANT]),
        (
            f"{BOS}Draw.{BLANK}{USER}a{BLANK}{ASSISTANT}<think>",
            [BOS, "Draw.\n\n", USER, "a", BLANK, ASSISTANT, "<think>"],
        ),
        (f"{BOS}Draw.{CUT}{BLANK}{CUT}{USER}{CUT}a", [BOS, "Draw.", BLANK, USER, "a"]),
        (f"{BOS}the User: of{BLANK}it", [BOS, "the User: of\n\nit"]),
    ],
)
def test_a_prompt_is_cut_at_roles(text: str, sections: list[str]) -> None:
    assert list(sections_of(text)) == sections


def test_a_picture_of_a_text_and_images() -> None:
    assert picture_prompt("a boat", 0, has_roles=False) == f"{BOS}a boat"
    made = list(sections_of(picture_prompt("it", 2, has_roles=True)))
    assert made == [BOS, USER, f"{IMAGE}{IMAGE}it", BLANK, ASSISTANT]


def encoder() -> Any:
    tokenizer = cached_get_tokenizer(str(GOLDEN / "checkpoint"))
    return lambda text: tokenizer.encode(text, add_special_tokens=False)


@needs_golden
@pytest.mark.parametrize("name", TEXTS)
def test_the_ids_are_those_of_the_original(name: str) -> None:
    encode, flow = encoder(), FLOWS[name]
    (text, *_), ids = flow["phases"][0]["text"], golden(name)["phase0.input_ids"][0].tolist()
    if flow.get("system_prompt"):  # its end is a section of its own, which a text does not say
        text = text.replace(flow["system_prompt"], f"{flow['system_prompt']}{CUT}")
    assert [token for section in sections_of(text) for token in encode(section)] == ids


@needs_golden
@pytest.mark.parametrize("name", [name for name in TEXTS if FLOWS[name]["phases"][0]["mode"] == "gen_image"])
def test_the_users_tokens_are_those_that_the_original_masks(name: str) -> None:
    encode = encoder()
    (mask,) = encode(MASK)
    ids, unconditional = golden(name)["phase0.input_ids"].tolist()
    end = FLOWS[name]["phases"][0]["gen_image_slices"][0][0][0] - 4  # of the prompt
    if "<answer>" in FLOWS[name]["phases"][0]["text"][0]:
        end -= 1
    roles = Roles(encode)
    masked = [index for start, stop in roles.user_ranges(ids[:end]) for index in range(start, stop)]
    assert masked == [index for index, token in enumerate(unconditional) if token == mask]
