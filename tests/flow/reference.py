"""A second definition of what a graph means, written for clarity: frames are joined by their origin.

Synchronous, node after node. Every activation knows the activation (and the yield of it) below which it stands, and a
join collects whatever stands below the same one: no ids, no hashes, no order of arrival, no dead activations (below
what has not run there is nothing to collect). Knows the DSL only, nothing of the parser, the plan or the controllers.
"""

import enum
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeAlias

from vllm_omni.flow.graph.dsl import FieldRef, Graph, Interface
from vllm_omni.flow.graph.transfer import ENTRY

Inputs: TypeAlias = dict[str, list[Any]]  # input field -> payloads, as they are read
Yield: TypeAlias = list[tuple[str, Any]]  # output field, payload


class Step(NamedTuple):
    """One fork, alternative or iteration on the path to an activation; the one that is read first compares less."""

    is_iteration: bool  # iterations come behind the yields
    index: int  # of the yield or the alternative; of an iteration: the further down the loop, the less
    node: str  # the node of the yield, alternative or iteration


Path: TypeAlias = tuple[Step, ...]
Behave: TypeAlias = Callable[[Path, int, Inputs], list[Yield]]  # path, declared group (see Run.group), inputs
Winner: TypeAlias = Callable[[str, Path, dict[int, Inputs]], int]  # node, base, candidates -> one of them


class NodeFails(Exception):
    """Raised by a ``Behave`` for a node that raises after these yields."""

    def __init__(self, yields: list[Yield]):
        super().__init__()
        self.yields = yields


MAX_FRAMES_READ = 10_000  # by one activation: a chain that doubles what it reads would never end


class TooLarge(Exception):
    """More activations, or frames of one, than allowed."""


class Unpredictable(Exception):
    """The inputs of a count node depend on the order of arrival."""


class Outcome(enum.Enum):
    DONE = "done"
    FAILS = "fails"
    OPEN = "open"  # a node raises, and the call may fail or end without it: nothing is said about outputs


@dataclass(frozen=True, eq=False)
class Edge:
    source: str
    source_field: str
    target: str
    field: str
    can_be_each: bool  # from a streamed output into an input declared whole
    is_constant: bool = False  # enters a loop elsewhere than at its header
    first_only: bool = False  # a constant that only the first iteration reads


@dataclass(eq=False)
class Group:
    node: str
    index: int  # in the declaration
    fields: tuple[str, ...]
    edges: list[Edge]
    is_back: bool
    is_alone: bool  # neither first_wins nor activate_by_count ties it to the others
    header: str = ""  # of the loop in whose every iteration the constant edges are read

    @property
    def paths(self) -> list[Edge]:
        return [edge for edge in self.edges if not edge.is_constant]

    @property
    def sources(self) -> set[str]:
        """As if the header passed all constants on."""
        return {edge.source for edge in self.paths} | ({self.header} if self.header else set())

    @property
    def is_direct(self) -> bool:
        return len(self.edges) == 1 and not self.header and not self.is_back and self.is_alone


@dataclass(eq=False)
class Run:
    """An activation: it stands below ``parent``, at one of its yields or (``index`` None) at all of it."""

    node: str
    path: Path
    parent: "Run | None"
    index: int | None
    group: int = 0  # as declared; of a count node 0
    num_iterations: int = 0
    inputs: Inputs = field(default_factory=dict)
    yields: list[Yield] = field(default_factory=list)
    indices: list[int | None] = field(default_factory=list)  # of the yields
    fails: bool = False

    def emitted(self, name: str, index: int | None = None) -> list[Any]:
        """Payloads of an output field: of one yield index, or all."""
        chosen = [
            one for one, number in zip(self.yields, self.indices, strict=True) if index is None or number == index
        ]
        return [payload for one in chosen for emitted, payload in one if emitted == name]

    @property
    def num_indices(self) -> int:
        return sum(number is not None for number in self.indices)

    def above(self, node: str) -> "tuple[Run, int | None] | None":
        """The nearest activation of ``node`` below which this one stands (or is), and the yield of it."""
        run, index = self, None
        while run.node != node:
            if run.parent is None:
                return None
            run, index = run.parent, run.index
        return run, index


