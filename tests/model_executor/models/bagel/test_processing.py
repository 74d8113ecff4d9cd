"""Images of prompts: their placeholders and pixels are those of the reference, on a tiny checkpoint."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from PIL import Image
from vllm.config import ModelConfig
from vllm.multimodal import MULTIMODAL_REGISTRY
from vllm.multimodal.inputs import PlaceholderRange
from vllm.multimodal.processing import ProcessorInputs, TimingContext

from tests.cases import case
from tests.reference.bagel import Context, Reference
from tests.reference.media import make_image
from vllm_omni.model_executor.models.bagel.language_model import BagelLanguageModel, language_hf_config
from vllm_omni.model_executor.models.bagel.processing import IS_DRAWN, PIXELS, PLACEHOLDER, VIEW, TokenIds
from vllm_omni.plugin import register
from vllm_omni.testing.bagel import build
from vllm_omni.unified.spans import spans_of_placeholder

SIZES = [(61, 50), (48, 64), (90, 40), (112, 112), (1, 1), (16, 300), (400, 20), (333, 222)]


class Prompt(NamedTuple):
    token_ids: list[int]
    places: list[PlaceholderRange]
    data: dict[str, Any]


class Front:
    """The processor of a checkpoint, and the reference of the same."""

    def __init__(self, path: Path) -> None:
        register()
        config = ModelConfig(str(path), hf_overrides=language_hf_config, dtype="float32")
        self.processor = MULTIMODAL_REGISTRY.create_processor(config)
        self.reference = Reference(path)
        self.ids: TokenIds = self.processor.info.token_ids

    def tokens(self, text: str) -> list[int]:
        return self.processor.info.get_tokenizer().encode(text)

    def read(self, text: str, images: Sequence[Image.Image], *, is_drawn: bool) -> Prompt:
        data = self.processor.info.parse_mm_data({"image": list(images)})
        inputs = ProcessorInputs(self.tokens(text), data, hf_processor_mm_kwargs={IS_DRAWN: True} if is_drawn else {})
        made = self.processor.apply(inputs, TimingContext())
        places = list(made["mm_placeholders"].get("image", ()))
        return Prompt(made["prompt_token_ids"], places, made["mm_kwargs"].get_data())

    def contexts(self, image: Image.Image, *, is_drawn: bool) -> list[Context]:
        """The reference behind each span of an image alone."""
        model = self.reference
        resized = model.resize(image, "vae_transform")
        view = model.read_view(model.new_context(), resized)
        latents = model.encode_pixels(resized, None)
        return [model.read_latents(model.new_context(), latents)] * is_drawn + [view]


@pytest.fixture(scope="module")
def front(tmp_path_factory: pytest.TempPathFactory) -> Front:
    return Front(build(tmp_path_factory.mktemp("bagel")))


# -- placeholders -----------------------------------------------------------------------------------------------------


@torch.no_grad()
@pytest.mark.parametrize("is_drawn", [False, True])
def test_an_image_has_as_many_tokens_as_in_the_reference(front: Front, is_drawn: bool) -> None:
    for size in SIZES:
        image = make_image(*size)
        (place,) = front.read(PLACEHOLDER, [image], is_drawn=is_drawn).places
        sizes = [span.end - span.start for span in spans_of_placeholder(place)]
        with case(size):
            assert sizes == [one.num_tokens for one in front.contexts(image, is_drawn=is_drawn)]
            assert (place.offset, place.length) == (0, sum(sizes))


def test_an_image_that_is_only_seen_is_one_span_without_latents(front: Front) -> None:
    for is_drawn, expected in ((False, [False]), (True, [True, False])):
        (place,) = front.read(PLACEHOLDER, [make_image(61, 50)], is_drawn=is_drawn).places
        assert [span.is_latent for span in spans_of_placeholder(place)] == expected


def test_embeddings_stand_between_the_markers_of_an_image(front: Front) -> None:
    for size in SIZES:
        prompt = front.read(f"x{PLACEHOLDER}y", [make_image(*size)], is_drawn=True)
        (place,) = prompt.places
        with case(size):
            assert place.is_embed is not None
            assert place.get_num_embeds() == place.length - 4
            for span in spans_of_placeholder(place):
                tokens = prompt.token_ids[span.start : span.end]
                assert (tokens[0], tokens[-1]) == (front.ids.start, front.ids.end)
                embeds = place.is_embed[span.start - place.offset : span.end - place.offset].tolist()
                assert embeds == [False, *[True] * (len(tokens) - 2), False]


def test_the_tokens_of_an_image_say_its_grid(front: Front) -> None:
    sizes = front.processor.info.sizes
    for size in SIZES:
        prompt = front.read(PLACEHOLDER, [make_image(*size)], is_drawn=True)
        latents, view = spans_of_placeholder(prompt.places[0])
        with case(size):
            assert front.ids.grid_of(prompt.token_ids[latents.start : latents.end]) == sizes.latent_grid(size)
            assert front.ids.grid_of(prompt.token_ids[view.start : view.end]) == sizes.view_grid(size)


def test_each_placeholder_of_a_prompt_is_an_image_in_order(front: Front) -> None:
    images = [make_image(*size) for size in SIZES[:3]]
    text = "first{0}, second{0}{0}: which?"
    alone = [front.read(PLACEHOLDER, [image], is_drawn=True).token_ids for image in images]
    prompt = front.read(text.format(PLACEHOLDER), images, is_drawn=True)
    expected = [*front.tokens("first"), *alone[0], *front.tokens(", second"), *alone[1], *alone[2]]
    assert prompt.token_ids == [*expected, *front.tokens(": which?")]
    assert [place.length for place in prompt.places] == [len(one) for one in alone]
    for place, tokens in zip(prompt.places, alone, strict=True):
        assert prompt.token_ids[place.offset : place.offset + place.length] == tokens


def test_a_prompt_without_images_stays(front: Front) -> None:
    prompt = front.read("a small red boat", [], is_drawn=True)
    assert prompt.token_ids == front.tokens("a small red boat") and prompt.places == []


def test_more_images_than_placeholders_are_rejected(front: Front) -> None:
    for text, number in (("no place", 1), (PLACEHOLDER, 2)):
        with pytest.raises(AssertionError, match=rf"mm_items\['image'\]\[{number - 1}\]"):
            front.read(text, [make_image(61, 50)] * number, is_drawn=False)


def test_no_image_has_more_tokens_than_the_largest(front: Front) -> None:
    most = front.processor.info.get_mm_max_tokens_per_item(512)["image"]
    lengths = [front.read(PLACEHOLDER, [make_image(*size)], is_drawn=True).places[0].length for size in SIZES]
    assert max(lengths) == most


def test_a_modality_that_the_model_does_not_read_is_rejected() -> None:
    assert BagelLanguageModel.get_placeholder_str("image", 1) == PLACEHOLDER
    with pytest.raises(ValueError, match="audio is no input of this model: valid: image"):
        BagelLanguageModel.get_placeholder_str("audio", 1)


# -- pixels -----------------------------------------------------------------------------------------------------------


def test_pixels_are_those_of_the_reference(front: Front) -> None:
    model = front.reference
    for size in SIZES:
        image = make_image(*size)
        resized = model.resize(image, "vae_transform")
        seen = front.read(PLACEHOLDER, [image], is_drawn=False).data
        drawn = front.read(PLACEHOLDER, [image], is_drawn=True).data
        with case(size):
            assert seen.keys() == {VIEW} and drawn.keys() == {VIEW, PIXELS}
            assert torch.equal(drawn[PIXELS][0], model.pixels(resized))
            for made in (seen, drawn):
                assert torch.equal(made[VIEW][0], model.pixels(model.resize(resized, "vit_transform")))


# -- ids of tokens ----------------------------------------------------------------------------------------------------


def test_a_grid_survives_as_tokens() -> None:
    ids = TokenIds(1, 2, 3)
    assert ids.span((2, 3)) == [1, 3, 3, 2, 3, 3, 2, 2]
    assert ids.span((3, 1)) == [1, 2, 2, 2, 2]
    for rows in range(1, 6):
        for columns in range(1, 6):
            span = ids.span((rows, columns))
            with case(rows, columns):
                assert len(span) == rows * columns + 2
                assert ids.grid_of(span) == (rows, columns)


def test_the_pad_is_the_first_that_the_vocabulary_has() -> None:
    marks = {"<|vision_start|>": 4, "<|vision_end|>": 5, "<|endoftext|>": 6}
    assert TokenIds.of(marks) == (4, 5, 6)
    assert TokenIds.of({**marks, "<|image_pad|>": 7}) == (4, 5, 7)
