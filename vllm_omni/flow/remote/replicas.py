"""One role with several replicas: choose the one that serves an activation.

From: Omni-Flow section 3.5, Service Discovery & Load Balancing.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter, deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing, nullcontext
from typing import Protocol

import msgspec

from vllm_omni.errors import NoInstance
from vllm_omni.flow.graph.declarations import Scheduling
from vllm_omni.flow.graph.transfer import Chunk
from vllm_omni.flow.remote.registry import Replica, ServiceRegistry
from vllm_omni.flow.run.node import Activation, Node, Yield


class LoadBalance(Protocol):
    """A policy that chooses among replicas; one object serves one role."""

    async def choose(self, replicas: Sequence[Replica], outstanding: Mapping[str, int], session: str | None) -> Replica:
        """Choose the replica for the next activation.

        Args:
            replicas: the live ones, by id; never empty.
            outstanding: replica id -> activations from this process that have not ended.
            session: the session of the activation's call.
        """


class RoundRobin:
    """One after the other, among the replicas that are live at the time."""

    def __init__(self) -> None:
        self._next = itertools.count()

    async def choose(self, replicas: Sequence[Replica], outstanding: Mapping[str, int], session: str | None) -> Replica:
        return replicas[next(self._next) % len(replicas)]


class LeastOutstanding(RoundRobin):
    """The replica with the fewest outstanding activations; among equals, one after the other."""

    async def choose(self, replicas: Sequence[Replica], outstanding: Mapping[str, int], session: str | None) -> Replica:
        least = min(outstanding.get(one.replica_id, 0) for one in replicas)
        idle = [one for one in replicas if outstanding.get(one.replica_id, 0) == least]
        return await super().choose(idle, outstanding, session)


class SessionLoadBalance:
    """A session stays at its replica, which holds its state (a cache, a history), as long as the replica is live.

    The registry records the replica of each session, so every process agrees. Another policy chooses the first
    replica of a session, and the one of an activation without a session.
    """

    def __init__(self, role: str, registry: ServiceRegistry, first: LoadBalance | None = None) -> None:
        self._role = role
        self._registry = registry
        self._first = first or LeastOutstanding()

    async def choose(self, replicas: Sequence[Replica], outstanding: Mapping[str, int], session: str | None) -> Replica:
        if session is None:
            return await self._first.choose(replicas, outstanding, session)
        bound = await self._registry.affinity(self._role, session)
        while True:
            for one in replicas:
                if one.replica_id == bound:
                    return one
            if not replicas:
                raise NoInstance(f"role {self._role!r}: no replica is registered")
            chosen = await self._first.choose(replicas, outstanding, session)
            bound = await self._registry.bind(self._role, session, chosen.replica_id, instead_of=bound)
            if bound != chosen.replica_id:  # another process was faster, and may know a new replica
                replicas = await self._registry.replicas(self._role)


class Broadcast:
    """Every replica serves every activation; their yields are merged as they arrive."""


def policy_for(scheduling: Scheduling, role: str, registry: ServiceRegistry) -> LoadBalance | Broadcast:
    """The policy that an interface declares."""
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
    """A node with several replicas: each activation goes to the replica that the policy chooses.

    Replicas may join and leave while requests run; a replica that leaves finishes its activations. The death of a
    replica is handled by the node that ``resolve`` returns.

    Args:
        role: the name under which replicas register.
        resolve: returns the node through which this process reaches a replica.
    """

    def __init__(
        self,
        role: str,
        registry: ServiceRegistry,
        policy: LoadBalance | Broadcast,
        resolve: Callable[[Replica], Node],
    ) -> None:
        self._role = role
        self._registry = registry
        self._policy = policy
        self._resolve = resolve
        self.outstanding: Counter[str] = Counter()  # replica id -> running activations

    async def forward(self, activation: Activation) -> AsyncIterator[Yield]:
        """Raises:
        NoInstance: the role has no live replica.
        RegistryUnavailable: the registry does not answer.
        """
        replicas = await self._registry.replicas(self._role)
        if not replicas:
            raise NoInstance(f"role {self._role!r}: no replica is registered")
        served: AsyncGenerator[Yield, None]
        if isinstance(self._policy, Broadcast):
            served = self._serve_by_all(replicas, activation)
        else:
            chosen = await self._policy.choose(replicas, self.outstanding, activation.session)
            served = self._serve(chosen, activation)
        async with aclosing(served):
            async for emission in served:
                yield emission

    async def _serve(self, replica: Replica, activation: Activation) -> AsyncGenerator[Yield, None]:
        self.outstanding[replica.replica_id] += 1
        try:
            emissions = self._resolve(replica).forward(activation)
            async with aclosing(emissions) if isinstance(emissions, AsyncGenerator) else nullcontext():
                async for emission in emissions:
                    yield emission
        finally:
            self.outstanding -= Counter([replica.replica_id])  # without those of zero

    async def _serve_by_all(self, replicas: Sequence[Replica], activation: Activation) -> AsyncGenerator[Yield, None]:
        tees = {name: _Tee(chunks, len(replicas)) for name, chunks in activation.inputs.items()}
        made: asyncio.Queue[Yield | None] = asyncio.Queue(maxsize=len(replicas))

        async def serve(number: int, replica: Replica) -> None:
            inputs = {name: tee.read(number) for name, tee in tees.items()}
            async with aclosing(self._serve(replica, msgspec.structs.replace(activation, inputs=inputs))) as served:
                async for emission in served:
                    await made.put(emission)
            await made.put(None)

        try:
            async with asyncio.TaskGroup() as tasks:
                for number, replica in enumerate(replicas):
                    tasks.create_task(serve(number, replica))
                num_running = len(replicas)
                while num_running:
                    emission = await made.get()
                    if emission is None:
                        num_running -= 1
                    else:
                        yield emission
        except BaseExceptionGroup as errors:
            if errors.subgroup(GeneratorExit) is None:  # unless the generator was closed at its yield
                raise errors.exceptions[0] from None  # the cause; the other tasks were cancelled


class _Tee:
    """One input with several readers: a chunk is kept until each has read it."""

    def __init__(self, chunks: AsyncIterator[Chunk], num_readers: int) -> None:
        self._chunks = chunks
        self._waiting: list[deque[Chunk]] = [deque() for _ in range(num_readers)]
        self._lock = asyncio.Lock()
        self._is_over = False

    async def read(self, number: int) -> AsyncIterator[Chunk]:
        mine = self._waiting[number]
        while True:
            async with self._lock:  # the reader that is ahead reads for all
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
