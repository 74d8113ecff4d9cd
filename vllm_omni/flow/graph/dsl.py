"""The statements of a pipeline: Graph, Role, interface, Placeholder.

A mistake that is visible in one statement (an unknown name, a field of another graph) is raised by that statement;
``GraphParser`` checks the whole graph.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import partial
from typing import Any, TypeVar, overload

from vllm_omni.errors import GraphError
from vllm_omni.flow.graph.declarations import Field, GlobalParameters, GraphCallEntry, Scheduling
from vllm_omni.flow.graph.transfer import ENTRY, TransferFunction
from vllm_omni.names import suggest

RoleT = TypeVar("RoleT", bound="Role")
RefT = TypeVar("RefT", bound="FieldRef")


@dataclass(frozen=True)
class FieldRef:
    """A field of a node (or a placeholder) as the source of an edge."""

    graph: Graph
    node: str
    field: str
    spec: Field | None
    transfer: TransferFunction | None = None

    def via(self: RefT, transfer: TransferFunction, *, yields: Field | None = None) -> RefT:
        """Put a transfer function on the edge.

        Args:
            yields: the type of its chunks; None skips the check against the input that reads them.
        """
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


@dataclass(frozen=True, slots=True)
class RoleEntry:
    """A role of a graph."""

    role_class: type[Role]
    parameters: tuple[GlobalParameters, ...]
    graph: Graph | None = None  # the graph that it stands for


@dataclass(frozen=True, slots=True)
class CallEntry:
    """One call of an interface in a graph."""

    node: str  # "role.interface"
    role: str
    interface: Interface
    sources: Mapping[str, FieldRef]  # input field -> source


@dataclass(slots=True)
class Declarations:
    """The content of a graph, in the order of its statements; ``GraphParser`` reads it."""

    placeholders: dict[str, Placeholder] = field(default_factory=dict)
    roles: dict[str, RoleEntry] = field(default_factory=dict)
    calls: list[CallEntry] = field(default_factory=list)
    outputs: dict[str, FieldRef] = field(default_factory=dict)
    parameters: dict[str, GlobalParameters] = field(default_factory=dict)
    graph_calls: dict[str, GraphCallEntry] = field(default_factory=dict)


@dataclass(eq=False)
class Interface:
    """One operation of a role, which declares it as a class attribute. Calling it on a role of a graph adds a node.

    Args:
        inputs_or: OR of AND groups: any group fires the node, and needs all of its fields.
        outputs: field name -> its type.
        inputs: field name -> its type; a field left out accepts any type.
        activate_by_count: field name -> number of frames after which the node fires, once in a call, whatever their
            paths (a multi-stream join); instead of a number the name of an input field that carries it.
        scheduling: choice among the instances of the role; with ``SESSION`` the activations of a call run one at a
            time, in the order in which their inputs were produced.
        first_wins: of several groups only the one that is complete first fires (per frame of their common source);
            otherwise each group does.
        max_iterations: at the header of a loop, the largest number of iterations in a row; the next one is not started.
            None: the nodes of the loop end it themselves, by not emitting the field that leads back.

    Raises:
        GraphError: a declaration contradicts itself; the message shows it.

    From: Omni-Flow section 3.1, OR-AND input semantics; section 3.2.3, activate_by_count.
    """

    inputs_or: Sequence[Sequence[str]]
    outputs: Mapping[str, Field]
    _: KW_ONLY
    inputs: Mapping[str, Field] = field(default_factory=dict)
    activate_by_count: Mapping[str, int | str] = field(default_factory=dict)
    scheduling: Scheduling = Scheduling.LEAST_OUTSTANDING
    first_wins: bool = False
    max_iterations: int | None = None
    name: str = field(default="", init=False)  # of the attribute that it is assigned to

    def __post_init__(self) -> None:
        where = f"interface(inputs_or={self.inputs_or!r})"
        if not self.inputs_or or any(isinstance(group, str) or not group for group in self.inputs_or):
            raise GraphError(f"{where}: must be a list of groups, each a list of field names: write [['prompt']]")
        if not self.outputs:
            raise GraphError(f"{where}: declares no outputs; a node without an output is never needed")
        self.inputs_or = tuple(map(tuple, self.inputs_or))
        _check_interface(where, self)
        _check_counts(where, self)

    @property
    def input_names(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(name for group in self.inputs_or for name in group))

    def __set_name__(self, owner: type[Role], name: str) -> None:
        self.name = name

    @overload
    def __get__(self, role: None, owner: type[Role]) -> Interface: ...

    @overload
    def __get__(self, role: Role, owner: type[Role]) -> Callable[..., NodeCall]: ...

    def __get__(self, role: Role | None, owner: type[Role]) -> Interface | Callable[..., NodeCall]:
        return self if role is None else partial(_add_call, role, self)


interface = Interface  # as roles write it


def _check_interface(where: str, declared: Interface) -> None:
    names = declared.input_names
    for name in [*declared.inputs, *declared.activate_by_count]:
        if name not in names:
            raise GraphError(f"{where}: no input {name!r}; {suggest(name, names)}")
    for name in [*declared.outputs, *names]:
        if not name.isidentifier() or name.startswith("_"):
            raise GraphError(f"{where}: field {name!r} must be an identifier without a leading underscore")
    if declared.first_wins and len(declared.inputs_or) == 1:
        raise GraphError(f"{where}: first_wins chooses among groups, but there is one; write [['fast'], ['slow']]")
    if declared.max_iterations is not None and declared.max_iterations < 0:
        raise GraphError(f"{where}: max_iterations = {declared.max_iterations} must be at least 0, or None")


def _check_counts(where: str, declared: Interface) -> None:
    counts = declared.activate_by_count
    if counts and declared.first_wins:
        raise GraphError(f"{where}: activate_by_count gathers all groups, so no group can win; drop first_wins")
    for name, count in counts.items():
        if isinstance(count, str):
            if count not in declared.input_names or count in counts:
                plain = [each for each in declared.input_names if each not in counts]
                raise GraphError(
                    f"{where}: activate_by_count[{name!r}] = {count!r} must be a number, or an input that carries the "
                    f"number and is not counted itself; {suggest(count, plain)}"
                )
        elif count < 1:
            raise GraphError(f"{where}: activate_by_count[{name!r}] = {count} must be at least 1")


class Role:
    """A computing role (an LLM, a vocoder, ...); subclasses declare interfaces. From: Omni-Flow section 3.1."""

    def __init__(self, graph: Graph, name: str):
        self._graph = graph  # underscores: the public names of a role are its interfaces
        self._name = name


def _add_call(role: Role, declared: Interface, /, **sources: FieldRef) -> NodeCall:
    """Call an interface of a role in a graph, with a source for each input.

    Another call adds sources to the same node: for another group, for a field that has a source already, or for the
    next iteration of a loop when they come from the node itself.
    """
    node, graph = f"{role._name}.{declared.name}", role._graph
    for name, source in sources.items():
        if name not in declared.input_names:
            raise GraphError(f"node {node!r} has no input {name!r}; {suggest(name, declared.input_names)}")
        _check_source(graph, f"node {node!r}, input {name!r}", source)
    graph._check_open()
    graph.declarations.calls.append(CallEntry(node, role._name, declared, sources))
    return NodeCall(graph, node, declared)


class GraphRole(Role):
    """Another graph as a role: its graph calls are the interfaces, with its placeholders as inputs."""

    def __getattr__(self, name: str) -> Callable[..., NodeCall]:
        if name.startswith("_"):
            raise AttributeError(name)
        calls = [one for one, value in vars(type(self)).items() if isinstance(value, Interface)]
        raise GraphError(f"graph {type(self).__name__!r} has no graph call {name!r}; {suggest(name, calls)}")


class NodeCall:
    """A node of the graph; its output fields are its attributes."""

    def __init__(self, graph: Graph, node: str, declared: Interface):
        self._graph = graph
        self._node = node
        self._outputs = declared.outputs

    def __getattr__(self, field: str) -> FieldRef:
        if field.startswith("_"):  # copy, inspect and similar modules probe for such names
            raise AttributeError(field)
        node, outputs = self._node, self._outputs
        if field not in outputs:
            raise GraphError(f"node {node!r} has no output {field!r}; {suggest(field, outputs)}")
        return FieldRef(self._graph, node, field, outputs[field])


class Graph:
    """A pipeline under construction: roles, placeholders, the calls that connect them, and the outputs.

    From: Omni-Flow section 3.1.
    """

    def __init__(self, name: str):
        self.name = name
        self.declarations = Declarations()
        self._as_role: type[GraphRole] | None = None  # once another graph calls it

    def __repr__(self) -> str:
        return f"Graph({self.name!r})"

    def placeholder(self, name: str, spec: Field | None = None) -> Placeholder:
        """Declare data that every call passes in, unless its outputs do not depend on it."""
        self._check_open()
        if name in self.declarations.placeholders:
            raise GraphError(f"graph {self.name!r}: placeholder {name!r} is declared twice")
        made = self.declarations.placeholders[name] = Placeholder(self, ENTRY, name, spec)
        return made

    def role(self, role: type[RoleT], name: str, *, parameters: Iterable[GlobalParameters] = ()) -> RoleT:
        """Add a role; the runtime binds one ``Node`` to ``name``.

        Args:
            parameters: the session state that its nodes may use.
        """
        self._check_open()
        if name in self.declarations.roles:
            raise GraphError(f"graph {self.name!r}: role {name!r} is declared twice; give one of them another name")
        if not name or "." in name:
            raise GraphError(f"graph {self.name!r}: role {name!r} must have a name without a dot")
        entry = RoleEntry(role, tuple(parameters))
        for one in entry.parameters:
            if self.declarations.parameters.setdefault(one.name, one) != one:
                raise GraphError(f"graph {self.name!r}: there are two different parameters named {one.name!r}")
        self.declarations.roles[name] = entry
        return role(self, name)

    def role_ref(self, role: RoleT) -> RoleT:
        """Use a role of another graph: one node serves it in both. From: Omni-Flow section 3.1, RoleRef."""
        if role._graph is self:
            raise GraphError(f"graph {self.name!r}: role {role._name!r} is its own; use it without role_ref")
        entry = role._graph.declarations.roles[role._name]
        made = self.role(type(role), role._name, parameters=entry.parameters)
        self.declarations.roles[role._name] = entry
        return made

    def graph_ref(self, graph: Graph, name: str | None = None) -> Any:
        """Call another graph: a role of which each graph call of the other is an interface.

        ``graph_ref(other).look(picture=...)`` passes its placeholders; its outputs are the fields of the node. The
        other graph must be complete, so that graphs cannot call one another in a circle.

        Args:
            name: of the role, which is that of the other graph by default; another one for a second node.
        """
        if graph is self:
            raise GraphError(f"graph {self.name!r} calls itself: a graph cannot; repeat its nodes in a loop")
        if not graph.declarations.graph_calls:
            raise GraphError(f"graph {graph.name!r} has no graph calls: declare one, {graph.name}.graph_call(...)")
        if graph._as_role is None:
            interfaces = {call: _interface_of(graph, entry) for call, entry in graph.declarations.graph_calls.items()}
            graph._as_role = type(graph.name, (GraphRole,), interfaces)
        made = self.role(graph._as_role, graph.name if name is None else name)
        self.declarations.roles[made._name] = RoleEntry(graph._as_role, (), graph)
        return made

    def graph_call(self, name: str, outputs: Iterable[str], *, until: Iterable[str] = ()) -> None:
        """Declare an entry point: the outputs of a call by this name, and those that complete it.

        Args:
            outputs: outputs of the graph, declared before.
            until: the call is over when these of its outputs have ended; all of them by default.

        From: Omni-Flow section 3.1, graph_call entry points and completion conditions.
        """
        self._check_open()
        entry = GraphCallEntry(name, frozenset(outputs), frozenset(until) or frozenset(outputs))
        where = f"graph {self.name!r}, graph call {name!r}"
        declared = self.declarations.outputs
        if name in self.declarations.graph_calls:
            raise GraphError(f"{where}: is declared twice")
        if not entry.outputs:
            raise GraphError(f"{where}: asks for no output; {suggest('', declared)}")
        for output in sorted(entry.outputs):
            if output not in declared:
                raise GraphError(f"{where}: no output {output!r}; {suggest(output, declared)}")
        for output in sorted(entry.until):
            if output not in entry.outputs:
                raise GraphError(f"{where}: waits for {output!r}, which is not among its outputs; add it to them")
        self.declarations.graph_calls[name] = entry

    def output(self, **sources: FieldRef) -> None:
        """Name the fields that a call can ask for."""
        self._check_open()
        declared = self.declarations.outputs
        for name, source in sources.items():
            _check_source(self, f"output {name!r}", source)
            if name in declared:
                raise GraphError(f"graph {self.name!r}: output {name!r} is declared twice; it is {declared[name]}")
            declared[name] = source

    def _check_open(self) -> None:
        if self._as_role is not None:
            raise GraphError(
                f"graph {self.name!r} is called by another graph already: complete it before graph_ref; graphs cannot "
                "call one another in a circle"
            )


def _interface_of(graph: Graph, entry: GraphCallEntry) -> Interface:
    """The interface of a graph call."""
    declared, calls = graph.declarations, graph.declarations.calls
    fed: dict[str, None] = {}  # placeholders
    outputs: dict[str, Field] = {}
    for name in sorted(entry.outputs):
        above = _above(calls, declared.outputs[name].node)
        fed |= {ref.field: None for call in above for ref in call.sources.values() if isinstance(ref, Placeholder)}
        spec = declared.outputs[name].spec or Field("")
        outputs[name] = replace(spec, streamed=spec.streamed or _may_repeat(above))
    inputs = [name for name in declared.placeholders if name in fed]
    if not inputs:
        raise GraphError(f"graph {graph.name!r}, graph call {entry.name!r}: no placeholder feeds its outputs")
    types = {name: typed for name in inputs if (typed := declared.placeholders[name].spec) is not None}
    return Interface([inputs], outputs, inputs=types)


def _above(calls: Sequence[CallEntry], node: str) -> list[CallEntry]:
    """The calls of a node and of those that it depends on."""
    found, todo = {node}, [node]
    while todo:
        at = todo.pop()
        new = {ref.node for call in calls if call.node == at for ref in call.sources.values()} - found
        found |= new
        todo += new
    return [call for call in calls if call.node in found]


def _may_repeat(calls: Sequence[CallEntry]) -> bool:
    """Whether the last of these nodes may run several times in a call of its graph."""
    sources: dict[str, set[str]] = {}
    fields: dict[str, set[str]] = {}
    for call in calls:
        declared = call.interface
        sources.setdefault(call.node, set()).update(ref.node for ref in call.sources.values())
        connected = fields.setdefault(call.node, set())
        connected.update(call.sources)
        num_groups = sum(connected.issuperset(group) for group in declared.inputs_or)
        if num_groups > 1 and not declared.first_wins and not declared.activate_by_count:
            return True
        if any(_may_start_each(declared.inputs.get(name), ref) for name, ref in call.sources.items()):
            return True
    while ends := [node for node, above in sources.items() if not above & sources.keys()]:
        for node in ends:
            del sources[node]
    return bool(sources)  # a loop


def _may_start_each(wanted: Field | None, source: FieldRef) -> bool:
    """Whether each frame of a source may start an activation."""
    is_one = isinstance(source, Placeholder) or wanted is None or wanted.streamed
    return not is_one and (source.spec is None or source.spec.streamed)


def _check_source(graph: Graph, where: str, source: Any) -> None:
    if not isinstance(source, FieldRef):
        raise GraphError(f"{where}: needs a placeholder or an output field of a node, got {type(source).__name__}")
    if source.graph is not graph:
        raise GraphError(f"{where}: {source} belongs to graph {source.graph.name!r}, not to {graph.name!r}")
