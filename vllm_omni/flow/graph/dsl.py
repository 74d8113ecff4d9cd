"""The words a pipeline is written in: Graph, Role, interface, Field, Placeholder, and what sessions share.

A mistake that one line shows (a name that does not exist, a field of another graph) is raised at that line;
what needs the whole graph is left to ``GraphParser``.
"""

from __future__ import annotations

import difflib
import enum
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar, overload

from vllm_omni.errors import GraphError
from vllm_omni.flow.graph.transfer import ENTRY, TransferFunction

RoleT = TypeVar("RoleT", bound="Role")
RefT = TypeVar("RefT", bound="FieldRef")


def what_exists(name: str, existing: Iterable[str]) -> str:
    """The tail of every "no such name" message: the nearest name, then all that exist."""
    names = sorted(existing)
    near = difflib.get_close_matches(name, names, n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    return f"{hint}there is: {', '.join(map(repr, names)) or 'nothing'}"


class Scheduling(enum.Enum):
    """Who serves the activations of an interface, if its role has several instances. From: Omni-Flow section 3.5."""

    ROUND_ROBIN = "round_robin"
    LEAST_OUTSTANDING = "least_outstanding"
    SESSION = "session"  # the instance that has the session; activations run one after the other, in order
    BROADCAST = "broadcast"  # all of them


@dataclass(frozen=True, slots=True)
class Field:
    """What a field carries.

    ``streamed``: an output may be emitted in many pieces (otherwise exactly one); an input is read piece by piece in
    one activation. An input declared without it has one activation for each piece of a streamed output, if it is alone
    in its group or is fed by the node above all of the group, and otherwise gathers what belongs together. An input
    that is not declared is as the output that feeds it.
    """

    modality: str
    dtype: str | None = None
    streamed: bool = False

    def accepts(self, produced: Field) -> bool:
        """Modality must agree, dtype too where both sides declare one."""
        same_dtype = self.dtype is None or produced.dtype is None or self.dtype == produced.dtype
        return self.modality == produced.modality and same_dtype


@dataclass(frozen=True)
class FieldRef:
    """A field of a node (or a placeholder) as the source of an edge."""

    graph: Graph
    node: str
    field: str
    spec: Field | None
    transfer: TransferFunction | None = None

    def via(self: RefT, transfer: TransferFunction, *, yields: Field | None = None) -> RefT:
        """Put a transfer function on the edge; ``yields`` declares what comes out of it (else that is not checked)."""
        name = getattr(transfer, "__qualname__", repr(transfer))
        if not callable(transfer) or inspect.iscoroutinefunction(transfer):
            raise GraphError(f"{self}.via({name}): needs an async generator function (async def with yield of Chunk)")
        if self.transfer is not None:
            raise GraphError(f"{self}.via({name}): has a transfer function already; make the two one generator")
        return replace(self, transfer=transfer, spec=yields)

    def __str__(self) -> str:
        return f"{self.node}.{self.field}"


class Placeholder(FieldRef):
    """External data injected at the graph's entry. From: Omni-Flow section 3.1."""


class Interface:
    """One thing a role can do; calling it on a role of a graph adds that node. Made by ``interface()``."""

    name = ""

    def __init__(
        self,
        inputs_or: Sequence[Sequence[str]],
        outputs: Mapping[str, Field],
        inputs: Mapping[str, Field],
        activate_by_count: Mapping[str, int | str],
        scheduling: Scheduling,
        first_wins: bool,
        max_turns: int | None,
    ):
        self.inputs_or = tuple(map(tuple, inputs_or))
        self.outputs = dict(outputs)
        self.inputs = dict(inputs)
        self.activate_by_count = dict(activate_by_count)
        self.scheduling = scheduling
        self.first_wins = first_wins
        self.max_turns = max_turns
        self.input_names = tuple(dict.fromkeys(name for group in self.inputs_or for name in group))

    def __set_name__(self, owner: type[Role], name: str) -> None:
        self.name = name

    @overload
    def __get__(self, role: None, owner: type[Role]) -> Interface: ...

    @overload
    def __get__(self, role: Role, owner: type[Role]) -> BoundInterface: ...

    def __get__(self, role: Role | None, owner: type[Role]) -> Interface | BoundInterface:
        return self if role is None else BoundInterface(role, self)


def interface(
    inputs_or: Sequence[Sequence[str]],
    outputs: Mapping[str, Field],
    *,
    inputs: Mapping[str, Field] | None = None,
    activate_by_count: Mapping[str, int | str] | None = None,
    scheduling: Scheduling = Scheduling.ROUND_ROBIN,
    first_wins: bool = False,
    max_turns: int | None = None,
) -> Interface:
    """Declare an interface of a role.

    Args:
        inputs_or: OR of AND groups: any group fires the node, all fields of a group belong together.
        outputs: field name -> what it carries.
        inputs: field name -> what it must carry; a field left out takes anything.
        activate_by_count: field name -> number of frames after which the node fires, once in a call, on whatever paths
            they come (a multi-stream join); instead of a number the name of an input field that carries it.
        scheduling: among the instances of the role; with ``SESSION`` the activations of a call run one after the other,
            in the order in which what feeds them was made.
        first_wins: of several groups only the one that is complete first fires (for every frame of their common
            source); otherwise each does.
        max_turns: where a loop comes back to this node, how many turns may follow one another; one more is not taken.
            None: the nodes of the loop end it themselves, by not emitting the field that leads on.

    Raises:
        GraphError: a declaration contradicts itself; the message shows it.

    From: Omni-Flow section 3.1, OR-AND input semantics; section 3.2.3, activate_by_count.
    """
    where = f"interface(inputs_or={inputs_or!r})"
    if not inputs_or or any(isinstance(group, str) or not group for group in inputs_or):
        raise GraphError(f"{where}: is a list of groups, each a list of field names: write [['prompt']]")
    if not outputs:
        raise GraphError(f"{where}: declares no outputs; a node without one could never be needed")
    declared = Interface(inputs_or, outputs, inputs or {}, activate_by_count or {}, scheduling, first_wins, max_turns)
    for name in [*declared.inputs, *declared.activate_by_count]:
        if name not in declared.input_names:
            raise GraphError(f"{where}: no input {name!r}; {what_exists(name, declared.input_names)}")
    for name in [*outputs, *declared.input_names]:
        if not name.isidentifier() or name.startswith("_"):
            raise GraphError(f"{where}: field {name!r} must be an identifier without a leading underscore")
    if first_wins and len(declared.inputs_or) == 1:
        raise GraphError(f"{where}: first_wins chooses among groups, but there is one; write [['fast'], ['slow']]")
    if max_turns is not None and max_turns < 0:
        raise GraphError(f"{where}: max_turns = {max_turns} must be at least 0, or None")
    for name, count in declared.activate_by_count.items():
        if first_wins:
            raise GraphError(f"{where}: activate_by_count gathers all groups, so that none can win; drop first_wins")
        if isinstance(count, str):
            if count not in declared.input_names or count in declared.activate_by_count:
                plain = [each for each in declared.input_names if each not in declared.activate_by_count]
                raise GraphError(
                    f"{where}: activate_by_count[{name!r}] = {count!r} is a number, or an input that carries it and is "
                    f"not counted itself; {what_exists(count, plain)}"
                )
        elif count < 1:
            raise GraphError(f"{where}: activate_by_count[{name!r}] = {count} must be at least 1")
    return declared


@dataclass(frozen=True)
class GlobalParameters:
    """What the calls of a session share across roles (a cache, a history): made with the first of them.

    Nodes find it in ``Activation.parameters``. It lives until ``GraphRuntime.end_session``; that of a call without a
    session as long as the call. From: Omni-Flow section 3.1.
    """

    name: str
    make: Callable[[], Any]
    release: Callable[[Any], None] | None = None


class Role:
    """A computing role (an LLM, a vocoder, ...); subclasses declare interfaces. From: Omni-Flow section 3.1."""

    def __init__(self, graph: Graph, name: str):
        self._graph = graph
        self._name = name
        self._parameters: tuple[GlobalParameters, ...] = ()


class BoundInterface:
    """An interface of a role in a graph: call it with a source for each input.

    Called again it adds sources to the same node: those of another group, more of one field, or of its next turn, when
    they come from the node itself (a loop).
    """

    def __init__(self, role: Role, declared: Interface):
        self._role = role
        self._interface = declared

    def __call__(self, **sources: FieldRef) -> NodeCall:
        graph = self._role._graph
        node = NodeCall(graph, self._role._name, self._interface, sources)
        for name, source in sources.items():
            if name not in self._interface.input_names:
                known = what_exists(name, self._interface.input_names)
                raise GraphError(f"node {node._name!r} has no input {name!r}; {known}")
            graph._check_source(f"node {node._name!r}, input {name!r}", source)
        graph._calls.append(node)
        return node


class NodeCall:
    """A node of the graph; its output fields are its attributes."""

    def __init__(self, graph: Graph, role: str, declared: Interface, sources: Mapping[str, FieldRef]):
        self._graph = graph
        self._role = role
        self._interface = declared
        self._sources = dict(sources)
        self._name = f"{role}.{declared.name}"

    def __getattr__(self, field: str) -> FieldRef:
        if field.startswith("_"):  # copy, inspect and friends probe for such names
            raise AttributeError(field)
        outputs = self._interface.outputs
        if field not in outputs:
            raise GraphError(f"node {self._name!r} has no output {field!r}; {what_exists(field, outputs)}")
        return FieldRef(self._graph, self._name, field, outputs[field])


@dataclass(frozen=True, slots=True)
class GraphCallEntry:
    """A named way to call a graph."""

    name: str
    outputs: frozenset[str]
    until: frozenset[str]


class Graph:
    """A pipeline under construction: roles, placeholders, the calls that connect them, and the outputs.

    It is only written to; ``GraphParser`` reads it. From: Omni-Flow section 3.1.
    """

    def __init__(self, name: str):
        self.name = name
        self._placeholders: dict[str, Placeholder] = {}
        self._roles: dict[str, Role] = {}
        self._calls: list[NodeCall] = []
        self._outputs: dict[str, FieldRef] = {}
        self._parameters: dict[str, GlobalParameters] = {}
        self._graph_calls: dict[str, GraphCallEntry] = {}

    def __repr__(self) -> str:
        return f"Graph({self.name!r})"

    def placeholder(self, name: str, spec: Field | None = None) -> Placeholder:
        """Declare data that every call passes in (where its outputs need it)."""
        if name in self._placeholders:
            raise GraphError(f"graph {self.name!r}: placeholder {name!r} is declared twice")
        return self._placeholders.setdefault(name, Placeholder(self, ENTRY, name, spec))

    def role(self, role: type[RoleT], name: str, *, parameters: Iterable[GlobalParameters] = ()) -> RoleT:
        """Put a role into the graph; the runtime binds one ``Node`` to ``name``.

        Args:
            parameters: what its nodes see of their session.
        """
        if name in self._roles:
            raise GraphError(f"graph {self.name!r}: role {name!r} is declared twice; give one of them another name")
        if not name or "." in name:
            raise GraphError(f"graph {self.name!r}: role {name!r} must have a name without a dot")
        made = role(self, name)
        made._parameters = tuple(parameters)
        for one in made._parameters:
            if self._parameters.setdefault(one.name, one) != one:
                raise GraphError(f"graph {self.name!r}: there are two different parameters named {one.name!r}")
        self._roles[name] = made
        return made

    def role_ref(self, role: RoleT) -> RoleT:
        """Use a role of another graph: one node serves it in both. From: Omni-Flow section 3.1, RoleRef."""
        if role._graph is self:
            raise GraphError(f"graph {self.name!r}: role {role._name!r} is its own; use it without role_ref")
        return self.role(type(role), role._name, parameters=role._parameters)

    def graph_call(self, name: str, outputs: Iterable[str], *, until: Iterable[str] = ()) -> None:
        """Declare an entry point: what a call by this name asks for, and what completes it.

        Args:
            outputs: of the graph, declared before.
            until: the call is over when these of its outputs have ended; all of them by default.

        From: Omni-Flow section 3.1, graph_call entry points and completion conditions.
        """
        entry = GraphCallEntry(name, frozenset(outputs), frozenset(until) or frozenset(outputs))
        where = f"graph {self.name!r}, graph call {name!r}"
        if name in self._graph_calls:
            raise GraphError(f"{where}: is declared twice")
        if not entry.outputs:
            raise GraphError(f"{where}: asks for no output; {what_exists('', self._outputs)}")
        for output in sorted(entry.outputs):
            if output not in self._outputs:
                raise GraphError(f"{where}: no output {output!r}; {what_exists(output, self._outputs)}")
        for output in sorted(entry.until):
            if output not in entry.outputs:
                raise GraphError(f"{where}: does not ask for {output!r}, which it waits for; add it to its outputs")
        self._graph_calls[name] = entry

    def output(self, **sources: FieldRef) -> None:
        """Name what a call can ask for."""
        for name, source in sources.items():
            self._check_source(f"output {name!r}", source)
            if name in self._outputs:
                raise GraphError(f"graph {self.name!r}: output {name!r} is declared twice; it is {self._outputs[name]}")
            self._outputs[name] = source

    def _check_source(self, where: str, source: Any) -> None:
        if not isinstance(source, FieldRef):
            raise GraphError(f"{where}: needs a placeholder or an output field of a node, got {type(source).__name__}")
        if source.graph is not self:
            raise GraphError(f"{where}: {source} belongs to graph {source.graph.name!r}, not to {self.name!r}")
