"""``config show``: its output is the deployment that a server runs, with the origin of each value."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.entrypoints.test_cli import rejected
from vllm_omni.config import load_config
from vllm_omni.entrypoints.cli.main import main

DEPLOYMENT = """\
engine_args: {dtype: float32}
stages:
  talker:
    max_num_seqs: 2
    default_sampling_params: {top_p: 0.5, detokenize: false}
voices: {alloy: Ethan}
"""
FLAGS = [
    '--stage-overrides={"0": {"max_num_seqs": 8}}',
    "--max-model-len=4096",
    '--compilation-config={"mode": 0}',
    "--stage=thinker.limit_mm_per_prompt={image: 2}",
    '--stage=thinker.download_dir="1e3"',
]


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("deployment") / "mine.yaml"
    path.write_text(DEPLOYMENT)
    return path


def show(capfd: pytest.CaptureFixture[str], model: Path, *args: object) -> str:
    main(["config", "show", str(model), *map(str, args)])
    return capfd.readouterr().out


def without_origins(text: str) -> list[str]:
    return [line.rpartition("  # ")[0] or line for line in text.splitlines()]


def test_the_output_is_a_file_for_the_same_deployment(
    capfd: pytest.CaptureFixture[str], tiny_checkpoint: Path, deployment: Path, tmp_path: Path
) -> None:
    shown = show(capfd, tiny_checkpoint, "--deploy-config", deployment, *FLAGS)
    (tmp_path / "shown.yaml").write_text(shown)
    again = show(capfd, tiny_checkpoint, "--deploy-config", tmp_path / "shown.yaml")
    assert without_origins(again) == without_origins(shown)
    thinker = load_config(tiny_checkpoint, deploy_config=tmp_path / "shown.yaml").stage("thinker")
    assert thinker.engine_args["max_num_seqs"] == 8
    assert thinker.engine_args["limit_mm_per_prompt"] == {"image": 2}
    assert thinker.engine_args["compilation_config"] == {"mode": 0}
    assert thinker.engine_args["download_dir"] == "1e3"


def test_the_output_for_the_bundled_deployment_is_one_too(
    capfd: pytest.CaptureFixture[str], tiny_checkpoint: Path, tmp_path: Path
) -> None:
    shown = show(capfd, tiny_checkpoint)
    assert yaml.safe_load(shown)["stages"]["token2wav"]["engine_args"] is None
    (tmp_path / "shown.yaml").write_text(shown)
    again = show(capfd, tiny_checkpoint, "--deploy-config", tmp_path / "shown.yaml")
    assert without_origins(again) == without_origins(shown)


def test_each_value_has_its_origin(capfd: pytest.CaptureFixture[str], tiny_checkpoint: Path, deployment: Path) -> None:
    lines = show(capfd, tiny_checkpoint, "--deploy-config", deployment, *FLAGS).splitlines()
    origins = dict(line.strip().rsplit("  # ", 1) for line in lines if "  # " in line.strip())
    assert origins["dtype: float32"] == f"{deployment}:1"
    assert origins["max_num_seqs: 2"] == f"{deployment}:4"
    assert origins["top_p: 0.5"] == f"{deployment}:5"
    assert origins["alloy: Ethan"] == f"{deployment}:6"
    assert origins["max_num_seqs: 8"] == "--stage-overrides"
    assert origins["max_model_len: 4096"] == "--max-model-len"
    assert origins["limit_mm_per_prompt: {image: 2}"] == "--stage thinker.limit_mm_per_prompt={image: 2}"
    assert origins["top_k: 40"].startswith("bundled qwen2_5_omni.yaml:")
    assert origins["model_type: qwen2_5_omni"] == f"{tiny_checkpoint}/config.json"
    assert origins["generation_config: vllm"] == "set by the model"
    assert origins["# architecture: Qwen2_5OmniTalker"] == "set by the model"
    assert origins["# load_format: safetensors"] == "default"
    pinned = [origin for value, origin in origins.items() if value.startswith("stop_token_ids: [")]
    assert pinned == ["set by the model"]


def test_json_has_origins_as_data(capfd: pytest.CaptureFixture[str], tiny_checkpoint: Path, deployment: Path) -> None:
    shown: dict[str, Any] = json.loads(
        show(capfd, tiny_checkpoint, "--deploy-config", deployment, "--hf-token=secret", "--json")
    )
    talker = shown["stages"]["talker"]
    at = {"origin": "file", "source": str(deployment), "line": 4}
    assert talker["engine_args"]["max_num_seqs"] == {"value": 2, "set": True, **at}
    assert talker["default_sampling_params"]["detokenize"] == {"value": False, "origin": "model", "set": True}
    assert talker["default_sampling_params"]["top_k"]["origin"] == "bundled"
    assert talker["engine_args"]["hf_token"]["value"] == "(hidden)"
    assert shown["edges"]["thinker->talker"]["transport"]["origin"] == "bundled"


def test_config_rejects(capsys: pytest.CaptureFixture[str], tiny_checkpoint: Path) -> None:
    for args, why in [
        (["shw"], "config shw: did you mean 'show'?"),
        (["show"], "no model"),
        (["show", "m", "--model", "n"], "--model: give it without the flag"),
        (["show", "m", "--jsn"], "unknown flag '--jsn': did you mean '--json'?"),
        (["show", "/etc/passwd"], "it is a file; give the directory of a checkpoint"),
        (["show", "TINY", "--stage=talker.enable_prompt_embeds=false"], "this model runs with True only"),
        (["show", "TINY", '--stage-overrides={"voices": {"alloy": "Eathn"}}'], "voices.alloy = 'Eathn': did you mean"),
        (["show", "TINY", "--deploy-config", "."], "deployment file '.' cannot be read: Is a directory"),
    ]:
        args = [str(tiny_checkpoint) if arg == "TINY" else arg for arg in args]
        assert why in rejected(capsys, "config", *args), args


def test_wrong_file_of_flags(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "flags.yaml"
    for text, why in [("", "must be a mapping"), ("{", "while parsing"), ("- 1", "must be a")]:
        path.write_text(text)
        assert f"--config {path}: {why}" in rejected(capsys, "config", "show", "m", "--config", str(path)), text
