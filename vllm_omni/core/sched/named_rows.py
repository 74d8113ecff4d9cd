"""``NamedRows``: the prefix cache of a stage whose prompts are rows of another stage.

vLLM names a KV page by the token ids of its block. The ids of such a prompt are fillers, the same for all prompts; what
the model reads are rows. So a page is named by the names of its rows (``TokenNames``) as well. A block with a row that
has no name (of the reply, which arrives while the request runs) is named by the request alone: it is found again when
the request was preempted, and by no other. All blocks behind it are then the request's own, as hashes are chained.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any
from uuid import uuid4

from vllm.config import CacheConfig
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import BlockHash, generate_block_hash_extra_keys, hash_block_tokens
from vllm.v1.request import Request

from vllm_omni.messages.stage_step import stage_args
from vllm_omni.messages.token_names import TokenNames, decode_names
from vllm_omni.vllm_patches import hash_blocks_by


class NamedRows:
    """Names the blocks of requests that read rows.

    Args:
        block_size: tokens between two hashes.
    """

    def __init__(self, cache_config: CacheConfig, block_size: int) -> None:
        self._hash = get_hash_fn_by_name(cache_config.prefix_caching_hash_algo)
        self._block_size = block_size
        self._is_on = bool(cache_config.enable_prefix_caching)

    def add(self, request: Request) -> None:
        """Name the blocks of a new request, before anything reads their hashes."""
        args = stage_args(request.sampling_params)
        if "payloads" not in args:
            return
        names = args.pop("row_names", None)  # nothing else reads them
        if self._is_on:
            known = TokenNames([]) if names is None else decode_names(names)
            hash_blocks_by(request, RowHasher(known, self._hash, self._block_size))


class RowHasher:
    """Computes the hashes of a request's full blocks, in the place of vLLM's."""

    def __init__(self, names: TokenNames, hash_function: Callable[[Any], bytes], block_size: int) -> None:
        self._names = names
        self._hash = hash_function
        self._block_size = block_size
        self._own = uuid4().bytes
        self._parts: Mapping[int, list[tuple[str, int]]] = _parts_by_block(names, block_size)

    def __call__(self, request: Request) -> list[BlockHash]:
        """The hashes of blocks that have become full since the last call."""
        hashes = list(request.block_hashes)
        num_known = len(hashes)
        for block in range(num_known, request.num_tokens // self._block_size):
            start, end = block * self._block_size, (block + 1) * self._block_size
            upstream, _ = generate_block_hash_extra_keys(request, start, end, 0)
            extra = (*(upstream or ()), ("rows", self._key(block)))
            parent = hashes[-1] if hashes else None
            hashes.append(hash_block_tokens(self._hash, parent, request.all_token_ids[start:end], extra))
        return hashes[num_known:]

    def _key(self, block: int) -> tuple[Any, ...] | bytes:
        start, end = block * self._block_size, (block + 1) * self._block_size
        if end > len(self._names.token_ids):
            return self._own
        salt = self._names.salt if block == 0 else ""
        return (*self._names.token_ids[start:end], salt, *self._parts.get(block, ()))


def _parts_by_block(names: TokenNames, block_size: int) -> Mapping[int, list[tuple[str, int]]]:
    """Block -> the parts that it has tokens of, each with its offset from the block's start."""
    found: defaultdict[int, list[tuple[str, int]]] = defaultdict(list)
    for part in names.parts:
        for block in range(part.offset // block_size, -(-(part.offset + part.length) // block_size)):
            found[block].append((part.name, part.offset - block * block_size))
    return found
