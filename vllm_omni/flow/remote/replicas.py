"""One role, several instances: who serves an activation.

From: Omni-Flow section 3.5, Service Discovery & Load Balancing.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter, deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing
from typing import Protocol

import msgspec

from vllm_omni.errors import NoInstance
from vllm_omni.flow.graph.declarations import Scheduling
from vllm_omni.flow.graph.transfer import Chunk
from vllm_omni.flow.remote.registry import Instance, ServiceRegistry
from vllm_omni.flow.run.node import Activation, Node, Yield


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


class Broadcast:
    """All of them: each instance serves every activation, and what they yield comes as it is made."""


def policy_for(scheduling: Scheduling, role: str, registry: ServiceRegistry) -> LoadBalance | Broadcast:
    """What an interface declares, as a policy."""
    match scheduling:
        case Scheduling.ROUND_ROBIN:
            return RoundRobin()
        case Scheduling.LEAST_OUTSTANDING:
            return LeastOutstanding()
        case Scheduling.SESSION:
            return SessionLoadBalance(role, registry)
        case Scheduling.BROADCAST:
            return Broadcast()


class ReplicatedNode:
    """A node of the graph that is several: each activation goes to the instance that the policy chooses.

    Instances may join and leave while requests run. Who leaves ends what it has; what its link does when an instance
    dies is the link's.

    Args:
        role: as the instances register it.
        resolve: the node behind an instance, as this process reaches it.
    """

    def __init__(
        self,
        role: str,
        registry: ServiceRegistry,
        policy: LoadBalance | Broadcast,
        resolve: Callable[[Instance], Node],
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
        served: AsyncGenerator[Yield, None]
        if isinstance(self._policy, Broadcast):
            served = self._serve_by_all(instances, activation)
        else:
            chosen = await self._policy.choose(instances, self.outstanding, activation.session)
            served = self._serve(chosen, activation)
        async with aclosing(served):
            async for emission in served:
                yield emission

    async def _serve(self, instance: Instance, activation: Activation) -> AsyncGenerator[Yield, None]:
        self.outstanding[instance.instance_id] += 1
        try:
            emissions = self._resolve(instance).forward(activation)
            if isinstance(emissions, AsyncGenerator):
                async with aclosing(emissions):
                    async for emission in emissions:
                        yield emission
            else:
                async for emission in emissions:
                    yield emission
        finally:
            self.outstanding[instance.instance_id] -= 1
            if not self.outstanding[instance.instance_id]:
                del self.outstanding[instance.instance_id]

    async def _serve_by_all(self, instances: Sequence[Instance], activation: Activation) -> AsyncGenerator[Yield, None]:
        tees = {name: _Tee(chunks, len(instances)) for name, chunks in activation.inputs.items()}
        made: asyncio.Queue[Yield | None] = asyncio.Queue(maxsize=len(instances))

        async def serve(number: int, instance: Instance) -> None:
            inputs = {name: tee.read(number) for name, tee in tees.items()}
            async with aclosing(self._serve(instance, msgspec.structs.replace(activation, inputs=inputs))) as served:
                async for emission in served:
                    await made.put(emission)
            await made.put(None)

        try:
            async with asyncio.TaskGroup() as tasks:
                for number, instance in enumerate(instances):
                    tasks.create_task(serve(number, instance))
                num_running = len(instances)
                while num_running:
                    emission = await made.get()
                    if emission is None:
                        num_running -= 1
                    else:
                        yield emission
        except BaseExceptionGroup as errors:
            if errors.subgroup(GeneratorExit) is None:  # it was not closed at its yield
                raise errors.exceptions[0] from None  # the cause; the others were cancelled


class _Tee:
    """One input, read by several: a chunk stays until each has it."""

    def __init__(self, chunks: AsyncIterator[Chunk], num_readers: int) -> None:
        self._chunks = chunks
        self._waiting: list[deque[Chunk]] = [deque() for _ in range(num_readers)]
        self._lock = asyncio.Lock()
        self._is_over = False

    async def read(self, number: int) -> AsyncIterator[Chunk]:
        mine = self._waiting[number]
        while True:
            async with self._lock:  # whoever is ahead reads on, for all
                if not mine and not self._is_over:
                    try:
                        chunk = await anext(self._chunks)
                    except StopAsyncIteration:
                        self._is_over = True
                    else:
                        for each in self._waiting:
                            each.append(chunk)
            if not mine:
                return
            yield mine.popleft()
