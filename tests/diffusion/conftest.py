"""Tiny pipelines, each built, loaded and checked at start once."""

from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit, pipeline_qwenimage_edit_plus

from vllm_omni.diffusion.loading import load_diffusers_pipeline
from vllm_omni.diffusion.merge_check import find_merging_rules
from vllm_omni.diffusion.merge_rules import MergeRule
from vllm_omni.diffusion.stepper import PipelineStepper


@pytest.fixture(scope="package")
def load_tiny(tiny_pipeline: Callable[[str], Path]) -> Iterator[Callable[[str], Any]]:
    """Name -> the pipeline, the same one for all tests here; a test that changes it copies it first."""
    patch = pytest.MonkeyPatch()
    # These pipelines scale every input image to a million pixels, and have no argument against it.
    patch.setattr(pipeline_qwenimage_edit, "calculate_dimensions", lambda area, ratio: (64, 64, None))
    patch.setattr(pipeline_qwenimage_edit_plus, "calculate_dimensions", lambda area, ratio: (64, 64))
    yield cache(lambda name: load_diffusers_pipeline(str(tiny_pipeline(name))))
    patch.undo()


@pytest.fixture(scope="package")
def checked_rules(load_tiny: Callable[[str], Any]) -> Callable[[str], Mapping[str, MergeRule]]:
    """Name -> the merge rules that hold for the pipeline."""

    @cache
    def check(name: str) -> Mapping[str, MergeRule]:
        with torch.no_grad():
            return find_merging_rules(load_tiny(name))

    return check


@pytest.fixture
def make_stepper(
    load_tiny: Callable[[str], Any], checked_rules: Callable[[str], Mapping[str, MergeRule]]
) -> Callable[..., PipelineStepper]:
    """Name and arguments -> a new stepper, without another check at start, whose steps are never late."""

    def make(name: str, rules: Mapping[str, MergeRule] | None = None, **arguments: Any) -> PipelineStepper:
        arguments = {"clock": lambda: 0.0, **arguments}
        return PipelineStepper(load_tiny(name), rules=checked_rules(name) if rules is None else rules, **arguments)

    return make
