"""Random graphs for property tests, with deterministic nodes.

A payload names the node, field and yield that made it and ends in a digest of its inputs, so a wrong
join is visible in every payload behind it. ``reference.py`` computes from ``Behaviour`` what ``RandomNode`` does.
"""

import asyncio
import hashlib
import random
from collections import Counter
from collections.abc import AsyncIterator, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from tests.flow import reference
from tests.flow.reference import Inputs, NodeFails, Outcome, Path, Result, Yield
from vllm_omni.flow.graph.declarations import Field, Scheduling
from vllm_omni.flow.graph.dsl import FieldRef, Graph, Interface, Role, interface
from vllm_omni.flow.graph.transfer import Chunk
from vllm_omni.flow.run.frame import Emission

VALUE = "value"  # of no modality: on engines, a field of any stage
NEVER = 10**6  # frames that a count node waits for until their number is known
MAX_DEPTH = 3  # of loops within loops
MAX_RUNS = 40  # activations of a case
MAX_FRAMES = 400  # that they read
LOOPS = (  # groups of the header, those of their fields that are fed from outside, fields that lead back
    ([["x"]], [["x"]], ("x",)),
    ([["x"], ["b"]], [["x"]], ("b",)),
    ([["x", "y"]], [["x", "y"]], ("x", "y")),
    ([["x", "y"]], [["x", "y"]], ("x",)),
    ([["x"], ["y"], ["b"]], [["x"], ["y"]], ("b",)),
    ([["x", "y"], ["b", "c"]], [["x", "y"]], ("b", "c")),
    ([["x"], ["b", "c"]], [["x"], ["c"]], ("b",)),
)
NUM_YIELDS = (1, 1, 1, 2, 2, 2, 3, 0)  # the last one of a sparse behaviour only


class NodeBroke(Exception):
    """The exception of a failing node."""


class _Dice:
    """Small numbers out of a digest."""

    def __init__(self, *seed: Any):
        self.number = int.from_bytes(hashlib.blake2b(repr(seed).encode(), digest_size=16).digest())

    def below(self, sides: int) -> int:
        self.number, rest = divmod(self.number, sides)
        return rest


@dataclass
class LoopOf:
    """A loop as its nodes see it."""

    header: str  # its role
    max_iterations: int
    back: set[tuple[str, str]] = field(default_factory=set)  # (role, output field) that lead to the next iteration


