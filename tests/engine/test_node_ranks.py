"""What an engine that spans hosts starts with on one of them (on two: tests/hosts/test_nodes.py)."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.platforms import current_platform

from tests.text_model import make_config
from vllm_omni.engine.memory import devices_of
from vllm_omni.engine.node_ranks import set_node
from vllm_omni.hosts.messages import Node
from vllm_omni.model_executor.rank_memory import RankMemory
from vllm_omni.process.memory_division import MEMORY
from vllm_omni.process.node_address import NODE_ADDRESS
from vllm_omni.process.tether import ServerTether


def make_part(rank: int, ids: list[int] | None = None) -> Any:
    """The configuration of one of two hosts with two ranks each."""
    config = make_config(num_layers=1, num_heads=4, head_size=32, vocab_size=8, block_size=16)
    parallel = SimpleNamespace(assigned_physical_gpu_ids=ids, local_world_size=2, world_size=4, nnodes=2)
    part = SimpleNamespace(parallel_config=parallel, device_config=config.device_config, additional_config={})
    set_node(part, Node(rank, "10.0.0.3", 4321), "127.0.0.1")  # type: ignore[arg-type]
    return part


def test_a_part_knows_its_place_the_store_and_its_address() -> None:
    part = make_part(1)
    parallel = part.parallel_config
    assert (parallel.node_rank, parallel.master_addr, parallel.master_port) == (1, "10.0.0.3", 4321)
    assert part.additional_config == {NODE_ADDRESS: "127.0.0.1"}


def test_vllm_gets_the_devices_of_the_ranks_on_this_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes their number for that of ranks on a host, and without them all cards of the machine."""
    assert make_part(0).parallel_config.assigned_physical_gpu_ids == [0, 1]
    assert make_part(0, [6, 7]).parallel_config.assigned_physical_gpu_ids == [6, 7]
    monkeypatch.setattr(type(current_platform), "is_cpu", lambda self: False)
    monkeypatch.setattr(type(current_platform), "device_id_to_physical_device_id", lambda self, one: one + 4)
    assert make_part(0).parallel_config.assigned_physical_gpu_ids == [4, 5]


@pytest.mark.parametrize(("rank", "name"), [(0, "thinker/node1 rank 0"), (3, "thinker/node1 rank 1")])
def test_a_rank_measures_itself_among_those_of_its_host(tmp_path: Path, rank: int, name: str) -> None:
    part = make_part(1)
    devices = devices_of(part)
    assert devices == ["cpu", "cpu"]
    tether = ServerTether(tmp_path, "thinker/node1")
    tether[MEMORY] = {"devices": devices, "ranks": {"cpu": ["thinker/node1 rank 0", "thinker/node1 rank 1"]}}
    part.additional_config = tether
    memory = RankMemory.of(part, rank)
    assert memory is not None
    assert memory._name == name