@dataclass
class Result:
    outcome: Outcome
    outputs: dict[str, list[Any]]
    runs: dict[str, list[Run]]  # node -> its activations in order
    totals: dict[str, list[dict[str, int]]]  # count node -> for each time it counts: field -> frames that come in all


class Topology:
    """Edges, groups, loops, roots and per-frame edges of a graph that is taken to be right."""

    def __init__(self, graph: Graph):
        self.interfaces: dict[str, Interface] = {call.node: call.interface for call in graph.declarations.calls}
        edges: dict[str, list[Edge]] = {name: [] for name in self.interfaces}  # by target
        for call in graph.declarations.calls:
            edges[call.node] += [
                _edge(call.node, call.interface, name, source) for name, source in call.sources.items()
            ]
        self.loops: dict[str, set[str]] = {}  # header -> all nodes of the loop
        self._find_loops(list(edges), edges, set())
        self.groups: dict[str, list[Group]] = {name: list(self._groups(name, edges[name])) for name in edges}
        forward_fed = {
            name: {source for group in groups if not group.is_back for source in group.sources}
            for name, groups in self.groups.items()
        }
        for name in forward_fed:
            if self.interfaces[name].activate_by_count:
                forward_fed[name].add(self.counts_below(name))  # it gathers from everywhere below
        self._feeds = _inverted(forward_fed)
        constants = defaultdict[str, set[str]](set)  # header -> what is read in its loop as constants
        for edge in (edge for groups in self.groups.values() for group in groups for edge in group.edges):
            for header, loop in self.loops.items():
                if edge.is_constant and edge.source not in loop and edge.target in loop:
                    constants[header].add(edge.source)
        self.order = list(_in_order({name: some | constants[name] for name, some in forward_fed.items()}))
        reached = {gone: _flood(ENTRY, self._feeds, without=gone) for gone in self.order}
        self._dominators = {
            name: {ENTRY, name, *(gone for gone in self.order if name not in reached[gone])} for name in self.order
        } | {ENTRY: {ENTRY}}
        self._below = {name: _flood(name, self._feeds) | {name} for name in [*self.order, ENTRY]}
        self._each: dict[Edge, bool] = {}
        self.each_fields: dict[str, set[tuple[str, str]]] = defaultdict(set)  # source -> its field, target
        for name, groups in self.groups.items():
            for group in groups:
                for edge in group.edges:
                    if self.is_each(edge, group):
                        self.each_fields[edge.source].add((edge.source_field, name))
        fed = {name: {edge.source for group in groups for edge in group.edges} for name, groups in self.groups.items()}
        self.below = {name: _flood(name, _inverted(fed)) for name in fed}

    def _find_loops(self, names: list[str], edges: dict[str, list[Edge]], headers: set[str]) -> None:
        """Loops among some nodes, and those within each, which remain without what leads back to its header."""
        fed = {
            name: {edge.source for edge in edges[name] if edge.source in names and name not in headers}
            for name in names
        }
        below = {name: _flood(name, _inverted(fed)) for name in names}  # the node itself only if it is in a loop
        found: list[set[str]] = []
        for name in names:
            loop = {other for other in below[name] if name in below[other]}
            if loop and loop not in found and self._can_start(name, edges[name], loop):
                found.append(loop)
                self.loops[name] = loop
                self._find_loops([each for each in names if each in loop], edges, {*headers, name})

    def around(self, name: str) -> str:
        """The header of the innermost loop around a node; of the one outside of its own loop, if it is a header."""
        headers = [header for header, loop in self.loops.items() if name in loop and name != header]
        return min(headers, key=lambda header: len(self.loops[header]), default="")

    def counts_below(self, name: str) -> str:
        return self.around(name) or ENTRY

    def alternatives(self, name: str) -> list[tuple[str, ...]]:
        """The fields of each declared group; one that counts gathers all groups in one."""
        declared = self.interfaces[name]
        return [declared.input_names] if declared.activate_by_count else [tuple(some) for some in declared.inputs_or]

    def _can_start(self, name: str, edges: list[Edge], loop: set[str]) -> bool:
        outside = {edge.field for edge in edges if edge.source not in loop}
        return bool(loop) and any(outside.issuperset(fields) for fields in self.alternatives(name))

    def _groups(self, name: str, edges: list[Edge]) -> Iterator[Group]:
        declared = self.interfaces[name]
        is_alone = not declared.first_wins and not declared.activate_by_count
        own = self.loops.get(name, set())
        around = self.around(name)
        inside = self.loops.get(around, {ENTRY, *self.interfaces})
        for index, fields in enumerate(self.alternatives(name)):
            some = [edge for edge in edges if edge.field in fields]
            if {edge.field for edge in some} != set(fields):
                continue
            back = [edge for edge in some if edge.source in own]
            start = [edge for edge in some if edge.source not in own]
            if {edge.field for edge in start} == set(fields):
                constants = [edge for edge in start if edge.source not in inside]
                yield _group(name, index, fields, start, constants, around, False, is_alone)
            if back:
                rest = [edge for edge in start if edge.field not in {one.field for one in back}]
                again = [edge for edge in some if edge in back or edge in rest]
                yield _group(name, index, fields, again, rest, name, True, is_alone)

    def forward_groups(self, name: str) -> list[Group]:
        return [group for group in self.groups[name] if not group.is_back]

    def siblings(self, group: Group) -> list[Group]:
        """The groups that share its root."""
        return self.forward_groups(group.node) if self.interfaces[group.node].first_wins else [group]

    def root(self, groups: list[Group]) -> str:
        """The nearest common dominator of all sources."""
        if groups[0].is_back:
            return groups[0].node
        return self.nearest({source for group in groups for source in group.sources})

    def nearest(self, nodes: Collection[str]) -> str:
        """The nearest node that dominates all of these."""
        common = set.intersection(*(self._dominators[name] for name in nodes))
        return max(common, key=lambda name: len(self._dominators[name]))  # dominators are a chain

    def forks(self, groups: list[Group]) -> bool:
        """Whether all paths from the root to these groups start with a per-frame edge."""
        root = self.root(groups)
        if groups[0].is_back or any(group.header == root for group in groups):
            return False
        direct = [edge for group in groups for edge in group.paths if edge.source == root]
        return self._all_each(root, direct, {source for group in groups for source in group.sources})

    def constant_root(self, edge: Edge, group: Group) -> tuple[str, bool]:
        """The nearest node above the loop and the source of a constant, and whether all paths start per frame."""
        ends = {edge.source, group.header}
        root = self.nearest(ends)
        return root, self._all_each(root, [edge] if edge.source == root else [], ends)

    def _all_each(self, root: str, direct: list[Edge], ends: set[str]) -> bool:
        if root == ENTRY or not all(edge.can_be_each for edge in direct):
            return False
        for name in self._feeds.get(root, ()):
            if self._below[name] & ends:
                if self.interfaces[name].activate_by_count:
                    return False
                for group in self.forward_groups(name):
                    if group.header == root or not all(
                        self.is_each(edge, group) for edge in group.paths if edge.source == root
                    ):
                        return False
        return True

    def is_each(self, edge: Edge, group: Group) -> bool:
        if edge not in self._each:
            self._each[edge] = self._is_each(edge, group)
        return self._each[edge]

    def _is_each(self, edge: Edge, group: Group) -> bool:
        if not edge.can_be_each or edge.source == ENTRY:
            return False
        if edge.is_constant:
            return self.constant_root(edge, group) == (edge.source, True)
        if self.interfaces[group.node].activate_by_count:
            return False
        if group.is_back:
            return len(group.edges) == 1
        siblings = self.siblings(group)
        return group.is_direct or (edge.source == self.root(siblings) and self.forks(siblings))


