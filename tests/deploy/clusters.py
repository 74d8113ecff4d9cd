"""Small clusters and stages, and plans as text, for the tests of placement."""

from collections.abc import Sequence
from typing import Any

import pytest

from vllm_omni.deploy.placement import PlacementPlan, plan
from vllm_omni.deploy.resources import Host, Stage
from vllm_omni.deploy.shortage import NoPlace
from vllm_omni.process.memory import Device, StageMemory

GIB = 1 << 30


def memory(gib: float, *, cache: float = 0, **fields: Any) -> StageMemory:
    """Weights of so many GiB, and a cache of at least so many."""
    fields = {"activations": 0, "cache_max": int(8 * cache * GIB), "max_model_len": 4096, "max_num_seqs": 8, **fields}
    return StageMemory(stage="", weights=int(gib * GIB), cache_min=int(cache * GIB), **fields)


def cards(name: str, number: int = 8, gib: int = 80) -> Host:
    return Host(name, tuple(Device(name=f"cuda:{i}", total=gib * GIB, free=gib * GIB) for i in range(number)))


def cpu(name: str, gib: int = 64) -> Host:
    return Host(name, (Device(name="cpu", total=gib * GIB, free=gib * GIB, is_host=True),), has_cards=False)


def qwen(**fields: Any) -> list[Stage]:
    """As ``needs.stages_of`` makes them: the first stage owns cards, the others share them."""
    thinker = Stage(name="thinker", may_share=True, near=frozenset({"talker"}), **{"memory": memory(16), **fields})
    talker = Stage(name="talker", layer=1, may_share=True, near=frozenset({"thinker"}), memory=memory(3))
    return [thinker, talker, Stage(name="token2wav", layer=1, may_share=True, memory=memory(2))]


def where(made: PlacementPlan) -> dict[str, list[str]]:
    """Replica -> its devices: "a cuda:0"."""
    return {one.name: [f"{place.host} {place.device}" for place in one.places] for one in made.replicas}


def rejected(stages: Sequence[Stage], hosts: Sequence[Host], running: PlacementPlan | None = None) -> NoPlace:
    with pytest.raises(NoPlace) as raised:
        plan(stages, hosts, running)
    return raised.value
