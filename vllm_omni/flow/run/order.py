"""Order across activations: what was made in parallel is read in the order of its paths.

From: Omni-Flow section 3.2.2 (SeqId segments) and appendix A, cases 1 to 3.
"""

from collections import deque
from typing import Generic

from vllm_omni.flow.run.frame import TURN, Path
from vllm_omni.flow.run.sequence import Numbered, SequenceQueue


class PathOrder(Generic[Numbered]):
    """A tree of paths. What one activation sends is a leaf; how many yields there were below a path is told by whoever
    yielded (``set_count``), so that the order knows when everything has come.

    A single activation, the usual case, is one leaf at the root: then there is no tree.
    """

    __slots__ = ("_leaf", "_root", "done")

    def __init__(self) -> None:
        self._leaf: SequenceQueue[Numbered] | None = None
        self._root: _Branch[Numbered] | None = None
        self.done = False

    def push(self, path: Path, item: Numbered, turns: tuple[int, ...]) -> list[Numbered]:
        """Take an item of the leaf at ``path``; returns what is due now.

        Args:
            turns: loops of which a turn is below the leaf, once the leaf has ended.
        """
        if not path and not turns and self._root is None:
            if self._leaf is None:
                if self.done:
                    return []
                if item.last and not item.seq:  # all there is
                    self.done = True
                    return [item]
                self._leaf = SequenceQueue()
            due = self._leaf.push(item)
            self.done = self._leaf.ended
            return due
        branch = self._find(path)
        if branch is None:
            return []
        branch.due.extend(branch.leaf.push(item))
        if branch.leaf.ended and branch.count is None:
            branch.count, branch.turns = 0, turns
        return self._advance()

    def set_count(self, path: Path, count: int, turns: tuple[int, ...]) -> list[Numbered]:
        """There were so many yields below ``path``."""
        branch = self._find(path)
        if branch is None or branch.count is not None:
            return []
        branch.count, branch.turns = count, turns
        return self._advance()

    def __len__(self) -> int:
        """Items that came ahead of their turn."""
        if self._root is None:
            return 0 if self._leaf is None else len(self._leaf)
        total, todo = 0, [self._root]
        while todo:
            branch = todo.pop()
            total += len(branch.due) + len(branch.leaf)
            todo.extend(branch.children.values())
        return total

    def _find(self, path: Path) -> "_Branch[Numbered] | None":
        """None if it is complete already: a duplicate."""
        if self.done:
            return None
        if self._root is None:
            self._root = _Branch(SequenceQueue() if self._leaf is None else self._leaf)
        branch = self._root
        for key in path:
            if branch.is_over(key):
                return None
            child = branch.children.get(key)
            if child is None:
                child = branch.children[key] = _Branch(SequenceQueue())
            branch = child
        return branch

    def _advance(self) -> list[Numbered]:
        assert self._root is not None
        out: list[Numbered] = []
        stack = [self._root]
        while stack:
            branch = stack[-1]
            out.extend(branch.due)
            branch.due.clear()
            if branch.is_complete:
                stack.pop()
                if stack:
                    parent = stack[-1]
                    del parent.children[parent.next_key]
                    parent.num_over += 1
                continue
            child = branch.children.get(branch.next_key)
            if child is None:
                return out
            stack.append(child)
        self.done = True
        return out


class _Branch(Generic[Numbered]):
    __slots__ = ("children", "count", "due", "leaf", "num_over", "turns")

    def __init__(self, leaf: SequenceQueue[Numbered]) -> None:
        self.leaf = leaf
        self.due: deque[Numbered] = deque()
        self.children: dict[int, _Branch[Numbered]] = {}  # seen, and not complete
        self.count: int | None = None  # of yields below; None while nobody has told, and the leaf has not ended
        self.turns: tuple[int, ...] = ()  # come behind the yields
        self.num_over = 0  # children that are complete: the first ones

    @property
    def is_complete(self) -> bool:
        return self.count is not None and self.num_over == self.count + len(self.turns)

    @property
    def next_key(self) -> int:
        if self.count is None or self.num_over < self.count:
            return self.num_over
        return TURN + self.turns[self.num_over - self.count]

    def is_over(self, key: int) -> bool:
        if key < TURN:
            return key < self.num_over
        return self.count is not None and (key - TURN) in self.turns[: max(0, self.num_over - self.count)]
