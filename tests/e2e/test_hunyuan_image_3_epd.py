"""HunyuanImage-3 on three engines: one encodes images, one reads contexts, and one writes and denoises.

The cases and tolerances are those of ``test_hunyuan_image_3.py``.
"""

import asyncio
from pathlib import Path

import pytest
import torch

from tests.e2e.engines import PATIENT
from tests.e2e.test_hunyuan_image_3 import CASES, Reference, Served, ask, expected_of
from vllm_omni.entrypoints.async_omni import AsyncOmni
from vllm_omni.testing.hunyuan_image_3 import build

pytestmark = [pytest.mark.timeout(400), pytest.mark.long]


async def test_pictures_and_texts_are_those_of_one_engine(tmp_path: Path) -> None:
    path = build(tmp_path)
    reference = Reference(path)
    with torch.no_grad():
        expected = {case.name: expected_of(reference, case) for case in CASES}
    settings = ["dtype=float32", "max_model_len=512", "max_num_batched_tokens=64", "kv_cache_memory_bytes=16777216"]
    overrides = [f"language_model.{one}" for one in settings]
    omni = await asyncio.to_thread(
        AsyncOmni, path, stage_overrides=overrides, epd={"instances": "E:1,P:1,D:1", **PATIENT}
    )
    served = Served("split", omni, reference, expected)
    try:
        outputs = await asyncio.gather(*(ask(served, case) for case in CASES))
        statistics = omni.instance_statistics()["language_model"]
    finally:
        await omni.aclose()
    for case, output in zip(CASES, outputs, strict=True):
        served.check(case, output)
    assert statistics.num_migrations == len(CASES) and not statistics.num_redone
