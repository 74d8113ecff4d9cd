"""``search``: find places for replicas, one after the other, beside those that are there.

*Order*: layer 0 first, since the others go where it is; in a layer, first the stages whose cards the configuration
names, last those that would not share in a layer below, and between them the large ones before the small.

*Choice*: every host offers its best devices with a key, and a heap has the lowest. Placing a replica changes the offers
of its own hosts alone, so a stage of r replicas on h hosts takes h + r offers rather than h r.

Nothing that was placed moves: a search may miss a plan for which something would have to.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple, get_args

from vllm_omni.deploy.resources import Host, Place, Replica, Stage
from vllm_omni.process.memory import Device

GIB = 1 << 30  # smaller differences of free memory do not decide: on equal hosts they change from moment to moment


Preference = Literal["near", "full", "empty"]


class Rules(NamedTuple):
    """How devices are chosen.

    Args:
        prefers: hosts near what a stage talks to, and devices evenly; or the fullest ones; or the emptiest.
        is_large_first: large stages before small ones, even if the small ones must not share.
        checks_memory: otherwise a device may get more than it has, where no other has less too little.
    """

    prefers: Preference = "near"
    is_large_first: bool = False
    checks_memory: bool = True


EVERY_RULES = (
    *(Rules(prefers, is_large_first) for is_large_first in (False, True) for prefers in get_args(Preference)),
    Rules(checks_memory=False),
)
"""In the order in which they are tried: the first plan that fits is taken, so being near costs no place."""


class NoDevices(Exception):
    """A replica finds no devices; those before it have."""

    def __init__(self, stage: Stage, numbers: Sequence[int], num_hosts: int, most: int, where: str) -> None:
        super().__init__(stage.replica_name(numbers[0]))
        self.stage = stage
        self.numbers = numbers  # of the replicas that are left
        self.num_hosts = num_hosts  # with enough devices for one of its nodes
        self.most = most  # devices for it on one host, at most
        self.where = where  # that host


class DeviceState:
    """What is on a device."""

    __slots__ = ("_caches", "_lacking", "_mapped", "device", "host", "layers", "loaded", "place", "position", "riders")

    def __init__(self, host: Host, device: Device, position: int) -> None:
        self.host = host
        self.device = device
        self.place = Place(host.name, device.name)
        self.position = position
        self.layers: set[int] = set()
        self.riders: set[str] = set()  # replicas on any device of the same owner, which share this set
        # Bytes: weights and activations; the least of caches; by which a configured cache is below its minimum.
        self.loaded = self._caches = self._lacking = 0
        self._mapped: set[tuple[str, int]] = set()  # weights of which a copy is here

    def is_open(self, layer: int) -> bool:
        """Whether a replica of this layer may have the device."""
        return layer not in self.layers and (layer == 0 or 0 in self.layers)

    def spare(self, stage: Stage, ranks: Sequence[int]) -> int:
        """Bytes that are left beside these ranks of a replica, each with its least cache; negative: too few."""
        loaded, caches, lacking = self._needs(stage, ranks)
        left = self.device.room_beside(self.loaded + loaded) - self._caches - caches
        return min(left, -lacking) if lacking else left

    def hold(self, stage: Stage, ranks: Sequence[int], layer: int) -> None:
        loaded, caches, lacking = self._needs(stage, ranks)
        self.layers.add(layer)
        self.loaded += loaded
        self._caches += caches
        self._lacking = max(self._lacking, lacking)
        self._mapped |= self._weights_of(stage, ranks)

    @property
    def missing(self) -> int:
        """Bytes by which the device has too little memory."""
        is_known = self.loaded or self._caches
        return max(self._lacking, self._caches - self.device.room_beside(self.loaded), 0) if is_known else 0

    def _needs(self, stage: Stage, ranks: Sequence[int]) -> tuple[int, int, int]:
        """Bytes of weights and activations; of least caches; and by which a configured cache is below its minimum."""
        memory = stage.memory_on(self.device)
        if memory is None:
            return 0, 0, 0
        mapped = len(self._mapped.intersection(self._weights_of(stage, ranks)))
        loaded = (memory.weights + memory.activations) * len(ranks) - memory.weights * mapped
        return loaded, memory.least_cache * len(ranks), max(0, memory.cache_min - memory.least_cache)

    def _weights_of(self, stage: Stage, ranks: Sequence[int]) -> set[tuple[str, int]]:
        return {key for rank in ranks if (key := stage.mapped_weights(self.host, rank)) is not None}


class _Offer(NamedTuple):
    """Devices of a host for one node of a replica."""

    key: tuple[Any, ...]  # ends with the host's index, so that no two are equal
    host: int
    devices: Sequence[DeviceState]


class _Filled(NamedTuple):
    """A stage in one layer."""

    placed: list[Replica]
    left: list[int]  # numbers without devices


class HostState:
    """What is on a host."""

    def __init__(self, host: Host, index: int) -> None:
        self.host = host
        self.index = index
        self.devices = [DeviceState(host, device, position) for position, device in enumerate(host.devices)]
        self.stages: Counter[str] = Counter()  # replicas of each
        self.num_offers = 0  # made, for tests

    def ranks_on_each(self, stage: Stage) -> range:
        """The ranks that a device gets, if it gets any: all of the host, if the device is its memory."""
        return range(1 if self.host.has_cards else stage.ranks_per_node)

    def num_devices(self, stage: Stage) -> int:
        return stage.ranks_per_node if self.host.has_cards else 1

    def open_devices(self, stage: Stage, number: int, layer: int) -> list[DeviceState]:
        """The devices that a replica may have by its layer, and by what the configuration names."""
        found = [one for one in self.devices if one.is_open(layer)]
        if not stage.pinned or not self.host.has_cards:
            return found
        own = stage.pinned[number]
        return sorted((one for one in found if one.position in own), key=lambda one: own.index(one.position))

    def offer(self, stage: Stage, number: int, layer: int, rules: Rules, room: int = 0) -> _Offer | None:
        """The best devices for one node of a replica; None: there are too few.

        Args:
            room: devices for it and those near it, which a host should have.
        """
        self.num_offers += 1
        found, needed = self.open_devices(stage, number, layer), self.num_devices(stage)
        if len(found) < needed:
            return None
        ranks = self.ranks_on_each(stage)
        spare = {one.position: one.spare(stage, ranks) for one in found}
        if rules.checks_memory and stage.memory is not None:
            found = [one for one in found if spare[one.position] >= 0]
            if len(found) < needed:
                return None
        lacking = max(0, room - len(found))
        left = len(found) - needed if layer == 0 else 0  # a host that is nearly full keeps others whole
        if not stage.pinned:
            found.sort(key=lambda one: (_device_key(one, spare[one.position], rules), one.position))
        chosen = found[:needed]
        worst = max(_device_key(one, spare[one.position], rules) for one in chosen)
        rank: tuple[Any, ...] = ()
        if rules.prefers == "near":
            rank = (*self._crowd(stage), lacking, left)
        elif rules.prefers == "full":
            rank = (left,)
        return _Offer((worst[0], *rank, worst, self.index), self.index, chosen)

    def _crowd(self, stage: Stage) -> tuple[bool, float]:
        """Whether nothing is here that the stage is near to; otherwise how many replicas share that already."""
        peers = sum(self.stages[name] for name in stage.near)
        return not peers, self.stages[stage.name] / peers if peers else 0.0


def _device_key(one: DeviceState, spare: int, rules: Rules) -> tuple[int, ...]:
    lacking = max(0, -spare)
    if rules.prefers == "near":
        return lacking, len(one.layers), len(one.riders), -(spare // GIB)
    return lacking, spare if rules.prefers == "full" else -spare


class Search:
    """Hosts that fill."""

    def __init__(self, stages: Mapping[str, Stage], hosts: Sequence[Host], rules: Rules) -> None:
        self.stages = stages
        self.rules = rules
        # Engines run on cards where there are any; a host without them may be there for the front end.
        by_cards = sorted(hosts, key=lambda host: not host.has_cards)
        every = [HostState(host, index) for index, host in enumerate(by_cards)]
        num_with_cards = sum(host.has_cards for host in hosts)
        self.hosts = every[: num_with_cards or len(every)]
        self._by_name = {one.host.name: one for one in every}
        self._top_layer = 0

    @property
    def devices(self) -> list[DeviceState]:
        return [one for host in self._by_name.values() for one in host.devices]

    def hold(self, stage: Stage, replica: Replica) -> None:
        """Count a replica that has its places."""
        for name in replica.hosts:
            host = self._by_name[name]
            names = replica.devices_on(name)
            riders: set[str] = set()
            for one in host.devices:
                if one.device.name in names:
                    one.hold(stage, host.ranks_on_each(stage), replica.layer)
                    if replica.owns_devices:
                        one.riders = riders
                    else:
                        one.riders.add(replica.name)
            host.stages[stage.name] += 1
        self._top_layer = max(self._top_layer, replica.layer)

    def place(self, numbers: Mapping[str, Sequence[int]]) -> list[Replica]:
        """Place replicas of these numbers, layer by layer: those above are where layer 0 is.

        Raises:
            NoDevices: for one of them; those before it have places.
        """
        left = {name: list(own) for name, own in numbers.items() if own}
        placed: list[Replica] = []
        layer = 0
        while left:
            for stage in self._due(left, layer):
                found = self._fill_layer(stage, left.pop(stage.name), layer)
                placed += found.placed
                if found.left and (not stage.may_share or layer > self._top_layer):
                    raise self._first_cause({stage.name: found.left, **left})
                if found.left:
                    left[stage.name] = found.left
            layer += 1
        return placed

    def _due(self, left: Mapping[str, Sequence[int]], layer: int) -> list[Stage]:
        """The stages to place in a layer, in their order."""

        def key(stage: Stage) -> tuple[bool, bool, bool, int, int, bool]:
            memory = stage.memory
            size = 0 if memory is None else memory.weights + memory.activations + memory.least_cache
            may_wait = stage.may_share and not self.rules.is_large_first
            return not stage.pinned, stage.layer < layer, may_wait, -stage.ranks, -size, stage.may_share

        stages = [self.stages[name] for name in left]
        due = [one for one in stages if one.layer == layer or (one.may_share and one.layer < layer)]
        return sorted(due, key=key)

    def _fill_layer(self, stage: Stage, numbers: list[int], layer: int) -> _Filled:
        """Place as many replicas as find devices in a layer."""
        if not stage.pinned:
            placed = self._fill_equal(stage, numbers, layer)
            return _Filled(placed, numbers[len(placed) :])
        placed = [one for number in numbers for one in self._fill_equal(stage, [number], layer)]  # offers differ
        done = {one.number for one in placed}
        return _Filled(placed, [number for number in numbers if number not in done])

    def _fill_equal(self, stage: Stage, numbers: Sequence[int], layer: int) -> list[Replica]:
        room = self._room_with_peers(stage) if layer == 0 else 0

        def ask(host: HostState) -> _Offer | None:
            return host.offer(stage, numbers[0], layer, self.rules, room)

        offers = [one for host in self.hosts if (one := ask(host)) is not None]
        heapq.heapify(offers)
        placed: list[Replica] = []
        for number in numbers:
            if len(offers) < stage.nodes:
                break
            chosen = [heapq.heappop(offers) for _ in range(stage.nodes)]
            placed.append(self._take(stage, number, layer, chosen))
            for one in chosen:
                if (again := ask(self.hosts[one.host])) is not None:
                    heapq.heappush(offers, again)
        return placed

    def _room_with_peers(self, stage: Stage) -> int:
        peers = (self.stages[name] for name in stage.near)
        return stage.ranks_per_node + sum(peer.ranks_per_node for peer in peers if peer.layer == 0)

    def _take(self, stage: Stage, number: int, layer: int, chosen: Sequence[_Offer]) -> Replica:
        places: list[Place] = []
        for offer in chosen:
            own = [one.place for one in offer.devices]
            places += own if len(own) == stage.ranks_per_node else own * stage.ranks_per_node
        replica = Replica(stage.replica_name(number), stage.name, number, layer, tuple(places))
        self.hold(stage, replica)
        return replica

    def _first_cause(self, left: Mapping[str, Sequence[int]]) -> NoDevices:
        """The error for the stage that failed, or for one whose lower layer it needs, if that finds no place at all."""
        failed, *others = (self._no_devices(self.stages[name], numbers) for name, numbers in left.items())
        lower = [one for one in others if one.stage.layer < failed.stage.layer and one.num_hosts < one.stage.nodes]
        return min(lower, key=lambda one: one.stage.layer, default=failed)

    def _no_devices(self, stage: Stage, numbers: Sequence[int]) -> NoDevices:
        top = max(stage.layer, self._top_layer + 1) if stage.may_share else stage.layer
        layers = range(stage.layer, top + 1)
        num_open = {
            host.host.name: max(len(host.open_devices(stage, numbers[0], layer)) for layer in layers)
            for host in self.hosts
        }
        most = max(num_open, key=lambda name: num_open[name])
        num_hosts = sum(num_open[host.host.name] >= host.num_devices(stage) for host in self.hosts)
        return NoDevices(stage, numbers, num_hosts, num_open[most], most)


def search(
    stages: Mapping[str, Stage],
    hosts: Sequence[Host],
    held: Sequence[Replica],
    numbers: Mapping[str, Sequence[int]],
    rules: Rules,
) -> tuple[list[Replica], Search]:
    """Place the replicas of these numbers beside those that are held.

    Raises:
        NoDevices: for one of them.
    """
    found = Search(stages, hosts, rules)
    for replica in sorted(held, key=lambda one: one.layer):
        found.hold(stages[replica.stage], replica)
    return found.place(numbers), found


def try_rules(
    stages: Mapping[str, Stage],
    hosts: Sequence[Host],
    held: Sequence[Replica],
    numbers: Mapping[str, Sequence[int]],
) -> list[Replica] | None:
    """Place the replicas by the first rules with which they fit; None: they fit by none."""
    if not _may_fit(stages, hosts, held, numbers):
        return None
    for rules in EVERY_RULES:
        try:
            placed, found = search(stages, hosts, held, numbers, rules)
        except NoDevices:
            continue
        if not any(one.missing for one in found.devices):
            return placed
    return None


def _may_fit(
    stages: Mapping[str, Stage],
    hosts: Sequence[Host],
    held: Sequence[Replica],
    numbers: Mapping[str, Sequence[int]],
) -> bool:
    """Whether there are as many devices as the replicas need that must own theirs: a search need not find that out."""
    with_cards = [host for host in hosts if host.has_cards]
    num_free = sum(len(host.devices) for host in with_cards or hosts)
    num_free -= len({place for one in held if one.owns_devices for place in one.places})
    owning = [one for name in numbers if (one := stages[name]).layer == 0 and not one.may_share]
    return num_free >= sum(len(numbers[one.name]) * (one.ranks if with_cards else one.nodes) for one in owning)
