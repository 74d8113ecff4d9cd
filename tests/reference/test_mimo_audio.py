"""The reference of MiMo-Audio against outputs of the original code, on a tiny checkpoint of the real layout.

The outputs are no part of the repository: ``GOLDEN`` is their directory, or ``../shared/golden``. Without them nothing
is tested.
"""

import json
import os
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.reference.mimo_audio import AudioTokenizer, Groups, LanguageModel, probabilities

ROOT = Path(__file__).resolve().parents[2]
GOLDEN = Path(os.environ.get("GOLDEN", ROOT.parent / "shared" / "golden")) / "mimo_audio"
CASES = json.loads((GOLDEN / "cases.json").read_text()) if GOLDEN.is_dir() else {"cases": {}, "facts": {}}
LONG = 60  # groups of a reply
REPLIES = [
    pytest.param(name, marks=pytest.mark.long if case["groups"] >= LONG else [])
    for name, case in CASES["cases"].items()
    if "groups" in case
]

pytestmark = pytest.mark.skipif(not CASES["cases"], reason=f"no outputs of the original at {GOLDEN}")


@cache
def language_model() -> LanguageModel:
    return LanguageModel(GOLDEN / "checkpoint" / "model")


@cache
def audio_tokenizer() -> AudioTokenizer:
    return AudioTokenizer(GOLDEN / "checkpoint" / "audio_tokenizer")


@cache
def golden(name: str) -> dict[str, Tensor]:
    return load_file(GOLDEN / f"{name}.safetensors")


@cache
def codes_of(wave: str) -> Tensor:
    """What the language model reads of a sound: the first eight codes of each frame."""
    return audio_tokenizer().encode(golden("waves")[wave])[:8]


def prompt_of(case: dict[str, Any]) -> Groups:
    """The prompt of a case, piece by piece."""
    model = language_model()
    given = case.get("audio", [])
    waves = iter([*([case["prompt_speech"]] if "prompt_speech" in case else []), *_as_list(given)])
    prompt = Groups(torch.empty(0, dtype=torch.long), torch.empty(0, model.group, model.num_channels).long())
    for piece in case["segments"]:
        if "text" in piece:
            prompt += model.text(piece["text"])
        elif "interleaved" in piece:
            prompt += model.spoken(piece["interleaved"]["text"], codes_of(next(waves)))
        elif "generated" in piece:
            prompt += groups_of(golden(piece["generated"])["generated_ids"])
        else:
            prompt += model.heard(codes_of(next(waves)))
    return prompt


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def groups_of(ids: Tensor) -> Groups:
    """The original's ids [1 + channels, groups * 4], of which the first row has each token four times."""
    model = language_model()
    codes = ids[1:].T.reshape(-1, model.group, model.num_channels).long()
    return Groups(ids[0, :: model.group].long(), codes)


def assert_same(groups: Groups, ids: Tensor) -> None:
    expected = groups_of(ids)
    assert groups.tokens.tolist() == expected.tokens.tolist()
    assert torch.equal(groups.codes, expected.codes)


@pytest.mark.parametrize("name", CASES["cases"])
def test_a_prompt_has_the_ids_and_codes_of_the_original(name: str) -> None:
    prompt = prompt_of(CASES["cases"][name])
    assert len(prompt) == CASES["cases"][name]["prompt_groups"]
    assert_same(prompt, golden(name)["prompt_ids"])


