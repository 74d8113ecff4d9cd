"""The registry of replicas: servers join with theirs, send heartbeats, and leave.

Where there is no registry, a server knows its own replicas, from their supervisors (``engine/group.py``).

From: Omni-Flow section 3.5, Service Discovery & Load Balancing.
"""

import msgspec

HEARTBEAT_S = 1.0
TIMEOUT_S = 5.0
"""A server without a heartbeat for this long (five heartbeats) is evicted, with its replicas."""


class Replica(msgspec.Struct, frozen=True):
    """One engine of a server, as the server has described it last."""

    server: str  # unique among the servers that share a registry
    engine: str  # "talker/1", or "talker" where it is the only one of its stage
    address: str  # of the server, for clients
    model: str  # the name under which the server serves it
    state: str  # see ``process.status.StageState``
    reason: str | None = None  # why it gets no requests
    num_requests: int = 0  # that run there: a drained replica with some is still draining
    work: float = 0.0  # outstanding tokens, or seconds with a cost model; of a stage with several engines
    num_restarts: int = 0
