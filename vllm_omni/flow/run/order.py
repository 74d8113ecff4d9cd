"""Order across activations: frames produced in parallel are read in the order of their paths.

From: Omni-Flow section 3.2.2 (SeqId segments) and appendix A, cases 1 to 3.
"""

from collections import deque
from dataclasses import dataclass, field
from typing import Generic

from vllm_omni.flow.run.frame import ITERATION, Path
from vllm_omni.flow.run.sequence import Numbered, SequenceQueue


class PathOrder(Generic[Numbered]):
    """A tree of paths. The frames of one activation are a leaf; the activation that yielded below a path reports the
    number of its yields (``set_count``), so the order knows when it is complete.

    A single activation, the usual case, is one leaf at the root: then there is no tree.
    """

    __slots__ = ("_leaf", "_root", "done")

    def __init__(self) -> None:
        self._leaf: SequenceQueue[Numbered] | None = None
        self._root: _Branch[Numbered] | None = None
        self.done = False

    def push(self, path: Path, item: Numbered, loops: tuple[int, ...]) -> list[Numbered]:
        """Add an item of the leaf at ``path``; returns the items that are due now.

        Args:
            loops: loops with an iteration below the leaf; used once the leaf has ended.
        """
        if not path and not loops and self._root is None:
            if self._leaf is None:
                if self.done:
                    return []
                if item.last and not item.seq:  # the only item
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
            branch.count, branch.loops = 0, loops
        return self._advance()

    def set_count(self, path: Path, count: int, loops: tuple[int, ...]) -> list[Numbered]:
        """Set the number of yields below ``path``; returns the items that are due now."""
        branch = self._find(path)
        if branch is None or branch.count is not None:
            return []
        branch.count, branch.loops = count, loops
        return self._advance()

    def __len__(self) -> int:
        """The number of early items."""
        if self._root is None:
            return 0 if self._leaf is None else len(self._leaf)
        total, todo = 0, [self._root]
        while todo:
            branch = todo.pop()
            total += len(branch.due) + len(branch.leaf)
            todo.extend(branch.children.values())
        return total

    def _find(self, path: Path) -> "_Branch[Numbered] | None":
        """The branch at ``path``; None if it is complete, so the message is a duplicate."""
        if self.done:
            return None
        if self._root is None:
            self._root = _Branch() if self._leaf is None else _Branch(self._leaf)
        branch = self._root
        for key in path:
            if branch.is_over(key):
                return None
            branch = branch.children.get(key) or branch.children.setdefault(key, _Branch())
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


@dataclass(slots=True)
class _Branch(Generic[Numbered]):
    leaf: SequenceQueue[Numbered] = field(default_factory=SequenceQueue)
    due: deque[Numbered] = field(default_factory=deque)
    children: dict[int, "_Branch[Numbered]"] = field(default_factory=dict)  # incomplete ones with a message
    count: int | None = None  # of yields below; None while unknown and the leaf has not ended
    loops: tuple[int, ...] = ()  # their iterations come behind the yields
    num_over: int = 0  # the first children, which are complete

    @property
    def is_complete(self) -> bool:
        return self.count is not None and self.num_over == self.count + len(self.loops)

    @property
    def next_key(self) -> int:
        if self.count is None or self.num_over < self.count:
            return self.num_over
        return ITERATION + self.loops[self.num_over - self.count]

    def is_over(self, key: int) -> bool:
        if key < ITERATION:
            return key < self.num_over
        return self.count is not None and (key - ITERATION) in self.loops[: max(0, self.num_over - self.count)]
