"""From a written graph to a checked plan: whatever is wrong is said before the first request arrives."""

import graphlib
from collections import Counter
from collections.abc import Iterable
from types import MappingProxyType

from vllm_omni.errors import GraphError, PlanError
from vllm_omni.flow.dsl import FieldRef, Graph, NodeCall, what_exists
from vllm_omni.flow.frame import ENTRY
from vllm_omni.flow.plan import Edge, Needed, NodePlan, StaticPlan


class GraphParser:
    """Checks a graph and compiles it.

    Planned today: trees, that is, every node is fed by one node (by any number of its fields) or by placeholders.

    From: Omni-Flow section 3.3.
    """

    def __init__(self, graph: Graph):
        self._graph = graph

    def parse(self) -> StaticPlan:
        """Compile the graph.

        Raises:
            GraphError: the graph is wrong; the message names node and field, what exists and the nearest fix.
            PlanError: the graph is right, but uses a join, several OR groups, a loop or ``activate_by_count``.
        """
        graph = self._graph
        if not graph._outputs:
            raise GraphError(f"graph {graph.name!r} has no output; end it with graph.output(name=node.field)")
        for call in graph._calls:
            self._check_strategy(call)
            self._check_inputs(call)
        self._check_called_once()
        for call in graph._calls:
            self._check_single_predecessor(call)
        for name, source in graph._outputs.items():
            self._check_output(name, source)

        # A field can only be used after the call that makes it, so the order of declaration is topological.
        nodes = {call._name: self._plan_node(call) for call in graph._calls}
        outputs = {name: Edge(source.node, source.field, ENTRY, name) for name, source in graph._outputs.items()}
        plan = StaticPlan(
            name=graph.name,
            nodes=MappingProxyType(nodes),
            edges=(*(edge for node in nodes.values() for edge in node.inputs.values()), *outputs.values()),
            placeholders=tuple(graph._placeholders),
            outputs=MappingProxyType(outputs),
            needed_by=MappingProxyType({name: _needed(edge, nodes) for name, edge in outputs.items()}),
        )
        self._check_all_used(plan)
        return plan

    def _check_strategy(self, call: NodeCall) -> None:
        declared = call._interface
        if declared.activate_by_count:
            raise PlanError(
                f"node {call._name!r}: activate_by_count {declared.activate_by_count} cannot be planned yet; "
                "let one upstream node collect the streams and emit a single field"
            )
        if len(declared.inputs_or) > 1:
            raise PlanError(
                f"node {call._name!r}: several OR groups {list(map(list, declared.inputs_or))} cannot be planned yet; "
                f"declare one interface per group, each with fields of one group, such as {list(declared.inputs_or[0])}"
            )

    def _check_inputs(self, call: NodeCall) -> None:
        for name in call._interface.inputs_or[0]:
            if name not in call._sources:
                fields = [f"{made._name}.{field}" for made in self._graph._calls for field in made._interface.outputs]
                known = what_exists(name, [*self._graph._placeholders, *fields])
                raise GraphError(
                    f"node {call._name!r}: input {name!r} is not connected; pass {name}=<a source> to the call; {known}"
                )
            source, wanted = call._sources[name], call._interface.inputs.get(name)
            if wanted is not None and source.spec is not None and not wanted.accepts(source.spec):
                raise GraphError(
                    f"node {call._name!r}: input {name!r} wants {wanted}, but {source} is {source.spec}; "
                    "convert it on the edge with .via(transfer_function, yields=...)"
                )

    def _check_called_once(self) -> None:
        counts = Counter(call._name for call in self._graph._calls)
        repeated = [call for call in self._graph._calls if counts[call._name] > 1]
        if not repeated:
            return
        predecessors: dict[str, list[str]] = {name: [] for name in counts}
        for call in self._graph._calls:
            predecessors[call._name].extend(s.node for s in call._sources.values() if s.node != ENTRY)
        try:
            graphlib.TopologicalSorter(predecessors).prepare()
        except graphlib.CycleError as exc:
            cycle: list[str] = exc.args[1]
            for call in repeated:
                for name, source in call._sources.items():
                    if call._name in cycle and source.node in cycle:
                        raise PlanError(
                            f"node {call._name!r}: input {name!r} from {source} closes the loop {' -> '.join(cycle)}, "
                            "which cannot be planned yet; unroll it, or run the loop inside one node"
                        ) from None
        name = repeated[0]._name
        fields = {field: None for call in repeated if call._name == name for field in call._sources}
        raise PlanError(
            f"node {name!r} is called {counts[name]} times, so that several sources feed {_names(fields)}; such a join "
            "cannot be planned yet; add a second role, or a second interface, for the second call"
        )

    def _check_single_predecessor(self, call: NodeCall) -> None:
        if len({source.node for source in call._sources.values()}) > 1:
            fed = ", ".join(f"{name!r} by {source}" for name, source in call._sources.items())
            raise PlanError(
                f"node {call._name!r} joins several nodes ({fed}), which cannot be planned yet; "
                "let one upstream node pass all of these fields on"
            )

    def _check_output(self, name: str, source: FieldRef) -> None:
        if source.node == ENTRY:
            raise GraphError(f"output {name!r} is the placeholder {source.field!r} itself; name a field of a node")
        if source.transfer is not None:
            raise PlanError(
                f"output {name!r}: {source} has a transfer function, but no node to run it in; drop .via(...) and let "
                f"node {source.node!r} emit what the user should see"
            )

    def _plan_node(self, call: NodeCall) -> NodePlan:
        inputs = {name: Edge(s.node, s.field, call._name, name, s.transfer) for name, s in call._sources.items()}
        outputs = MappingProxyType(call._interface.outputs)
        return NodePlan(call._name, call._role, call._interface.name, MappingProxyType(inputs), outputs)

    def _check_all_used(self, plan: StaticPlan) -> None:
        used = frozenset[str]().union(*(needed.nodes for needed in plan.needed_by.values()))
        for node in plan.nodes.values():
            if node.name not in used:
                raise GraphError(
                    f"node {node.name!r} leads to no output, so it would never run; add graph.output(...) with one of "
                    f"its fields {_names(node.outputs)}, or remove the call"
                )
        for role in self._graph._roles:
            if role not in plan.roles:
                raise GraphError(f"role {role!r} is never called; call one of its interfaces, or remove it")
        for name in plan.placeholders:
            if not any(edge.source == ENTRY and edge.source_field == name for edge in plan.edges):
                raise GraphError(f"placeholder {name!r} feeds no node; pass it to a call, or remove it")


def _needed(output: Edge, nodes: dict[str, NodePlan]) -> Needed:
    found: set[str] = set()
    edges: set[Edge] = set()
    todo = [output]
    while todo:
        edge = todo.pop()
        edges.add(edge)
        if edge.source != ENTRY and edge.source not in found:
            found.add(edge.source)
            todo.extend(nodes[edge.source].inputs.values())
    return Needed(frozenset(found), frozenset(edges))


def _names(names: Iterable[str]) -> str:
    return ", ".join(map(repr, names))
