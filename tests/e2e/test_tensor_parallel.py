"""Two ranks on the CPU publish the states that one model has."""

import asyncio
from pathlib import Path

import pytest
from msgspec import to_builtins
from transformers import Qwen2_5OmniConfig

from tests.e2e.test_qwen2_5_omni_parity import HIDDEN_STATE_TOLERANCE, MAX_TOKENS, expected_rows, think
from tests.reference.media import CASES
from tests.reference.qwen2_5_omni import Reference
from tests.shared_engines import BLOCK_SIZE
from vllm_omni.config import load_config
from vllm_omni.engine.stage import StageEngine
from vllm_omni.model_executor.models.qwen2_5_omni.pipeline import Qwen2_5OmniPipeline
from vllm_omni.process.run_directory import RunDirectory
from vllm_omni.process.tether import ServerTether
from vllm_omni.relay.hub import OPTIONS, EdgeOptions, RelayHub, RelayOptions
from vllm_omni.testing import qwen2_5_omni as tiny

pytestmark = pytest.mark.long


def start_thinker(path: Path, run_directory: RunDirectory, hub: RelayHub) -> StageEngine:
    config = load_config(
        path,
        dtype="float32",
        enforce_eager=True,
        max_model_len=2048,
        block_size=BLOCK_SIZE,
        skip_mm_profiling=True,
        stage_overrides=["thinker.tensor_parallel_size=2"],
    )
    pipeline = Qwen2_5OmniPipeline(str(path), Qwen2_5OmniConfig.from_pretrained(path))
    spec = next(spec for spec in pipeline.stages if spec.name == "thinker")
    with run_directory.inherited():
        engine = StageEngine(config.stage("thinker"), spec)
        tether = ServerTether(run_directory.path, "thinker")
        tether[OPTIONS] = to_builtins(
            RelayOptions(num_bytes=16 << 20, edges={"talker": EdgeOptions("shm", stream=True)})
        )
        engine.start(tether, hub)
    return engine


async def test_rank_zero_publishes_the_states_of_one_model(tmp_path: Path) -> None:
    path = tiny.build(tmp_path / "checkpoint")
    run_directory = RunDirectory()
    hub = RelayHub(RelayOptions(), prefault=False)
    engine = await asyncio.to_thread(start_thinker, path, run_directory, hub)
    try:
        cases = [case for case in CASES if case.name in ("text", "images", "audio_short")]
        replies = await asyncio.gather(*(think(engine, hub, case) for case in cases))
        num_cached = engine.llm.num_cached_rows
        again = await asyncio.gather(*(think(engine, hub, case, request_id=f"again-{case.name}") for case in cases))
        assert engine.llm.num_cached_rows > num_cached
    finally:
        await engine.aclose()
        await asyncio.to_thread(engine.shutdown)
        hub.close()
        run_directory.remove()
    reference = Reference(path)
    for case, reply in zip([*cases, *cases], [*replies, *again], strict=True):
        expected = reference.think(reference.process(case), MAX_TOKENS)
        assert reply.token_ids == expected.token_ids, case.name
        rows = expected_rows(reference, expected)
        assert reply.rows.shape == rows.shape, f"{case.name}: each row is published once"
        assert (reply.rows - rows).abs().max() < HIDDEN_STATE_TOLERANCE, case.name
