"""The vocoder against transformers' modules on the same weights. Tolerance, in float32: 1e-5, of samples in [-1, 1]."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
from transformers import Qwen2_5OmniConfig

from tests.reference.qwen2_5_omni import Reference
from vllm_omni.model_executor.models.qwen2_5_omni.token2wav import Decode, Qwen2_5OmniToken2Wav, token2wav_hf_config
from vllm_omni.model_executor.models.qwen2_5_omni.windows import WindowCutter, WindowSizes
from vllm_omni.testing import qwen2_5_omni as tiny

TOLERANCE = 1e-5


class Pair(NamedTuple):
    vocoder: Qwen2_5OmniToken2Wav
    reference: Reference

    def read(self, codes: list[int], sizes: WindowSizes, seed: int, speaker: str) -> list[Decode]:
        cutter = WindowCutter(sizes, block=12)
        windows = [*cutter.push(codes), cutter.finish()]
        return [self.vocoder.read({**window._asdict(), "seed": seed, "speaker": speaker}) for window in windows]

    def say(self, *batch: Decode) -> list[torch.Tensor]:
        with torch.inference_mode():
            return [output["audio"] for output in self.vocoder.generate(batch)]


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Pair]:
    """Variant of the tiny checkpoint -> its vocoder, and transformers' modules."""
    return cache(lambda variant: make_pair(tmp_path_factory.mktemp(variant), variant))


def make_pair(directory: Path, variant: str) -> Pair:
    path = tiny.build(directory, variant=variant)
    config = token2wav_hf_config(Qwen2_5OmniConfig.from_pretrained(path))
    model_config = SimpleNamespace(hf_config=config, model=str(path), revision=None)
    vocoder = Qwen2_5OmniToken2Wav(vllm_config=SimpleNamespace(model_config=model_config)).eval()
    reference = Reference(path)
    weights = reference.model.token2wav.state_dict()
    vocoder.load_weights((f"token2wav.{name}", tensor) for name, tensor in weights.items())
    return Pair(vocoder, reference)


def make_codes(num_codes: int, seed: int = 0) -> list[int]:
    return torch.randint(0, 200, (num_codes,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.mark.parametrize(
    ("variant", "lengths"),
    [
        ("wide", (1, 5, 36)),
        ("deep", (36,)),
        pytest.param("wide", (150, 301), marks=pytest.mark.long),
        pytest.param("deep", (1, 5, 150, 301), marks=pytest.mark.long),
    ],
)
def test_windows_equal_transformers_over_the_same_windows(
    pairs: Callable[[str], Pair], variant: str, lengths: tuple[int, ...]
) -> None:
    pair = pairs(variant)
    for num_codes in lengths:
        codes = make_codes(num_codes)
        audio = torch.cat([wave for one in pair.read(codes, WindowSizes(), 3, "Ethan") for wave in pair.say(one)])
        expected = pair.reference.vocode_windows(codes, "Ethan", seed=3)
        assert audio.shape == expected.shape == (480 * num_codes,), num_codes
        assert (audio - expected).abs().max() < TOLERANCE, num_codes


def test_a_whole_utterance_equals_transformers(pairs: Callable[[str], Pair]) -> None:
    for variant, num_codes in (("wide", 100), ("deep", 40)):
        pair, codes = pairs(variant), make_codes(num_codes)
        (audio,) = pair.say(*pair.read(codes, WindowSizes(size=0), 3, "Chelsie"))
        assert (audio - pair.reference.vocode(codes, "Chelsie", seed=3)).abs().max() < TOLERANCE, variant


@pytest.mark.parametrize(
    ("variant", "lengths"),
    [
        ("wide", (1, 7, 12, 13, 24, 0)),
        ("deep", (1, 13, 0)),
        pytest.param("wide", (1, 7, 12, 13, 24, 100, 180, 0), marks=pytest.mark.long),
        pytest.param("deep", (1, 7, 12, 13, 24, 100, 180, 0), marks=pytest.mark.long),
    ],
)
def test_each_window_of_a_batch_equals_the_window_alone(
    pairs: Callable[[str], Pair], variant: str, lengths: tuple[int, ...]
) -> None:
    """Windows differ in length, also within a block, in voice and in noise; one is empty."""
    pair = pairs(variant)
    batch = [
        one
        for index, num_codes in enumerate(lengths)
        for one in pair.read(
            make_codes(num_codes, index), WindowSizes(future=index), index, ("Ethan", "Chelsie")[index % 2]
        )
    ]
    for together, one in zip(pair.say(*batch), batch, strict=True):
        (alone,) = pair.say(one)
        assert together.shape == alone.shape == (240 * len(one.keep),)
        assert len(alone) == 0 or (together - alone).abs().max() < TOLERANCE


@pytest.mark.long
@pytest.mark.parametrize("variant", ["wide", "deep"])
def test_default_windows_differ_from_the_whole_utterance_by_less_than_16_bits(
    pairs: Callable[[str], Pair], variant: str
) -> None:
    """docs/vocoder.md: the reason for the defaults. Rounding to 16 bits has an error of 2**-15 / sqrt(12)."""
    pair, codes = pairs(variant), make_codes(400)
    audio = torch.cat([wave for one in pair.read(codes, WindowSizes(), 3, "Ethan") for wave in pair.say(one)])
    whole = pair.reference.vocode(codes, "Ethan", seed=3)
    assert (audio - whole).pow(2).mean().sqrt() < 2**-15 / 12**0.5


@pytest.mark.parametrize(
    ("codec_ids", "message"),
    [([0, 10_000], r"got 0\.\.10000"), ([-1, 2], r"got -1\.\.2"), ([0] * 20_000, "20000 codes in one window")],
)
def test_codes_that_cannot_be_decoded_are_rejected(
    pairs: Callable[[str], Pair], codec_ids: list[int], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        pairs("base").vocoder.read(
            {"codec_ids": codec_ids, "start": 0, "keep": (0, len(codec_ids)), "speaker": "Ethan", "seed": 0}
        )
