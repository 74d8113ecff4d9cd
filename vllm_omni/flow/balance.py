"""One role, several instances: who serves an activation.

From: Omni-Flow section 3.5, Service Discovery & Load Balancing.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing
from typing import Protocol

from vllm_omni.errors import NoInstance
from vllm_omni.flow.controller import Activation, Node, Yield
from vllm_omni.flow.registry import Instance, ServiceRegistry


class LoadBalance(Protocol):
    """Chooses among instances; one object serves one role."""

    async def choose(
        self, instances: Sequence[Instance], outstanding: Mapping[str, int], session: str | None
    ) -> Instance:
        """Who serves the next activation.

        Args:
            instances: who is alive; never empty, by id.
            outstanding: instance id -> activations that this process has given it and that have not ended.
            session: of the activation's call.
        """


class RoundRobin:
    """One after the other. Who joins takes its turn, who leaves loses it."""

    def __init__(self) -> None:
        self._turn = itertools.count()

    async def choose(
        self, instances: Sequence[Instance], outstanding: Mapping[str, int], session: str | None
    ) -> Instance:
        return instances[next(self._turn) % len(instances)]


class LeastOutstanding:
    """Whoever has least to do; among equals, one after the other."""

    def __init__(self) -> None:
        self._turn = itertools.count()

    async def choose(
        self, instances: Sequence[Instance], outstanding: Mapping[str, int], session: str | None
    ) -> Instance:
        least = min(outstanding.get(one.instance_id, 0) for one in instances)
        idle = [one for one in instances if outstanding.get(one.instance_id, 0) == least]
        return idle[next(self._turn) % len(idle)]


class SessionLoadBalance:
    """A session stays where it is, for what it has there (a cache, a history), as long as that instance lives.

    Who belongs where is kept in the registry, so that every process agrees. A session's first instance, and an
    activation without a session, is the choice of another policy.
    """

    def __init__(self, role: str, registry: ServiceRegistry, first: LoadBalance | None = None) -> None:
        self._role = role
        self._registry = registry
        self._first = first or LeastOutstanding()

    async def choose(
        self, instances: Sequence[Instance], outstanding: Mapping[str, int], session: str | None
    ) -> Instance:
        if session is None:
            return await self._first.choose(instances, outstanding, session)
        bound = await self._registry.affinity(self._role, session)
        while True:
            for one in instances:
                if one.instance_id == bound:
                    return one
            if not instances:
                raise NoInstance(f"role {self._role!r}: no instance is registered")
            chosen = await self._first.choose(instances, outstanding, session)
            bound = await self._registry.bind(self._role, session, chosen.instance_id, instead_of=bound)
            if bound != chosen.instance_id:  # another process was faster, and may know somebody who is new
                instances = await self._registry.instances(self._role)


class ReplicatedNode:
    """A node of the graph that is several: each activation goes to the instance that the policy chooses.

    Instances may join and leave while requests run. Who leaves ends what it has; what its link does when an instance
    dies is the link's.

    Args:
        role: as the instances register it.
        resolve: the node behind an instance, as this process reaches it.
    """

    def __init__(
        self, role: str, registry: ServiceRegistry, policy: LoadBalance, resolve: Callable[[Instance], Node]
    ) -> None:
        self._role = role
        self._registry = registry
        self._policy = policy
        self._resolve = resolve
        self.outstanding: Counter[str] = Counter()  # instance id -> activations that run

    async def forward(self, activation: Activation) -> AsyncIterator[Yield]:
        """Raises:
        NoInstance: nobody serves the role.
        RegistryUnavailable: the registry does not answer.
        """
        instances = await self._registry.instances(self._role)
        if not instances:
            raise NoInstance(f"role {self._role!r}: no instance is registered")
        chosen = await self._policy.choose(instances, self.outstanding, activation.session)
        self.outstanding[chosen.instance_id] += 1
        try:
            emissions = self._resolve(chosen).forward(activation)
            if isinstance(emissions, AsyncGenerator):
                async with aclosing(emissions):
                    async for emission in emissions:
                        yield emission
            else:
                async for emission in emissions:
                    yield emission
        finally:
            self.outstanding[chosen.instance_id] -= 1
            if not self.outstanding[chosen.instance_id]:
                del self.outstanding[chosen.instance_id]