def interpret(
    graph: Graph,
    behave: Mapping[str, Behave],
    inputs: Mapping[str, Any],
    outputs: Collection[str] | None = None,
    *,
    winners: Winner | None = None,
    max_runs: int = 10_000,
) -> Result:
    """Run a call of a graph.

    Args:
        behave: node (role.interface) -> what it does, a pure function.
        outputs: that the call asks for; all by default.
        winners: chooses the group of a first_wins node that fired, among those that could; the first by default.
        max_runs: activations of all nodes.

    Raises:
        TooLarge: there are more than ``max_runs`` activations, or one reads more than ``MAX_FRAMES_READ`` frames.
        Unpredictable: a count node does not read all frames, and its inputs depend on the order of arrival.
    """
    return _Interpreter(graph, behave, inputs, outputs, winners, max_runs).run()


class _Interpreter:
    def __init__(
        self,
        graph: Graph,
        behave: Mapping[str, Behave],
        inputs: Mapping[str, Any],
        outputs: Collection[str] | None,
        winners: Winner | None,
        max_runs: int,
    ):
        self.topology = Topology(graph)
        self.behave = behave
        self.winners = winners or (lambda node, base, candidates: min(candidates))
        self.wanted = {name: graph.declarations.outputs[name] for name in sorted(outputs or graph.declarations.outputs)}
        self.num_runs_left = max_runs
        fed = {name: {e.source for g in groups for e in g.edges} for name, groups in self.topology.groups.items()}
        ends = {source.node for source in self.wanted.values()}
        self.needed = ends.union(*(_flood(end, fed) for end in ends)) - {ENTRY}
        self.each_fields = {
            source: {name for name, target in some if target in self.needed}
            for source, some in self.topology.each_fields.items()
        }
        self.entry = Run(ENTRY, (), None, None, yields=[list(inputs.items())], indices=[None])
        self.runs: dict[str, list[Run]] = {ENTRY: [self.entry]} | {name: [] for name in self.topology.order}
        self.visited: set[tuple[Any, ...]] = set()
        self.totals: dict[str, list[dict[str, int]]] = {}

    def run(self) -> Result:
        topology = self.topology
        for name in topology.order:
            if name in self.needed and not topology.around(name):
                self.run_all(name)
        for runs in self.runs.values():
            runs.sort(key=lambda run: run.path)
        outputs = {
            name: [payload for run in self.runs[source.node] for payload in run.emitted(source.field)]
            for name, source in self.wanted.items()
        }
        del self.runs[ENTRY]
        return Result(self.outcome(), outputs, {name: self.runs[name] for name in sorted(self.needed)}, self.totals)

    def run_all(self, name: str) -> None:
        """A node, and if it is a header, its loop as often as it iterates."""
        self.run_node(name)
        if name not in self.topology.loops:
            return
        body = [each for each in self.topology.order if self.topology.around(each) == name]
        again = True
        while again:
            for each in body:
                self.run_all(each)
            again = self.start_iterations(name)

    def run_node(self, name: str) -> None:
        """All activations that the sources start now, except iterations."""
        declared = self.topology.interfaces[name]
        groups = self.topology.forward_groups(name)
        if declared.activate_by_count:
            self.run_count(groups[0])
        elif declared.first_wins:
            root, forks = self.topology.root(groups), self.topology.forks(groups)
            for base, index in self.bases(root, forks, name):
                read = {group.index: self.collect(group, base, index) for group in groups}
                candidates = {number: inputs for number, inputs in read.items() if all(inputs.values())}
                if candidates:
                    path = _path_below(base, index)
                    winner = self.winners(name, path, candidates)
                    assert winner in candidates, f"{name} at {path}: group {winner} has won, but cannot have fired"
                    self.start(Run(name, path, base, index, winner, inputs=candidates[winner]))
        else:
            for group in groups:
                self.run_group(group, groups)

    def run_group(self, group: Group, groups: list[Group]) -> None:
        if group.is_direct:
            root, forks = group.edges[0].source, self.topology.is_each(group.edges[0], group)
        else:
            root, forks = self.topology.root([group]), self.topology.forks([group])
        for base, index in self.bases(root, forks, (group.node, group.index)):
            inputs = self.collect(group, base, index)
            if all(inputs.values()):
                run = Run(group.node, _path_below(base, index), base, index, group.index, inputs=inputs)
                if len(groups) > 1:
                    run.path = self.with_alternative(run, groups)
                self.start(run)

    def bases(self, root: str, forks: bool, reader: Any) -> Iterator[tuple[Run, int | None]]:
        """Where something may be activated, each given once."""
        for base in list(self.runs[root]):
            for index in range(base.num_indices) if forks else [None]:
                if (reader, base.path, index) not in self.visited:
                    self.visited.add((reader, base.path, index))
                    yield base, index

    def collect(self, group: Group, base: Run, index: int | None) -> Inputs:
        inputs: Inputs = {name: [] for name in group.fields}
        for edge in group.edges:
            for payloads in self.read(edge, group, base, index):
                inputs[edge.field].extend(payloads)
        return inputs

    def read(self, edge: Edge, group: Group, base: Run, index: int | None = None) -> Iterator[list[Any]]:
        """The frames of one edge that belong to a base, in order."""
        if edge.first_only and base.num_iterations:
            return
        under, number = self.constant_base(edge, group, base) if edge.is_constant else (base, index)
        for run, payloads in self.pieces(edge, group, under, number):
            assert run.path[: len(under.path)] == under.path
            yield payloads

    def constant_base(self, edge: Edge, group: Group, base: Run) -> tuple[Run, int | None]:
        root, forks = self.topology.constant_root(edge, group)
        above = base.above(root)
        assert above is not None
        return above if forks else (above[0], None)

    def pieces(self, edge: Edge, group: Group, base: Run, index: int | None) -> Iterator[tuple[Run, list[Any]]]:
        """The frames below a base on one edge, in the order of paths."""
        for run in sorted(self.runs[edge.source], key=lambda run: run.path):
            above = run.above(base.node)
            if above is None or above[0] is not base:
                continue
            if run is base:
                yield run, run.emitted(edge.source_field, index if self.topology.is_each(edge, group) else None)
            elif index is None or above[1] == index:
                yield run, run.emitted(edge.source_field)

    def with_alternative(self, run: Run, groups: list[Group]) -> Path:
        """Of several groups: below the base that they have in common, the one after the other."""
        above = run.above(self.topology.root(groups))
        assert above is not None
        depth = len(above[0].path) + self.topology.forks(groups)
        return (*run.path[:depth], Step(False, run.group, run.node), *run.path[depth:])

    def start_iterations(self, header: str) -> bool:
        """Activate the header once more below its last activations, where its back group is complete."""
        max_iterations = self.topology.interfaces[header].max_iterations
        rank = -self.topology.order.index(header)
        groups = [group for group in self.topology.groups[header] if group.is_back]
        assert len(groups) == 1, f"{header}: an iteration by several groups is not defined"
        again = False
        for base, _ in self.bases(header, False, (header, "iteration")):
            for below, inputs in self.iterations(groups[0], base):
                if max_iterations is None or base.num_iterations < max_iterations:
                    path = (*base.path, Step(True, rank, header), *below)
                    self.start(Run(header, path, base, None, groups[0].index, base.num_iterations + 1, inputs))
                    again = True
        return again

    def iterations(self, group: Group, base: Run) -> Iterator[tuple[Path, Inputs]]:
        """The iterations that an activation of a header leads to: their paths below it, and inputs."""
        edge = group.edges[0]
        if len(group.edges) > 1 or not self.topology.is_each(edge, group):
            inputs = self.iteration_inputs(group, base)
            if inputs is not None:
                yield (), inputs
            return
        for run, _ in self.pieces(edge, group, base, None):
            for index in range(run.num_indices):
                if payloads := run.emitted(edge.source_field, index):
                    yield (*run.path[len(base.path) :], Step(False, index, run.node)), {edge.field: payloads}

    def iteration_inputs(self, group: Group, base: Run) -> Inputs | None:
        if self.topology.interfaces[group.node].activate_by_count:
            return self.count(group, base)
        inputs = self.collect(group, base, None)
        return inputs if all(inputs.values()) else None

    def run_count(self, group: Group) -> None:
        for base, _ in self.bases(self.topology.counts_below(group.node), False, group.node):
            inputs = self.count(group, base)
            if inputs is not None:
                self.start(Run(group.node, base.path, base, None, inputs=inputs))

    def count(self, group: Group, base: Run) -> Inputs | None:
        """The frames that a count node reads below a base; None if there are too few."""
        declared = self.topology.interfaces[group.node]
        come = {
            each: [one for edge in group.edges if edge.field == each for one in self.read(edge, group, base)]
            for each in group.fields
        }
        inputs = {each: [payload for payloads in pieces for payload in payloads] for each, pieces in come.items()}
        self.totals.setdefault(group.node, []).append({each: len(inputs[each]) for each in declared.activate_by_count})
        for each in inputs:
            wanted = declared.activate_by_count.get(each, 1)
            if isinstance(wanted, str):
                if not inputs[wanted]:
                    return None
                wanted = int(inputs[wanted][0])
            if len(inputs[each]) < wanted:
                return None
            if 0 < wanted < len(inputs[each]) and sum(map(bool, come[each])) > 1:
                raise Unpredictable(f"{group.node}.{each} reads {wanted} of {len(inputs[each])}")
            inputs[each] = inputs[each][:wanted]
        return inputs

    def start(self, run: Run) -> None:
        self.num_runs_left -= 1
        if self.num_runs_left < 0 or sum(map(len, run.inputs.values())) > MAX_FRAMES_READ:
            raise TooLarge
        copy = {name: list(payloads) for name, payloads in run.inputs.items()}
        try:
            run.yields = self.behave[run.node](run.path, run.group, copy)
        except NodeFails as exc:
            run.yields, run.fails = exc.yields, True
        each, number = self.each_fields.get(run.node, set()), 0
        for one in run.yields:
            assert len({name for name, _ in one}) == len(one), f"{run.node}: a field is twice in a yield"
            if any(name in each for name, _ in one):
                run.indices.append(number)
                number += 1
            else:
                run.indices.append(None)
        self.runs[run.node].append(run)

    def outcome(self) -> Outcome:
        failed = [run for runs in self.runs.values() for run in runs if run.fails]
        if not failed:
            return Outcome.DONE
        surely = any(
            not self.may_do_without(run.node)
            and any(self.is_waited_for(run, name) for name in self.topology.interfaces[run.node].outputs)
            for run in failed
        )
        return Outcome.FAILS if surely else Outcome.OPEN

    def may_do_without(self, node: str) -> bool:
        """Whether a node further down has an alternative."""
        for name in self.topology.below[node] & self.needed:
            groups = [group for group in self.topology.groups[name] if not group.is_back]
            if self.topology.interfaces[name].first_wins and len(groups) > 1:
                return True
            if any(len(group.edges) > len(group.fields) for group in groups):
                return True
        return False

    def is_waited_for(self, run: Run, name: str) -> bool:
        """Whether the call cannot be over before the end of this field of a failed activation is known."""
        if not self.topology.interfaces[run.node].outputs[name].streamed and run.emitted(name):
            return False  # that was its end
        return self.leads_to_output(run.node, name)

    def leads_to_output(self, node: str, name: str) -> bool:
        """By paths on which no node can end before all frames have arrived."""
        if any(source.node == node and source.field == name for source in self.wanted.values()):
            return True
        return any(
            self.leads_to_output(target, each)
            for target in self.needed
            for group in self.topology.groups[target]
            if group.is_direct and (group.edges[0].source, group.edges[0].source_field) == (node, name)
            for each in self.topology.interfaces[target].outputs
        )


