"""What is placed, and where: stages with their replicas, hosts with their devices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from msgspec.structs import replace

from vllm_omni.errors import ConfigError
from vllm_omni.process.memory import Device, StageMemory


class Place(NamedTuple):
    """A device of a host."""

    host: str
    device: str

    def __str__(self) -> str:
        return f"{self.device} of {self.host}"


@dataclass(frozen=True)
class Host:
    """A machine. Without cards it has one device, its memory, which ranks share.

    A device's ``free`` bytes are those that the deployment may use; with what its own replicas have allocated.
    """

    name: str
    devices: tuple[Device, ...]
    address: str = ""  # where others reach it; "": by its name
    has_cards: bool = True

    def check(self) -> None:
        """Raises ``ConfigError`` for a host on which nothing could be placed."""
        names = [device.name for device in self.devices]
        if not names:
            raise ConfigError(f"host {self.name!r}: has no device: give its cards, or its memory")
        if len(set(names)) < len(names):
            raise ConfigError(f"host {self.name!r}: two of its devices have one name: {', '.join(names)}")
        if not self.has_cards and len(names) > 1:
            raise ConfigError(f"host {self.name!r}: without cards it has one device, its memory")


@dataclass(frozen=True, kw_only=True)
class Stage:
    """A stage, or one kind of its instances: equal replicas, each placed whole.

    From: Omni-Flow, section 6: the replica is the unit of resources; layer 0 owns cards, those above reuse them.
    """

    name: str  # "talker", or "thinker/PD" of instances
    replicas: int = 1
    ranks: int = 1  # of a replica: one card each, or one process each on a host without cards
    nodes: int = 1  # hosts that a replica spans, with as many ranks on each
    layer: int = 0  # 0: owns its devices; above: placed on devices that a replica of layer 0 owns
    may_share: bool = False  # where no device is left in its layer, a replica goes to a layer above
    default_layer: int = 1  # the layer from which it shares, if the deployment gives none
    memory: StageMemory | None = None  # of one rank; None: unknown, and not checked
    memory_share: float | None = None  # of a device, for weights, activations and cache: ``gpu_memory_utilization``
    shared_weights: str | None = None  # names weights of which ranks of the same number map one copy on a host
    pinned: tuple[tuple[int, ...], ...] = ()  # positions of each replica's cards among those of its host
    near: frozenset[str] = frozenset()  # stages with which it exchanges much: rows, caches
    names: tuple[str, ...] = ()  # of its first replicas, if these are not "talker/0", "talker/1", ...

    def check(self, stages: Mapping[str, Stage]) -> None:
        """Raises ``ConfigError`` for numbers that no plan could honour."""
        where = f"stage {self.name!r}"
        if min(self.replicas, self.layer) < 0 or min(self.ranks, self.nodes) < 1:
            raise ConfigError(f"{where}: replicas and layer must be at least 0, ranks and nodes at least 1")
        if self.ranks % self.nodes:
            raise ConfigError(
                f"{where}: nodes = {self.nodes}: cannot share its {self.ranks} ranks evenly; give nodes = "
                f"{max(one for one in range(1, self.nodes) if self.ranks % one == 0)}"
            )
        if self.pinned:
            self._check_pinned(where)
        if unknown := sorted(self.near - stages.keys()):
            raise ConfigError(f"{where}: near {', '.join(unknown)}: there is no such stage")

    def _check_pinned(self, where: str) -> None:
        if self.nodes > 1:
            raise ConfigError(f"{where}: device_ids name cards of one host, and nodes = {self.nodes}: leave one out")
        if len(self.pinned) < self.replicas:
            raise ConfigError(
                f"{where}: device_ids name the cards of {len(self.pinned)} replicas, and there are {self.replicas}: "
                "give more, or leave them out"
            )
        if any(len(own) != self.ranks for own in self.pinned):
            raise ConfigError(
                f"{where}: a replica has {self.ranks} ranks, and device_ids name "
                f"{', '.join(str(len(own)) for own in self.pinned)} cards: give one for each rank"
            )

    @property
    def ranks_per_node(self) -> int:
        return self.ranks // self.nodes

    def memory_on(self, device: Device) -> StageMemory | None:
        """The needs of one rank on a device; those of a share depend on its size."""
        if self.memory is None or self.memory_share is None:
            return self.memory
        loaded = self.memory.weights + self.memory.activations
        return replace(self.memory, cache=int(device.total * self.memory_share) - loaded)

    def mapped_weights(self, host: Host, rank: int) -> tuple[str, int] | None:
        """Names the weights of which a rank maps a copy that others on the host may map; None: it has its own."""
        if self.shared_weights is None or self.memory is None or host.has_cards or self.nodes > 1:
            return None
        return self.shared_weights, rank

    def replica_name(self, number: int) -> str:
        """As engines are named: "talker/0"; of instances "thinker/PD0"."""
        if number < len(self.names):
            return self.names[number]
        return f"{self.name}{number}" if "/" in self.name else f"{self.name}/{number}"


@dataclass(frozen=True)
class Replica:
    """A replica and its places, one for each rank; those on one host follow each other."""

    name: str
    stage: str
    number: int
    layer: int
    places: tuple[Place, ...]
    is_draining: bool = False  # it gets no new requests, and has its places until it is released

    @property
    def owns_devices(self) -> bool:
        """Whether its devices are reserved for it; otherwise it uses what another replica has reserved."""
        return self.layer == 0

    @property
    def hosts(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(place.host for place in self.places))

    def devices_on(self, host: str) -> tuple[str, ...]:
        """The devices that its processes on a host may see, each once."""
        return tuple(dict.fromkeys(place.device for place in self.places if place.host == host))


def check_hosts(hosts: Sequence[Host]) -> None:
    """Raises ``ConfigError`` for an inventory that has no hosts, or two of one name."""
    if not hosts:
        raise ConfigError("the inventory has no hosts")
    names: set[str] = set()
    for host in hosts:
        host.check()
        if host.name in names:
            raise ConfigError(f"two hosts have the name {host.name!r}")
        names.add(host.name)
