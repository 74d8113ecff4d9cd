"""``CachedRows``: which part of the prefix cache a request may read whose rows another stage reads.

The rows of tokens that are not computed are published from the runner's ``RowCache``. It has those of all blocks that
this engine has computed, and of those that it has loaded from a pool whose pages have rows; a block that it has pulled
from another engine has none. A hit of such a request then ends in front of the first block without rows, and the
connector is not asked for more.
"""

from __future__ import annotations

from collections.abc import Sequence

from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.request import Request

from vllm_omni.messages.stage_step import stage_args


class CachedRows:
    """The blocks without rows, by what they held when they were loaded: a block that is used again has its rows.

    Args:
        is_on: whether the engine keeps rows; otherwise such requests read nothing.
        has_connector: whether blocks may be loaded without rows.
    """

    def __init__(self, block_size: int, *, is_on: bool, has_connector: bool) -> None:
        self._block_size = block_size
        self._is_on = is_on
        self.has_connector = is_on and has_connector
        self._without: dict[int, bytes | None] = {}  # block -> its hash; None: not full yet
        self._num_own: dict[str, int] = {}  # request -> its tokens in blocks that were found here
        self._unfilled: dict[str, KVCacheBlock] = {}  # request -> the block in which what was loaded ends

    def add(self, request: Request) -> None:
        """Let a new request read the prefix cache, if it may and no block is without rows."""
        if not self.has_connector and self.may_read(request):
            request.skip_reading_prefix_cache = False

    def may_read(self, request: Request) -> bool:
        """Whether the request publishes rows, and those of a cached prefix can be published, too."""
        return self._is_on and bool(stage_args(request.sampling_params).get("cached_rows"))

    def num_tokens_with_rows(self, blocks: Sequence[KVCacheBlock]) -> int:
        """How many of the first tokens of a hit have rows."""
        if not self._without:
            return len(blocks) * self._block_size
        return self._block_size * next((i for i, one in enumerate(blocks) if self._lacks_rows(one)), len(blocks))

    def _lacks_rows(self, block: KVCacheBlock) -> bool:
        known = self._without.get(block.block_id, b"")
        return known is None or known == block.block_hash

    def note_own(self, request: Request, num_tokens: int) -> None:
        """Of a request for which a connector may load more: the tokens of its hit here."""
        self._num_own[request.request_id] = num_tokens

    def note_loaded(self, request: Request, blocks: Sequence[KVCacheBlock], num_tokens: int) -> None:
        """The request's first tokens are here; those behind its own hit were loaded."""
        first = self._num_own.pop(request.request_id, 0) // self._block_size
        for block in blocks[first : -(-num_tokens // self._block_size)]:
            self._without[block.block_id] = block.block_hash
            if block.block_hash is None:
                self._unfilled[request.request_id] = block

    def release(self, request: Request) -> None:
        """The request's blocks are about to be freed: what it has filled is known by then."""
        self._num_own.pop(request.request_id, None)
        block = self._unfilled.pop(request.request_id, None)
        if block is None:
            return
        if block.block_hash is None:
            del self._without[block.block_id]  # never found
        else:
            self._without[block.block_id] = block.block_hash