@dataclass
class Behaviour:
    """The yields of a node, a function of its inputs."""

    seed: int
    name: str  # of the role
    streamed: tuple[str, ...]
    single: tuple[str, ...]  # output fields that are not streamed
    forwards: bool  # yields while it reads
    sparse: bool  # often yields nothing, or not all fields
    fails: bool = False  # now and then
    loops: list[LoopOf] = field(default_factory=list)  # that it is part of, the innermost first

    def __call__(self, path: Path, group: int, inputs: Inputs) -> list[Yield]:
        main, head = self.split(inputs)
        yields: list[Yield] = []
        for number, payload in enumerate(main):
            yields += self.on_chunk(head, number, payload, len(yields))
        end, fails = self.at_end(inputs, len(yields))
        if fails:
            raise NodeFails(yields + end)
        return yields + end

    def main_field(self, fields: Collection[str]) -> str | None:
        """The payloads that are forwarded piece by piece after the other inputs have been read."""
        return min(fields) if self.forwards else None

    def split(self, inputs: Inputs) -> tuple[list[Any], Inputs]:
        main = self.main_field(inputs)
        head = {name: inputs[name] for name in sorted(inputs) if name != main}
        return (inputs[main] if main is not None else []), head

    def on_chunk(self, head: Inputs, number: int, payload: Any, num_yields: int) -> list[Yield]:
        dice = _Dice(self.seed, self.name, head, number, payload)
        iterations = self.iterations_of([payload, *(one for some in head.values() for one in some)])
        return self.make_yields(dice, (1, 1, 2, 0)[dice.below(3 + self.sparse)], iterations, num_yields)

    def at_end(self, inputs: Inputs, num_yields: int) -> tuple[list[Yield], bool]:
        """The last yields, and whether it raises then."""
        dice = _Dice(self.seed, self.name, sorted(inputs.items()))
        iterations = self.iterations_of([one for some in inputs.values() for one in some])
        fails = self.fails and not dice.below(3)
        count = dice.below(2) if self.forwards else NUM_YIELDS[dice.below(7 + self.sparse)]
        yields = self.make_yields(dice, count, iterations, num_yields)
        for name in self.single:
            if self.has_field(dice) and self.may_emit(name, iterations):
                place = dice.below(len(yields) + 1)
                if place == len(yields):
                    yields.append([])
                yields[place].append((name, self.payload(name, num_yields + place, iterations, dice)))
        return (yields[: dice.below(len(yields) + 1)] if fails else yields), fails

    def make_yields(self, dice: _Dice, count: int, iterations: list[int], start: int) -> list[Yield]:
        fields = [name for name in self.streamed if self.may_emit(name, iterations)]
        yields = []
        for number in range(start, start + count):
            chosen = [name for name in fields if self.has_field(dice)]
            if dice.below(2):
                chosen.reverse()
            if chosen:
                yields.append([(name, self.payload(name, number, iterations, dice)) for name in chosen])
        return yields

    def has_field(self, dice: _Dice) -> bool:
        return dice.below(6 if self.sparse else 24) > 0

    def payload(self, name: str, number: int, iterations: list[int], dice: _Dice) -> str:
        counts = "".join(f"@{loop.header}={count}" for loop, count in zip(self.loops, iterations, strict=True))
        return f"{self.name}.{name}{number}{counts}#{dice.number & 0xFFFFFF:06x}"

    def may_emit(self, name: str, iterations: list[int]) -> bool:
        """False for a field that would lead to an iteration too many."""
        return not any(
            (self.name, name) in loop.back and count >= loop.max_iterations
            for loop, count in zip(self.loops, iterations, strict=True)
        )

    def iterations_of(self, payloads: Sequence[Any]) -> list[int]:
        """The iteration of each of its loops, read from the payloads made in it."""
        marks = [mark for one in payloads if isinstance(one, str) for mark in one.split("#")[0].split("@")[1:]]
        return [
            max([int(mark.split("=")[1]) for mark in marks if mark.startswith(f"{loop.header}=")], default=-1)
            + (loop.header == self.name)
            for loop in self.loops
        ]


class Activated(Protocol):
    """The part of ``vllm_omni.flow.Activation`` that a node needs."""

    @property
    def inputs(self) -> Mapping[str, AsyncIterator[Chunk]]: ...


class RandomNode:
    """A node with a behaviour: reads and yields in steps of random length, and records its inputs."""

    def __init__(self, behaviour: Behaviour, rng: random.Random):
        self._behaviour = behaviour
        self._rng = rng
        self.seen: list[Inputs] = []  # of the activations that have read everything, in this order
        self.paths: list[tuple[int, ...]] = []  # theirs
        self.num_running = 0
        self.most_running = 0

    async def forward(self, activation: Activated) -> AsyncIterator[Emission | list[Emission]]:
        self.num_running += 1
        self.most_running = max(self.most_running, self.num_running)
        try:
            async for one in self._forward(activation.path, activation.inputs):
                yield one
        finally:
            self.num_running -= 1

    async def _forward(
        self, path: tuple[int, ...], streams: Mapping[str, AsyncIterator[Chunk]]
    ) -> AsyncIterator[Emission | list[Emission]]:
        behaviour, rng = self._behaviour, self._rng
        main = behaviour.main_field(streams)
        others = sorted(name for name in streams if name != main)
        inputs: Inputs = {name: [] for name in sorted(streams)}
        await self._read(streams, others, inputs)
        num_yields = 0
        if main is not None:
            head = {name: inputs[name] for name in others}
            async for chunk in streams[main]:
                inputs[main].append(chunk.payload)
                for one in behaviour.on_chunk(head, len(inputs[main]) - 1, chunk.payload, num_yields):
                    await self._pause()
                    yield self._emissions(one, ())
                    num_yields += 1
        self.seen.append(inputs)
        self.paths.append(path)
        end, fails = behaviour.at_end(inputs, num_yields)
        for number, one in enumerate(end):
            await self._pause()
            to_come = {name for later in end[number + 1 :] for name, _ in later}
            ended = [name for name, _ in one if not fails and name not in to_come and rng.random() < 0.5]
            yield self._emissions(one, ended)
        await self._pause()
        if fails:
            raise NodeBroke(behaviour.name)

    async def _read(self, streams: Mapping[str, AsyncIterator[Chunk]], names: list[str], inputs: Inputs) -> None:
        """All of these fields, one after the other or interleaved."""
        names = self._rng.sample(names, len(names))
        if self._rng.random() < 0.5:
            for name in names:
                async for chunk in streams[name]:
                    inputs[name].append(chunk.payload)
            return
        while names:
            for name in list(names):
                try:
                    inputs[name].append((await anext(streams[name])).payload)
                except StopAsyncIteration:
                    names.remove(name)

    def _emissions(self, one: Yield, ended: Collection[str]) -> Emission | list[Emission]:
        made = [Emission(name, payload, name in ended) for name, payload in one]
        return made[0] if len(made) == 1 and self._rng.random() < 0.5 else made

    async def _pause(self) -> None:
        for _ in range(self._rng.choice((0, 0, 1, 2, 5))):
            await asyncio.sleep(0)


