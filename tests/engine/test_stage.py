"""The configuration of a stage. Stages with engines: tests/entrypoints/test_async_omni.py, tests/e2e/."""

from pathlib import Path
from typing import get_args

import pytest
from transformers import AutoConfig

from vllm_omni.config import load_config
from vllm_omni.config.model import EngineType
from vllm_omni.engine.kinds import ENGINE_KINDS
from vllm_omni.engine.stage import StageEngine
from vllm_omni.errors import ConfigError
from vllm_omni.model_executor.pipeline import load_pipeline
from vllm_omni.testing import llava as llava


def test_budgets_with_asynchronous_steps_are_rejected_before_the_start(tmp_path: Path) -> None:
    path = llava.build(tmp_path)
    overrides = ["language.epd.tpot_ms=30", "language.async_scheduling=true"]
    config = load_config(path, dtype="float32", enforce_eager=True, stage_overrides=overrides)
    hf_config = AutoConfig.from_pretrained(path)
    pipeline = load_pipeline(config.model_type, str(path), hf_config)
    with pytest.raises(ConfigError, match="'language': async_scheduling = True: with budgets"):
        StageEngine(config.stages[0], pipeline.stages[0])


def test_every_engine_type_of_a_deployment_has_a_kind() -> None:
    assert set(ENGINE_KINDS) == set(get_args(EngineType))
