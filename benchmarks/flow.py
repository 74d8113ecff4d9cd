"""Cost of a node in control flow: this project's flow against LangGraph and against asyncio queues, in one run.

    python -m benchmarks.flow [--rounds 5] [--without-langgraph] [--quick]

Baseline: LangGraph (the `bench` extra), a ``StateGraph`` compiled once, without a checkpointer, its nodes async
functions, called by ``ainvoke``. Lower bound: plain asyncio, a task for each node of a call and an
``asyncio.Queue(64)`` for each edge: no checks, no errors, no cancellation, no order but the queue's. *Standing* is
lower still: the tasks exist beforehand and all calls share them. Alone, a hop is then one put, one wake-up and one
get; with many calls at once a wake-up serves up to 64 of them, but a waiting node blocks every call. *flow* is
``GraphRuntime.open`` and reading the call to its end. All sides do the same work (a node adds one), and their answers
are checked.

Regimes, each with one call after the other and with many at once (``asyncio.gather``):

* chain: 10 nodes in a row.
* fan-out: one node, 8 nodes after it, and one that joins them: 10 nodes.
* stream: 4 nodes, the first of which emits 1,000 frames; a hop is a frame that leaves a node. LangGraph has no streamed
  edge: a node's output is one update of the state, after which the next node runs. The nearest is a loop through the
  four nodes in one run, once for each frame, whose last node hands the frame out (``get_stream_writer``, ``astream``
  with ``stream_mode="custom"``). *Whole list* is the alternative: each node takes all frames at once; cheap, but not
  a stream: no node starts before the previous one has finished the last frame. With many calls at once LangGraph's
  have fewer frames (all of them would take more than half an hour a round): its cost per hop hardly depends on it.
* growth: 3 nodes; calls are opened until so many wait in the first node, and then released. Each in a process of its
  own. Memory is what Python allocated for a waiting call and its reader (tracemalloc, in a run that is not timed) and
  the growth of the resident set. *No collector* is the same with Python's garbage collector off.

Times are those of a whole call, including opening and reading it, divided by its nodes or hops: medians of interleaved
rounds after one warm-up round, with the 10th and 90th percentile. Everything is bound by the interpreter, on one core.
All sides use asyncio's own event loop; the garbage collector is on with its defaults, and each sample starts with a
collected heap.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import importlib.metadata
import itertools
import json
import operator
import os
import platform
import statistics
import subprocess
import sys
import time
import tracemalloc
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple, Protocol, TypedDict

from vllm_omni.flow import Activation, Emission, Field, Graph, GraphParser, GraphRuntime, Role, interface

CHAIN, FAN_OUT, STREAM, GATED = 10, 8, 4, 3  # nodes; of the fan-out without the two at its ends
QUEUE_SIZE = 64
COUNTS = (1, 10, 100, 1_000, 10_000, 100_000)
MAX_TRACED, MIN_RESIDENT = 10_000, 1_000  # graph calls: tracing more takes minutes; with fewer, pages hide the calls
FLOOR = "queues"  # and its variant
STANDING = "standing"
OURS = "flow"
LANGGRAPH = "langgraph"
WHOLE_LIST = "whole list"
FLAT_FROM = 100  # graph calls; with fewer, opening the gate is a share of the time


class Gate:
    """Blocks calls until it is opened; ``full`` is set when enough of them wait."""

    def __init__(self, num_calls: int) -> None:
        self.full = asyncio.Event()
        self._num_to_come = num_calls
        self._opened = asyncio.Event()

    async def wait(self) -> None:
        self._num_to_come -= 1
        if not self._num_to_come:
            self.full.set()
        await self._opened.wait()

    def open(self) -> None:
        self._opened.set()


class Side(Protocol):
    """One way to run the workloads; made and used on one event loop. Each method is one graph call."""

    async def chain(self) -> int: ...

    async def fan_out(self) -> int: ...

    def stream(self, num_frames: int) -> AsyncIterator[int]: ...

    async def gated(self, gate: Gate) -> int: ...


# -- this project ------------------------------------------------------------------------------------------------------

NUMBER, NUMBERS = Field("number"), Field("number", streamed=True)
BRANCHES = [f"value_{index}" for index in range(FAN_OUT)]


class Single(Role):
    run = interface(inputs_or=[["value"]], outputs={"value": NUMBER})


class Streaming(Role):
    run = interface(inputs_or=[["value"]], outputs={"value": NUMBERS})


class Joining(Role):
    run = interface(inputs_or=[BRANCHES], outputs={"value": NUMBER})


class Add:
    async def forward(self, activation: Activation) -> AsyncIterator[Emission]:
        async for chunk in activation.inputs["value"]:
            yield Emission("value", chunk.payload + 1, last=chunk.last)


class Make:
    async def forward(self, activation: Activation) -> AsyncIterator[Emission]:
        async for chunk in activation.inputs["value"]:
            for index in range(chunk.payload):
                yield Emission("value", index, last=index == chunk.payload - 1)


class Join:
    async def forward(self, activation: Activation) -> AsyncIterator[Emission]:
        total = 0
        for name in BRANCHES:
            async for chunk in activation.inputs[name]:
                total += chunk.payload
        yield Emission("value", total)


class Wait:
    async def forward(self, activation: Activation) -> AsyncIterator[Emission]:
        async for chunk in activation.inputs["value"]:
            await activation.context.wait()
            yield Emission("value", chunk.payload + 1)


class Flow:
    def __init__(self) -> None:
        self._ids = itertools.count()
        self._chain = self._make_chain([Add() for _ in range(CHAIN)], Single)
        self._stream = self._make_chain([Make(), *(Add() for _ in range(STREAM - 1))], Streaming)
        self._gated = self._make_chain([Wait(), *(Add() for _ in range(GATED - 1))], Single)
        self._fan_out = self._make_fan_out()

    @staticmethod
    def _make_chain(nodes: Sequence[Any], role: type[Single] | type[Streaming]) -> GraphRuntime:
        graph = Graph("chain")
        value: Any = graph.placeholder("value")
        for index in range(len(nodes)):
            value = graph.role(role, f"node_{index}").run(value=value).value
        graph.output(value=value)
        return GraphRuntime(GraphParser(graph).parse(), {f"node_{index}": node for index, node in enumerate(nodes)})

    @staticmethod
    def _make_fan_out() -> GraphRuntime:
        graph = Graph("fan_out")
        first = graph.role(Single, "first").run(value=graph.placeholder("value"))
        branches = {name: graph.role(Single, name).run(value=first.value).value for name in BRANCHES}
        graph.output(value=graph.role(Joining, "join").run(**branches).value)
        nodes: dict[str, Any] = {"first": Add(), "join": Join(), **{name: Add() for name in BRANCHES}}
        return GraphRuntime(GraphParser(graph).parse(), nodes)

    async def _call(self, runtime: GraphRuntime, context: Any = None) -> int:
        value = -1
        async for frame in runtime.open(f"call-{next(self._ids)}", {"value": 0}, ["value"], context=context):
            value = frame.payload
        return value

    async def chain(self) -> int:
        return await self._call(self._chain)

    async def fan_out(self) -> int:
        return await self._call(self._fan_out)

    async def gated(self, gate: Gate) -> int:
        return await self._call(self._gated, gate)

    async def stream(self, num_frames: int) -> AsyncIterator[int]:
        async for frame in self._stream.open(f"call-{next(self._ids)}", {"value": num_frames}, ["value"]):
            yield frame.payload


# -- the floor ---------------------------------------------------------------------------------------------------------


def make_queue() -> asyncio.Queue[Any]:
    return asyncio.Queue(QUEUE_SIZE)


class Queues:
    """A task for each node of a call, a queue for each edge."""

    async def chain(self) -> int:
        return await self._run([self._add] * CHAIN)

    async def gated(self, gate: Gate) -> int:
        async def wait(inbox: asyncio.Queue[int], outbox: asyncio.Queue[int]) -> None:
            value = await inbox.get()
            await gate.wait()
            await outbox.put(value + 1)

        return await self._run([wait, *[self._add] * (GATED - 1)])

    @staticmethod
    async def _run(nodes: Sequence[Callable[..., Awaitable[None]]]) -> int:
        queues = [make_queue() for _ in range(len(nodes) + 1)]
        tasks = [
            asyncio.ensure_future(node(*pair)) for node, pair in zip(nodes, itertools.pairwise(queues), strict=True)
        ]
        await queues[0].put(0)
        value: int = await queues[-1].get()
        del tasks  # they are done; until then asyncio keeps only weak references to them
        return value

    @staticmethod
    async def _add(inbox: asyncio.Queue[int], outbox: asyncio.Queue[int]) -> None:
        await outbox.put(await inbox.get() + 1)

    async def fan_out(self) -> int:
        entry, end = make_queue(), make_queue()
        into, out_of = ([make_queue() for _ in range(FAN_OUT)] for _ in range(2))

        async def first() -> None:
            value = await entry.get() + 1
            for queue in into:
                await queue.put(value)

        async def join() -> None:
            total = 0
            for queue in out_of:
                total += await queue.get()
            await end.put(total)

        nodes = [first(), *map(self._add, into, out_of), join()]
        tasks = [asyncio.ensure_future(node) for node in nodes]
        await entry.put(0)
        value: int = await end.get()
        del tasks
        return value

    async def stream(self, num_frames: int) -> AsyncIterator[int]:
        queues = [make_queue() for _ in range(STREAM)]

        async def make(outbox: asyncio.Queue[tuple[int, bool]]) -> None:
            for index in range(num_frames):
                await outbox.put((index, index == num_frames - 1))

        async def add(inbox: asyncio.Queue[tuple[int, bool]], outbox: asyncio.Queue[tuple[int, bool]]) -> None:
            last = False
            while not last:
                value, last = await inbox.get()
                await outbox.put((value + 1, last))

        nodes = [make(queues[0]), *(add(*pair) for pair in itertools.pairwise(queues))]
        tasks = [asyncio.ensure_future(node) for node in nodes]
        last = False
        while not last:
            value, last = await queues[-1].get()
            yield value
        del tasks


class _Message(NamedTuple):
    value: int
    answer: asyncio.Future[int]


class StandingQueues:
    """The tasks of all nodes exist beforehand and serve all calls; a stream costs as with ``Queues``."""

    def __init__(self) -> None:
        chain = [make_queue() for _ in range(CHAIN)]
        into, out_of = ([make_queue() for _ in range(FAN_OUT)] for _ in range(2))
        self._chain, self._fan_out = chain[0], make_queue()
        nodes = [
            *(self._add(inbox, [outbox]) for inbox, outbox in itertools.pairwise(chain)),
            self._add(chain[-1], []),
            self._add(self._fan_out, into),
            *(self._add(inbox, [outbox]) for inbox, outbox in zip(into, out_of, strict=True)),
            self._join(out_of),
        ]
        self._tasks = [asyncio.ensure_future(node) for node in nodes]

    @staticmethod
    async def _add(inbox: asyncio.Queue[_Message], outboxes: list[asyncio.Queue[_Message]]) -> None:
        while True:
            value, answer = await inbox.get()
            message = _Message(value + 1, answer)
            for outbox in outboxes:
                await outbox.put(message)
            if not outboxes:
                answer.set_result(value + 1)

    @staticmethod
    async def _join(inboxes: list[asyncio.Queue[_Message]]) -> None:
        while True:
            messages = [await inbox.get() for inbox in inboxes]
            messages[0].answer.set_result(sum(message.value for message in messages))

    @staticmethod
    async def _call(entry: asyncio.Queue[_Message]) -> int:
        answer = asyncio.get_running_loop().create_future()
        await entry.put(_Message(0, answer))
        return await answer

    async def chain(self) -> int:
        return await self._call(self._chain)

    async def fan_out(self) -> int:
        return await self._call(self._fan_out)

    async def aclose(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


# -- LangGraph ---------------------------------------------------------------------------------------------------------


class One(TypedDict):
    value: int


class Gated(TypedDict):
    value: int
    gate: Gate


class Several(TypedDict):
    value: int
    values: Annotated[list[int], operator.add]


class Framed(TypedDict):
    num_frames: int
    index: int
    value: int


class Listed(TypedDict):
    num_frames: int
    values: list[int]


class LangGraph:
    """Raises ``ImportError`` where it is not installed."""

    def __init__(self) -> None:
        from langgraph.config import get_stream_writer
        from langgraph.graph import END, START, StateGraph

        async def add(state: One) -> dict[str, int]:
            return {"value": state["value"] + 1}

        async def wait(state: Gated) -> dict[str, int]:
            await state["gate"].wait()
            return {"value": state["value"] + 1}

        async def branch(state: Several) -> dict[str, list[int]]:
            return {"values": [state["value"] + 1]}

        async def join(state: Several) -> dict[str, int]:
            return {"value": sum(state["values"])}

        async def make(state: Framed) -> dict[str, int]:
            return {"value": state["index"], "index": state["index"] + 1}

        async def add_and_hand_out(state: Framed) -> None:
            get_stream_writer()(state["value"] + 1)

        async def make_all(state: Listed) -> dict[str, list[int]]:
            return {"values": list(range(state["num_frames"]))}

        async def add_all(state: Listed) -> dict[str, list[int]]:
            return {"values": [value + 1 for value in state["values"]]}

        async def add_and_hand_out_all(state: Listed) -> None:
            write = get_stream_writer()
            for value in state["values"]:
                write(value + 1)

        def compile_chain(
            state: type, nodes: Sequence[Callable[..., Any]], end: Callable[..., str] | None = None
        ) -> Any:
            graph = StateGraph(state)
            graph.add_sequence([(f"node_{index}", node) for index, node in enumerate(nodes)])
            graph.add_edge(START, "node_0")
            last = f"node_{len(nodes) - 1}"
            if end is None:
                graph.add_edge(last, END)
            else:
                graph.add_conditional_edges(last, end, ["node_0", END])
            return graph.compile()

        def turn(state: Framed) -> str:
            return "node_0" if state["index"] < state["num_frames"] else END

        fan_out = StateGraph(Several)
        fan_out.add_node("first", add)
        fan_out.add_node("join", join)
        for name in BRANCHES:
            fan_out.add_node(name, branch)
            fan_out.add_edge("first", name)
        fan_out.add_edge(START, "first")
        fan_out.add_edge(BRANCHES, "join")
        fan_out.add_edge("join", END)
        self._fan_out = fan_out.compile()
        self._chain = compile_chain(One, [add] * CHAIN)
        self._gated = compile_chain(Gated, [wait, *[add] * (GATED - 1)])
        self._stream = compile_chain(Framed, [make, *[add] * (STREAM - 2), add_and_hand_out], turn)
        self._whole = compile_chain(Listed, [make_all, *[add_all] * (STREAM - 2), add_and_hand_out_all])

    async def chain(self) -> int:
        return (await self._chain.ainvoke({"value": 0}))["value"]

    async def fan_out(self) -> int:
        return (await self._fan_out.ainvoke({"value": 0, "values": []}))["value"]

    async def gated(self, gate: Gate) -> int:
        return (await self._gated.ainvoke({"value": 0, "gate": gate}))["value"]

    def stream(self, num_frames: int) -> AsyncIterator[int]:
        config = {"recursion_limit": STREAM * num_frames + 1}
        return self._stream.astream({"num_frames": num_frames, "index": 0}, config, stream_mode="custom")

    def stream_whole(self, num_frames: int) -> AsyncIterator[int]:
        return self._whole.astream({"num_frames": num_frames}, stream_mode="custom")


# -- one regime --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Regime:
    """A workload at so many calls at once."""

    workload: str
    num_calls: int  # at once; 1: one after the other
    num_units: int  # nodes or hops of a call
    unit: str
    sides: dict[str, Callable[[], Awaitable[float | None]]]  # one call; returns the seconds to its first frame, if any
    units_of: dict[str, int]  # where a side's call has other than ``num_units``

    @property
    def name(self) -> str:
        return f"{self.workload}, {self.num_calls:,} at once" if self.num_calls > 1 else f"{self.workload}, alone"


class Sample(NamedTuple):
    unit_us: float
    first_frame_s: float | None  # the median of the calls


async def sample(regime: Regime, side: str, min_s: float) -> Sample:
    """Calls one after the other until ``min_s`` have passed; or all at once, once."""
    call = regime.sides[side]
    gc.collect()
    firsts: list[float | None] = []
    started = time.perf_counter()
    if regime.num_calls > 1:
        firsts += await asyncio.gather(*(call() for _ in range(regime.num_calls)))
        elapsed_s = time.perf_counter() - started
    else:
        elapsed_s = 0.0
        while elapsed_s < min_s:
            firsts.append(await call())
            elapsed_s = time.perf_counter() - started
    first_frame_s = statistics.median(first for first in firsts if first is not None) if firsts[0] is not None else None
    units = len(firsts) * regime.units_of.get(side, regime.num_units)
    return Sample(elapsed_s / units * 1e6, first_frame_s)


def checked(call: Callable[[], Awaitable[int]], expected: int) -> Callable[[], Awaitable[None]]:
    async def run() -> None:
        value = await call()
        assert value == expected, f"{call} answered {value} instead of {expected}"

    return run


def streamed(stream: Callable[[int], AsyncIterator[int]], num_frames: int) -> Callable[[], Awaitable[float]]:
    async def run() -> float:
        started, first_s, expected = time.perf_counter(), 0.0, STREAM - 1
        async for value in stream(num_frames):
            if expected == STREAM - 1:
                first_s = time.perf_counter() - started
            assert value == expected, f"{stream}: frame {value} stands where {expected} should"
            expected += 1
        assert expected == num_frames + STREAM - 1, f"{stream} made {expected - STREAM + 1} of {num_frames} frames"
        return first_s

    return run


def make_regimes(sides: dict[str, Any], options: argparse.Namespace) -> list[Regime]:
    regimes = []
    for num_calls in (1, options.calls):
        chain = {name: checked(side.chain, CHAIN) for name, side in sides.items()}
        regimes.append(Regime("chain", num_calls, CHAIN, "node", chain, {}))
        fan_out = {name: checked(side.fan_out, 2 * FAN_OUT) for name, side in sides.items()}
        regimes.append(Regime("fan-out", num_calls, FAN_OUT + 2, "node", fan_out, {}))
        frames = {name: options.frames for name in sides if name != STANDING}
        if num_calls > 1 and LANGGRAPH in sides:
            frames[LANGGRAPH] = min(options.frames, options.langgraph_frames)
        stream: dict[str, Callable[[], Awaitable[float]]] = {
            name: streamed(sides[name].stream, num_frames) for name, num_frames in frames.items()
        }
        if num_calls == 1 and LANGGRAPH in sides:
            stream[WHOLE_LIST] = streamed(sides[LANGGRAPH].stream_whole, options.frames)
        units_of = {name: num_frames * STREAM for name, num_frames in frames.items()}
        regimes.append(Regime("stream", num_calls, options.frames * STREAM, "hop", stream, units_of))
    return [regime for regime in regimes if regime.workload in options.workloads]


async def measure(options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Regime -> side -> summary of its samples."""
    standing = StandingQueues()
    sides: dict[str, Any] = {FLOOR: Queues(), STANDING: standing, OURS: Flow()}
    if not options.without_langgraph:
        sides[LANGGRAPH] = LangGraph()
    regimes = make_regimes(sides, options)
    for regime in regimes:
        for call in regime.sides.values():
            await call()
    gc.collect()
    gc.freeze()  # the collector does not scan imported modules while a side is timed
    samples: dict[tuple[str, str], list[Sample]] = {}
    for round_ in range(options.rounds):
        for regime in regimes:
            names = list(regime.sides)
            for turn in range(len(names)):  # each round starts with another side
                name = names[(turn + round_) % len(names)]
                samples.setdefault((regime.name, name), []).append(await sample(regime, name, options.sample_s))
        print(f"round {round_ + 1} of {options.rounds}", file=sys.stderr)
    await standing.aclose()
    table: dict[str, dict[str, Any]] = {}
    for regime in regimes:
        row = table[regime.name] = {"unit": regime.unit}
        for name in regime.sides:
            row[name] = summarize([one.unit_us for one in samples[regime.name, name]])
            firsts = [one.first_frame_s for one in samples[regime.name, name] if one.first_frame_s is not None]
            if firsts and regime.num_calls == 1:
                row[name]["first_frame_us"] = statistics.median(firsts) * 1e6
    return table


