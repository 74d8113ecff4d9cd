"""The contract of a registry."""

from typing import Protocol

import msgspec

HEARTBEAT_S = 1.0
TIMEOUT_S = 5.0
"""An instance that was not heard of for so long is evicted: five heartbeats."""
AFFINITY_TTL_S = 3600.0
"""A session that nobody has asked for is forgotten after so long."""


class Instance(msgspec.Struct, frozen=True, order=True):
    """One replica of a role."""

    role: str
    instance_id: str  # unique within the role
    address: str = ""  # where a link finds it; empty within the process


class ServiceRegistry(Protocol):
    """Instances of roles, and which of them a session belongs to.

    All methods belong to one event loop. Those of a backend elsewhere raise ``RegistryUnavailable`` when it cannot be
    reached in time.
    """

    async def register(self, instance: Instance) -> None:
        """Join, and stay until ``deregister``, ``aclose`` or the end of this process. Once more: another address."""

    async def deregister(self, instance: Instance) -> None:
        """Leave; its sessions go elsewhere with their next activation. Unknown ones are ignored."""

    async def instances(self, role: str) -> tuple[Instance, ...]:
        """Who is alive, by id."""

    async def affinity(self, role: str, session: str) -> str | None:
        """The id of the instance that the session belongs to, alive or not."""

    async def bind(self, role: str, session: str, instance_id: str, *, instead_of: str | None) -> str:
        """Give a session to an instance, unless another process was faster; returns whom it belongs to now.

        Args:
            instead_of: whom it belonged to when the choice was made; None for nobody.
        """

    async def aclose(self) -> None:
        """Everything that was registered here leaves."""
