"""What an ``InstanceGroup`` does to prompts; requests themselves are in ``tests/e2e/test_epd_instances.py``."""

from pathlib import Path
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

from tests.reference import llama
from vllm_omni import OmniLLM
from vllm_omni.engine.instances import has_counted_media, name_media, without_media
from vllm_omni.errors import ConfigError


def make_prompt(*names: str, pixels: tuple[float, ...] = (0.0, 1.0)) -> dict[str, Any]:
    """As vLLM renders a prompt with as many images."""

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


def test_media_with_a_name_keep_it() -> None:
    assert not has_counted_media(make_prompt("users", "hash"))
    assert not has_counted_media({"type": "token", "prompt_token_ids": [1]})
    named = name_media(make_prompt("users", counted(7)))
    assert named["mm_hashes"]["image"][0] == "users"


def test_media_that_were_counted_are_named_by_content() -> None:
    one = name_media(make_prompt(counted(1), counted(2)))
    again = name_media(make_prompt(counted(3), counted(4)))
    other = name_media(make_prompt(counted(1), counted(2), pixels=(0.0, 2.0)))
    assert has_counted_media(make_prompt(counted(1))) and not has_counted_media(one)
    assert one["mm_hashes"] == again["mm_hashes"]
    first, second = one["mm_hashes"]["image"]
    assert other["mm_hashes"]["image"][0] == first
    assert len({first, second, other["mm_hashes"]["image"][1]}) == 3


def test_images_that_are_known_are_left_out_and_their_places_stay() -> None:
    prompt = make_prompt("known", "new")
    rest = without_media(prompt, lambda name: name == "known")
    assert rest["prompt_token_ids"] == prompt["prompt_token_ids"]
    assert rest["mm_hashes"] == {"image": ["new"]}
    assert [place.offset for place in rest["mm_placeholders"]["image"]] == [8]
    assert torch.equal(rest["mm_kwargs"]["image"][0]["pixel_values"].data, torch.ones(3, 2, 2))
    assert without_media(prompt, lambda name: True)["mm_hashes"] == {}


@pytest.mark.parametrize(
    ("mix", "advice"), [("E:1,PD:1", "give EPD:1"), ("E:2,P:1,D:1", "give P:1,D:1"), ("EP:1,D:1", "give P:1,D:1")]
)
def test_an_encoder_is_refused_where_there_is_nothing_to_encode(tmp_path: Path, mix: str, advice: str) -> None:
    model = llama.build(tmp_path / "model")
    with pytest.raises(ConfigError, match=f"'language': epd: this model reads text alone.*{advice}"):
        OmniLLM(model, epd=mix, skip_tokenizer_init=True)
