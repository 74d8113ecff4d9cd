"""Prompts of text and sound: where each group stands, as in the reference."""

import pytest
import torch

from tests.reference.mimo_audio import LanguageModel
from vllm_omni.model_executor.models.mimo_audio.processing import PLACEHOLDER, SPOKEN, TokenIds, lay_out
from vllm_omni.testing.mimo_audio import build


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return LanguageModel(build(tmp_path_factory.mktemp("mimo_audio")))


@pytest.fixture(scope="module")
def ids(model):
    return TokenIds.of(model.tokenizer.get_vocab())


def codes(num_groups: int) -> torch.Tensor:
    return torch.zeros(8, 4 * num_groups, dtype=torch.long)


@pytest.mark.parametrize("text, num_groups", [("that is a reply of ten tokens", 3), ("hi", 12), ("", 4), ("fives", 1)])
def test_a_spoken_reply_has_text_and_sound_in_turns(text, num_groups, model, ids):
    prompt = model.tokenizer.encode(f"x{SPOKEN.format(text=text)}y{PLACEHOLDER}").ids
    made, sounds = lay_out(prompt, [num_groups, 2], ids)
    expected = model.text("x") + model.spoken(text, codes(num_groups)) + model.text("y") + model.heard(codes(2))
    assert made == expected.tokens.tolist()
    for sound, num in zip(sounds, (num_groups, 2), strict=True):
        assert sum(sound.is_sound) == num
        assert [token == ids.empty for token in made[sound.start : sound.start + len(sound.is_sound)]] == sound.is_sound


@pytest.mark.parametrize("num_sounds", [0, 2])
def test_a_prompt_has_one_place_for_each_sound(num_sounds, model, ids):
    with pytest.raises(ValueError, match=f"1 places for audio .* there are {num_sounds} audios"):
        lay_out(model.tokenizer.encode(PLACEHOLDER).ids, [3] * num_sounds, ids)
