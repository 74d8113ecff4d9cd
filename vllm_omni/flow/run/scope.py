"""The interface between a call and the controllers of its nodes."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from vllm_omni.flow.graph.plan import Route
from vllm_omni.flow.run.activity import Tracker
from vllm_omni.flow.run.link import Link


@dataclass(frozen=True, slots=True)
class CallScope:
    """The data of a call that every controller gets."""

    call_id: str
    route: Route
    tracker: Tracker
    context: Any
    session: str | None = None
    parameters: Mapping[str, Any] = field(default_factory=dict)


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


class RemoteNode(ABC):
    """Stands for the node of a role that this process does not serve."""

    @abstractmethod
    def make_controller(self, name: str, link: Link) -> Controller:
        """The controller through which the runtime reaches the node ``name``."""
