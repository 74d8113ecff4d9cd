"""Which requests' pages are leased, saved, announced and pulled: the scheduler's half of a migration of KV caches.

A *prefill task* computes a prompt for another engine: it waits until every rank has leased buffers for the pages of the
whole prompt, saves pages as they are complete, and ends with an announcement. A *decode task* brings the announcement
of its prompt: its pages are pulled, or the prompt is computed here if anything about them is wrong.

From: HydraInfer, section 4.3 (migration: announce, admit, pull, release).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from vllm_omni.errors import RelayBroken
from vllm_omni.kv.page_relay import Load, PageTable, Reserve, Save
from vllm_omni.kv.pages import CacheFormat
from vllm_omni.messages.payload import TensorRef

logger = logging.getLogger(__name__)

MAX_ANNOUNCED = 4096  # announcements that a late abort can still take back


class Scheduled(NamedTuple):
    """What a step computes of a request."""

    request_id: str
    num_computed_tokens: int  # before the step
    num_tokens: int  # in the step


@dataclass
class Actions:
    """What the workers do in a step."""

    reserves: list[Reserve] = field(default_factory=list)
    saves: list[Save] = field(default_factory=list)
    loads: list[Load] = field(default_factory=list)
    drops: list[str] = field(default_factory=list)  # requests whose buffers no reader will ask for


@dataclass
class _PrefillTask:
    num_tokens: int
    num_pages: int
    digest: str = ""
    refs: dict[int, list[list[TensorRef]]] = field(default_factory=dict)  # by rank
    num_saved: int = 0  # pages that workers were asked to save
    error: str = ""


@dataclass
class _DecodeTask:
    num_tokens: int
    page_table: bytes
    is_loaded: bool = False  # a request's pages are pulled once, whether that succeeds or not


class MigrationScheduler:
    """Decides synchronously; ``take_actions`` returns what the workers have to do in a step.

    Args:
        block_size: tokens of a page.
    """

    def __init__(self, block_size: int) -> None:
        self.ranks: tuple[CacheFormat, ...] = ()  # of this engine's caches
        self.block_size = block_size
        self._prefills: dict[str, _PrefillTask] = {}
        self._decodes: dict[str, _DecodeTask] = {}
        self._reserves: list[Reserve] = []
        self._loads: list[Load] = []
        self._drops: list[str] = []
        self._announced: dict[str, None] = {}  # requests, the oldest first

    @property
    def has_drops(self) -> bool:
        """Whether workers hold buffers that are to be dropped."""
        return bool(self._drops)

    def check_idle(self) -> None:
        """For tests: no request has left anything behind."""
        left = (self._prefills, self._decodes, self._reserves, self._loads, self._drops)
        assert not any(left), f"left behind: {left}"

    def add(self, request_id: str, num_tokens: int, params: Mapping[str, Any], digest: Callable[[], str]) -> None:
        """Add a request.

        Args:
            num_tokens: of its prompt.
            params: its ``kv_transfer_params``.
            digest: names its prompt; raises ``ValueError`` for a prompt that cannot be moved between engines.
        """
        if params.get("do_remote_prefill"):
            try:
                self._decodes[request_id] = _DecodeTask(num_tokens, self._read(num_tokens, params, digest))
            except (RelayBroken, ValueError) as exc:
                logger.warning("request %s: its prompt is computed here: %s", request_id, exc)
        if params.get("do_remote_decode"):
            task = self._prefills[request_id] = _PrefillTask(num_tokens, self._num_pages(num_tokens))
            try:
                task.digest = digest()
                self._reserves.append(Reserve(request_id, task.num_pages))
            except ValueError as exc:
                task.error = str(exc)

    def _num_pages(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def _read(self, num_tokens: int, params: Mapping[str, Any], digest: Callable[[], str]) -> bytes:
        """Check an announcement; returns its page table."""
        if error := params.get("error"):
            raise ValueError(f"the source has announced no pages: {error}")
        pages, num_announced = params.get("pages"), params.get("num_tokens")
        if not isinstance(pages, bytes):
            raise ValueError(f"kv_transfer_params have no page table in 'pages', but {type(pages).__name__}")
        if num_announced != num_tokens or params.get("prompt") != digest():
            raise ValueError(
                f"the announcement is of another prompt, of {num_announced} tokens; this one has {num_tokens}"
            )
        table = PageTable.decode(pages)
        for rank, target in enumerate(self.ranks):
            if reason := table.why_not(target, rank):
                raise ValueError(f"the pages that were announced cannot be used here: {reason}")
        if table.num_pages != self._num_pages(num_tokens):
            raise ValueError(f"a page table of {table.num_pages} pages for {num_tokens} tokens")
        return pages

    def num_new_tokens(self, request_id: str, num_computed_tokens: int) -> int | None:
        """Tokens to pull for a waiting request; None: it waits for its buffers."""
        prefill = self._prefills.get(request_id)
        if prefill is not None and not prefill.error and len(prefill.refs) < len(self.ranks):
            return None
        num_tokens = self.num_announced_tokens(request_id)
        # The last token is computed here in any case.
        return 0 if num_tokens - 1 <= num_computed_tokens else num_tokens - num_computed_tokens

    def num_announced_tokens(self, request_id: str) -> int:
        """Tokens of a waiting request's prompt whose pages will be pulled."""
        decode = self._decodes.get(request_id)
        return 0 if decode is None or decode.is_loaded else decode.num_tokens

    def load(self, request_id: str, blocks: list[int], num_tokens: int) -> None:
        """Pull the last ``num_tokens`` of a prompt into a request's blocks."""
        decode = self._decodes[request_id]
        first = (decode.num_tokens - num_tokens) // self.block_size
        num_pages = self._num_pages(decode.num_tokens)
        decode.is_loaded = True
        self._loads.append(Load(request_id, first, blocks[first:num_pages], decode.page_table))
        decode.page_table = b""

    def take_actions(self, scheduled: Iterable[Scheduled], blocks_of: Callable[[str], list[int]]) -> Actions:
        """Return what the workers do in a step, once.

        Args:
            scheduled: the requests that the step computes.
            blocks_of: returns the blocks of a scheduled request.
        """
        actions = Actions(self._reserves, [], self._loads, self._drops)
        self._reserves, self._loads, self._drops = [], [], []
        if self._prefills:
            actions.saves = [save for one in scheduled if (save := self._save(one, blocks_of)) is not None]
        return actions

    def _save(self, one: Scheduled, blocks_of: Callable[[str], list[int]]) -> Save | None:
        """Save the pages that are full after this step, and after a prompt's last one also the page that is not.

        Pages that were found in the prefix cache or pulled are saved as well. Pages that were saved before a preemption
        are not saved again: they are the same.
        """
        task = self._prefills.get(one.request_id)
        if task is None or task.error or task.num_saved == task.num_pages:
            return None
        num_tokens = one.num_computed_tokens + one.num_tokens
        num_pages = task.num_pages if num_tokens >= task.num_tokens else num_tokens // self.block_size
        if num_pages <= task.num_saved:
            return None
        first, task.num_saved = task.num_saved, num_pages
        return Save(one.request_id, first, blocks_of(one.request_id)[first:num_pages], num_pages == task.num_pages)

    def add_leased(self, refs: Mapping[str, dict[int, list[list[TensorRef]]]], rejected: Mapping[str, str]) -> None:
        """Take note of the buffers that ranks have leased, by request and rank, and of requests that get none."""
        for request_id, of_ranks in refs.items():
            if (task := self._prefills.get(request_id)) is not None:  # otherwise its buffers are dropped already
                task.refs |= of_ranks
        for request_id, reason in rejected.items():
            if (task := self._prefills.get(request_id)) is not None:
                logger.warning("request %s: its pages cannot be announced: %s", request_id, reason)
                task.error = reason
                self._drops.append(request_id)  # other ranks may have leased some

    def finish(self, request_id: str, *, is_failed: bool) -> dict[str, Any] | None:
        """Remove a request; returns the announcement of a prefill task."""
        self._decodes.pop(request_id, None)
        task = self._prefills.pop(request_id, None)
        if task is None:
            return None
        self._reserves = [one for one in self._reserves if one.request_id != request_id]
        if task.error:
            return {"do_remote_prefill": True, "error": task.error}
        if is_failed or task.num_saved < task.num_pages:
            self._drops.append(request_id)
            return None
        self._announced[request_id] = None
        while len(self._announced) > MAX_ANNOUNCED:
            del self._announced[next(iter(self._announced))]
        return {
            "do_remote_prefill": True,
            "num_tokens": task.num_tokens,
            "prompt": task.digest,
            "block_size": self.block_size,
            "pages": self._page_table(task).encode(),
        }

    def _page_table(self, task: _PrefillTask) -> PageTable:
        refs = {
            f"{rank}/{group}/{buffer}": ref
            for rank, of_groups in sorted(task.refs.items())
            for group, of_group in enumerate(of_groups)
            for buffer, ref in enumerate(of_group)
        }
        return PageTable(task.num_pages, self.ranks, refs)

    def abort_announced(self, request_id: str) -> None:
        """Drop the pages of a prefill task that was aborted after it had ended."""
        if request_id in self._announced:
            del self._announced[request_id]
            self._drops.append(request_id)