@dataclass
class Case:
    """A graph, the inputs and wanted outputs of a call, and the expected result."""

    graph: Graph
    behaviours: dict[str, Behaviour]  # by node
    inputs: dict[str, Any]
    outputs: frozenset[str]
    features: Counter[str]
    expected: Result  # before anybody has won: see ``check``

    def make_nodes(self, rng: random.Random) -> dict[str, RandomNode]:
        """For ``GraphRuntime``: role -> node."""
        return {behaviour.name: RandomNode(behaviour, rng) for behaviour in self.behaviours.values()}

    def check(
        self, nodes: Mapping[str, RandomNode], outputs: Mapping[str, list[Any]], error: BaseException | None
    ) -> None:
        """Compare a call that is over with the reference.

        Args:
            nodes: made by ``make_nodes`` for this call.
            outputs: the payloads that were read, of outputs without any or not.
            error: what reading raised.
        """
        expected = self.expected
        if self.features["first_wins"]:
            if isinstance(error, NodeBroke):  # an earlier winner may not have read enough to decide
                return
            expected = self.interpret(_Observed(nodes))
        if expected.outcome is Outcome.OPEN:
            assert error is None or isinstance(error, NodeBroke), f"{error!r}\n{self}"
            return
        if expected.outcome is Outcome.FAILS:
            assert isinstance(error, NodeBroke), f"{error!r} instead of NodeBroke\n{self}"
            return
        assert error is None, f"{error!r}\n{self}"
        got = {name: outputs.get(name, []) for name in expected.outputs}
        assert got == expected.outputs, f"\ngot      {got}\nexpected {expected.outputs}\n{self}"
        assert set(outputs) <= self.outputs, f"outputs that were not requested: {outputs}\n{self}"
        for name, behaviour in self.behaviours.items():
            node, runs = nodes[behaviour.name], expected.runs.get(name, [])
            self._check_seen(name, node, [run.inputs for run in runs])

    def _check_seen(self, name: str, node: RandomNode, expected: list[Inputs]) -> None:
        """No activation but those expected. Some may be missing: those that no output depended on."""
        context = f"{name} read\n{node.seen}\ninstead of\n{expected}\n{self}"
        assert node.num_running == 0, f"{name} is still running\n{self}"
        if self.graph_interface(name).scheduling is Scheduling.SESSION:
            assert node.most_running <= 1, f"{name}: two activations at once\n{self}"
            rest: Iterator[Inputs] = iter(expected)
            assert all(any(one == other for other in rest) for one in node.seen), context
        else:
            seen, due = Counter(map(_key, node.seen)), Counter(map(_key, expected))
            assert seen <= due, context

    def interpret(self, winners: reference.Winner | None = None) -> Result:
        return reference.interpret(
            self.graph, self.behaviours, self.inputs, self.outputs, winners=winners, max_runs=2 * MAX_RUNS
        )

    def graph_interface(self, name: str) -> Interface:
        return next(call.interface for call in self.graph.declarations.calls if call.node == name)

    def __str__(self) -> str:
        """The graph as the program that would make it, more or less."""
        lines = [f"inputs {self.inputs}"]
        reported = set()
        for call in self.graph.declarations.calls:
            declared = call.interface
            if call.node not in reported:
                reported.add(call.node)
                some = {name: "streamed" if spec.streamed else "whole" for name, spec in declared.inputs.items()}
                outs = {name: "streamed" if spec.streamed else "single" for name, spec in declared.outputs.items()}
                rest = f"{declared.activate_by_count or ''} {'first_wins' if declared.first_wins else ''}"
                lines.append(
                    f"{call.node}: {list(map(list, declared.inputs_or))} {some} -> {outs} "
                    f"{declared.scheduling.value} {rest} max_iterations={declared.max_iterations}"
                )
                lines.append(f"    {self.behaviours[call.node]}")
            lines.append(f"  {call.node}({', '.join(f'{name}={source}' for name, source in call.sources.items())})")
        wanted = {name: str(source) for name, source in self.graph.declarations.outputs.items()}
        lines.append(f"outputs {wanted}, asked for {sorted(self.outputs)}")
        for name, runs in self.expected.runs.items():
            for run in runs:
                path = "/".join(f"{step.node}{'*' if step.is_iteration else step.index}" for step in run.path)
                lines.append(f"  {name} at [{path}] reads {run.inputs}")
                lines.append(f"    yields {run.yields}{' and fails' if run.fails else ''}")
        return "\n".join(lines)


