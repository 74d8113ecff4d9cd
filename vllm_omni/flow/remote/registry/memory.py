"""The registry of one process, and the default: nothing to start, nothing to lose."""

from collections import OrderedDict

from vllm_omni.flow.remote.registry.base import AFFINITY_TTL_S, Instance
from vllm_omni.flow.run.clock import Clock, LoopClock


class MemoryRegistry:
    """Keeps everything in dictionaries. There are no heartbeats: instances end with the process."""

    def __init__(self, *, clock: Clock | None = None, affinity_ttl_s: float = AFFINITY_TTL_S) -> None:
        self._clock = clock or LoopClock()
        self._affinity_ttl_s = affinity_ttl_s
        self._instances: dict[str, dict[str, Instance]] = {}
        # (role, session) -> its instance, and when it was last asked for; in the order of the latter.
        self._affinity: OrderedDict[tuple[str, str], tuple[str, float]] = OrderedDict()

    async def register(self, instance: Instance) -> None:
        self._instances.setdefault(instance.role, {})[instance.instance_id] = instance

    async def deregister(self, instance: Instance) -> None:
        self._instances.get(instance.role, {}).pop(instance.instance_id, None)

    async def instances(self, role: str) -> tuple[Instance, ...]:
        return tuple(sorted(self._instances.get(role, {}).values()))

    async def affinity(self, role: str, session: str) -> str | None:
        self._forget_old()
        found = self._affinity.get((role, session))
        if found is None:
            return None
        self._keep(role, session, found[0])
        return found[0]

    async def bind(self, role: str, session: str, instance_id: str, *, instead_of: str | None) -> str:
        bound = await self.affinity(role, session)
        if bound == instead_of:
            bound = instance_id
            self._keep(role, session, instance_id)
        assert bound is not None
        return bound

    async def aclose(self) -> None:
        self._instances.clear()
        self._affinity.clear()

    def _keep(self, role: str, session: str, instance_id: str) -> None:
        self._affinity[role, session] = (instance_id, self._clock.monotonic())
        self._affinity.move_to_end((role, session))

    def _forget_old(self) -> None:
        oldest = self._clock.monotonic() - self._affinity_ttl_s
        while self._affinity and next(iter(self._affinity.values()))[1] <= oldest:
            self._affinity.popitem(last=False)
