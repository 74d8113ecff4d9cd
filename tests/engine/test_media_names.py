"""Names of the media in rendered prompts."""

from typing import Any

import torch
from vllm.multimodal.inputs import (
    MultiModalBatchedField,
    MultiModalFieldElem,
    MultiModalKwargsItem,
    MultiModalKwargsItems,
    PlaceholderRange,
)

from vllm_omni.engine.media_names import has_counted_media, name_media, without_media


def make_prompt(*names: str, pixels: tuple[float, ...] = (0.0, 1.0)) -> dict[str, Any]:
    """A prompt with as many images, as vLLM renders it."""

    def item(value: float) -> MultiModalKwargsItem:
        elem = MultiModalFieldElem(torch.full((3, 2, 2), value), MultiModalBatchedField())
        return MultiModalKwargsItem({"pixel_values": elem})

    return {
        "type": "multimodal",
        "prompt_token_ids": list(range(20)),
        "mm_hashes": {"image": list(names)},
        "mm_kwargs": MultiModalKwargsItems({"image": [item(value) for value in pixels[: len(names)]]}),
        "mm_placeholders": {"image": [PlaceholderRange(offset=8 * n, length=4) for n in range(len(names))]},
    }


def counted(number: int) -> str:
    return f"renderer0-mm-{number}-image-0"


def test_named_media_keep_their_names() -> None:
    assert not has_counted_media(make_prompt("users", "hash"))
    assert not has_counted_media({"type": "token", "prompt_token_ids": [1]})
    named = name_media(make_prompt("users", counted(7)))
    assert named["mm_hashes"]["image"][0] == "users"


def test_counted_media_are_named_by_content() -> None:
    one = name_media(make_prompt(counted(1), counted(2)))
    again = name_media(make_prompt(counted(3), counted(4)))
    other = name_media(make_prompt(counted(1), counted(2), pixels=(0.0, 2.0)))
    assert has_counted_media(make_prompt(counted(1))) and not has_counted_media(one)
    assert one["mm_hashes"] == again["mm_hashes"]
    first, second = one["mm_hashes"]["image"]
    assert other["mm_hashes"]["image"][0] == first
    assert len({first, second, other["mm_hashes"]["image"][1]}) == 3


def test_known_images_are_left_out_and_their_placeholders_stay() -> None:
    prompt = make_prompt("known", "new")
    rest = without_media(prompt, lambda name: name == "known")
    assert rest["prompt_token_ids"] == prompt["prompt_token_ids"]
    assert rest["mm_hashes"] == {"image": ["new"]}
    assert [place.offset for place in rest["mm_placeholders"]["image"]] == [8]
    assert torch.equal(rest["mm_kwargs"]["image"][0]["pixel_values"].data, torch.ones(3, 2, 2))
    assert without_media(prompt, lambda name: True)["mm_hashes"] == {}
