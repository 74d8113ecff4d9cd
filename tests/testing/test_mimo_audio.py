"""Tiny MiMo-Audio checkpoints: reproducible, with the tensors of the real one, and greedy replies of text and sound."""

import json

import pytest
import torch
from safetensors import safe_open

from tests.reference.mimo_audio import LanguageModel
from tests.reference.test_mimo_audio import GOLDEN
from vllm_omni.testing.mimo_audio import VARIANTS, build


def names_of(path):
    with safe_open(path / "model.safetensors", "pt") as file:
        return set(file.keys())


def test_the_same_arguments_write_the_same_bytes(tmp_path):
    one, two = (build(tmp_path / name, seed=3, variant="narrow") for name in ("one", "two"))
    other = build(tmp_path / "other", seed=4, variant="narrow")
    files = sorted(path.relative_to(one) for path in one.rglob("*") if path.is_file())
    assert len(files) == 7
    for file in files:
        assert (one / file).read_bytes() == (two / file).read_bytes(), file
    assert (one / "model.safetensors").read_bytes() != (other / "model.safetensors").read_bytes()


def test_an_unknown_variant_is_rejected_with_the_known_ones(tmp_path):
    with pytest.raises(ValueError, match=r"no variant 'bse'; known: .*base"):
        build(tmp_path, variant="bse")


@pytest.mark.skipif(not GOLDEN.is_dir(), reason=f"no checkpoint of the original's layout at {GOLDEN}")
@pytest.mark.parametrize("mine, theirs", [("", "model"), ("audio_tokenizer", "audio_tokenizer")])
def test_tensors_and_keys_of_the_configuration_are_those_of_the_original(mine, theirs, tmp_path):
    path, original = build(tmp_path) / mine, GOLDEN / "checkpoint" / theirs
    assert names_of(path) == names_of(original)
    keys = [json.loads((one / "config.json").read_text()).keys() for one in (path, original)]
    assert keys[1] - keys[0] <= {"input_local_dim"}  # absent where it is local_dim


@pytest.mark.parametrize("variant", [name for name in VARIANTS if name != "wide"])
def test_a_greedy_reply_has_text_and_sound(variant, tmp_path):
    model = LanguageModel(build(tmp_path, variant=variant))
    prompt = model.text("<|im_start|>user\nPlease speak<|im_end|>\n<|im_start|>assistant\n<|sostm|>")
    made = model.generate(prompt, 20, [model.token_id("<|eostm|>")]).groups
    is_sound = made.tokens == model.token_id("<|empty|>")
    assert 2 <= is_sound.sum() < len(made) - 2
    assert len(torch.unique(made.codes[is_sound], dim=0)) > 1