def _edge(target: str, declared: Interface, name: str, source: FieldRef) -> Edge:
    assert source.transfer is None, "transfer functions are not interpreted"
    spec = declared.inputs.get(name)
    streams = source.spec is not None and source.spec.streamed
    return Edge(source.node, source.field, target, name, streams and spec is not None and not spec.streamed)


def _group(
    name: str,
    index: int,
    fields: tuple[str, ...],
    edges: list[Edge],
    constants: list[Edge],
    header: str,
    is_back: bool,
    is_alone: bool,
) -> Group:
    fed = {edge.field for edge in edges if edge not in constants}  # by the loop itself
    marked = [
        replace(edge, is_constant=edge in constants, first_only=edge in constants and (not fed or edge.field in fed))
        for edge in edges
    ]
    return Group(name, index, fields, marked, is_back, is_alone, header if constants else "")


def _path_below(base: Run, index: int | None) -> Path:
    return base.path if index is None else (*base.path, Step(False, index, base.node))


def _inverted(sources: Mapping[str, Collection[str]]) -> dict[str, set[str]]:
    targets: dict[str, set[str]] = defaultdict(set)
    for target, some in sources.items():
        for source in some:
            targets[source].add(target)
    return dict(targets)


def _flood(start: str, neighbours: Mapping[str, Collection[str]], without: str = "") -> set[str]:
    """All that can be reached; ``start`` only if it is on a cycle."""
    found: set[str] = set()
    todo = [start]
    while todo:
        for name in neighbours.get(todo.pop(), ()):
            if name not in found and name != without:
                found.add(name)
                todo.append(name)
    return found


def _in_order(fed: Mapping[str, Collection[str]]) -> Iterator[str]:
    """Sources before targets."""
    done = {ENTRY}
    while len(done) <= len(fed):
        name = next(name for name in fed if name not in done and done.issuperset(fed[name]))  # else: a nested loop
        done.add(name)
        yield name
