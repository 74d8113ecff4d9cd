"""Replicas on one GPU that share one copy of their weights: ``pytest -m gpu``."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from tests.e2e.engines import MARKS, UPSTREAM
from tests.e2e.test_replica_engines import TWICE, ask_all, assert_both_have_worked
from tests.e2e.test_replicas import until
from vllm_omni import OmniLLM
from vllm_omni.process.memory_division import MEMORY, MemoryDivision
from vllm_omni.process.status import StageState, StageStatus

pytestmark = [
    *MARKS,
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device"),
    pytest.mark.timeout(400),
]

ON_GPU: dict[str, Any] = {**UPSTREAM, "attention_backend": "TRITON_ATTN", "mm_encoder_attn_backend": "TORCH_SDPA"}


def used_bytes() -> int:
    free, total = torch.cuda.mem_get_info()
    return total - free


@pytest.fixture(scope="module")
def plain(llava_checkpoint: Path) -> list[list[int]]:
    """Replies with vLLM's default loader."""
    with OmniLLM(llava_checkpoint, **ON_GPU) as omni:
        return omni.run(ask_all(omni))


@pytest.fixture(scope="module")
def shared(llava_checkpoint: Path) -> Iterator[OmniLLM]:
    before = used_bytes()
    with OmniLLM(llava_checkpoint, **ON_GPU, load_format="omni_shared", stage_overrides=TWICE) as omni:
        yield omni
    assert used_bytes() - before < 16 << 20, "all of it is free again"


def test_replicas_answer_as_with_the_default_loader(shared: OmniLLM, plain: list[list[int]]) -> None:
    assert shared.run(ask_all(shared)) == plain
    assert_both_have_worked(shared)


def test_each_replica_that_is_killed_finds_the_weights_again(shared: OmniLLM, plain: list[list[int]]) -> None:
    """So one of the two that were killed has loaded them."""

    async def kill_each() -> None:
        for engine in shared.engine.orchestrator.nodes["language"].engines.values():  # type: ignore[attr-defined]
            for pid in engine.pids():
                psutil.Process(pid).kill()
            await until(lambda engine=engine: engine.current_status() == StageStatus(StageState.RUNNING, None, 1))

    shared.run(kill_each())
    assert shared.run(ask_all(shared)) == plain


def test_the_memory_plan_counts_them_once(shared: OmniLLM, llava_checkpoint: Path) -> None:
    engine = next(iter(shared.engine.orchestrator.nodes["language"].engines.values()))  # type: ignore[attr-defined]
    tether = engine.vllm_config.additional_config
    ((device, ranks),) = tether[MEMORY]["ranks"].items()
    plan = MemoryDivision(tether.directory, device, ranks).plan()
    assert plan is not None
    smaller, larger = sorted(stage.weights for stage in plan.stages)
    checkpoint = sum(file.stat().st_size for file in llava_checkpoint.glob("*.safetensors"))
    assert larger - smaller > 0.9 * checkpoint
