"""Both ends of a cache's way over the relay, as one rank of an engine sees them; which requests, others decide.

At the source, buffers for a whole prompt are leased before any of it is computed, all or none, first come first
served: so a full relay holds back prefills rather than breaking them, and their references are known from then on.
Pages are copied into them layer by layer, while the layers behind are computed, chunk by chunk. At the target a thread
pulls them beside the engine's steps, and copies each buffer into the blocks that were allocated.

Who is told of the references ends the leases (``release(for_all=True)``); a target only says that it has read.

From: HydraInfer, section 4.3 (migrate: admission by the target, the pull, the release).
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from math import prod
from typing import NamedTuple

import msgspec
import torch
from torch import Tensor

from vllm_omni.errors import PoolExhausted, RelayBroken, RelayError, RelayTimeout
from vllm_omni.kv.pages import CacheFormat, HeadRun, PagedCaches, match_heads
from vllm_omni.messages.payload import Payload, TensorRef, decode, encode
from vllm_omni.relay.base import TIMEOUT_S, Clock
from vllm_omni.relay.hub import RelayHub
from vllm_omni.relay.slab import CHUNK_BYTES

logger = logging.getLogger(__name__)

PULL_TIMEOUT_S = TIMEOUT_S  # of all pages of a request
NUM_THREADS = 4  # that pull: one waits for the network while another copies


# -- the announcement ------------------------------------------------------------------------------------------------


class PageTable(msgspec.Struct, frozen=True):
    """Where the pages of a prompt lie: what a source announces of its caches."""

    num_pages: int
    ranks: tuple[CacheFormat, ...]  # of the source, by tensor-parallel rank
    refs: dict[str, TensorRef]  # "rank/group/buffer" -> a buffer of ``GroupFormat.buffer_shapes``

    def encode(self) -> bytes:
        """A packed ``Payload``: who only passes it on can release it by ``release_payload``."""
        values = {"num_pages": self.num_pages, "ranks": msgspec.to_builtins(self.ranks)}
        return encode(Payload(self.refs, values))

    @staticmethod
    def decode(data: bytes) -> PageTable:
        """Raises ``RelayBroken``: the bytes are no page table."""
        payload = decode(data)
        try:
            ranks = msgspec.convert(payload.values["ranks"], tuple[CacheFormat, ...])
            return PageTable(msgspec.convert(payload.values["num_pages"], int), ranks, payload.tensors)
        except (msgspec.ValidationError, KeyError, TypeError) as exc:
            raise RelayBroken(f"not a page table: {exc}") from exc

    def ref(self, rank: int, group: int, buffer: int) -> TensorRef:
        """Raises ``RelayBroken``: there is none, or it is of another shape than its rank's format says."""
        path = f"{rank}/{group}/{buffer}"
        ref = self.refs.get(path)
        if ref is None:
            raise RelayBroken(f"a page table without {path!r}")
        shape = self.ranks[rank].groups[group].buffer_shapes(self.num_pages)[buffer]
        if ref.shape != shape or ref.dtype != "uint8":
            raise RelayBroken(f"{path!r} is {ref.dtype} {list(ref.shape)} in a page table, and must be {list(shape)}")
        return ref

    def why_not(self, target: CacheFormat, rank: int = 0) -> str:
        """Why a rank of a target cannot use these pages; empty if it can."""
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
    """Pages that are complete when a step has been computed, or were before it."""

    request_id: str
    first_page: int
    blocks: list[int]  # of page ``first_page`` and those behind it
    is_last: bool  # of the request


class _Buffers(NamedTuple):
    tensors: list[list[Tensor]]  # by group
    refs: list[list[TensorRef]]


class PageSource:
    """One rank's buffers. For the engine's thread alone."""

    def __init__(self, hub: RelayHub, caches: PagedCaches):
        self._hub = hub
        self._caches = caches
        self._waiting: deque[Reserve] = deque()
        self._buffers: dict[str, _Buffers] = {}
        self._saves: list[tuple[Save, Tensor]] = []  # of this step
        self._layers_left: set[str] = set()

    def reserve(self, reserve: Reserve) -> None:
        self._waiting.append(reserve)

    def drop(self, request_id: str) -> None:
        """Nobody was told of the request's buffers, or will ask for them."""
        self._waiting = deque(one for one in self._waiting if one.request_id != request_id)
        self._buffers.pop(request_id, None)
        self._hub.abort(_key(request_id))

    def grant(self) -> tuple[dict[str, list[list[TensorRef]]], dict[str, str]]:
        """Lease what there is room for, in the order in which it was asked for.

        Returns:
            References by request, group and buffer; and by request why it will never have any.
        """
        granted: dict[str, list[list[TensorRef]]] = {}
        refused: dict[str, str] = {}
        while self._waiting:
            request_id, num_pages = self._waiting[0]
            shapes = [group.buffer_shapes(num_pages) for group in self._caches.format.groups]
            num_bytes = sum(_size(shape) for of_group in shapes for shape in of_group)
            if num_bytes > (of_relay := self._hub.options.num_bytes):
                refused[request_id] = (
                    f"the pages of its prompt take {num_bytes} bytes of the relay, which has {of_relay} in all; "
                    "VLLM_OMNI_RELAY_BYTES makes it larger"
                )
            # Asked first: to lease a part and to give it back would tell the readers, in every step.
            elif num_bytes > of_relay - self._hub.num_bytes_leased:
                break
            else:
                try:
                    self._buffers[request_id] = buffers = self._lease(request_id, shapes)
                    granted[request_id] = buffers.refs
                except RelayError as exc:
                    self._hub.abort(_key(request_id))
                    if isinstance(exc, PoolExhausted):  # in pieces too small, or a large prompt's place is taken
                        break
                    refused[request_id] = str(exc)
            self._waiting.popleft()
        return granted, refused

    def _lease(self, request_id: str, shapes: list[list[tuple[int, ...]]]) -> _Buffers:
        buffers = _Buffers([], [])
        for of_group in shapes:
            leased = [self._hub.lease(_key(request_id), shape, torch.uint8) for shape in of_group]
            buffers.tensors.append([tensor for tensor, _ in leased])
            buffers.refs.append([ref for _, ref in leased])
        return buffers

    def begin_step(self, saves: list[Save]) -> None:
        """What the step that begins is to save."""
        self._saves = []
        for save in saves:
            buffers = self._buffers.get(save.request_id)
            if buffers is None:
                continue
            # Written only what is ours: a lease may have expired while its request waited.
            if all(self._hub.renew(ref) for of_group in buffers.refs for ref in of_group):
                self._saves.append((save, torch.tensor(save.blocks, dtype=torch.int64)))
            else:
                logger.warning("request %s: its pages waited too long for being computed", save.request_id)
                self.drop(save.request_id)
        self._layers_left = set(self._caches.layer_names) if self._saves else set()

    def save_layer(self, name: str) -> None:
        """A layer has been computed. Within a step no layer is written again."""
        if name not in self._layers_left:
            return
        self._layers_left.remove(name)
        for save, blocks in self._saves:
            self._caches.gather(name, blocks, save.first_page, self._buffers[save.request_id].tensors)

    def end_step(self) -> None:
        """All is computed; what nobody told of (a graph runs without telling) is saved now. Returns when it is."""
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


