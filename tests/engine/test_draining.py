"""Engines and hosts that are taken out of service, with engines that answer from a script."""

import asyncio
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from tests.engine.test_replicas import Replica, ask, hold, make_group
from vllm_omni.config import StageConfig
from vllm_omni.engine.draining import Draining, HostStatus
from vllm_omni.engine.replicas import ReplicaGroup, make_replicas
from vllm_omni.errors import InvalidRequest
from vllm_omni.process.status import StageState, StageStatus

HOSTS = {"talker": ["box-a", "box-b"], "vocoder": [None, "box-b"]}


def make_stages(hosts: Mapping[str, Sequence[str | None]]) -> tuple[Draining, dict[str, Any], dict[str, Any]]:
    """Stages with a replica on each of their hosts, and what drains them; all of these engines by name."""
    nodes, engines = {}, {}
    for stage, names in hosts.items():
        config = StageConfig(stage_id=1, name=stage, model="model", replicas=len(names))
        replicas = [Replica(one, host=host) for one, host in zip(make_replicas(config), names, strict=True)]
        nodes[stage] = ReplicaGroup(config, replicas, "round_robin")  # type: ignore[arg-type]
        engines |= nodes[stage].engines
    addresses = {host: f"10.0.0.{ord(host[-1])}" for names in hosts.values() for host in names if host is not None}
    return Draining(engines, nodes, lambda: addresses), nodes, engines


def states(engines: Mapping[str, Any]) -> dict[str, str]:
    return {name: str(engine.current_status().state) for name, engine in engines.items()}


async def test_a_drained_replica_ends_its_requests_and_gets_no_others() -> None:
    group, replicas = make_group()
    draining = Draining(group.engines, {"talker": group}, dict)
    replicas[0].is_open.clear()
    running = await hold(group, replicas, "a")
    (drained,) = await draining.drain("talker/0", 0.01)
    assert (drained.engine, drained.num_requests, drained.is_idle) == ("talker/0", 1, False)
    for name in "bcd":
        await ask(group, name)
    assert [len(one.got) for one in replicas] == [1, 3]
    assert replicas[0].current_status().state is StageState.DRAINED
    assert group.current_status() == StageStatus()
    waiting = asyncio.create_task(draining.drain("talker/0", 60))
    await asyncio.sleep(0)
    replicas[0].is_open.set()
    (drained,) = await waiting
    assert (drained.num_requests, drained.is_idle, await running) == (0, True, ["0", "1", "2"])
    assert draining.undrain("talker/0")[0].status == StageStatus()
    await ask(group, "e")
    assert len(replicas[0].got) == 2


async def test_an_engine_is_not_idle_while_another_stage_reads_what_it_has_made() -> None:
    draining, _, engines = make_stages(HOSTS)
    engines["talker/1"].num_leases = 1
    (drained,) = await draining.drain("talker/1", 0)
    assert (drained.num_requests, drained.is_idle) == (0, False)
    engines["talker/1"].num_leases = 0
    assert (await draining.drain("talker/1", 0))[0].is_idle


async def test_an_engine_is_not_idle_while_a_request_is_on_its_way_to_it() -> None:
    draining, nodes, _ = make_stages({"talker": ["box-a", "box-b"]})
    state = (
        await nodes["talker"]._make_request(SimpleNamespace(prompt=[1], args={}), _context(), frozenset(), "")
    ).state
    assignment = nodes["talker"].assign(state)
    (drained,) = await draining.drain(assignment.instance, 0)
    assert (drained.num_requests, drained.is_idle) == (1, False)
    nodes["talker"].router.release(assignment)
    assert (await draining.drain(assignment.instance, 0))[0].is_idle


def _context() -> Any:
    return SimpleNamespace(request_id="a", session_id=None, lora_request=None)


async def test_all_engines_of_a_drained_host_end_their_requests_and_get_no_others() -> None:
    draining, nodes, engines = make_stages(HOSTS)
    for one in engines.values():
        one.is_open.clear()
    running = [
        await hold(group, list(group.engines.values()), f"{number}")
        for group in nodes.values()
        for number in range(len(group.engines))
    ]
    waiting = asyncio.create_task(draining.drain("box-b", 60))
    await asyncio.sleep(0)
    assert states(engines) == {
        "talker/0": "running",
        "talker/1": "drained",
        "vocoder/0": "running",
        "vocoder/1": "drained",
    }
    for one in engines.values():
        one.is_open.set()
    assert [(one.engine, one.num_requests, one.is_idle) for one in await waiting] == [
        ("talker/1", 0, True),
        ("vocoder/1", 0, True),
    ]
    assert await asyncio.gather(*running) == [["0", "1", "2"]] * 4
    for group in nodes.values():
        for name in "bcd":
            await ask(group, name)
    assert {name: len(one.got) for name, one in engines.items()} == {
        "talker/0": 4,
        "talker/1": 1,
        "vocoder/0": 4,
        "vocoder/1": 1,
    }
    assert [one.engine for one in draining.undrain("box-b")] == ["talker/1", "vocoder/1"]
    assert set(states(engines).values()) == {"running"}


