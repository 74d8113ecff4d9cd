"""Tiny pipelines, each built, loaded and tested at start once."""

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import pytest
from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit, pipeline_qwenimage_edit_plus

from vllm_omni.diffusion.loading import load_diffusers_pipeline
from vllm_omni.diffusion.stepper import PipelineStepper
from vllm_omni.testing import diffusion as tiny


@pytest.fixture(scope="session")
def load_tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Any]]:
    """Name -> the pipeline, always the same one; tests that change it copy it first."""
    root = tmp_path_factory.mktemp("tiny_pipelines")
    patch = pytest.MonkeyPatch()
    # They bring every input image to a million pixels, and have no argument against it.
    patch.setattr(pipeline_qwenimage_edit, "calculate_dimensions", lambda area, ratio: (64, 64, None))
    patch.setattr(pipeline_qwenimage_edit_plus, "calculate_dimensions", lambda area, ratio: (64, 64))

    @cache
    def load(name: str) -> Any:
        return load_diffusers_pipeline(str(tiny.build(root / name, name)))

    yield load
    patch.undo()


@pytest.fixture(scope="session")
def tested_rules(load_tiny: Callable[[str], Any]) -> Callable[[str], PipelineStepper]:
    """Name -> a stepper whose test at the start has run; ``make_stepper`` takes its result."""

    @cache
    def test(name: str) -> PipelineStepper:
        return PipelineStepper(load_tiny(name))

    return test


@pytest.fixture
def make_stepper(
    load_tiny: Callable[[str], Any], tested_rules: Callable[[str], PipelineStepper]
) -> Callable[..., PipelineStepper]:
    """Name and arguments -> a new stepper, without another test at the start."""

    def make(name: str, **arguments: Any) -> PipelineStepper:
        rules = arguments.pop("rules", None)
        if rules is None:
            rules = tested_rules(name).rules
        return PipelineStepper(load_tiny(name), rules=rules, **arguments)

    return make
