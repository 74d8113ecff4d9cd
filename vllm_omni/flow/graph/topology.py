"""Loops, topological order and dominators of a graph. Graphs are small, so the algorithms are plain.

From: Omni-Flow section 3.3 (diamond roots by reverse search).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile

from vllm_omni.flow.graph.transfer import ENTRY


@dataclass(frozen=True)
class Cycle:
    """A strongly connected part of a graph."""

    nodes: frozenset[str]
    headers: tuple[str, ...]  # nodes with a source outside the cycle


class Topology:
    """The shape of a graph.

    ``forward`` is ``feeds`` without the edges that lead back to the header of a cycle.

    Args:
        feeds: node -> the nodes (or ENTRY) that feed it.
        gathering: nodes that gather all frames of a call; only ENTRY dominates them, and nothing above them dominates
            the nodes below them.
    """

    def __init__(self, feeds: Mapping[str, Iterable[str]], gathering: Iterable[str] = ()):
        self._gathering = frozenset(gathering)
        self._feeds = {name: tuple(dict.fromkeys(sources)) for name, sources in feeds.items()}
        self.cycles = self._find_cycles()
        self._cycle_of = {name: cycle for cycle in self.cycles for name in cycle.nodes}
        self.forward = {
            name: tuple(source for source in sources if not self.is_back(source, name))
            for name, sources in self._feeds.items()
        }

    def cycle_of(self, node: str) -> Cycle | None:
        return self._cycle_of.get(node)

    def is_back(self, source: str, target: str) -> bool:
        """Whether an edge leads back to a header of its cycle."""
        cycle = self._cycle_of.get(target)
        return cycle is not None and source in cycle.nodes and target in cycle.headers

    def order(self) -> Sequence[str]:
        """Nodes in topological order of ``forward``; nodes on a cycle that remains there are left out."""
        placed = {ENTRY: None}
        todo = list(self.forward)
        while todo:
            ready = [name for name in todo if all(source in placed for source in self.forward[name])]
            if not ready:
                break
            placed[ready[0]] = None
            todo.remove(ready[0])
        del placed[ENTRY]
        return list(placed)

    def dominators(self) -> Mapping[str, list[str]]:
        """Node -> the nodes on every path from ENTRY to it, from ENTRY down to itself."""
        chains: dict[str, list[str]] = {ENTRY: [ENTRY]}
        for name in self.order():
            above = [[ENTRY]] if name in self._gathering else [chains[source] for source in self.forward[name]]
            chains[name] = [*common_prefix(above), name]
        return chains

    def reaches(self, source: str) -> frozenset[str]:
        """All nodes with a forward path from ``source``, itself included."""
        return _closure([source], lambda at: [name for name, sources in self.forward.items() if at in sources])

    def _find_cycles(self) -> list[Cycle]:
        above = {name: _closure(feeds, lambda at: self._feeds.get(at, ())) for name, feeds in self._feeds.items()}
        cycles: list[Cycle] = []
        seen: set[str] = set()
        for name in self._feeds:
            if name not in above[name] or name in seen:
                continue
            nodes = frozenset(other for other in above[name] if name in above.get(other, ()))
            seen |= nodes
            headers = tuple(
                each for each in self._feeds if each in nodes and any(s not in nodes for s in self._feeds[each])
            )
            cycles.append(Cycle(nodes, headers))
        return cycles


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