def summarize(values: Sequence[float]) -> dict[str, Any]:
    deciles = statistics.quantiles(values, n=10, method="inclusive") if len(values) > 1 else [values[0]] * 9
    return {"us": statistics.median(values), "p10": deciles[0], "p90": deciles[-1], "samples": len(values)}


# -- growth, each in a process of its own ------------------------------------------------------------------------------

UNCOLLECTED = "flow, no collector"  # what of our growth is the garbage collector's
GROWING: dict[str, Callable[[], Side]] = {FLOOR: Queues, OURS: Flow, UNCOLLECTED: Flow, LANGGRAPH: LangGraph}


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


async def grow(side: Side, num_calls: int, memory: Callable[[], int]) -> tuple[float, float]:
    """Microseconds per node and bytes per call, of calls that are all open at the same time."""
    gate = Gate(num_calls)
    gc.collect()
    bytes_before = memory()
    started = time.perf_counter()
    calls = [asyncio.ensure_future(side.gated(gate)) for _ in range(num_calls)]
    await gate.full.wait()
    elapsed_s = time.perf_counter() - started
    num_bytes = memory() - bytes_before
    started = time.perf_counter()
    gate.open()
    assert set(await asyncio.gather(*calls)) == {GATED}
    elapsed_s += time.perf_counter() - started
    return elapsed_s / (num_calls * GATED) * 1e6, num_bytes / num_calls


