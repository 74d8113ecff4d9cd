"""Instances whose caches travel over other transports than shared memory: replies equal those of one engine."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tests import machine
from tests.contract.relays import BACKENDS
from tests.e2e.engines import MARKS, PATIENT, UPSTREAM, greedy, tokens_of, upstream_answers
from tests.e2e.test_epd_instances import count_leases, make_prompts
from vllm_omni import OmniLLM
from vllm_omni.engine.instances import InstanceGroup
from vllm_omni.relay.hub import INLINE_BYTES
from vllm_omni.testing import llava as llava

pytestmark = [*MARKS, pytest.mark.long]

PROMPTS = make_prompts()[1:6]  # a text, and four with an image each
RELEASED_S = 20.0

# Embeddings too large to be part of their reference.
SHAPE = llava.Shape(image_size=112, hidden_size=128)
assert SHAPE.num_image_tokens * SHAPE.hidden_size * 4 > INLINE_BYTES


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return llava.build(tmp_path_factory.mktemp("llava"), SHAPE)


@pytest.fixture(scope="module")
def expected(checkpoint: Path) -> list[list[int]]:
    return tokens_of(upstream_answers(checkpoint, PROMPTS))


@pytest.mark.parametrize("transport", ["tcp", "nixl", "mooncake"])
def test_embeddings_and_pages_travel_over_any_transport(
    transport: str, checkpoint: Path, expected: list[list[int]]
) -> None:
    if needs := BACKENDS[transport].needs:
        machine.require(needs)
    # A long timeout for slow machines: what is not pulled in time would be computed again.
    epd = {"instances": "E:1,P:1,D:1", "transport": transport, "relay_bytes": 64 << 20, **PATIENT}
    with OmniLLM(checkpoint, **UPSTREAM, epd=epd) as omni:
        assert tokens_of(omni.generate(PROMPTS, greedy(), use_tqdm=False)) == expected
        group = omni.engine.orchestrator.nodes["language"]
        assert isinstance(group, InstanceGroup)
        statistics = group.statistics()
        of_relay = {name: omni.run(engine.relay_statistics())[0][transport] for name, engine in group.engines.items()}
        omni.run(omni.engine.reset_mm_cache())
        assert omni.run(all_leases_end(group))
    assert statistics.num_tasks == {"language/E0": 4, "language/P0": 5, "language/D0": 5}
    assert (statistics.num_encoded, statistics.num_migrations, statistics.num_redone) == (4, 5, 0)
    counts = {name: (one["num_puts"], one["num_gets"]) for name, one in of_relay.items()}
    assert counts == {"language/E0": (4, 0), "language/P0": (5, 4), "language/D0": (0, 5)}


async def all_leases_end(group: InstanceGroup) -> bool:
    """Whether every lease ends in time: between hosts, a release is a message."""
    leases: dict[str, Any] = {}
    for _ in range(int(RELEASED_S / 0.02)):
        leases = await count_leases(group)
        if not any(leases.values()):
            return True
        await asyncio.sleep(0.02)
    return False
