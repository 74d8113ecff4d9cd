"""``CachedForward``: one forward of a denoiser in which rows that hit the first-block cache skip most blocks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from vllm_omni.diffusion.denoiser_blocks import FoundBlocks


class RowKey(NamedTuple):
    """Identifies a row of a denoiser call: the same key in each step."""

    request_id: str
    component: str  # name of the denoiser in its pipeline: "transformer", "transformer_2"
    branch: str  # distinguishes the calls of one step: "cond", "uncond"
    row: int  # among the rows of this request in this call


class RowStep(NamedTuple):
    """Progress of the request of a row."""

    step_index: int  # denoise steps done before this call
    num_steps: int  # of the whole run; 0: not known yet


@dataclass(slots=True)
class CacheEntry:
    """Residuals of the latest step in which all blocks of a row were computed."""

    head_residual: Tensor  # r', [T, D] on the device, without padding
    tail_residual: Tensor  # (t - h)', same shape
    num_reuses: int = 0  # since it was computed

    @property
    def num_bytes(self) -> int:
        return self.head_residual.nbytes + self.tail_residual.nbytes

    def matches(self, residual: Tensor) -> bool:
        known = self.head_residual
        return (known.shape, known.dtype, known.device) == (residual.shape, residual.dtype, residual.device)

    def distance(self, residual: Tensor) -> Tensor:
        """d of a row: a float32 scalar on the device."""
        change = (residual - self.head_residual).abs().mean(dtype=torch.float32)
        return change / self.head_residual.abs().mean(dtype=torch.float32)


class EntryStore(Protocol):
    """Interface of the cache for one forward."""

    def may_keep(self, key: RowKey, num_bytes: int) -> bool:
        """Note the size of a row's entry; return whether there is room for it."""

    def choose_hits(
        self, keys: Mapping[int, RowKey], steps: Sequence[RowStep], residuals: Mapping[int, Tensor]
    ) -> dict[int, CacheEntry]:
        """Choose the entries to reuse, by row; free the entries of all other rows in ``keys``.

        Args:
            keys: row -> key, for the rows that have one.
            residuals: row -> r, [T, D], for the rows that may have an entry.
        """

    def keep(self, key: RowKey, entry: CacheEntry) -> None:
        """Store the entry of a row, if there is room."""


