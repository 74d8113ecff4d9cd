"""The registry of one process; the default."""

from collections import OrderedDict

from vllm_omni.flow.remote.registry.base import AFFINITY_TTL_S, Replica
from vllm_omni.flow.run.clock import Clock, LoopClock


class MemoryRegistry:
    """Keeps everything in dictionaries. There are no heartbeats: replicas end with the process."""

    def __init__(self, *, clock: Clock | None = None, affinity_ttl_s: float = AFFINITY_TTL_S) -> None:
        self._clock = clock or LoopClock()
        self._affinity_ttl_s = affinity_ttl_s
        self._replicas: dict[str, dict[str, Replica]] = {}
        # (role, session) -> its replica, and the time of the last request for it; in the order of the latter.
        self._affinity: OrderedDict[tuple[str, str], tuple[str, float]] = OrderedDict()

    async def register(self, replica: Replica) -> None:
        self._replicas.setdefault(replica.role, {})[replica.replica_id] = replica

    async def deregister(self, replica: Replica) -> None:
        self._replicas.get(replica.role, {}).pop(replica.replica_id, None)

    async def replicas(self, role: str) -> tuple[Replica, ...]:
        return tuple(sorted(self._replicas.get(role, {}).values()))

    async def affinity(self, role: str, session: str) -> str | None:
        self._forget_old()
        found = self._affinity.get((role, session))
        if found is None:
            return None
        self._keep(role, session, found[0])
        return found[0]

    async def bind(self, role: str, session: str, replica_id: str, *, instead_of: str | None) -> str:
        bound = await self.affinity(role, session)
        if bound == instead_of:
            bound = replica_id
            self._keep(role, session, replica_id)
        assert bound is not None
        return bound

    async def aclose(self) -> None:
        self._replicas.clear()
        self._affinity.clear()

    def _keep(self, role: str, session: str, replica_id: str) -> None:
        self._affinity[role, session] = (replica_id, self._clock.monotonic())
        self._affinity.move_to_end((role, session))

    def _forget_old(self) -> None:
        oldest = self._clock.monotonic() - self._affinity_ttl_s
        while self._affinity and next(iter(self._affinity.values()))[1] <= oldest:
            self._affinity.popitem(last=False)