@pytest.mark.parametrize("name", REPLIES)
def test_a_reply_is_that_of_the_original(name: str) -> None:
    case, expected = CASES["cases"][name], golden(name)
    reply = language_model().generate(prompt_of(case), case["max_new_groups"], case["stop_token_ids"])
    assert reply.groups.tokens.tolist() == expected["text_ids"].tolist()
    assert_same(reply.groups, expected["generated_ids"])
    assert torch.equal(reply.codes, expected["codes"].long())
    assert reply.text == case["text"]
    torch.testing.assert_close(reply.rows, expected["inputs_embeds"], atol=1e-5, rtol=0)
    torch.testing.assert_close(reply.hidden, expected["hidden"], atol=1e-4, rtol=0)
    if "text_logits" in expected:
        torch.testing.assert_close(reply.logits, expected["text_logits"], atol=1e-3, rtol=0)
    for index, steps in enumerate(reply.local_steps):
        torch.testing.assert_close(steps.inputs[0], expected["local_input_first"][index], atol=1e-4, rtol=0)
    for index, steps in enumerate(reply.local_steps[: len(expected.get("local_inputs", ()))]):
        torch.testing.assert_close(steps.inputs, expected["local_inputs"][index], atol=1e-4, rtol=0)
        torch.testing.assert_close(steps.hidden, expected["local_hidden"][index], atol=1e-4, rtol=0)
    if "wav" in expected:
        torch.testing.assert_close(audio_tokenizer().decode(reply.codes).wave, expected["wav"], atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", ["question", "voice"])
def test_codes_of_a_wave_are_those_of_the_original(name: str) -> None:
    tokenizer, expected = audio_tokenizer(), golden("audio_tokenizer")
    mels = tokenizer.mels(golden("waves")[name])
    torch.testing.assert_close(mels, expected[f"{name}.mel"], atol=1e-4, rtol=0)
    features = tokenizer.features(mels)
    torch.testing.assert_close(features, expected[f"{name}.features"], atol=1e-4, rtol=0)
    codes, quantized = tokenizer.quantize(features)
    assert torch.equal(codes, expected[f"{name}.codes"].long())
    torch.testing.assert_close(quantized, expected[f"{name}.quantized"], atol=1e-4, rtol=0)
    assert torch.equal(language_model().sound(codes[:8]).codes.flatten(0, 1).T, expected[f"{name}.prompt_codes"].long())


@pytest.mark.long
def test_each_minute_of_a_long_sound_is_encoded_alone() -> None:
    """Between these pure tones the spectrum is what float32 rounds: mels in float64 differ by up to 1.8, and so do
    those of another machine. So not all codes can be equal; of another sound, about one in twenty would be.
    """
    time = torch.arange(int(61.3 * 24000), dtype=torch.float64) / 24000

    def sine(hertz: Tensor | float) -> Tensor:
        return (2 * torch.pi * hertz * time).sin()

    wave = 0.3 * sine(220) * (0.6 + 0.4 * sine(1.7)) + 0.2 * sine(300 + 5 * time) + 0.05 * sine(3000 - 20 * time)
    tokenizer, expected = audio_tokenizer(), golden("audio_tokenizer")
    codes = tokenizer.encode(wave.float())
    minute, rest = tokenizer.mels(wave.float()).split(6000)
    assert torch.equal(codes[:, :1500], tokenizer.quantize(tokenizer.features(minute))[0])
    assert torch.equal(codes[:, 1500:], tokenizer.quantize(tokenizer.features(rest))[0])
    assert (codes[:8, :1500] == expected["long.prompt_codes"][:, :1500]).float().mean() > 0.8
    assert (codes[:, 1500:] == expected["long.remainder_alone_codes"]).float().mean() > 0.8


@pytest.mark.parametrize("name", ["dec13", "dec40", "dec130"])
def test_codes_are_decoded_to_the_waves_of_the_original(name: str) -> None:
    expected = golden("audio_tokenizer")
    decoded = audio_tokenizer().decode(expected[f"{name}.codes"])
    torch.testing.assert_close(decoded.wave, expected[f"{name}.wav"], atol=1e-5, rtol=0)
    if name == "dec40":
        for mine, theirs in [
            (decoded.quantized, "quantized"),
            (decoded.upsampled, "dconv1"),
            (decoded.hidden, "decoder_hidden"),
            (decoded.mels, "coarse_mel"),
            (decoded.vocoder_hidden, "vocoder_hidden"),
        ]:
            torch.testing.assert_close(mine, expected[f"{name}.{theirs}"], atol=1e-4, rtol=0, msg=theirs)


def test_codes_are_sampled_from_the_distribution_of_the_original() -> None:
    expected = golden("sampler")
    logits = expected["logits"][:5]  # in the sixth row the original removes all that it could sample
    for index, settings in enumerate(CASES["facts"]["sampler_combos"]):
        made = probabilities(logits, **settings, without=64)
        torch.testing.assert_close(made, expected[f"probs{index}"][:5], atol=1e-6, rtol=0, msg=str(settings))
