"""Which replica of a stage starts next; with engines: tests/e2e/test_scaling.py, tests/hosts/test_replicas.py."""

import asyncio
from collections.abc import Callable, Collection
from types import SimpleNamespace
from typing import Any

import pytest

from tests.engine.test_replicas import Replica
from vllm_omni.config import StageConfig
from vllm_omni.config.epd import Instance
from vllm_omni.engine.draining import Draining
from vllm_omni.engine.replicas import ReplicaGroup, make_replicas
from vllm_omni.engine.scaling import Scaling
from vllm_omni.errors import StageFailed
from vllm_omni.process.status import StageState

HOSTS = ["box-a", "box-b", "box-c"]


def make_scaling(
    joined: Collection[str] = HOSTS, while_it_starts: Callable[[Any], None] = lambda engine: None
) -> tuple[Scaling, Draining, ReplicaGroup]:
    """A stage of which one replica of three runs, each with a host of its own; only these hosts have joined."""
    config = StageConfig(stage_id=1, name="talker", model="model", max_replicas=3, host=HOSTS)

    def make_engine(_: StageConfig, instance: Instance) -> Any:
        return Replica(instance, host=HOSTS[instance.number])

    group = ReplicaGroup(config, [make_engine(config, make_replicas(config)[0])], "least_work")
    engines, nodes = dict(group.engines), {"talker": group}
    ignore = SimpleNamespace(add=lambda *_: None, remove=lambda *_: None)

    def remote(name: str) -> Any:
        host = HOSTS[int(name[-1])]
        return SimpleNamespace(host=host, has_host=host in joined, how_to_join=lambda: f"--stage {name}")

    running: Any = SimpleNamespace(add=lambda engine, *_: while_it_starts(engine), remote=remote)
    draining = Draining(engines, nodes, lambda: dict.fromkeys(HOSTS))
    options: Any = SimpleNamespace(stages=[config])
    maker: Any = SimpleNamespace(make_engine=make_engine)
    return Scaling(options, nodes, engines, maker, ignore.add, ignore, running, draining), draining, group  # type: ignore[arg-type]


async def scale(scaling: Scaling, number: int) -> None:
    scaling.set_target("talker", number)
    await scaling.wait("talker")


async def test_a_replica_whose_host_has_joined_starts_before_one_that_would_wait_for_its_host() -> None:
    joined = ["box-a", "box-c"]
    scaling, _, group = make_scaling(joined)
    await scale(scaling, 2)
    assert list(group.engines) == ["talker/0", "talker/2"]
    scaling.set_target("talker", 3)
    await asyncio.sleep(0)
    assert list(group.engines) == ["talker/0", "talker/2"]
    joined.append("box-b")
    await scaling.wait("talker")
    assert list(group.engines) == ["talker/0", "talker/2", "talker/1"]


async def test_where_no_host_joins_in_time_what_runs_stays_and_the_hosts_are_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("VLLM_OMNI_STAGE_READY_TIMEOUT_S", "0.001")
    scaling, _, _ = make_scaling(["box-a"])
    said = r"no host .* joined within 0\.001 s: 'box-b': --stage talker/1; 'box-c': --stage talker/2"
    with pytest.raises(StageFailed, match=said):
        await scale(scaling, 2)
    (report,) = scaling.report()
    assert (report.replicas, report.target) == (1, 1)


async def test_a_later_target_ends_the_wait_for_a_host() -> None:
    scaling, _, group = make_scaling(["box-a"])
    scaling.set_target("talker", 3)
    await asyncio.sleep(0)
    async with asyncio.timeout(60):
        await scale(scaling, 1)
    assert list(group.engines) == ["talker/0"]


async def test_no_replica_starts_on_a_host_that_is_drained() -> None:
    scaling, draining, group = make_scaling()
    await draining.drain("box-b", 1)
    await scale(scaling, 2)
    assert list(group.engines) == ["talker/0", "talker/2"]
    with pytest.raises(StageFailed, match=r"do not run are on hosts that are drained: talker/1 on 'box-b'"):
        await scale(scaling, 3)
    draining.undrain("box-b")
    await scale(scaling, 3)
    assert set(group.engines) == {"talker/0", "talker/1", "talker/2"}


async def test_a_replica_whose_host_is_drained_while_it_starts_gets_no_requests() -> None:
    scaling, draining, group = make_scaling(while_it_starts=lambda engine: draining.drained_hosts.add(engine.host))
    await scale(scaling, 2)
    assert group.engines["talker/1"].current_status().state is StageState.DRAINED
