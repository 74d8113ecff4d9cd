"""``DecodedMedia``: decoded files of earlier prompts, by their bytes: one that is sent again is not decoded again.

A file is found by what it contains, never by where it came from, so that nothing stale is served. What vLLM's processor
makes of it is found by the same bytes in that processor's own cache, and what the encoder made of that in the pool.

From: Omni-Flow section 5.1 (a cache by the hash of the raw input), 4.1.2 (one upload in flight).
"""

from __future__ import annotations

import asyncio
import hashlib
import threading
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple

from vllm.multimodal.media import MediaIO


class DecodedStatistics(NamedTuple):
    """Files that are kept now, their decoded bytes, and look-ups since the start."""

    num_files: int
    num_bytes: int
    num_hits: int
    num_misses: int


class DecodedMedia:
    """Keeps the most recently used files, up to a number of bytes. Thread-safe: servers of one process share it."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._lock = threading.Lock()
        self._files: OrderedDict[bytes, tuple[Any, int]] = OrderedDict()  # digest -> (decoded, number of bytes)
        self._decoding: dict[tuple[bytes, int], asyncio.Task[Any]] = {}  # by digest and event loop
        self._num_bytes = self._num_hits = self._num_misses = 0

    async def get(self, key: bytes, num_bytes: int, decode: Callable[[], Awaitable[Any]]) -> Any:
        """Return a decoded file, which prompts share and must not change; concurrent prompts decode it once.

        Args:
            num_bytes: of the decoded file; one of more than ``max_bytes`` is not kept.
        """
        here = key, id(asyncio.get_running_loop())
        with self._lock:
            if (found := self._files.get(key)) is not None:
                self._num_hits += 1
                self._files.move_to_end(key)
                return found[0]
            decoding = self._decoding.get(here)
            self._num_hits += decoding is not None
            self._num_misses += decoding is None
            if decoding is None:
                decoding = self._decoding[here] = asyncio.ensure_future(self._decode(here, num_bytes, decode))
        return await asyncio.shield(decoding)  # this prompt may be aborted while others wait for the same file

    async def _decode(self, here: tuple[bytes, int], num_bytes: int, decode: Callable[[], Awaitable[Any]]) -> Any:
        try:
            decoded = await decode()
        finally:
            with self._lock:
                del self._decoding[here]
        with self._lock:
            if num_bytes <= self.max_bytes and here[0] not in self._files:
                self._files[here[0]] = decoded, num_bytes
                self._num_bytes += num_bytes
            while self._num_bytes > self.max_bytes:
                _, (_, num_evicted) = self._files.popitem(last=False)
                self._num_bytes -= num_evicted
        return decoded

    def statistics(self) -> DecodedStatistics:
        with self._lock:
            return DecodedStatistics(len(self._files), self._num_bytes, self._num_hits, self._num_misses)


def key_of(data: bytes, media_io: MediaIO[Any]) -> bytes:
    """Name a file by its bytes, and by the decoder and its settings."""
    return hashlib.sha256(data).digest() + hashlib.sha256(_describe(media_io).encode()).digest()


def _describe(value: Any) -> str:
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key!r}: {_describe(one)}' for key, one in sorted(value.items()))}}}"
    if hasattr(value, "__dict__") and not isinstance(value, type):  # its own description may be its address
        return f"{type(value).__module__}.{type(value).__qualname__} {_describe(vars(value))}"
    return repr(value)