def _size(shape: tuple[int, ...]) -> int:
    """Bytes of a slab that a buffer takes."""
    return -(-prod(shape) // CHUNK_BYTES) * CHUNK_BYTES


def _key(request_id: str) -> str:
    """A request's images may lie in the same relay, and outlive its pages."""
    return f"kv/{request_id}"


# -- the target --------------------------------------------------------------------------------------------------------


class Load(NamedTuple):
    request_id: str
    first_page: int  # that is not here yet
    blocks: list[int]  # for it and those behind it
    page_table: bytes


class _Pull:
    def __init__(self, load: Load):
        self.load = load
        self.is_cancelled = False
        self.running: Future[None] | None = None


class PageTarget:
    """Pulls pages into one rank's caches, beside the engine's steps.

    Args:
        rank: tensor-parallel, of this target.
    """

    def __init__(self, hub: RelayHub, caches: PagedCaches, rank: int = 0, *, clock: Clock = time.monotonic):
        self._hub = hub
        self._caches = caches
        self._rank = rank
        self._clock = clock
        self._pulls: dict[str, _Pull] = {}
        self._lock = threading.Lock()
        self._done: dict[str, bool] = {}  # request -> whether all its pages are here
        self._reading: Counter[TensorRef] = Counter()
        self._threads = ThreadPoolExecutor(NUM_THREADS, "kv-pull")
        self._streams = threading.local()

    def begin(self, load: Load) -> None:
        pull = self._pulls[load.request_id] = _Pull(load)
        pull.running = self._threads.submit(self._run, pull)

    def wait(self, timeout_s: float = PULL_TIMEOUT_S) -> None:
        """Until every pull that has begun has ended.

        Raises:
            RelayTimeout: one has not, in time.
        """
        running = [pull.running for pull in self._pulls.values() if pull.running is not None]
        if concurrent.futures.wait(running, timeout_s).not_done:
            raise RelayTimeout(f"pages are being pulled for more than {timeout_s:g} s")

    def cancel(self, request_id: str) -> None:
        """Its pages are not needed any more; it is done as soon as nothing writes into its blocks."""
        if (pull := self._pulls.get(request_id)) is not None:
            pull.is_cancelled = True

    def take_done(self) -> tuple[set[str], set[str]]:
        """Requests whose pull has ended since the last call, and which of them do not have their pages."""
        with self._lock:
            done, self._done = self._done, {}
        for request_id in done:
            del self._pulls[request_id]
        return set(done), {request_id for request_id, is_loaded in done.items() if not is_loaded}

    def _run(self, pull: _Pull) -> None:
        is_loaded = False
        try:
            with torch.inference_mode(), self._stream():  # by thread, both
                self._pull(pull)
            is_loaded = not pull.is_cancelled
        except RelayError as exc:
            logger.warning("request %s: its pages could not be pulled: %s", pull.load.request_id, exc)
        except Exception:  # a request alone is at stake: the engine computes it itself
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
        deadline = self._clock() + PULL_TIMEOUT_S
        for group, of_target in enumerate(self._caches.format.groups):
            sources = [rank.groups[group] for rank in table.ranks]
            for run in match_heads(of_target, sources, self._rank):
                for buffer, pages, of_blocks in sources[run.source_rank].overlaps(first, num_pages):
                    if pull.is_cancelled:
                        return
                    if (seconds := deadline - self._clock()) <= 0:
                        raise RelayTimeout(f"{num_pages} pages did not come within {PULL_TIMEOUT_S:g} s")
                    ref = table.ref(run.source_rank, group, buffer)
                    self._copy(ref, seconds, group, pages, blocks[of_blocks], run)

    def _copy(self, ref: TensorRef, seconds: float, group: int, pages: slice, blocks: Tensor, run: HeadRun) -> None:
        # A release is for the whole process: another request of this one may be reading the same buffer.
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
