"""Qwen2.5-Omni answers alike whatever carries the rows: three stages in three processes, held against transformers.

Shared memory and TCP are those of the deployments in ``test_qwen2_5_omni_parity.py``; these are the others.
"""

import asyncio
from pathlib import Path
from typing import NamedTuple

import pytest

from tests import machine
from tests.contract.relays import BACKENDS
from tests.e2e.test_qwen2_5_omni_parity import FEW_CODES, MAX_TOKENS, WAVEFORM_TOLERANCE, answer, num_equal_until_tie
from tests.reference.media import CASES
from tests.reference.qwen2_5_omni import Answer, Reference
from vllm_omni.entrypoints.async_omni import AsyncOmni
from vllm_omni.testing import qwen2_5_omni as tiny

pytestmark = pytest.mark.long


class Deployment(NamedTuple):
    transport: str
    stage_overrides: tuple[str, ...] = ()


DEPLOYMENTS = {
    "inline": Deployment("inline"),
    "nixl": Deployment("nixl"),
    "mooncake": Deployment("mooncake"),
    "two ranks read": Deployment("shm", ("talker.tensor_parallel_size=2",)),
}


ASKED = [case for case in CASES if case.name in ("text", "video")]
SPEAKER = "Chelsie"


class Checkpoint(NamedTuple):
    path: Path
    reference: Reference
    expected: list[Answer]  # to ``ASKED``


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    path = tiny.build(tmp_path_factory.mktemp("checkpoint"))
    reference = Reference(path)
    params = {"max_tokens": MAX_TOKENS, "max_codes": FEW_CODES, "repetition_penalty": 1.0, "seed": 0}
    return Checkpoint(path, reference, [reference.answer(case, speaker=SPEAKER, **params) for case in ASKED])


@pytest.mark.parametrize("name", DEPLOYMENTS)
async def test_codes_and_waveform_equal_transformers(name: str, checkpoint: Checkpoint) -> None:
    transport, stage_overrides = DEPLOYMENTS[name]
    if needs := BACKENDS[transport].needs:
        machine.require(needs)
    omni = await asyncio.to_thread(
        AsyncOmni,
        checkpoint.path,
        dtype="float32",
        enforce_eager=True,
        max_model_len=2048,
        skip_mm_profiling=True,
        overrides={"edges": {"thinker->talker": {"transport": transport}}},
        stage_overrides=stage_overrides,
    )
    try:
        outputs = await asyncio.gather(*(answer(omni, case, max_codes=FEW_CODES) for case in ASKED))
    finally:
        await omni.aclose()
    assert omni.orchestrator.pipeline.validate({})["speaker"] == SPEAKER
    for case, output, expected in zip(ASKED, outputs, checkpoint.expected, strict=True):
        assert expected.speech is not None
        codes = output.multimodal_output["codec_ids"]
        if not num_equal_until_tie(codes, expected.speech.codes, expected.speech.margins, f"{case.name}, codes"):
            waveform = checkpoint.reference.vocode_windows(codes, SPEAKER)
            assert (output.multimodal_output["audio"] - waveform).abs().max() < WAVEFORM_TOLERANCE, case.name
