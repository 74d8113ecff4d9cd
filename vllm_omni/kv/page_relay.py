"""Move the pages of one rank's caches over the relay: save them at the source, pull them at the target.

``migration.py`` decides which requests' pages travel. At the source, buffers for a whole prompt are leased before any
of it is computed, all or none, in order: so a full relay delays prefills instead of breaking them, and the references
are known from then on. Pages are copied into the buffers layer by layer, while the following layers are computed, and
chunk by chunk. At the target, a thread pulls them in parallel to the engine's steps, and copies each buffer into the
blocks that were allocated.

The front end, which receives the references, ends the leases (``release(for_all=True)``); a target releases its own
read only.

From: HydraInfer, section 4.3 (migrate: admission by the target, the pull, the release).
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

import msgspec
import torch
from torch import Tensor

from vllm_omni.errors import PoolExhausted, RelayBroken, RelayError, RelayTimeout
from vllm_omni.kv.pages import CacheFormat, HeadRun, PagedCaches, match_heads
from vllm_omni.messages.payload import Payload, TensorRef, decode, encode
from vllm_omni.relay.base import TIMEOUT_S
from vllm_omni.relay.hub import RelayHub
from vllm_omni.relay.slab import CHUNK_BYTES

logger = logging.getLogger(__name__)

PULL_TIMEOUT_S = TIMEOUT_S  # for all pages of a request
NUM_THREADS = 4  # pulls in parallel: one waits for the network while another copies


# -- the announcement ------------------------------------------------------------------------------------------------


class PageTable(msgspec.Struct, frozen=True):
    """Where the pages of a prompt lie, as a source announces it."""

    num_pages: int
    ranks: tuple[CacheFormat, ...]  # the source's caches, by tensor-parallel rank
    refs: dict[str, TensorRef]  # "rank/group/buffer" -> a buffer of ``GroupFormat.buffer_shapes``

    def encode(self) -> bytes:
        """Serialize as a ``Payload``, so that a process that only forwards it can release it by ``release_payload``."""
        values = {"num_pages": self.num_pages, "ranks": msgspec.to_builtins(self.ranks)}
        return encode(Payload(self.refs, values))

    @staticmethod
    def decode(data: bytes) -> PageTable:
        """Parse a page table. Raises ``RelayBroken`` for other bytes."""
        payload = decode(data)
        try:
            ranks = msgspec.convert(payload.values["ranks"], tuple[CacheFormat, ...])
            return PageTable(msgspec.convert(payload.values["num_pages"], int), ranks, payload.tensors)
        except (msgspec.ValidationError, KeyError, TypeError) as exc:
            raise RelayBroken(f"not a page table: {exc}") from exc

    def ref(self, rank: int, group: int, buffer: int) -> TensorRef:
        """Return a buffer's reference. Raises ``RelayBroken`` if it is missing, or its shape is not the format's."""
        path = f"{rank}/{group}/{buffer}"
        ref = self.refs.get(path)
        if ref is None:
            raise RelayBroken(f"a page table without {path!r}")
        shape = self.ranks[rank].groups[group].buffer_shapes(self.num_pages)[buffer]
        if ref.shape != shape or ref.dtype != "uint8":
            raise RelayBroken(f"{path!r} is {ref.dtype} {list(ref.shape)} in a page table, and must be {list(shape)}")
        return ref

    def why_not(self, target: CacheFormat, rank: int = 0) -> str:
        """Return why a rank of a target cannot use these pages; empty if it can."""
        if not self.ranks:
            return "no rank has announced its caches"
        for source in self.ranks:
            if source.block_size != target.block_size:
                return f"blocks of {source.block_size} tokens there, of {target.block_size} here"
            if source.content != target.content:
                return f"caches of {source.content} there, of {target.content} here"
            theirs = [(group.num_layers, group.head_page) for group in source.groups]
            ours = [(group.num_layers, group.head_page) for group in target.groups]
            if theirs != ours:
                return f"layers and pages of a head {theirs} there, {ours} here"
        try:
            for group, of_target in enumerate(target.groups):
                match_heads(of_target, [source.groups[group] for source in self.ranks], rank)
        except ValueError as exc:
            return str(exc)
        return ""


# -- the source --------------------------------------------------------------------------------------------------------


class Reserve(NamedTuple):
    request_id: str
    num_pages: int


class Save(NamedTuple):
    """Pages that are complete after a step."""

    request_id: str
    first_page: int
    blocks: list[int]  # of page ``first_page`` and the following ones
    is_last: bool  # these are the request's last pages


class _Buffers(NamedTuple):
    tensors: list[list[Tensor]]  # by group
    refs: list[list[TensorRef]]


class PageSource:
    """Copies pages of one rank into leased buffers. Used by the engine's thread only."""

    def __init__(self, hub: RelayHub, caches: PagedCaches):
        self._hub = hub
        self._caches = caches
        self._waiting: deque[Reserve] = deque()
        self._buffers: dict[str, _Buffers] = {}
        self._saves: list[tuple[Save, Tensor]] = []  # in this step
        self._layers_left: set[str] = set()

    def reserve(self, reserve: Reserve) -> None:
        """Queue a request for buffers."""
        self._waiting.append(reserve)

    def drop(self, request_id: str) -> None:
        """Free a request's buffers, which no reader will ask for."""
        self._waiting = deque(one for one in self._waiting if one.request_id != request_id)
        self._buffers.pop(request_id, None)
        self._hub.abort(_key(request_id))

    def grant(self) -> tuple[dict[str, list[list[TensorRef]]], dict[str, str]]:
        """Lease buffers for the queued requests, in order, as far as there is room.

        Returns:
            References by request, group and buffer; and by request the reason why it will never get any.
        """
        granted: dict[str, list[list[TensorRef]]] = {}
        rejected: dict[str, str] = {}
        while self._waiting:
            request_id, num_pages = self._waiting[0]
            shapes = [group.buffer_shapes(num_pages) for group in self._caches.format.groups]
            num_bytes = sum(-(-prod(shape) // CHUNK_BYTES) * CHUNK_BYTES for of_group in shapes for shape in of_group)
            if num_bytes > (of_relay := self._hub.options.num_bytes):
                rejected[request_id] = (
                    f"the pages of its prompt take {num_bytes} bytes of the relay, which has {of_relay} in all; "
                    "VLLM_OMNI_RELAY_BYTES makes it larger"
                )
            # Checked first: leasing a part and giving it back would wake the readers in every step.
            elif num_bytes > of_relay - self._hub.num_bytes_leased:
                break
            else:
                try:
                    self._buffers[request_id] = buffers = self._lease(request_id, shapes)
                    granted[request_id] = buffers.refs
                except RelayError as exc:
                    self._hub.abort(_key(request_id))
                    if isinstance(exc, PoolExhausted):  # fragmented, or another prompt has taken the room
                        break
                    rejected[request_id] = str(exc)
            self._waiting.popleft()
        return granted, rejected

    def _lease(self, request_id: str, shapes: list[list[tuple[int, ...]]]) -> _Buffers:
        leased = [[self._hub.lease(_key(request_id), shape, torch.uint8) for shape in of_group] for of_group in shapes]
        tensors = [[tensor for tensor, _ in of_group] for of_group in leased]
        return _Buffers(tensors, [[ref for _, ref in of_group] for of_group in leased])

    def start_step(self, saves: list[Save]) -> None:
        """Set what the step that starts will save."""
        self._saves = []
        for save in saves:
            buffers = self._buffers.get(save.request_id)
            if buffers is None:
                continue
            # A lease may have expired while its request waited; its memory may then have another owner.
            if all(self._hub.renew(ref) for of_group in buffers.refs for ref in of_group):
                self._saves.append((save, torch.tensor(save.blocks, dtype=torch.int64)))
            else:
                logger.warning("request %s: its pages were not computed before their lease expired", save.request_id)
                self.drop(save.request_id)
        self._layers_left = set(self._caches.layer_names) if self._saves else set()

    def save_layer(self, name: str) -> None:
        """Copy the pages of a layer that has been computed. Within a step no layer is written twice."""
        if name not in self._layers_left:
            return
        self._layers_left.remove(name)
        for save, blocks in self._saves:
            self._caches.gather(name, blocks, save.first_page, self._buffers[save.request_id].tensors)

    def end_step(self) -> None:
        """Save the layers that were not reported (a CUDA graph reports none); returns when all are saved."""
        for name in list(self._layers_left):
            self.save_layer(name)
        if self._saves and self._caches.device.type == "cuda":
            torch.cuda.current_stream(self._caches.device).synchronize()
        for save, _ in self._saves:
            if save.is_last:
                del self._buffers[save.request_id]
        self._saves = []

    def close(self) -> None:
        for request_id in list(self._buffers):
            self.drop(request_id)


def _key(request_id: str) -> str:
    """Return the relay's request id for pages: a request's images may lie in the same relay, and outlive its pages."""
    return f"kv/{request_id}"


# -- the target --------------------------------------------------------------------------------------------------------


class Load(NamedTuple):
    request_id: str
    first_page: int  # the first that is missing here
    blocks: list[int]  # for this page and the following ones
    page_table: bytes


@dataclass(eq=False)
class _Pull:
    load: Load
    is_cancelled: bool = False
    running: Future[None] | None = None


class PageTarget:
    """Pulls pages into one rank's caches, in parallel to the engine's steps.

    Args:
        rank: this target's tensor-parallel rank.
    """

    def __init__(self, hub: RelayHub, caches: PagedCaches, rank: int):
        self._hub = hub
        self._caches = caches
        self._rank = rank
        self._pulls: dict[str, _Pull] = {}
        self._lock = threading.Lock()
        self._done: dict[str, bool] = {}  # request -> whether all its pages were pulled
        self._reading: Counter[TensorRef] = Counter()
        self._threads = ThreadPoolExecutor(NUM_THREADS, "kv-pull")
        self._streams = threading.local()

    def start(self, load: Load) -> None:
        """Start to pull a request's pages."""
        pull = self._pulls[load.request_id] = _Pull(load)
        pull.running = self._threads.submit(self._run, pull)

    def cancel(self, request_id: str) -> None:
        """Stop a pull; it is done as soon as nothing writes into the request's blocks."""
        if (pull := self._pulls.get(request_id)) is not None:
            pull.is_cancelled = True

    def take_done(self) -> tuple[set[str], set[str]]:
        """Return requests whose pull has ended since the last call, and those of them that failed."""
        with self._lock:
            done, self._done = self._done, {}
        for request_id in done:
            del self._pulls[request_id]
        return set(done), {request_id for request_id, is_loaded in done.items() if not is_loaded}

    def _run(self, pull: _Pull) -> None:
        is_loaded = False
        try:
            with torch.inference_mode(), self._stream():  # both are thread-local
                self._pull(pull)
            is_loaded = not pull.is_cancelled
        except RelayError as exc:
            logger.warning("request %s: its pages could not be pulled: %s", pull.load.request_id, exc)
        except Exception:  # affects this request only: the engine computes the prompt itself
            logger.exception("request %s: its pages could not be pulled", pull.load.request_id)
        with self._lock:
            self._done[pull.load.request_id] = is_loaded

    @contextlib.contextmanager
    def _stream(self) -> Iterator[None]:
        if self._caches.device.type != "cuda":
            yield
            return
        if not hasattr(self._streams, "stream"):
            self._streams.stream = torch.cuda.Stream(self._caches.device)
        with torch.cuda.stream(self._streams.stream):
            yield
            self._streams.stream.synchronize()

    def _pull(self, pull: _Pull) -> None:
        table = PageTable.decode(pull.load.page_table)
        if reason := table.why_not(self._caches.format, self._rank):
            raise RelayBroken(reason)
        first, num_pages = pull.load.first_page, len(pull.load.blocks)
        if first + num_pages > table.num_pages:
            raise RelayBroken(f"pages {first} to {first + num_pages} of {table.num_pages}")
        blocks = torch.tensor(pull.load.blocks, dtype=torch.int64)
        deadline = time.monotonic() + PULL_TIMEOUT_S
        for group, of_target in enumerate(self._caches.format.groups):
            sources = [rank.groups[group] for rank in table.ranks]
            for run in match_heads(of_target, sources, self._rank):
                for buffer, pages, of_blocks in sources[run.source_rank].overlaps(first, num_pages):
                    if pull.is_cancelled:
                        return
                    if (seconds := deadline - time.monotonic()) <= 0:
                        raise RelayTimeout(f"{num_pages} pages did not come within {PULL_TIMEOUT_S:g} s")
                    ref = table.ref(run.source_rank, group, buffer)
                    self._copy(ref, seconds, group, pages, blocks[of_blocks], run)

    def _copy(self, ref: TensorRef, seconds: float, group: int, pages: slice, blocks: Tensor, run: HeadRun) -> None:
        # A release counts for the whole process, in which another request may be reading the same buffer.
        with self._lock:
            self._reading[ref] += 1
        try:
            tensor = self._hub.get_blocking(ref, seconds)
            self._caches.scatter(group, tensor[:, pages], blocks, run)
            if self._caches.device.type == "cuda":
                torch.cuda.current_stream(self._caches.device).synchronize()
        finally:
            with self._lock:
                self._reading[ref] -= 1
                if not self._reading[ref]:
                    del self._reading[ref]
                    self._hub.release(ref)

    def close(self) -> None:
        for pull in list(self._pulls.values()):
            pull.is_cancelled = True
        self._threads.shutdown(wait=True, cancel_futures=True)
