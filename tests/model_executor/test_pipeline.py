"""A package that is installed beside this one adds a pipeline: examples/morse, by its entry points."""

import json
import os
import shutil
import subprocess
import sys
from importlib.metadata import EntryPoint
from itertools import groupby
from pathlib import Path

import numpy as np
import pytest
import soundfile

from vllm_omni import config
from vllm_omni.errors import ConfigError
from vllm_omni.model_executor.pipeline import load_pipeline

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "morse"
PROGRAM = """
import json
import sys
from vllm_omni import OmniLLM

if __name__ == "__main__":
    overrides = {"model_type": "qwen2_5_omni_morse"}
    with OmniLLM(sys.argv[1], overrides=overrides, enforce_eager=True, max_model_len=512) as omni:
        thinker = {"max_tokens": 24, "temperature": 0.0}
        (output,) = omni.chat([{"role": "user", "content": "SOS"}], {"thinker": thinker}, use_tqdm=False)
        output.save_audio("morse.wav")
        print(json.dumps({"text": output.outputs[0].text, "stages": sorted(output.stage_durations)}))
"""
DOT = 480  # samples


def read_morse(path: Path, letters: dict[str, str]) -> str:
    samples, sample_rate = soundfile.read(path)
    assert sample_rate == 8000
    is_on = np.abs(samples.reshape(-1, DOT)).mean(axis=1) > 0.1
    text, letter = "", ""
    for on, run in groupby(is_on):
        length = len(list(run))
        if on:
            letter += {1: ".", 3: "-"}[length]
        elif length >= 3:
            text, letter = text + letters[letter], ""
    return text


@pytest.mark.slow
def test_a_package_adds_a_pipeline_and_a_model(tiny_checkpoint: Path, tmp_path: Path) -> None:
    source = shutil.copytree(EXAMPLE, tmp_path / "source")  # a build leaves files there
    installed = tmp_path / "installed"
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*pip, "--target", installed, source], check=True, capture_output=True, timeout=120)
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    result = subprocess.run(
        [sys.executable, program, tiny_checkpoint],
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(installed), os.environ.get("PYTHONPATH", "")])},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert result.returncode == 0, result.stderr
    answer = json.loads(result.stdout.splitlines()[-1])
    assert answer["stages"] == ["key", "thinker", "total"]
    sys.path.insert(0, str(installed))
    try:
        from omni_morse.model import CODES
    finally:
        sys.path.remove(str(installed))
    keyed = "".join(letter for letter in answer["text"].upper() if letter in CODES)
    assert keyed
    assert read_morse(tmp_path / "morse.wav", {signs: letter for letter, signs in CODES.items()}) == keyed


def add_pipeline(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    entry = EntryPoint("mine", value, config.PIPELINE_GROUP)
    monkeypatch.setattr(config, "entry_points", lambda group: [entry] if group == config.PIPELINE_GROUP else [])


def test_an_added_model_type_is_among_the_supported(monkeypatch: pytest.MonkeyPatch) -> None:
    add_pipeline(monkeypatch, "my_package.pipeline:MyPipeline")
    assert set(config.supported_model_types()) == {"mine", "diffusers", "language", "qwen2_5_omni"}


def test_a_package_that_is_gone_is_named(monkeypatch: pytest.MonkeyPatch, tiny_checkpoint: Path) -> None:
    add_pipeline(monkeypatch, "my_package.pipeline:MyPipeline")
    with pytest.raises(ConfigError, match=r"model type 'mine': its package cannot be imported: .*my_package"):
        config.load_config(tiny_checkpoint, overrides={"model_type": "mine"})


def test_a_package_without_a_deployment_is_told_where_it_belongs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, tiny_checkpoint: Path
) -> None:
    (tmp_path / "my_module.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    add_pipeline(monkeypatch, "my_module:MyPipeline")
    with pytest.raises(ConfigError, match=rf"{tmp_path}/mine.yaml"):
        config.load_config(tiny_checkpoint, overrides={"model_type": "mine"})


def test_a_model_type_without_a_pipeline_is_refused() -> None:
    with pytest.raises(
        ConfigError, match="no pipeline for model type 'other'; known: diffusers, language, qwen2_5_omni"
    ):
        load_pipeline("other", "", None)