async def grow_in_child(name: str, num_calls: int, trace: bool) -> dict[str, Any]:
    side = GROWING[name]()
    for _ in range(3):
        await grow(side, min(num_calls, 10), resident_bytes)
    gc.collect()
    gc.freeze()
    if name == UNCOLLECTED:
        gc.disable()
    if trace:
        tracemalloc.start()
        return {"traced_bytes": (await grow(side, num_calls, lambda: tracemalloc.get_traced_memory()[0]))[1]}
    # Memory is that of the first wave: later ones reuse freed memory.
    first_us, num_bytes = await grow(side, num_calls, resident_bytes)
    more = [(await grow(side, num_calls, resident_bytes))[0] for _ in range(min(100, 1000 // num_calls))]
    return {"us": statistics.median([first_us, *more]), "resident_bytes": num_bytes}


def start_child(name: str, num_calls: int, *flags: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.flow", "--grow", name, str(num_calls), *flags]
    return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)


def measure_growth(options: argparse.Namespace) -> dict[str, dict[int, dict[str, Any]]]:
    """Side -> number of graph calls -> their cost."""
    limits = {FLOOR: options.max_calls, OURS: options.max_calls, UNCOLLECTED: options.max_calls}
    if not options.without_langgraph:
        limits[LANGGRAPH] = min(options.max_calls, options.langgraph_calls)
    cases = [(name, count) for count in COUNTS for name, limit in limits.items() if count <= limit]
    timed: dict[tuple[str, int], list[dict[str, Any]]] = {case: [] for case in cases}
    for round_ in range(options.growth_rounds):
        for case in cases:
            timed[case].append(start_child(*case))
        print(f"growth, round {round_ + 1} of {options.growth_rounds}", file=sys.stderr)
    table: dict[str, dict[int, dict[str, Any]]] = {name: {} for name in limits}
    for (name, count), runs in timed.items():
        resident = statistics.median(run["resident_bytes"] for run in runs)
        traced = start_child(name, count, "--trace")["traced_bytes"] if count <= MAX_TRACED else None
        memory = {"traced_bytes": traced, "resident_bytes": resident if count >= MIN_RESIDENT else None}
        table[name][count] = {**summarize([run["us"] for run in runs]), **memory}
    return table


# -- the whole ---------------------------------------------------------------------------------------------------------


class Goal(NamedTuple):
    what: str
    limit: float
    got: float
    is_least: bool

    @property
    def reached(self) -> bool:
        return self.got >= self.limit if self.is_least else self.got <= self.limit


def goals(table: dict[str, dict[str, Any]], growth: dict[str, dict[int, dict[str, Any]]]) -> list[Goal]:
    rows = []
    for name, row in table.items():
        if LANGGRAPH in row:
            ratio = row[LANGGRAPH]["us"] / row[OURS]["us"]
            rows.append(Goal(f"{name}: LangGraph's {row['unit']}, times ours", 10.0, ratio, True))
    for floor in (FLOOR, STANDING):
        for name, row in table.items():
            # Standing tasks take up to 64 messages of as many calls at once: which no longer measures a hop.
            if floor in row and (floor == FLOOR or name.endswith("alone")):
                ratio = row[OURS]["us"] / row[floor]["us"]
                rows.append(Goal(f"{name}: our {row['unit']}, times that of {floor}", 6.0, ratio, False))
    ours, uncollected, floor_growth = (grown(growth[name]) for name in (OURS, UNCOLLECTED, FLOOR))
    what = (
        f"growth: our dearest node from {FLAT_FROM} calls on, times that at {FLAT_FROM} (queues': {floor_growth:.2f})"
    )
    rows.append(Goal(what, 1.5, ours, False))
    rows.append(Goal("growth: the same without Python's garbage collector", 1.5, uncollected, False))
    return rows


def grown(costs: dict[int, dict[str, Any]]) -> float:
    return max(one["us"] for count, one in costs.items() if count >= FLAT_FROM) / costs[FLAT_FROM]["us"]


def format_time(one: dict[str, Any] | None) -> str:
    return f"{one['us']:.3g} ({one['p10']:.3g}-{one['p90']:.3g})" if one else ""


def format_ratio(above: dict[str, Any] | None, below: dict[str, Any] | None) -> str:
    return f"{above['us'] / below['us']:.2f}" if above and below else ""


def format_memory(one: dict[str, Any] | None) -> str:
    sizes = [one[name] for name in ("traced_bytes", "resident_bytes")] if one else []
    return ", ".join("-" if size is None else f"{size / 1024:.1f}" for size in sizes)


def report(
    machine: dict[str, Any],
    table: dict[str, dict[str, Any]],
    growth: dict[str, dict[int, dict[str, Any]]],
    options: argparse.Namespace,
) -> None:
    print(", ".join(f"{name} {value}" for name, value in machine.items()))
    print(
        f"{options.rounds} rounds (growth: {options.growth_rounds}), {options.frames:,} frames "
        f"(LangGraph's, {options.calls:,} at once: {min(options.frames, options.langgraph_frames):,})\n"
    )
    ratios = "flow / queues | flow / standing | LangGraph / flow"
    print(f"| µs, median (p10-p90) | per | queues | standing | flow | LangGraph | {ratios} |")
    print("|---" * 9 + "|")
    for name, row in table.items():
        cells = [format_time(row.get(side)) for side in (FLOOR, STANDING, OURS, LANGGRAPH)]
        cells += [format_ratio(row[OURS], row.get(floor)) for floor in (FLOOR, STANDING)]
        cells.append(format_ratio(row.get(LANGGRAPH), row[OURS]))
        print(f"| {name} | {row['unit']} | " + " | ".join(cells) + " |")
    for row in table.values():
        firsts = {name: one for name, one in row.items() if isinstance(one, dict) and "first_frame_us" in one}
        if firsts:
            print("\n| a stream alone | first frame, ms | µs per hop |\n|---|---|---|")
            for name, one in firsts.items():
                print(f"| {name} | {one['first_frame_us'] / 1e3:.3g} | {format_time(one)} |")
    sides = list(growth)
    print("\n| graph calls open | " + " | ".join(f"{name}, µs per node" for name in sides), end=" | ")
    print(" | ".join(f"{name}, KiB per call: Python's, resident" for name in sides) + " |")
    print("|---" * (1 + 2 * len(sides)) + "|")
    for count in growth[OURS]:
        at = [growth[name].get(count) for name in sides]
        memory = [format_memory(one) for one in at]
        print(f"| {count:,} | " + " | ".join([*map(format_time, at), *memory]) + " |")
    print("\n| goal | at least / at most | measured | |\n|---|---|---|---|")
    for goal in goals(table, growth):
        bound, verdict = "at least" if goal.is_least else "at most", "reached" if goal.reached else "MISSED"
        print(f"| {goal.what} | {bound} {goal.limit:g} | {goal.got:.2f} | {verdict} |")


def describe_machine(with_langgraph: bool) -> dict[str, Any]:
    return {
        "cores": os.cpu_count(),
        "machine": platform.machine(),
        "python": platform.python_version(),
        "event loop": type(asyncio.get_event_loop_policy()).__module__,
        "langgraph": importlib.metadata.version("langgraph") if with_langgraph else "not measured",
    }


def parse_options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--growth-rounds", type=int, default=3)
    parser.add_argument("--calls", type=int, default=1000, help="graph calls at once")
    parser.add_argument("--frames", type=int, default=1000, help="of a stream")
    parser.add_argument("--max-calls", type=int, default=100_000, help="up to which growth is measured")
    parser.add_argument(
        "--langgraph-frames", type=int, default=10, help="the same for LangGraph, of many calls at once"
    )
    parser.add_argument("--langgraph-calls", type=int, default=10_000, help="the same for LangGraph's growth")
    parser.add_argument("--sample-s", type=float, default=0.3, help="how long calls follow one another in a sample")
    workloads = ("chain", "fan-out", "stream")
    parser.add_argument("--workloads", nargs="+", choices=workloads, default=workloads)
    parser.add_argument("--without-langgraph", action="store_true")
    parser.add_argument("--quick", action="store_true", help="all of it in seconds: shows that it works, no more")
    parser.add_argument("--grow", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--trace", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.quick:
        options.rounds, options.growth_rounds, options.sample_s = 2, 1, 0.005
        options.calls, options.frames, options.langgraph_frames = 20, 100, 5
        options.max_calls, options.langgraph_calls = 100, 1
    return options


def require_langgraph() -> None:
    os.environ["LANGSMITH_TRACING"] = "false"  # or LangSmith sends every call to a server
    try:
        import langgraph.graph  # noqa: F401
    except ImportError as exc:
        raise SystemExit(
            f"The baseline is LangGraph, which cannot be imported ({exc}): install this checkout with its `bench` "
            "extra, pip install -e '.[bench]', or measure --without-langgraph"
        ) from exc


def main() -> None:
    options = parse_options()
    if options.grow:
        name, num_calls = options.grow
        print(json.dumps(asyncio.run(grow_in_child(name, int(num_calls), options.trace))))
        return
    if not options.without_langgraph:
        require_langgraph()
    machine = describe_machine(not options.without_langgraph)
    table = asyncio.run(measure(options))
    growth = measure_growth(options)
    report(machine, table, growth, options)
    rows: Iterable[dict[str, Any]] = [{**goal._asdict(), "reached": goal.reached} for goal in goals(table, growth)]
    print(json.dumps({"machine": machine, "us": table, "growth": growth, "goals": list(rows)}))


if __name__ == "__main__":
    main()