async def test_a_host_that_has_the_last_engines_of_stages_is_not_drained() -> None:
    draining, _, engines = make_stages(
        {"reader": [None, "box-b"], "talker": ["box-b", "box-b"], "vocoder": ["box-b"] * 2}
    )
    with pytest.raises(InvalidRequest, match=r"host 'box-b' cannot be drained: .* stage 'talker' and 'vocoder'$"):
        await draining.drain("box-b", 60)
    assert set(states(engines).values()) == {"running"}


async def test_the_last_engine_of_a_stage_that_gets_requests_is_not_drained() -> None:
    draining, _, engines = make_stages(HOSTS)
    await draining.drain("talker/0", 1)
    before = states(engines)
    with pytest.raises(InvalidRequest, match="engine 'talker/1' cannot be drained: no other engine of its stage gets"):
        await draining.drain("talker/1", 1)
    with pytest.raises(InvalidRequest, match=r"host 'box-b' cannot be drained: no engine elsewhere .* stage 'talker'$"):
        await draining.drain("box-b", 1)
    assert states(engines) == before


async def test_what_is_drained_already_stays_drained_whatever_has_become_of_the_others() -> None:
    """The command asks again until the engine is idle."""
    draining, _, engines = make_stages(HOSTS)
    await draining.drain("talker/1", 1)
    engines["talker/0"].has_died = True
    assert (await draining.drain("talker/1", 1))[0].is_idle
    assert engines["talker/1"].current_status().state is StageState.DRAINED


async def test_a_host_that_is_away_can_be_drained_and_stays_so_when_it_is_back() -> None:
    draining, nodes, engines = make_stages(HOSTS)
    for name in ("talker/1", "vocoder/1"):
        engines[name].has_died = True
    assert [(one.is_idle, one.status.state) for one in await draining.drain("box-b", 60)] == [
        (True, StageState.RESTARTING)
    ] * 2
    for name in ("talker/1", "vocoder/1"):
        engines[name].has_died = False  # restarted
        assert engines[name].current_status().state is StageState.DRAINED
    await ask(nodes["talker"], "a")
    assert not engines["talker/1"].got


async def test_a_replica_that_ends_while_it_is_drained_is_idle() -> None:
    draining, nodes, engines = make_stages(HOSTS)
    engines["talker/1"].num_leases = 1
    waiting = asyncio.create_task(draining.drain("talker/1", 60))
    await asyncio.sleep(0)
    nodes["talker"].remove("talker/1")
    (drained,) = await waiting
    assert (drained.num_requests, drained.is_idle) == (0, True)


@pytest.mark.parametrize(
    "name, message",
    [
        ("talker/3", r"no engine or host 'talker/3': did you mean 'talker/\d'\?"),
        ("box-c", r"no engine or host 'box-c': did you mean 'box-\w'\? valid: .*vocoder/1, box-a, box-b"),
        ("reader", "'reader' is an engine, and a host: give the host's engines: talker/0, reader"),
    ],
)
async def test_a_name_that_is_neither_or_both_is_rejected(name: str, message: str) -> None:
    hosts = HOSTS if name != "reader" else {"talker": ["reader", None]}
    draining, nodes, engines = make_stages(hosts)
    if name == "reader":
        reader = Replica(make_replicas(StageConfig(stage_id=0, name="reader", model="model"))[0], host="reader")
        reader.name = "reader"  # the only engine of its stage
        engines["reader"], nodes["reader"] = reader, reader
    for call in (lambda: draining.drain(name, 1), lambda: asyncio.sleep(0, draining.undrain(name))):
        with pytest.raises(InvalidRequest, match=message):
            await call()
    assert set(states(engines).values()) == {"running"}


async def test_without_other_hosts_none_is_suggested() -> None:
    draining, _, _ = make_stages({"talker": [None, None]})
    assert draining.host_report() == {}
    with pytest.raises(InvalidRequest, match=r"^no engine 'talkr/1': did you mean 'talker/1'"):
        await draining.drain("talkr/1", 1)


async def test_each_host_is_reported_with_its_engines_its_address_and_whether_it_is_drained() -> None:
    draining, _, _ = make_stages(HOSTS)
    await draining.drain("box-b", 1)
    assert draining.host_report() == {
        "box-a": HostStatus(["talker/0"], "10.0.0.97", is_drained=False),
        "box-b": HostStatus(["talker/1", "vocoder/1"], "10.0.0.98", is_drained=True),
    }
    draining.undrain("vocoder/1")
    assert not draining.host_report()["box-b"].is_drained  # a part of it is back


async def test_a_host_that_is_not_drained_is_not_reported_as_drained() -> None:
    draining, _, _ = make_stages({"talker": ["box-b", "box-b"]})
    with pytest.raises(InvalidRequest):
        await draining.drain("box-b", 1)
    assert not draining.drained_hosts


async def test_a_host_without_an_engine_can_be_drained() -> None:
    """A replica may start there later."""
    draining, nodes, engines = make_stages(HOSTS)
    for stage, name in (("talker", "talker/1"), ("vocoder", "vocoder/1")):
        nodes[stage].remove(name)
        del engines[name]
    assert await draining.drain("box-b", 1) == []
    assert draining.host_report()["box-b"] == HostStatus([], "10.0.0.98", is_drained=True)
    assert draining.undrain("box-b") == []
    assert not draining.drained_hosts
