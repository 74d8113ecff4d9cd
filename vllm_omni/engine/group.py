"""``EngineGroup``: the node of a stage that is several engines, instances or replicas."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from vllm_omni.config import StageConfig
from vllm_omni.config.epd import Balance, Tasks
from vllm_omni.engine.node import StageNode
from vllm_omni.engine.stage import StageEngine
from vllm_omni.epd.router import Assignment, RequestState, Router
from vllm_omni.errors import GraphError, StageFailed
from vllm_omni.flow import Scheduling, StaticPlan
from vllm_omni.process.status import StageState, StageStatus

_STATES = (StageState.RUNNING, StageState.RESTARTING, StageState.DRAINED)
"""The state of a stage is the first of these that one of its engines has, otherwise FAILED."""

IDLE_ANSWER_S = 10.0  # for an engine to say whether its tensors have readers

_BALANCES: dict[Scheduling, Balance] = {
    Scheduling.LEAST_OUTSTANDING: "least_work",
    Scheduling.ROUND_ROBIN: "round_robin",
    Scheduling.SESSION: "session",
}


class EngineGroup(StageNode):
    """Several engines as one node; a router assigns requests to them.

    Args:
        engines: the orchestrator starts them, like all others; one is the front, which reads the prompts for all.

    Attributes:
        engines: by name.
        router: may be replaced while no request runs, for another policy.
    """

    router: Router

    def __init__(self, config: StageConfig, engines: Sequence[StageEngine]) -> None:
        self.config = config
        self.name = config.name
        self.engines = {engine.name: engine for engine in engines}
        self.front = next(engine for engine in engines if engine.instance is not None and engine.instance.is_front)
        self.spec = self.front.spec
        self._num_restarts: dict[str, int] = {}

    def assign(self, request: RequestState) -> Assignment | None:
        """``Router.assign``; an engine that has been restarted since the last request holds no pages."""
        for name, engine in self.engines.items():
            num_restarts = engine.current_status().num_restarts
            if num_restarts != self._num_restarts.get(name, 0):
                self._num_restarts[name] = num_restarts
                self.router.forget_pages(name)
        return self.router.assign(request)

    def current_status(self) -> StageStatus:
        """RUNNING while requests can be served; each engine has a status of its own as well."""
        kinds = self.router.kinds
        statuses = {name: self.engines[name].current_status() for name, kind in kinds.items() if kind != Tasks.E}
        num_restarts = sum(engine.current_status().num_restarts for engine in self.engines.values())
        states = {status.state for status in statuses.values()}
        state = next((one for one in _STATES if one in states), StageState.FAILED)
        reason = "; ".join(f"{name}: {status.reason}" for name, status in statuses.items() if status.reason)
        return StageStatus(state, None if state is StageState.RUNNING else reason, num_restarts)

    def is_available(self, name: str) -> bool:
        """Whether an engine gets new requests."""
        return self.engines[name].current_status().state is StageState.RUNNING

    def is_alive(self, name: str) -> bool:
        """Whether an engine runs; one that is drained does."""
        return self.engines[name].current_status().state in (StageState.RUNNING, StageState.DRAINED)

    def num_requests(self, name: str) -> int:
        """The requests that an engine has, or is about to get; 0: also if it has been removed."""
        return max(self.engines[name].num_requests, self.router.num_open(name)) if name in self.engines else 0

    async def vacate(self, name: str) -> bool:
        """Ask whether nothing needs an engine that gets no new requests: it has none, and its tensors have no readers.

        What is kept there for later requests is dropped.
        """
        if self.num_requests(name):
            return False
        engine = self.engines.get(name)
        if engine is None or engine.has_died:  # what it had made is gone
            return True
        try:
            ranks = await engine.relay_statistics(IDLE_ANSWER_S)
        except StageFailed:  # it dies, or does not answer
            return engine.has_died
        return not any(one["num_leases"] for backends in ranks for one in backends.values())


def balance_of(stage: StageConfig, plans: Iterable[StaticPlan]) -> Balance:
    """How requests are balanced between the engines of a stage: as the deployment says, or else its graphs.

    Raises:
        GraphError: interfaces of the stage declare different policies, and the deployment chooses none.
    """
    given = stage.deployment.balance if stage.deployment.is_split else stage.balance
    if given is not None:
        return given
    nodes = [node for plan in plans for node in plan.nodes.values() if node.role == stage.name]
    declared = {node.scheduling: node.name for node in nodes}
    if len(declared) > 1:
        said = ", ".join(f"{name!r} {scheduling.name}" for scheduling, name in declared.items())
        key = "epd.balance" if stage.deployment.is_split else "balance"
        raise GraphError(
            f"stage {stage.name!r}: its engines are balanced in one way, and its nodes declare several ({said}): "
            f"choose one by --stage {stage.name}.{key}=VALUE: {', '.join(_BALANCES.values())}, affinity"
        )
    (scheduling,) = declared
    return _BALANCES[scheduling]
