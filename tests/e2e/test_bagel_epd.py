"""BAGEL with ``unified: false``: one engine reads contexts and writes texts, another gets their KV caches and denoises.

The cases and tolerances are those of ``test_bagel.py``.
"""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from tests.e2e.test_bagel import CASES, Case, Reference, Served, ask, expected_of
from vllm_omni.entrypoints.async_omni import AsyncOmni
from vllm_omni.testing.bagel import build

pytestmark = [pytest.mark.timeout(400), pytest.mark.long]

SETTINGS = [
    "dtype=float32",
    "max_model_len=512",
    "max_num_batched_tokens=64",
    "kv_cache_memory_bytes=16777216",
    "unified=false",
    "epd.admission_timeout_s=300",  # slow machines redo nothing
]

DENOISES = "language_model/G0"


class Split(NamedTuple):
    served: Served
    omni: AsyncOmni

    @property
    def num_tasks(self) -> dict[str, int]:
        return dict(self.omni.instance_statistics()["language_model"].num_tasks)


@pytest.fixture(scope="module")
async def split(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Split]:
    path: Path = build(tmp_path_factory.mktemp("bagel"))
    reference = Reference(path)
    with torch.no_grad():
        expected = {case.name: expected_of(reference, case) for case in CASES}
    overrides = [f"language_model.{one}" for one in SETTINGS]
    omni = await asyncio.to_thread(AsyncOmni, path, stage_overrides=overrides)
    yield Split(Served("apart", omni, expected, reference), omni)
    await omni.aclose()


def cases(*, pictures: bool) -> list[Case]:
    return [case for case in CASES if (case.picture is not None) == pictures]


async def test_pictures_and_texts_are_those_of_one_engine(split: Split) -> None:
    outputs = await asyncio.gather(*(ask(split.served, case) for case in CASES))
    for case, output in zip(CASES, outputs, strict=True):
        split.served.check(case, output)
    statistics = split.omni.instance_statistics()["language_model"]
    assert not statistics.num_redone and not any(statistics.work.values())
    assert statistics.num_migrations == len(cases(pictures=True))


async def test_only_pictures_reach_the_engine_that_denoises(split: Split) -> None:
    for has_pictures in (False, True):
        before = split.num_tasks[DENOISES]
        for case in cases(pictures=has_pictures):
            split.served.check(case, await ask(split.served, case))
        assert split.num_tasks[DENOISES] - before == (len(cases(pictures=True)) if has_pictures else 0)


async def test_a_picture_whose_engine_is_killed_is_made_by_another(split: Split) -> None:
    asked = [asyncio.create_task(ask(split.served, case)) for case in cases(pictures=True)]
    for _ in range(3000):
        if split.omni.instance_statistics()["language_model"].work[DENOISES]:
            break
        await asyncio.sleep(0.01)
    split.omni.orchestrator.engines[DENOISES].kill()
    outputs = await asyncio.gather(*asked)
    for case, output in zip(cases(pictures=True), outputs, strict=True):
        split.served.check(case, output)
    assert split.omni.instance_statistics()["language_model"].num_redone
