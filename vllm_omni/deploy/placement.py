"""``plan``: which host and devices each replica of each stage has.

Pure: numbers in, a plan out; no clock, no input or output, no Ray. The server's start, ``--dry-run``, whatever places
replicas on other hosts, and a simulator call it alike.

*Layers.* A replica of layer 0 owns its devices: no other one of layer 0 is on them. A replica of a layer above is on
devices that are owned, and alone there in its own layer. So weights of several stages share cards, and what reserves
cards (Ray, a user) needs to know of layer 0 alone. The layers of a device divide its memory (``process/memory.py``).

*Change.* ``add`` moves nothing that runs. ``remove`` marks a replica as draining: it keeps its devices until it is
released. A plan for other hosts or stages, ``plan(..., running=...)``, keeps whatever still has its devices.

From: Omni-Flow, section 6.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from msgspec import structs

from vllm_omni.deploy.resources import Host, Place, Replica, Stage, check_hosts
from vllm_omni.deploy.search import try_rules
from vllm_omni.deploy.shortage import explain
from vllm_omni.errors import ConfigError
from vllm_omni.names import suggest
from vllm_omni.process.memory import DevicePlan, StageMemory, divide, name_rank


@dataclass(frozen=True)
class PlacementPlan:
    """Where each replica is. A change makes another plan."""

    stages: tuple[Stage, ...]
    hosts: tuple[Host, ...]
    replicas: tuple[Replica, ...]

    def replica(self, name: str) -> Replica:
        """Raises ``ConfigError`` for a name that is not in the plan."""
        for one in self.replicas:
            if one.name == name:
                return one
        raise ConfigError(f"no replica {name!r}: {suggest(name, [one.name for one in self.replicas])}")

    def of_stage(self, stage: str) -> list[Replica]:
        return [one for one in self.replicas if one.stage == stage]

    def add(self, stage: str, count: int = 1) -> PlacementPlan:
        """Place further replicas of a stage; all others stay.

        Raises:
            NoPlace: there is too little room.
            ConfigError: there is no such stage.
        """
        names = [one.name for one in self.stages]
        if stage not in names:
            raise ConfigError(f"no stage {stage!r}: {suggest(stage, names)}")
        more = [replace(one, replicas=one.replicas + count) if one.name == stage else one for one in self.stages]
        return plan(more, self.hosts, self)

    def remove(self, name: str) -> PlacementPlan:
        """Start to drain a replica, which keeps its devices until it is released.

        Raises:
            ConfigError: replicas of other layers are on its devices, or there is no such replica.
        """
        replica = self.replica(name)
        if replica.is_draining:
            return self
        _check_removable(self.replicas, [replica])
        stages = (replace(one, replicas=one.replicas - 1) if one.name == replica.stage else one for one in self.stages)
        drained = (replace(one, is_draining=True) if one is replica else one for one in self.replicas)
        return PlacementPlan(tuple(stages), self.hosts, tuple(drained))

    def release(self, name: str) -> PlacementPlan:
        """Take a drained replica, whose processes have ended, out of the plan.

        Raises:
            ConfigError: it is not draining, or others that still run are on its devices.
        """
        replica = self.replica(name)
        if not replica.is_draining:
            raise ConfigError(f"replica {name!r} runs: remove it, and release it when it has ended")
        left = tuple(one for one in self.replicas if one is not replica)
        if replica.owns_devices and (riders := _on_devices_of(left, [replica])):
            raise ConfigError(f"replica {name!r}: {', '.join(riders)} on its devices must be released first")
        return PlacementPlan(self.stages, self.hosts, left)

    def memory(self) -> dict[Place, DevicePlan]:
        """Divide each device in use among the ranks on it whose needs are known.

        Raises:
            DoesNotFit: never for a plan that was admitted.
        """
        stages = {one.name: one for one in self.stages}
        hosts = {one.name: one for one in self.hosts}
        devices = {Place(host.name, one.name): one for host in self.hosts for one in host.devices}
        needs: dict[Place, list[StageMemory]] = {}
        mapped: set[tuple[Place, tuple[str, int]]] = set()
        for replica in self.replicas:
            stage = stages[replica.stage]
            for rank, place in enumerate(replica.places):
                if (memory := stage.memory_on(devices[place])) is None:
                    continue
                if (key := stage.mapped_weights(hosts[place.host], rank)) is not None:
                    memory = structs.replace(memory, weights=0) if (place, key) in mapped else memory
                    mapped.add((place, key))
                named = structs.replace(memory, stage=name_rank(replica.name, rank, len(replica.places)))
                needs.setdefault(place, []).append(named)
        return {place: divide(devices[place], ranks, are_loaded=False) for place, ranks in needs.items()}


def plan(stages: Sequence[Stage], hosts: Sequence[Host], running: PlacementPlan | None = None) -> PlacementPlan:
    """Place every replica of every stage.

    Args:
        running: what is there. Its replicas stay where they are if their devices are still in the inventory; those
            that are too many, or have other needs now, drain; those whose hosts are gone are placed again, together
            with what was on devices that only they owned.

    Raises:
        NoPlace: there is too little room; the message says what is short, where, and the nearest change that fits.
        ConfigError: a stage or a host is wrong, or a replica would have to drain beneath others.
    """
    check_hosts(hosts)
    by_name = {one.name: one for one in stages}
    if len(by_name) < len(stages):
        raise ConfigError(f"stages: two have one name: {', '.join(one.name for one in stages)}")
    for stage in stages:
        stage.check(by_name)
    held: list[Replica] = []
    if running is not None:
        ended = [replace(one, replicas=0, near=frozenset()) for one in running.stages if one.name not in by_name]
        by_name |= {one.name: one for one in ended}
        held = _drain(_still_there(running, hosts), by_name)
    numbers = {name: _missing_numbers(stage, held) for name, stage in by_name.items()}
    placed = _place(by_name, hosts, held, numbers)
    rank = {name: index for index, name in enumerate(by_name)}
    replicas = sorted([*held, *placed], key=lambda one: (rank[one.stage], one.number))
    in_use = {one.stage for one in replicas} | {one.name for one in stages}
    return PlacementPlan(tuple(one for one in by_name.values() if one.name in in_use), tuple(hosts), tuple(replicas))


def _place(
    stages: dict[str, Stage], hosts: Sequence[Host], held: Sequence[Replica], numbers: dict[str, list[int]]
) -> list[Replica]:
    placed = try_rules(stages, hosts, held, numbers)
    if placed is None:
        raise explain(stages, hosts, held, numbers)
    return placed


# -- what runs ---------------------------------------------------------------------------------------------------------


def _still_there(running: PlacementPlan, hosts: Sequence[Host]) -> list[Replica]:
    """The replicas that have all their devices, and of those above layer 0 the ones whose devices have an owner."""
    places = {Place(host.name, device.name) for host in hosts for device in host.devices}
    whole = [one for one in running.replicas if places.issuperset(one.places)]
    owned = {place for one in whole if one.owns_devices for place in one.places}
    return [one for one in whole if owned.issuperset(one.places)]


def _drain(there: Sequence[Replica], stages: dict[str, Stage]) -> list[Replica]:
    """Mark those that are too many, or no longer as their stage is."""
    leaving: list[Replica] = []
    for stage in sorted(stages.values(), key=lambda one: -one.layer):  # what is on top leaves first
        own = [one for one in there if one.stage == stage.name and not one.is_draining]
        changed = [one for one in own if not _is_current(one, stage)]
        current = [one for one in own if one not in changed]
        leaving += changed
        if (surplus := len(current) - stage.replicas) > 0:
            is_beneath = {one.name: bool(_beneath(there, leaving, one)) for one in current}
            leaving += sorted(current, key=lambda one: (is_beneath[one.name], -one.number))[:surplus]
    _check_removable(there, leaving)
    return [replace(one, is_draining=True) if one in leaving else one for one in there]


def _is_current(replica: Replica, stage: Stage) -> bool:
    is_in_layer = replica.layer == stage.layer or (stage.may_share and replica.layer > stage.layer)
    return is_in_layer and (len(replica.places), len(replica.hosts)) == (stage.ranks, stage.nodes)


def _check_removable(there: Sequence[Replica], leaving: Sequence[Replica]) -> None:
    for one in leaving:
        if riders := _beneath(there, leaving, one):
            raise ConfigError(
                f"replica {one.name!r} owns the devices of {', '.join(riders)}, which would have none: remove "
                f"{'it' if len(riders) == 1 else 'them'} first"
            )


def _beneath(there: Sequence[Replica], leaving: Sequence[Replica], replica: Replica) -> list[str]:
    """The replicas that stay on the devices that a replica owns."""
    staying = [one for one in there if not one.is_draining and one not in leaving]
    return _on_devices_of(staying, [replica]) if replica.owns_devices else []


def _on_devices_of(others: Sequence[Replica], owners: Sequence[Replica]) -> list[str]:
    owned = {place for one in owners for place in one.places}
    return [one.name for one in others if not one.owns_devices and not owned.isdisjoint(one.places)]


def _missing_numbers(stage: Stage, held: Sequence[Replica]) -> list[int]:
    """Numbers of the replicas to place: the lowest that no other has."""
    own = [one for one in held if one.stage == stage.name]
    taken = {one.number for one in own}
    count = stage.replicas - sum(not one.is_draining for one in own)
    return [number for number, _ in zip(_free_numbers(taken), range(count), strict=False)]


def _free_numbers(taken: set[int]) -> Iterator[int]:
    number = 0
    while True:
        if number not in taken:
            yield number
        number += 1
