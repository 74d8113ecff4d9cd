"""``explain``: what a plan lacks, where, and the nearest change with which everything would have a place."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from msgspec import structs

from vllm_omni.deploy.resources import Host, Replica, Stage
from vllm_omni.deploy.search import DeviceState, NoDevices, Rules, search, try_rules
from vllm_omni.errors import ConfigError
from vllm_omni.process.memory import StageMemory, changes, describe_shortage, format_bytes

_SIZES = ("weights", "activations", "cache_min", "cache_max", "cache", "activations_per_seq")


@dataclass(frozen=True)
class Change:
    """A change with which everything has a place."""

    text: str  # "give talker.replicas=1"
    stages: tuple[Stage, ...]
    hosts: tuple[Host, ...]


class NoPlace(ConfigError):
    """Replicas find no place; the message has what is short, where, and the nearest change.

    Attributes:
        replica: the first without a place, or one of those that have too little memory.
        short: "devices" or "memory".
        missing: devices on one host, or bytes on one device.
        where: that host or device, the one that lacks least.
        change: with which everything would fit; None: none is known.
    """

    def __init__(self, message: str, replica: str, short: str, missing: int, where: str, change: Change | None) -> None:
        super().__init__(message)
        self.replica = replica
        self.short = short
        self.missing = missing
        self.where = where
        self.change = change


class _Case:
    """A plan that does not fit."""

    def __init__(
        self,
        stages: Mapping[str, Stage],
        hosts: Sequence[Host],
        held: Sequence[Replica],
        numbers: Mapping[str, Sequence[int]],
    ) -> None:
        self.stages = stages
        self.hosts = tuple(hosts)
        self.held = held
        self.numbers = numbers

    def first_that_fits(self, candidates: Iterator[tuple[str, Mapping[str, Stage], Sequence[Host]]]) -> Change | None:
        for text, changed, hosts in candidates:
            stages = {**self.stages, **changed}
            if self.fits(stages, hosts):
                return Change(text, tuple(stages.values()), tuple(hosts))
        return None

    def fits(self, stages: Mapping[str, Stage], hosts: Sequence[Host]) -> bool:
        numbers = {
            name: own[: max(0, len(own) - (self.stages[name].replicas - stages[name].replicas))]
            for name, own in self.numbers.items()
        }
        return try_rules(stages, hosts, self.held, numbers) is not None

    # -- changes -------------------------------------------------------------------------------------------------------

    def of_layout(self, stage: Stage) -> Iterator[tuple[str, Mapping[str, Stage], Sequence[Host]]]:
        """Other devices for a stage."""
        if not stage.may_share:
            shared = replace(stage, layer=stage.default_layer, may_share=True)
            yield from self._one(f"leave {stage.name}.layer out, so that it shares", shared)
        for nodes in range(stage.nodes + 1, stage.ranks + 1):
            if stage.ranks % nodes == 0 and not stage.pinned:
                yield from self._one(f"give {stage.name}.nodes={nodes}", replace(stage, nodes=nodes))
        if stage.pinned:
            yield from self._one(f"leave {stage.name}.device_ids out", replace(stage, pinned=()))

    def of_devices(self, stage: Stage) -> Iterator[tuple[str, Mapping[str, Stage], Sequence[Host]]]:
        """Devices of its own for a stage that shares."""
        if stage.may_share and stage.layer > 0:
            text = f"give {stage.name}.layer=0, which are devices of its own"
            yield from self._one(text, replace(stage, layer=0, may_share=False))

    def of_number(self, stage: Stage) -> Iterator[tuple[str, Mapping[str, Stage], Sequence[Host]]]:
        """As many replicas of a stage as fit, if these are more than there are, and at least one."""
        fewest = max(1, stage.replicas - len(self.numbers[stage.name]) + 1)

        def exceeds(replicas: int) -> bool:
            return not self.fits({**self.stages, stage.name: replace(stage, replicas=replicas)}, self.hosts)

        counts = range(fewest, stage.replicas)
        if num_fitting := bisect_left(counts, True, key=exceeds):
            replicas = counts[num_fitting - 1]
            yield from self._one(f"give {_count_of(stage, replicas)}", replace(stage, replicas=replicas))

    def of_hosts(self) -> Iterator[tuple[str, Mapping[str, Stage], Sequence[Host]]]:
        """As few further hosts as are enough, like the one with the most memory."""
        like = max(self.hosts, key=lambda host: (host.has_cards, sum(device.total for device in host.devices)))
        empty = tuple(structs.replace(device, free=device.total) for device in like.devices)

        def with_further(number: int) -> tuple[Host, ...]:
            further = (Host(f"{like.name} again {one}", empty, has_cards=like.has_cards) for one in range(number))
            return (*self.hosts, *further)

        # With a host for each node of each replica, no further one would help.
        most = sum(len(numbers) * self.stages[name].nodes for name, numbers in self.numbers.items())
        number = 1 + bisect_left(range(1, most + 1), True, key=lambda one: self.fits(self.stages, with_further(one)))
        if number <= most:
            what = f"{_counted(number, 'host')} like {like.name} ({_devices_of(like)})"
            yield f"add {what}", {}, with_further(number)

    def of_memory(
        self, missing: int, merged: Sequence[StageMemory], copies: Mapping[str, int]
    ) -> Iterator[tuple[str, Mapping[str, Stage], Sequence[Host]]]:
        """Settings of the stages on a device that save so many bytes there."""
        for text, changed in changes(missing, merged):
            stages = {}
            for before, after in zip(merged, changed, strict=True):
                if after is not before:
                    stage = self.stages[before.stage]
                    one = _divided(after, copies[before.stage])
                    share = None if after.cache is not None else stage.memory_share
                    stages[stage.name] = replace(stage, memory=one, memory_share=share)
            yield text, stages, self.hosts

    def _one(self, text: str, stage: Stage) -> Iterator[tuple[str, Mapping[str, Stage], Sequence[Host]]]:
        yield text, {stage.name: stage}, self.hosts


def explain(
    stages: Mapping[str, Stage],
    hosts: Sequence[Host],
    held: Sequence[Replica],
    numbers: Mapping[str, Sequence[int]],
) -> NoPlace:
    """Make the error for replicas that do not fit beside those that are held."""
    case = _Case(stages, hosts, held, numbers)
    try:
        placed, found = search(stages, hosts, held, numbers, Rules(checks_memory=False))
    except NoDevices as exc:
        return _too_few_devices(case, exc)
    short = max(found.devices, key=lambda one: one.missing)
    return _too_little_memory(case, short, [*held, *placed])


# -- too few devices ---------------------------------------------------------------------------------------------------


def _too_few_devices(case: _Case, found: NoDevices) -> NoPlace:
    stage = found.stage
    has_cards = any(host.has_cards for host in case.hosts)
    needed = stage.ranks_per_node if has_cards else 1
    change = case.first_that_fits(_devices_changes(case, stage))
    missing = needed - found.most if stage.nodes == 1 else needed * (stage.nodes - found.num_hosts)
    name = stage.replica_name(found.numbers[0])
    more = f" (and {len(found.numbers) - 1} more of {stage.name})" if len(found.numbers) > 1 else ""
    what = f"{needed} cards" if needed > 1 else "a card" if has_cards else "a host"
    if stage.nodes > 1:
        what = f"{what} on each of {stage.nodes} hosts" if has_cards else f"{stage.nodes} hosts"
    elif needed > 1:
        what += " on one host"
    if stage.pinned:
        what += f" (device_ids {', '.join(map(str, stage.pinned[found.numbers[0]]))})"
    there = f"{found.where} has {found.most}" if stage.nodes == 1 else f"{found.num_hosts} have as many"
    message = (
        f"replica {name}{more} finds no place: it needs {what} {_whose(stage)}, and of "
        f"{_counted(len(case.hosts), 'host')} {there}: "
        f"{change.text if change else 'give it fewer ranks, or larger hosts'}"
    )
    return NoPlace(message, name, "devices", max(1, missing), found.where, change)


def _devices_changes(case: _Case, stage: Stage) -> Iterator[tuple[str, Mapping[str, Stage], Sequence[Host]]]:
    yield from case.of_layout(stage)
    yield from case.of_number(stage)
    yield from case.of_hosts()


def _whose(stage: Stage) -> str:
    if stage.may_share:
        return "in any layer"
    if stage.layer == 0:
        return "that no other replica of layer 0 owns"
    return f"that layer 0 owns, and no other replica of layer {stage.layer} has"


# -- too little memory -------------------------------------------------------------------------------------------------


def _too_little_memory(case: _Case, short: DeviceState, replicas: Sequence[Replica]) -> NoPlace:
    place, device = short.place, short.device
    copies: Counter[str] = Counter()
    for replica in replicas:
        copies[replica.stage] += replica.places.count(place)
    missing = short.missing
    merged = [
        structs.replace(_multiplied(memory, copies[name]), stage=name)
        for name in sorted(name for name, number in copies.items() if number)
        if (memory := case.stages[name].memory_on(device)) is not None
    ]
    change = case.first_that_fits(_memory_changes(case, missing, merged, copies))
    named = [
        structs.replace(one, stage=f"{copies[one.stage]} ranks of {one.stage}") if copies[one.stage] > 1 else one
        for one in merged
    ]
    is_only_one = len(case.hosts) == 1 and len(case.hosts[0].devices) == 1
    where = place.device if is_only_one else str(place)
    said = change.text if change else f"use devices with {format_bytes(missing)} more"
    first = next(one.name for one in replicas if place in one.places)
    message = f"{describe_shortage(where, device, missing, named)}: {said}"
    return NoPlace(message, first, "memory", missing, str(place), change)


def _memory_changes(
    case: _Case, missing: int, merged: Sequence[StageMemory], copies: Mapping[str, int]
) -> Iterator[tuple[str, Mapping[str, Stage], Sequence[Host]]]:
    """Settings first, of replicas that do not run; then other devices, fewer replicas, more hosts."""
    here = [case.stages[one.stage] for one in merged]
    if not case.held:
        yield from case.of_memory(missing, merged, copies)
    for stage in here:
        yield from case.of_devices(stage)
    for stage in here:
        yield from case.of_number(stage)
    yield from case.of_hosts()


def _multiplied(memory: StageMemory, copies: int) -> StageMemory:
    """As much as so many ranks need together."""
    sizes = {name: getattr(memory, name) for name in _SIZES}
    return structs.replace(memory, **{name: size * copies for name, size in sizes.items() if size is not None})


def _divided(memory: StageMemory, copies: int) -> StageMemory:
    sizes = {name: getattr(memory, name) for name in _SIZES}
    return structs.replace(memory, **{name: size // copies for name, size in sizes.items() if size is not None})


# -- words -------------------------------------------------------------------------------------------------------------


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("s" if number > 1 else "")


def _count_of(stage: Stage, number: int) -> str:
    name, _, kind = stage.name.partition("/")
    return f"{number} instances of kind {kind} to {name}.epd" if kind else f"{name}.replicas={number}"


def _devices_of(host: Host) -> str:
    sizes = Counter(device.total for device in host.devices)
    return ", ".join(
        format_bytes(size) if not host.has_cards else f"{_counted(number, 'card')} of {format_bytes(size)}"
        for size, number in sizes.items()
    )
