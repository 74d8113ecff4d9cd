"""The plain reference of Qwen3-TTS answers what the model's own package does (golden files of ``tools/reference``)."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.reference.qwen3_tts import Reference
from tools.reference.qwen3_tts.make_golden import GOLDEN, ROOT, STRIDE
from tools.reference.qwen3_tts.waves import make_wave
from vllm_omni.speech.recording import SAMPLE_RATE, Samples, make_recording
from vllm_omni.testing.qwen3_tts import build

CASES = json.loads((GOLDEN / "cases.json").read_text(encoding="utf-8"))
ROWS = 1e-5  # rows and hidden states of values up to 3, float32
WAVE = 1e-5  # samples of a peak of 0.35
MIN_MARGIN = 1e-3  # a smaller one could turn with rounding


@pytest.fixture(scope="module", params=CASES)
def variant(request, tmp_path_factory) -> tuple[str, Reference]:
    path = tmp_path_factory.mktemp("qwen3_tts")
    return request.param, Reference(build(path, variant=request.param))


def recording(seconds: float, seed: int, rate: int = SAMPLE_RATE) -> Samples:
    """A case's recording at the rate that the encoders read, resampled as the server does."""
    return make_recording(make_wave(seconds, seed, rate), rate, 60, "ref_audio")


def answer(reference: Reference, case: dict):
    arguments = dict(case["arguments"])
    streaming = not arguments.pop("non_streaming_mode", case["kind"] != "clone")
    max_tokens = arguments.pop("max_new_tokens")
    voice = None
    if case["kind"] == "clone":
        wave = torch.from_numpy(recording(**case["reference"]))
        text = arguments.pop("ref_text", None)
        arguments.pop("x_vector_only_mode", None)
        voice = arguments["voice"] = reference.voice(wave, text)
    return voice, reference.speak(arguments.pop("text"), max_tokens=max_tokens, streaming=streaming, **arguments)


def test_rows_codes_and_samples_equal_those_of_the_package(variant):
    name, reference = variant
    golden = load_file(GOLDEN / f"{name}.safetensors")
    for case in CASES[name]:
        voice, speech = answer(reference, case)
        expected = {key.partition(".")[2]: one for key, one in golden.items() if key.partition(".")[0] == case["name"]}
        where = f"{name}, {case['name']}"
        if voice is not None:
            assert (voice.x_vector - expected["x_vector"]).abs().max() < ROWS, where
        if voice is not None and voice.codes is not None:
            assert voice.codes.tolist() == expected["reference_codes"].tolist(), where
        assert speech.margins.min() > MIN_MARGIN, where
        assert speech.prompt_rows.shape == expected["prompt_rows"].shape, where
        assert (speech.prompt_rows - expected["prompt_rows"]).abs().max() < ROWS, where
        assert speech.codes.tolist() == expected["codes"].tolist(), where
        assert (speech.hidden - expected["hidden"]).abs().max() < ROWS, where
        assert (speech.wave[::STRIDE] - expected["wave"]).abs().max() < WAVE, where


@pytest.mark.long
def test_golden_files_are_what_the_package_answers_today():
    command = [sys.executable, Path("tools", "reference", "qwen3_tts", "make_golden.py"), "--check"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-2000:]