class _Observed:
    """Which group has won: the one whose inputs the node has read, in the order of its activations, because several may
    read the same.
    """

    def __init__(self, nodes: Mapping[str, RandomNode]):
        self._seen = {
            name: [
                _key(inputs) for _, inputs in sorted(zip(node.paths, node.seen, strict=True), key=lambda one: one[0])
            ]
            for name, node in nodes.items()
        }

    def __call__(self, node: str, base: Path, candidates: dict[int, Inputs]) -> int:
        seen = self._seen[node.split(".")[0]]
        groups = {_key(inputs): group for group, inputs in candidates.items()}
        for key in seen:
            if key in groups:
                seen.remove(key)
                return groups[key]
        return min(candidates)  # it was not run to its end, so no output depended on it


def _key(inputs: Inputs) -> str:
    return repr(sorted(inputs.items()))


def make_case(rng: random.Random, *, max_nodes: int = 9, with_errors: bool = True) -> Case:
    """A random graph that is right by construction, small enough to run in milliseconds.

    ``features`` of the case counts nodes (join, slots, or, first_wins, count, loop, session, fails) and activations
    (forks: one for each yield; iterations; nested: of a loop in an iteration of another; constants: of nodes that read
    some; unequal: of ordered nodes; counting: in a loop; tree:
    iterations that one frame started each).
    """
    while True:
        builder = _Builder(rng, rng.choice([n for n in (2, 3, 4, 4, 5, 5, 6, 6, 7, 8, 9) if n <= max_nodes]))
        try:
            return builder.build(with_errors and rng.random() < 0.12)
        except (reference.TooLarge, reference.Unpredictable):
            continue


@dataclass(frozen=True)
class _Source:
    ref: FieldRef
    role: str  # "" of a placeholder


@dataclass
class _Loop:
    header: str
    role: Role
    back_fields: tuple[str, ...]
    num_left: int  # nodes of the body to come
    sources: list[_Source]