class CachedForward:
    """Wrappers of a denoiser's blocks for one forward: the blocks run in order, and after the first one only on the
    rows that missed the cache.

    Args:
        keys: of each row of the batch; None: this row is not cached.
        steps: of each row of the batch.
        num_tokens: of each row, without padding; None: rows are not padded.
    """

    def __init__(
        self,
        store: EntryStore,
        blocks: FoundBlocks,
        keys: Sequence[RowKey | None],
        steps: Sequence[RowStep],
        num_tokens: Sequence[int] | None,
    ):
        assert len(keys) == len(steps), "one key and one step for each row"
        self._store = store
        self._blocks = blocks
        self._denoiser = blocks.denoiser
        self._num_rows = len(keys)
        self._keys = {row: key for row, key in enumerate(keys) if key is not None}
        self._steps = steps
        self._num_tokens = num_tokens
        self._hits: dict[int, CacheEntry] = {}  # row -> its entry
        self._residuals: dict[int, Tensor] = {}  # row -> r, of rows that missed and may keep an entry
        self._misses: list[int] = []
        self._miss_index: Tensor | None = None  # the same on the device; None: all rows missed, or none
        self._narrowed: dict[int, tuple[Tensor, Tensor]] = {}  # id of an argument -> the argument, its missed rows
        self._head_result: Any = None  # of the first block, all rows

    def wrap_blocks(self, module: nn.Module) -> dict[str, list[partial[Any]]]:
        """For each list of blocks of ``module``, the callables that replace them."""
        lists = {name: list(getattr(module, name)) for name in self._denoiser.lists}
        first, *_, last = [block for blocks in lists.values() for block in blocks]
        roles = {first: self._run_first, last: self._run_last}
        return {
            name: [partial(roles.get(block, self._run_between), block) for block in blocks]
            for name, blocks in lists.items()
        }

    def _run_first(self, block: nn.Module, *args: Any, **kwargs: Any) -> Any:
        names = self._blocks.parameters[type(block)]
        before = {**dict(zip(names, args, strict=False)), **kwargs}[self._denoiser.hidden]
        assert before.shape[0] == self._num_rows, "one key for each row of the batch"
        result = self._head_result = block(*args, **kwargs)
        after = self._blocks.get_hidden(result)
        for row, key in self._keys.items():
            part = self._part(after, row)
            if self._store.may_keep(key, 2 * part.numel() * part.element_size()):
                self._residuals[row] = part - self._part(before, row)  # a new tensor, not a view of the batch
        self._hits = self._store.choose_hits(self._keys, self._steps, self._residuals)
        self._misses = [row for row in range(self._num_rows) if row not in self._hits]
        self._residuals = {row: self._residuals[row] for row in self._residuals if row not in self._hits}
        if not self._hits or not self._misses:
            return result
        self._miss_index = torch.tensor(self._misses, device=after.device)
        if isinstance(result, Tensor):
            return self._narrow(result)
        return tuple(self._narrow(part) for part in result)

    def _run_between(self, block: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not self._hits:
            return block(*args, **kwargs)
        if not self._misses:
            return self._head_result  # only passed on to the next wrapper, which ignores it
        names = self._blocks.parameters[type(block)]
        is_row = self._denoiser.row_arguments.__contains__
        # A block ignores arguments beyond its named ones (`*args` of HunyuanVideo's blocks).
        named = [self._narrow(value) if is_row(name) else value for name, value in zip(names, args, strict=False)]
        others = {name: self._narrow(value) if is_row(name) else value for name, value in kwargs.items()}
        return block(*named, *args[len(named) :], **others)

    def _run_last(self, block: nn.Module, *args: Any, **kwargs: Any) -> Any:
        result = self._run_between(block, *args, **kwargs)
        head = self._blocks.get_hidden(self._head_result)
        tail = self._blocks.get_hidden(result)  # of the rows that missed
        for position, row in enumerate(self._misses):
            if (residual := self._residuals.pop(row, None)) is not None:
                entry = CacheEntry(residual, self._part(tail, row, at=position) - self._part(head, row))
                self._store.keep(self._keys[row], entry)
        if not self._hits:
            return result
        hidden = head.clone()
        if self._miss_index is not None:
            hidden.index_copy_(0, self._miss_index, tail)
        for row, entry in self._hits.items():
            self._part(hidden, row).add_(entry.tail_residual)
        # No model reads the text's states after its last block, so those of the first block are returned: they need
        # not be kept, and a text may have other padding in the next step.
        return self._blocks.replace_hidden(self._head_result, hidden)

    def _part(self, hidden: Tensor, row: int, at: int | None = None) -> Tensor:
        """A view of a row's own tokens, [T, D]; ``at``: position of the row, if not its number."""
        part = hidden[row if at is None else at]
        return part if self._num_tokens is None else part[: self._num_tokens[row]]

    def _narrow(self, value: Any) -> Any:
        """Select the rows that missed from an argument whose first dimension is rows.

        Unchanged are an earlier block's result, which has only these rows, and what is broadcast over rows. An argument
        of the whole batch is never mistaken for either, since it has more rows than missed.
        """
        if not isinstance(value, Tensor) or value.shape[0] in (1, len(self._misses)):
            return value
        if id(value) not in self._narrowed:  # the table keeps the argument, so that its id stays unique
            groups = value.unflatten(0, (-1, self._num_rows))  # [k * B, ...]: k groups of all rows
            self._narrowed[id(value)] = value, groups.index_select(1, self._miss_index).flatten(0, 1)
        return self._narrowed[id(value)][1]
