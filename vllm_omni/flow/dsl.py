"""The words a pipeline is written in: Graph, Role, interface, Field, Placeholder.

A mistake that one line shows (a name that does not exist, a field of another graph) is raised at that line;
what needs the whole graph is left to ``GraphParser``.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar, overload

from vllm_omni.errors import GraphError
from vllm_omni.flow.frame import ENTRY, TransferFunction

RoleT = TypeVar("RoleT", bound="Role")
RefT = TypeVar("RefT", bound="FieldRef")


def what_exists(name: str, existing: Iterable[str]) -> str:
    """The tail of every "no such name" message: the nearest name, then all that exist."""
    names = sorted(existing)
    near = difflib.get_close_matches(name, names, n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    return f"{hint}there is: {', '.join(map(repr, names)) or 'nothing'}"


@dataclass(frozen=True, slots=True)
class Field:
    """What a field carries. ``streamed``: an output may be emitted in many pieces (otherwise exactly one)."""

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
        activate_by_count: Mapping[str, int],
    ):
        self.inputs_or = tuple(map(tuple, inputs_or))
        self.outputs = dict(outputs)
        self.inputs = dict(inputs)
        self.activate_by_count = dict(activate_by_count)
        self.input_names = frozenset(name for group in self.inputs_or for name in group)

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
    activate_by_count: Mapping[str, int] | None = None,
) -> Interface:
    """Declare an interface of a role.

    Args:
        inputs_or: OR of AND groups: any group fires the node, all fields of a group belong together.
        outputs: field name -> what it carries.
        inputs: field name -> what it must carry; a field left out takes anything.
        activate_by_count: field name -> number of frames that fire the node (a multi-stream join).

    Raises:
        GraphError: a declaration contradicts itself; the message shows it.

    From: Omni-Flow section 3.1, OR-AND input semantics.
    """
    where = f"interface(inputs_or={inputs_or!r})"
    if not inputs_or or any(isinstance(group, str) or not group for group in inputs_or):
        raise GraphError(f"{where}: is a list of groups, each a list of field names: write [['prompt']]")
    if not outputs:
        raise GraphError(f"{where}: declares no outputs; a node without one could never be needed")
    declared = Interface(inputs_or, outputs, inputs or {}, activate_by_count or {})
    for name in [*declared.inputs, *declared.activate_by_count]:
        if name not in declared.input_names:
            raise GraphError(f"{where}: no input {name!r}; {what_exists(name, declared.input_names)}")
    for name in [*outputs, *declared.input_names]:
        if not name.isidentifier() or name.startswith("_"):
            raise GraphError(f"{where}: field {name!r} must be an identifier without a leading underscore")
    return declared


class Role:
    """A computing role (an LLM, a vocoder, ...); subclasses declare interfaces. From: Omni-Flow section 3.1."""

    def __init__(self, graph: Graph, name: str):
        self._graph = graph
        self._name = name


class BoundInterface:
    """An interface of a role in a graph: call it with a source for each input."""

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

    def __repr__(self) -> str:
        return f"Graph({self.name!r})"

    def placeholder(self, name: str, spec: Field | None = None) -> Placeholder:
        """Declare data that every call passes in (where its outputs need it)."""
        if name in self._placeholders:
            raise GraphError(f"graph {self.name!r}: placeholder {name!r} is declared twice")
        return self._placeholders.setdefault(name, Placeholder(self, ENTRY, name, spec))

    def role(self, role: type[RoleT], name: str) -> RoleT:
        """Put a role into the graph; the runtime binds one ``Node`` to ``name``."""
        if name in self._roles:
            raise GraphError(f"graph {self.name!r}: role {name!r} is declared twice; give one of them another name")
        if not name or "." in name:
            raise GraphError(f"graph {self.name!r}: role {name!r} must have a name without a dot")
        made = role(self, name)
        self._roles[name] = made
        return made

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
