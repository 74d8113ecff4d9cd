"""Names of the media in rendered prompts."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.multimodal.inputs import (
    MultiModalBatchedField,
    MultiModalFieldElem,
    MultiModalKwargsItem,
    MultiModalKwargsItems,
    PlaceholderRange,
)

from vllm_omni.engine.media_names import of_tenant, without_media
from vllm_omni.vllm_patches import name_media_by_content


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


def test_tenants_have_names_of_their_own() -> None:
    names = {of_tenant("hash", salt) for salt in (None, "one", "two")}
    assert len(names) == 3 and "hash" in names
    assert of_tenant("hash", "") == "hash" and of_tenant("hash", "one") == of_tenant("hash", "one")


def renderer(*, trusts_uuids: bool) -> Any:
    """What vLLM's renderer asks for the names of a prompt's media."""
    made: Any = SimpleNamespace(_validate_mm_uuids=lambda *_: None)
    name_media_by_content(made, trusts_uuids=trusts_uuids)
    return made


def test_no_name_is_a_counter_and_names_of_users_count_where_they_are_trusted() -> None:
    data, names = {"image": [1, 2]}, {"image": ["one", None]}
    assert renderer(trusts_uuids=True)._process_mm_uuids(data, data, names, "renderer0-mm-1") == names
    assert renderer(trusts_uuids=False)._process_mm_uuids(data, data, names, "renderer0-mm-1") == {}


def test_a_name_without_data_is_rejected_where_names_are_not_trusted() -> None:
    for data, items in [({"image": None}, {}), ({"image": [1, None]}, {"image": [1, None]})]:
        assert renderer(trusts_uuids=True)._process_mm_uuids(data, items, {"image": ["one", "two"]}, "")
        with pytest.raises(ValueError, match=r"'image'.* has no data .*send the data"):
            renderer(trusts_uuids=False)._process_mm_uuids(data, items, {"image": ["one", "two"]}, "")


def test_known_images_are_left_out_and_their_placeholders_stay() -> None:
    prompt = make_prompt("known", "new")
    rest = without_media(prompt, lambda name: name == "known")
    assert rest["prompt_token_ids"] == prompt["prompt_token_ids"]
    assert rest["mm_hashes"] == {"image": ["new"]}
    assert [place.offset for place in rest["mm_placeholders"]["image"]] == [8]
    assert torch.equal(rest["mm_kwargs"]["image"][0]["pixel_values"].data, torch.ones(3, 2, 2))
    assert without_media(prompt, lambda name: True)["mm_hashes"] == {}
