"""``HeldPages``: which instance holds what of a prompt in its caches, as far as the front end knows.

It is kept from what instances were given: an instance that has computed a prompt holds its pages. Engines evict without
notice; what one reports with a request's first output, how many tokens it has found, shows what it has lost. vLLM's
events of its prefix cache would show it sooner. They were considered, at the cost of a socket and a thread for each
engine; they come after the decision where an engine is busy, and say nothing of pages in a pool.

From: Omni-Flow, section 5.1 (chained hashes of pages, which processes and replicas can compare).
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Hashable, Iterator, Sequence
from typing import NamedTuple

from vllm_omni.config.epd import Tasks
from vllm_omni.messages.token_names import TokenNames

PAGE_TOKENS = 64  # of a page in this index; the engines' block sizes may differ
MAX_PAGES = 1 << 16  # of an instance that are remembered, and images; the least recently used go first
SLACK_TOKENS = 256  # by which an engine may find less than it holds: it finds whole blocks, and computes the last token
POOL = "the pool"  # holds what any instance with a pool has computed, also one that has died since


class Content(NamedTuple):
    """What caches may hold of a request: pages of its prompt, in their order, or its images."""

    keys: Sequence[Hashable]
    sizes: Sequence[int]  # tokens of a page, embeddings of an image
    is_chain: bool  # whether each is of use only behind those in front of it


def content_of(names: TokenNames | None, tasks: Tasks) -> Content:
    """What caches may hold of a request's next tasks: images of an encode, pages of a prefill, nothing of a decode."""
    if names is None or not tasks & (Tasks.E | Tasks.P):
        return Content((), (), is_chain=True)
    if Tasks.P not in tasks:
        return Content(
            [("image", one.name) for one in names.parts], [one.length for one in names.parts], is_chain=False
        )
    keys = list(_pages(names))
    return Content(keys, [PAGE_TOKENS] * len(keys), is_chain=True)


def _pages(names: TokenNames) -> Iterator[Hashable]:
    """Keys of the full pages. Python's hash: a page that is mistaken for another costs time, and no answer.

    Hashes of earlier turns are not kept: comparing a prompt with that of the turn before takes longer than hashing it
    (4,096 tokens: 45 and 32 us).
    """
    parts: defaultdict[int, list[tuple[int, str]]] = defaultdict(list)
    for part in names.parts:  # placeholders of different media are equal
        parts[part.offset // PAGE_TOKENS].append((part.offset, part.name))
    chain = hash(names.salt)
    for number in range(len(names.token_ids) // PAGE_TOKENS):
        start = number * PAGE_TOKENS
        chain = hash((chain, tuple(names.token_ids[start : start + PAGE_TOKENS]), *parts.get(number, ())))
        yield chain


class HeldPages:
    """What each instance holds; bounded for each.

    A page has the time of its last use, in uses: 0 until a request that was to compute it has its first output.
    """

    def __init__(self, max_pages: int = MAX_PAGES) -> None:
        self._max_pages = max_pages
        self._held: defaultdict[str, OrderedDict[Hashable, int]] = defaultdict(OrderedDict)
        self._num_uses = 0

    def note_given(self, instance: str, content: Content) -> None:
        """The instance is about to compute what of this it does not hold."""
        held = self._held[instance]
        for key in content.keys:
            held.setdefault(key, 0)
            held.move_to_end(key)
        self._trim(held)

    def note_computed(self, instance: str, content: Content) -> None:
        """The instance holds all of this."""
        held = self._held[instance]
        for key in reversed(content.keys):  # the end of a chain goes first, as engines evict
            self._num_uses += 1
            held[key] = self._num_uses
            held.move_to_end(key)
        self._trim(held)

    def note_found(self, instance: str, content: Content, num_found: int) -> None:
        """The instance has found so many tokens of a chain. If it was to hold more, it has evicted the rest, and
        whatever it used before that.
        """
        held = self._held[instance]
        first_lost = -(-(num_found + SLACK_TOKENS) // PAGE_TOKENS)
        last_use = max((held.get(key, 0) for key in content.keys[first_lost:]), default=0)
        if last_use:
            for key in [key for key, use in held.items() if 0 < use <= last_use]:
                del held[key]

    def num_tokens(self, instance: str, content: Content) -> int:
        """How many tokens, or embeddings, of a request the instance holds."""
        held, total = self._held[instance], 0
        for key, size in zip(content.keys, content.sizes, strict=True):
            if key in held:
                total += size
            elif content.is_chain:
                break
        return total

    def forget(self, instance: str) -> None:
        """The instance has terminated."""
        self._held.pop(instance, None)

    def _trim(self, held: OrderedDict[Hashable, int]) -> None:
        while len(held) > self._max_pages:
            held.popitem(last=False)
