"""A package that is installed beside this one adds a pipeline by its entry points.

That it runs, the commands of docs/adding_a_model.md show (``test_documented_commands.py``).
"""

from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from vllm_omni.config import checkpoint, load_config
from vllm_omni.errors import ConfigError
from vllm_omni.model_executor.pipeline import find_pipeline_cls


def add_pipeline(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    entry = EntryPoint("mine", value, checkpoint.PIPELINE_GROUP)
    monkeypatch.setattr(checkpoint, "entry_points", lambda group: [entry] if group == checkpoint.PIPELINE_GROUP else [])


def test_an_added_model_type_is_supported(monkeypatch: pytest.MonkeyPatch) -> None:
    add_pipeline(monkeypatch, "my_package.pipeline:MyPipeline")
    assert set(checkpoint.supported_model_types()) == {"mine", *checkpoint.bundled_model_types()}


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch, tiny_checkpoint: Path) -> None:
    add_pipeline(monkeypatch, "my_package.pipeline:MyPipeline")
    with pytest.raises(ConfigError, match=r"model type 'mine': its package cannot be imported: .*my_package"):
        load_config(tiny_checkpoint, overrides={"model_type": "mine"})


def test_a_package_without_a_deployment_reports_where_it_is_expected(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, tiny_checkpoint: Path
) -> None:
    (tmp_path / "my_module.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    add_pipeline(monkeypatch, "my_module:MyPipeline")
    with pytest.raises(ConfigError, match=rf"{tmp_path}/mine.yaml"):
        load_config(tiny_checkpoint, overrides={"model_type": "mine"})


def test_a_model_type_without_a_pipeline_is_rejected() -> None:
    with pytest.raises(ConfigError, match="no pipeline for model type 'other'; known: bagel, diffusers, "):
        find_pipeline_cls("other")
