"""Engines that map one copy of their weights answer as others do, in the memory of one."""

import asyncio
import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pytest
from vllm.lora.request import LoRARequest

from tests.e2e.engines import MARKS, UPSTREAM
from tests.e2e.test_epd_recovery import ENGINE, ONE_AT_A_TIME, Upstream, adapter, read_all, upstream
from tests.e2e.test_replica_engines import TWICE, ask_all, assert_both_have_worked, plain
from tests.e2e.test_replicas import assert_equal, until
from vllm_omni import OmniLLM
from vllm_omni.errors import StageFailed
from vllm_omni.messages.outputs import OmniRequestOutput, collect
from vllm_omni.process.memory_division import MEMORY, MemoryDivision
from vllm_omni.process.proc import SHM
from vllm_omni.process.status import StageState, StageStatus
from vllm_omni.testing import qwen2_5_omni

pytestmark = [*MARKS, pytest.mark.timeout(400), pytest.mark.long]  # units: tests/*/test_shared_weights.py

__all__ = ["adapter", "plain", "upstream"]  # fixtures

SHARED: dict[str, Any] = {"load_format": "omni_shared"}
SHAPE = qwen2_5_omni.TinyShape(thinker_layers=4, thinker_heads=8, thinker_kv_heads=2, thinker_intermediate_size=1024)
PROMPT = "<|im_start|>user\nHello {}<|im_end|>\n<|im_start|>assistant\n"
PARAMS: dict[str, Any] = {
    "thinker": {"temperature": 0.0, "max_tokens": 24, "ignore_eos": True},
    "talker": {"temperature": 0.0, "max_tokens": 40},
    "token2wav": {"seed": 0},
}
STAGES = ("thinker", "talker", "token2wav")
MAX_RATIO = 1.05
"""Weight bytes of two engines over those of one: the goal of the project. Pages that an engine writes are its own."""


class Mapped(NamedTuple):
    """The files of weights that a process has mapped."""

    inodes: set[int]
    resident: int  # bytes
    proportional: int  # bytes, each page divided among the processes that have mapped it


def mapped_weights(pid: int) -> Mapped:
    found, is_weights = Mapped(set(), 0, 0), False
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            is_weights = "-weights-" in line
            if is_weights:
                found.inodes.add(int(line.split()[4]))
        elif is_weights and (one := re.match(r"(Rss|Pss): +(\d+) kB", line)):
            num_bytes = int(one[2]) * 1024
            rss, pss = (num_bytes, 0) if one[1] == "Rss" else (0, num_bytes)
            found = Mapped(found.inodes, found.resident + rss, found.proportional + pss)
    return found


def engines_of(omni: OmniLLM, stage: str) -> list[Any]:
    return list(omni.engine.orchestrator.nodes[stage].engines.values())  # type: ignore[attr-defined]


def in_shared_memory() -> set[str]:
    return {file.name for file in SHM.glob("vllm-omni-*-weights-*")}


# -- a language model --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def shared_llava(llava_checkpoint: Path) -> Iterator[OmniLLM]:
    before = in_shared_memory()
    with OmniLLM(llava_checkpoint, **UPSTREAM, **SHARED, stage_overrides=TWICE) as omni:
        yield omni
    assert in_shared_memory() <= before


def test_a_language_model_answers_as_with_the_default_loader(shared_llava: OmniLLM, plain: list[list[int]]) -> None:
    assert shared_llava.run(ask_all(shared_llava)) == plain
    assert_both_have_worked(shared_llava)


def test_each_replica_that_is_killed_maps_the_same_file_again(shared_llava: OmniLLM, plain: list[list[int]]) -> None:
    """So one of the two that were killed has loaded the weights, which stayed."""
    files = [mapped_weights(engine.pids()[0]).inodes for engine in engines_of(shared_llava, "language")]
    assert files[0] == files[1] and len(files[0]) == 1

    async def kill_each() -> None:
        for engine in engines_of(shared_llava, "language"):
            psutil.Process(engine.pids()[0]).kill()
            await until(lambda engine=engine: engine.current_status() == StageStatus(StageState.RUNNING, None, 1))

    shared_llava.run(kill_each())
    assert [mapped_weights(engine.pids()[0]).inodes for engine in engines_of(shared_llava, "language")] == files
    assert shared_llava.run(ask_all(shared_llava)) == plain