class _Builder:
    def __init__(self, rng: random.Random, num_nodes: int):
        self.rng = rng
        self.num_nodes = num_nodes
        self.graph = Graph("random")
        self.inputs: dict[str, Any] = {"p0": "p0"}
        self.sources = [_Source(self.graph.placeholder("p0"), "")]
        self.behaviours: dict[str, Behaviour] = {}
        self.made: dict[str, dict[str, FieldRef]] = {}  # role -> its outputs
        self.parents: dict[str, set[str]] = {}  # role -> the roles that feed it forward
        self.unheard: set[str] = set()  # roles without a reader so far
        self.loops: list[_Loop] = []  # that are not closed yet, the innermost last
        self.features: Counter[str] = Counter()
        self.counted: list[tuple[str, Interface, dict[str, str]]] = []  # node, -> field -> placeholder of its number
        self.seed = rng.randrange(1 << 30)
        self.sparseness = rng.choice((0.0, 0.1, 0.5))
        self.forking = rng.choice((0.2, 0.6, 0.9))  # how many inputs are declared whole
        self.looping = rng.choice((2, 2, 10))  # how many nodes are headers of loops
        self.entering = rng.choice((0, 0.1, 0.4))  # how many inputs enter a loop elsewhere than at its header

    def chance(self, probability: float) -> bool:
        return self.rng.random() < probability

    def build(self, fails: bool) -> Case:
        for number in range(self.num_nodes):
            self.add_node(f"n{number}")
            if self.loops and number + 1 < self.num_nodes:
                self.loops[-1].num_left -= 1
                while self.loops and self.loops[-1].num_left < 0:
                    self.close_loop()
        while self.loops:
            self.close_loop()
        if fails:
            self.rng.choice(list(self.behaviours.values())).fails = True
            self.features["fails"] += 1
        for role in sorted(self.made):
            if role in self.unheard or self.chance(0.25):
                self.add_output(role)
        names = sorted(self.graph.declarations.outputs)
        wanted = names if self.chance(0.7) else self.rng.sample(names, self.rng.randint(1, len(names)))
        case = Case(
            self.graph,
            self.behaviours,
            self.inputs,
            frozenset(wanted),
            self.features,
            Result(Outcome.DONE, {}, {}, {}),
        )
        self.solve(case)
        return case

    def solve(self, case: Case) -> None:
        """The expected result; on the way the number of frames is set for each count node, in order."""
        for name, declared, numbers in self.counted:
            totals = self.rng.choice(case.interpret().totals.get(name) or [{}])
            before = dict(declared.activate_by_count)
            for prefix in (True, False):
                for each in before:
                    total = totals.get(each, 0)
                    wanted = total + self.rng.choice((0, 0, 0, 0, -1 if prefix else 0, 1))
                    if each in numbers:
                        self.inputs[numbers[each]] = max(wanted, 0)
                    else:
                        declared.activate_by_count[each] = max(wanted, 1)
                try:
                    case.interpret()
                    break
                except reference.Unpredictable:
                    continue
        case.expected = case.interpret()
        runs = [run for some in case.expected.runs.values() for run in some]
        num_frames = sum(len(payloads) for run in runs for payloads in run.inputs.values())
        if len(runs) > MAX_RUNS or num_frames > MAX_FRAMES:
            raise reference.TooLarge
        self.features["forks"] += sum(run.index is not None for run in runs)
        self.features["iterations"] += sum(run.num_iterations > 0 for run in runs)
        paths = [{step.node for step in run.path if step.is_iteration} for run in runs]
        topology = reference.Topology(self.graph)
        self.features["nested"] += sum(topology.around(node) in nodes for nodes in paths for node in nodes)
        self.features["unequal"] += sum(
            self.is_unequal(name, some, topology) for name, some in case.expected.runs.items()
        )
        backs = {
            name
            for name in topology.loops
            for some in topology.groups[name]
            if some.is_back and len(some.edges) == 1 and topology.is_each(some.edges[0], some)
        }
        self.features["tree"] += sum(run.num_iterations > 0 and run.node in backs for run in runs)
        looping = set[str]().union(*topology.loops.values())
        counting = {name for name in looping if topology.interfaces[name].activate_by_count}
        self.features["counting"] += sum(run.node in counting for run in runs)
        groups = [group for some in topology.groups.values() for group in some if group.header]
        self.features["constants"] += sum(run.node == group.node for run in runs for group in groups)

    def is_unequal(self, name: str, runs: list[reference.Run], topology: reference.Topology) -> bool:
        """Whether a group of an ordered node has several activations for one of what its groups have in common."""
        groups, declared = topology.forward_groups(name), topology.interfaces[name]
        is_tied = declared.first_wins or declared.activate_by_count or len(groups) < 2
        if declared.scheduling is not Scheduling.SESSION or is_tied:
            return False
        root, forks = topology.root(groups), topology.forks(groups)
        places = Counter((run.group, run.above(root)[0].path, forks and run.above(root)[1]) for run in runs)
        return any(count > 1 for count in places.values())

    # ---- below: one node ----

    def add_node(self, name: str) -> None:
        kinds = ["single"] * 5 + ["join"] * 5 + ["slots"] * 2 + ["or"] * 2
        if len(self.loops) < MAX_DEPTH:
            kinds += ["loop"] * self.looping if self.num_nodes > 1 else []
        kinds += [] if self.counted else ["first_wins"]
        kinds += [] if self.features["first_wins"] else ["count"] * (1 + bool(self.loops))
        kind = "single" if name == "n0" and self.chance(0.8) else self.rng.choice(kinds)
        self.features[kind] += 1
        numbers: dict[str, str] = {}
        counts: dict[str, int | str] = {}
        back: tuple[str, ...] = ()
        slots: dict[str, int] = {}
        if kind in ("or", "first_wins"):
            groups = self.rng.choice(([["x"], ["y"]], [["x"], ["y", "z"]], [["x", "w"], ["y", "z"]]))
        elif kind == "count":
            groups, counts, numbers = self.make_count(name)
        elif kind == "loop":
            groups, forward, back = self.rng.choice(LOOPS)
            if len(groups) == 1 and self.chance(0.2) and not self.features["first_wins"]:
                counts = dict.fromkeys(groups[0], NEVER)
        else:
            groups = [["x"]] if kind == "single" else self.rng.choice(([["x", "y"]], [["x", "y"]], [["x", "y", "z"]]))
            if kind == "slots":
                groups = self.rng.choice(([["x"]], [["x", "y"]]))
                slots = {"x": self.rng.choice((2, 2, 3))}
        declared = self.declare(groups, counts, kind)
        role = self.graph.role(type("R", (Role,), {"run": declared}), name)
        made = self.connect(role, forward if kind == "loop" else groups, slots, numbers)
        self.behaviours[f"{name}.run"] = Behaviour(
            self.seed,
            name,
            tuple(each for each, spec in declared.outputs.items() if spec.streamed),
            tuple(each for each, spec in declared.outputs.items() if not spec.streamed),
            forwards=self.chance(0.35),
            sparse=self.chance(self.sparseness),
        )
        outputs = self.made[name] = {each: getattr(made, each) for each in declared.outputs}
        self.unheard.add(name)
        own = [_Source(ref, name) for ref in outputs.values()]
        if counts:
            self.counted.append((f"{name}.run", declared, numbers))
        if kind == "loop":
            self.loops.append(_Loop(name, role, back, self.rng.choice((0, 1, 1, 2, 3)), []))
        (self.loops[-1].sources if self.loops else self.sources).extend(own)

    def make_count(self, name: str) -> tuple[list[list[str]], dict[str, int | str], dict[str, str]]:
        groups, counts = self.rng.choice(
            (
                ([["x"]], {"x": NEVER}),
                ([["x", "y"]], {"x": NEVER, "y": NEVER}),
                ([["x"], ["y"]], {"x": NEVER, "y": NEVER}),
                ([["x", "n"]], {"x": "n"}),
                ([["x"], ["y", "n"]], {"x": NEVER, "y": "n"}),
            )
        )
        numbers = {each: f"{name}_{each}" for each, count in counts.items() if count == "n"}
        for placeholder in numbers.values():
            self.inputs[placeholder] = NEVER
        return groups, dict(counts), numbers

    def output(self) -> Field:
        streamed = self.chance(0.8)
        return Field(VALUE, streamed=streamed, window=self.rng.choice((None, None, 1, 2)) if streamed else None)

    def declare(self, groups: list[list[str]], counts: dict[str, int | str], kind: str) -> Interface:
        outputs = {each: self.output() for each in (("a", "b") if self.chance(0.7) else "a")}
        inputs = {}
        for each in dict.fromkeys(each for group in groups for each in group):
            if each == "n":
                continue
            if self.chance(self.forking):
                inputs[each] = Field(VALUE)
            elif self.chance(0.5):
                inputs[each] = Field(VALUE, streamed=True)
        session = self.chance(0.4 if kind == "or" else 0.15)
        self.features["session"] += session
        return interface(
            groups,
            outputs,
            inputs=inputs,
            activate_by_count=counts,
            scheduling=Scheduling.SESSION if session else Scheduling.LEAST_OUTSTANDING,
            first_wins=kind == "first_wins",
            max_iterations=self.rng.randint(1, 3) if kind == "loop" and self.chance(0.5) else None,
        )

    def connect(self, role: Role, groups: list[list[str]], slots: dict[str, int], numbers: dict[str, str]) -> Any:
        """In one call of the interface or in several."""
        edges: list[dict[str, FieldRef]] = [{}]
        parents = self.parents[role._name] = set[str]()
        for group in groups:
            first: _Source | None = None
            for each in group:
                if each == "n":
                    edges[-1][each] = self.graph.placeholder(next(iter(numbers.values())))
                    continue
                for number in range(slots.get(each, 1)):
                    first = source = self.pick(first)
                    parents.add(source.role)
                    self.unheard.discard(source.role)
                    if number:
                        edges.append({each: source.ref})
                    else:
                        edges[-1][each] = source.ref
            if self.chance(0.5):
                edges.append({})
        calls = [some for some in edges if some]
        if self.chance(0.3):
            self.rng.shuffle(calls)
        return [role.run(**some) for some in calls][-1]  # type: ignore[attr-defined]

    def pick(self, relative: _Source | None = None) -> _Source:
        """A source of an edge; near another one, for such joins are difficult."""
        sources = self.loops[-1].sources if self.loops else self.sources
        if self.loops and self.chance(self.entering):
            sources = self.rng.choice([self.sources, *(loop.sources for loop in self.loops[:-1])]) or sources
        if relative is not None and self.chance(0.7):
            family = {relative.role, *self.parents.get(relative.role, ())} - {""}
            near = [one for one in sources if one.role in family or family & self.parents.get(one.role, set())]
            if near:
                return self.rng.choice(near)
        if not self.loops and self.behaviours and self.chance(0.04):
            name = f"p{len(self.inputs)}"
            self.inputs[name] = name
            sources.append(_Source(self.graph.placeholder(name), ""))
            return sources[-1]
        recent = sources[-5:] if self.chance(0.6) else sources
        made = [source for source in recent if source.role]
        return self.rng.choice(made if made and self.chance(0.85) else recent)

    def close_loop(self) -> None:
        loop = self.loops.pop()
        chosen = {each: self.rng.choice(loop.sources[-4:]) for each in loop.back_fields}
        loop.role.run(**{each: source.ref for each, source in chosen.items()})  # type: ignore[attr-defined]
        made = LoopOf(loop.header, self.rng.randint(1, 3), {(one.role, one.ref.field) for one in chosen.values()})
        for role in {source.role for source in loop.sources}:
            self.behaviours[f"{role}.run"].loops.append(made)
        self.unheard.difference_update(source.role for source in chosen.values())
        (self.loops[-1].sources if self.loops else self.sources).extend(loop.sources)
        self.add_output(loop.header if self.chance(0.5) else self.rng.choice(list(chosen.values())).role)

    def add_output(self, role: str) -> None:
        self.unheard.discard(role)
        name = self.rng.choice(sorted(self.made[role]))
        if f"{role}_{name}" not in self.graph.declarations.outputs:
            self.graph.output(**{f"{role}_{name}": self.made[role][name]})
