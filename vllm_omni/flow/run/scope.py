"""The interface between a call and the controllers of its nodes."""

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from vllm_omni.errors import OmniError
from vllm_omni.flow.graph.plan import NodePlan, Route, StaticPlan
from vllm_omni.flow.run.activity import Tracker
from vllm_omni.flow.run.clock import Clock, LoopClock
from vllm_omni.flow.run.link import Link
from vllm_omni.names import suggest


@dataclass(frozen=True, slots=True)
class CallScope:
    """The data of a call that every controller gets."""

    call_id: str
    route: Route
    tracker: Tracker
    context: Any
    session: str | None = None
    parameters: Mapping[str, Any] = field(default_factory=dict)
    clock: Clock = field(default_factory=LoopClock)


class Controller(Protocol):
    """The controller of a node, in this process or another one; ``NodeController`` documents the methods."""

    @property
    def num_running(self) -> int: ...

    @property
    def num_buffered(self) -> int: ...

    def open(self, scope: CallScope) -> None: ...

    def cancel(self, call_id: str, *, unfinished_only: bool = False) -> None: ...

    def close(self, call_id: str) -> None: ...

    def shutdown(self) -> None: ...


def index_plans(plans: StaticPlan | Sequence[StaticPlan]) -> tuple[dict[str, StaticPlan], dict[str, NodePlan]]:
    """Index plans that may share nodes: by graph or graph call ("graph.call"), and their nodes by name."""
    plans = [plans] if isinstance(plans, StaticPlan) else plans
    by_graph = {one.name: one for plan in plans for one in (plan, *plan.entries())}
    return by_graph, {name: node for plan in by_graph.values() for name, node in plan.nodes.items()}


def check_names(complaint: str, names: Iterable[str], existing: Collection[str], error: type[OmniError]) -> None:
    """Raise ``error`` for the first name that does not exist, with the nearest one."""
    for name in sorted(names):
        if name not in existing:
            raise error(f"{complaint} {name!r}; {suggest(name, existing)}")


class RemoteNode(ABC):
    """Stands for the node of a role that this process does not serve."""

    @abstractmethod
    def make_controller(self, name: str, link: Link) -> Controller:
        """The controller through which the runtime reaches the node ``name``."""
