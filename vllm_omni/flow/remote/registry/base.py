"""The interface of a registry."""

from typing import Protocol

import msgspec

HEARTBEAT_S = 1.0
TIMEOUT_S = 5.0
"""A replica without a heartbeat for this long (five heartbeats) is evicted."""
AFFINITY_TTL_S = 3600.0
"""A session that is not asked for is forgotten after this time."""


class Replica(msgspec.Struct, frozen=True, order=True):
    """One replica of a role."""

    role: str
    replica_id: str  # unique within the role
    address: str = ""  # its address for a link; empty within the process


class ServiceRegistry(Protocol):
    """The replicas of roles, and the replica of each session.

    All methods belong to one event loop. They raise ``RegistryUnavailable`` when a remote backend does not answer in
    time.
    """

    async def register(self, replica: Replica) -> None:
        """Add a replica until ``deregister``, ``aclose`` or the end of this process; again: change its address."""

    async def deregister(self, replica: Replica) -> None:
        """Remove a replica; its sessions move at their next activation. Unknown replicas are ignored."""

    async def replicas(self, role: str) -> tuple[Replica, ...]:
        """The live replicas of a role, by id."""

    async def affinity(self, role: str, session: str) -> str | None:
        """The id of the replica that the session is bound to, live or not."""

    async def bind(self, role: str, session: str, replica_id: str, *, instead_of: str | None) -> str:
        """Bind a session to a replica, unless another process was faster; returns the replica it is bound to now.

        Args:
            instead_of: the replica it was bound to when the choice was made; None: unbound.
        """

    async def aclose(self) -> None:
        """Remove all replicas that were registered here."""