def test_ranks_share_with_the_same_ranks_of_other_replicas(llava_checkpoint: Path, plain: list[list[int]]) -> None:
    with OmniLLM(llava_checkpoint, **UPSTREAM, **SHARED, tensor_parallel_size=2, stage_overrides=TWICE) as omni:
        assert omni.run(ask_all(omni)) == plain
        files = [mapped_weights(pid).inodes for engine in engines_of(omni, "language") for pid in engine.pids()]
        assert len(set.union(*files)) == 2
        assert sorted(len(one) for one in files) == [0, 0, 1, 1, 1, 1], "two engine cores, four workers"


def test_adapters_work_beside_shared_weights(llava_checkpoint: Path, upstream: Upstream, adapter: LoRARequest) -> None:
    with OmniLLM(llava_checkpoint, **ENGINE | ONE_AT_A_TIME, **SHARED, stage_overrides=TWICE) as omni:
        for _ in range(2):
            assert omni.run(read_all(omni, adapter)) == (upstream.plain, upstream.adapted)


def test_a_start_whose_loading_engine_is_killed_fails_and_leaves_nothing(llava_checkpoint: Path) -> None:
    before, killed = in_shared_memory(), threading.Event()

    def kill_who_loads() -> None:
        deadline = time.monotonic() + 200
        while time.monotonic() < deadline and not killed.is_set():
            for process in psutil.Process().children(recursive=True):
                if any(file.path.endswith(".weights-lock") for file in _open_files(process)):
                    process.kill()
                    killed.set()
                    return
            time.sleep(0.01)

    thread = threading.Thread(target=kill_who_loads)
    thread.start()
    with pytest.raises(StageFailed, match=r"language/[01]"):
        OmniLLM(llava_checkpoint, **UPSTREAM, **SHARED, stage_overrides=TWICE)
    thread.join()
    assert killed.is_set() and in_shared_memory() <= before


def _open_files(process: psutil.Process) -> list[Any]:
    try:
        return process.open_files()
    except psutil.Error:  # it has just ended
        return []


# -- Qwen2.5-Omni ------------------------------------------------------------------------------------------------------


def start(checkpoint: Path, *stage_overrides: str, **more: Any) -> OmniLLM:
    small: dict[str, Any] = {"enforce_eager": True, "max_model_len": 1024, "skip_mm_profiling": True}
    return OmniLLM(checkpoint, dtype="float32", stage_overrides=stage_overrides, **small, **more)


async def speak(omni: OmniLLM) -> list[OmniRequestOutput]:
    return await asyncio.gather(*(collect(omni.engine.generate(PROMPT.format(n), PARAMS)) for n in range(4)))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return qwen2_5_omni.build(tmp_path_factory.mktemp("checkpoint"), shape=SHAPE)


@pytest.fixture(scope="module")
def by_default(checkpoint: Path) -> list[OmniRequestOutput]:
    with start(checkpoint) as omni:
        return omni.run(speak(omni))


@pytest.fixture(scope="module")
def shared(checkpoint: Path) -> Iterator[OmniLLM]:
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("VLLM_CPU_KVCACHE_SPACE", raising=False)  # so that the memory is divided
        with start(checkpoint, *(f"{name}.replicas=2" for name in STAGES), **SHARED) as omni:
            yield omni


def test_all_stages_answer_as_with_the_default_loader(by_default: list[OmniRequestOutput], shared: OmniLLM) -> None:
    for one, expected in zip(shared.run(speak(shared)), by_default, strict=True):
        assert_equal(one, expected)


def test_two_thinkers_have_the_weights_of_one(shared: OmniLLM) -> None:
    shared.run(speak(shared))
    one, other = (mapped_weights(engine.pids()[0]) for engine in engines_of(shared, "thinker"))
    assert one.inodes == other.inodes
    assert one.proportional + other.proportional <= MAX_RATIO * min(one.resident, other.resident)


def test_two_vocoders_have_the_weights_of_one(shared: OmniLLM) -> None:
    shared.run(speak(shared))
    one, other = (mapped_weights(engine.pids()[0]) for engine in engines_of(shared, "token2wav"))
    assert one.inodes == other.inodes
    assert one.proportional + other.proportional <= MAX_RATIO * max(one.resident, other.resident)


def test_the_memory_plan_counts_them_once(shared: OmniLLM) -> None:
    engine = engines_of(shared, "thinker")[0]
    tether = engine.vllm_config.additional_config
    plan = MemoryDivision(tether.directory, "cpu", tether[MEMORY]["ranks"]["cpu"]).plan()
    assert plan is not None
    weights = {stage.stage: stage.weights for stage in plan.stages}
    sizes = sorted([weights["thinker/0"], weights["thinker/1"]])
    assert sizes[1] - sizes[0] > 0.9 * mapped_weights(engine.pids()[0]).resident
