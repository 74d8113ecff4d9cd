"""Loops, topological order and dominators of a graph. Graphs are small, so the algorithms are plain.

From: Omni-Flow section 3.3 (diamond roots by reverse search).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import TypeAlias

from vllm_omni.flow.graph.transfer import ENTRY

Feeds: TypeAlias = Mapping[str, tuple[str, ...]]
"""Node -> the nodes (or ENTRY) that feed it."""


@dataclass(frozen=True, eq=False)
class Loop:
    """A strongly connected part of a graph, without the edges that lead back to the headers of the loops around it."""

    nodes: frozenset[str]
    header: str | None  # where its iterations start; None: nothing outside can start it
    outer: Loop | None  # the loop around it

    @property
    def depth(self) -> int:
        """The number of loops around its nodes, itself included."""
        return 1 if self.outer is None else 1 + self.outer.depth


class Loops:
    """The loops of a graph.

    Args:
        feeds: node -> the nodes (or ENTRY) that feed it.
        can_start: whether a node can be activated by what comes from outside of some nodes. The first such node of a
            loop is its header.
    """

    def __init__(self, feeds: Mapping[str, Iterable[str]], can_start: Callable[[str, frozenset[str]], bool]):
        self._can_start = can_start
        within = {name: tuple(dict.fromkeys(sources)) for name, sources in feeds.items()}
        self.all = list(self._find(within, None))  # a loop comes before those within it
        self._of = {name: loop for loop in self.all for name in loop.nodes}

    def of(self, node: str) -> Loop | None:
        """The innermost loop that a node is part of."""
        return self._of.get(node)

    def entered(self, node: str) -> Loop | None:
        """The innermost loop that an edge into a node enters elsewhere than at its header."""
        loop = self._of.get(node)
        return loop.outer if loop is not None and loop.header == node else loop

    def is_back(self, source: str, target: str) -> bool:
        """Whether an edge leads back to the header of a loop."""
        loop = self._of.get(target)
        return loop is not None and target == loop.header and source in loop.nodes

    def _find(self, within: Feeds, outer: Loop | None) -> Iterator[Loop]:
        above = {name: _closure(sources, lambda at: within.get(at, ())) for name, sources in within.items()}
        seen: set[str] = set()
        for name in within:
            if name not in above[name] or name in seen:
                continue
            nodes = frozenset(other for other in above[name] if name in above.get(other, ()))
            seen |= nodes
            inside = [each for each in within if each in nodes]
            header = next((each for each in inside if self._can_start(each, nodes)), None)
            loop = Loop(nodes, header, outer)
            yield loop
            if header is not None:
                rest = {each: tuple(source for source in within[each] if source in nodes) for each in inside}
                yield from self._find(rest | {header: ()}, loop)


class Paths:
    """The graph without the edges that lead back.

    Args:
        feeds: node -> the nodes (or ENTRY) that feed it. A node of a loop that reads a constant is fed by the header.
        constants: node -> the nodes (or ENTRY) that feed it from outside of its loop. They are no paths: a constant
            is the same in all iterations.
        gathering: nodes that gather frames -> the header of their loop, or ENTRY; nothing below this node dominates
            them.
    """

    def __init__(self, feeds: Feeds, constants: Feeds, gathering: Mapping[str, str]):
        self._feeds = feeds
        self._gathering = gathering
        self._all = {name: (*sources, *constants[name]) for name, sources in feeds.items()}

    def order(self) -> list[str]:
        """Nodes in topological order."""
        placed = {ENTRY: None}
        todo = list(self._all)
        while todo:
            ready = next(name for name in todo if all(source in placed for source in self._all[name]))
            placed[ready] = None
            todo.remove(ready)
        del placed[ENTRY]
        return list(placed)

    def dominators(self) -> Mapping[str, list[str]]:
        """Node -> the nodes on every path from ENTRY to it, from ENTRY down to itself."""
        chains: dict[str, list[str]] = {ENTRY: [ENTRY]}
        for name in self.order():
            sources = [self._gathering[name]] if name in self._gathering else self._feeds[name]
            chains[name] = [*common_prefix(chains[source] for source in sources), name]
        return chains

    def reaches(self, source: str, *, with_constants: bool = True) -> frozenset[str]:
        """All nodes with a path from ``source``, itself included."""
        feeds = self._all if with_constants else self._feeds
        return _closure([source], lambda at: [name for name, sources in feeds.items() if at in sources])


def common_prefix(chains: Iterable[Sequence[str]]) -> list[str]:
    return [names[0] for names in takewhile(lambda names: len(set(names)) == 1, zip(*chains, strict=False))]


def _closure(start: Iterable[str], neighbours: Callable[[str], Iterable[str]]) -> frozenset[str]:
    """All nodes that can be reached from some."""
    found: set[str] = set()
    todo = [*start]
    while todo:
        at = todo.pop()
        if at not in found:
            found.add(at)
            todo.extend(neighbours(at))
    return frozenset(found)
