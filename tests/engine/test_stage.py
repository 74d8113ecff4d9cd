"""The door before the first stage. Stages with engines: tests/entrypoints/test_async_omni.py, tests/e2e/."""

import asyncio
from pathlib import Path

import pytest
from transformers import AutoConfig

from vllm_omni.config import load_config
from vllm_omni.engine.stage import Door, StageEngine
from vllm_omni.errors import ConfigError
from vllm_omni.model_executor.pipeline import load_pipeline
from vllm_omni.testing import llava as llava


async def test_a_closed_door_keeps_new_requests_out_and_lets_those_inside_be() -> None:
    door = Door()
    await door.enter("before")
    door.close()
    await door.enter("before")  # its second chunk
    late = asyncio.create_task(door.enter("late"))
    await asyncio.sleep(0)
    assert not late.done()
    assert door.inside == {"before"}
    door.open()
    await late
    assert door.inside == {"before", "late"}


async def test_a_door_is_empty_when_the_last_has_left() -> None:
    door = Door()
    await door.wait_until_empty()
    await door.enter("one")
    await door.enter("two")
    door.close()
    emptied = asyncio.create_task(door.wait_until_empty())
    for request_id in ("never entered", "one"):
        door.leave(request_id)
        await asyncio.sleep(0)
        assert not emptied.done()
    door.leave("two")
    await emptied


async def test_a_request_that_is_cancelled_at_the_door_has_not_entered() -> None:
    door = Door()
    door.close()
    waiting = asyncio.create_task(door.enter("one"))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    door.open()
    assert door.inside == set()


def test_budgets_and_asynchronous_steps_are_refused_before_the_start(tmp_path: Path) -> None:
    path = llava.build(tmp_path)
    overrides = ["language.epd.tpot_ms=30", "language.async_scheduling=true"]
    config = load_config(path, dtype="float32", enforce_eager=True, stage_overrides=overrides)
    hf_config = AutoConfig.from_pretrained(path)
    pipeline = load_pipeline(config.model_type, str(path), hf_config)
    with pytest.raises(ConfigError, match="'language': async_scheduling = True: with budgets"):
        StageEngine(config.stages[0], pipeline.stages[0])
