"""A pipeline that the caller gives, instead of the one for the checkpoint's model type."""

import os
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.graphs.pipelines import GraphsPipeline
from vllm_omni.config import load_config
from vllm_omni.config.given_pipeline import find_pipeline
from vllm_omni.errors import ConfigError

FILE = """
from tests.e2e.graphs.pipelines import GraphsPipeline

class Mine(GraphsPipeline):
    pass
"""


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "my_own_pipeline", raising=False)
    monkeypatch.setenv("PYTHONPATH", os.environ.get("PYTHONPATH", ""))
    path = tmp_path / "my_own_pipeline.py"
    path.write_text(FILE)
    return path


def test_a_class_a_module_and_a_file_are_the_same_to_a_deployment(file: Path) -> None:
    for given in (GraphsPipeline, "tests.e2e.graphs.pipelines:GraphsPipeline", f"{file}:Mine"):
        config = load_config("somewhere", pipeline=given, stage_overrides=["painter.model=elsewhere"])
        assert config.stage_names == ("writer", "critic", "painter")
        assert [stage.model for stage in config.stages] == ["somewhere", "somewhere", "elsewhere"]
        assert config.pipeline is not None
        assert config.model_type == config.pipeline.__name__
    assert os.environ["PYTHONPATH"].split(os.pathsep)[0] == str(file.parent)  # for the processes of the engines


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("no_colon", r"pipeline = 'no_colon': must be a class that derives from Pipeline, or its place"),
        ("nowhere.py:Mine", r"nowhere.py: no such file"),
        ("no_such_module:Mine", r"importing no_such_module failed: ModuleNotFoundError"),
        ("tests.e2e.graphs.pipelines:GraphPipeline", r"no class 'GraphPipeline'; did you mean 'GraphsPipeline'"),
        ("tests.e2e.graphs.pipelines:Writer", r"must be a class that derives from Pipeline"),
        (dict, r"must be a class that derives from Pipeline"),
        (7, r"pipeline = 7: must be"),
    ],
)
def test_what_is_no_pipeline_is_rejected(given: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        find_pipeline(given)


def test_a_file_that_another_module_hides_is_rejected(file: Path) -> None:
    hidden = file.with_name("json.py")
    hidden.write_text(FILE)
    with pytest.raises(ConfigError, match=r"a module 'json' is imported already; rename the file"):
        find_pipeline(f"{hidden}:Mine")


@pytest.mark.parametrize("body", ["import nothing_of_this_name", "class Other: ...", "Mine = 7", "raise SystemExit"])
def test_a_file_that_fails_leaves_the_path_of_modules_as_it_was(file: Path, body: str) -> None:
    before = list(sys.path), os.environ["PYTHONPATH"]
    file.write_text(body)
    with pytest.raises((ConfigError, SystemExit)):
        find_pipeline(f"{file}:Mine")
    assert (list(sys.path), os.environ["PYTHONPATH"]) == before
    file.write_text(FILE + "# repaired\n")
    assert find_pipeline(f"{file}:Mine").__name__ == "Mine"


def test_a_relative_file_is_found_from_the_working_directory(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file.rename(file.with_name("relative_pipeline.py"))
    monkeypatch.chdir(file.parent)
    for given in ("relative_pipeline.py:Mine", "./relative_pipeline.py:Mine"):
        assert find_pipeline(given).__module__ == "relative_pipeline"
    assert os.environ["PYTHONPATH"].split(os.pathsep)[0] == str(file.parent), "absolute, for other processes"


def test_a_pipeline_without_stages_or_with_a_model_type_is_rejected() -> None:
    class Bare(GraphsPipeline):
        deployment = {}

    with pytest.raises(ConfigError, match=r"Bare.deployment: must name the stages"):
        load_config("somewhere", pipeline=Bare)
    with pytest.raises(ConfigError, match=r"model_type: cannot be combined with a pipeline \(GraphsPipeline\)"):
        load_config("somewhere", pipeline=GraphsPipeline, overrides={"model_type": "language", "stages": {}})
