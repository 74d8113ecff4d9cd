"""Traces of prompts, as chains of pages, to compare eviction policies with: seeded, without text or model.

A trace yields requests in the order of their arrival. A request is the chain of its pages from the start of its prompt;
a page is the digest of the chain up to it, as vLLM's block hashes are, so two requests with a common prefix have equal
digests there. A cache can use only a prefix: pages up to the first that it does not hold.
"""

from __future__ import annotations

import hashlib
import itertools
import random
from bisect import bisect
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

Chain = list[bytes]  # SHA-256 digests, 32 bytes each


class TraceCase(NamedTuple):
    """A trace at the size of a cache to run it with."""

    name: str
    requests: Callable[[int, int], Iterator[Chain]]  # (number of requests, seed)
    num_pages: int  # that the cache holds
    num_requests: int  # at full size


def extend(chain: Chain, *names: object) -> Chain:
    """A chain with a page more for each name; the original is not changed."""
    longer = list(chain)
    for name in names:
        parent = longer[-1] if longer else b""
        longer.append(hashlib.sha256(parent + repr(name).encode()).digest())
    return longer


class Zipf:
    """Draws ranks from 0, with a probability proportional to 1 / (rank + 1) ** exponent."""

    def __init__(self, num_ranks: int, exponent: float) -> None:
        self._cumulative = list(itertools.accumulate((rank + 1) ** -exponent for rank in range(num_ranks)))

    def draw(self, rng: random.Random) -> int:
        return bisect(self._cumulative, rng.random() * self._cumulative[-1])


def zipf_prompts(num_requests: int, seed: int, *, scan_share: float = 0.0) -> Iterator[Chain]:
    """Independent prompts of 1 to 8 pages, popular by Zipf 0.9.

    Args:
        scan_share: share of requests whose prompt is used once, and is twice as long: batch jobs, crawlers.
    """
    rng, popularity = random.Random(seed), Zipf(2000, 0.9)
    lengths = [rng.randint(1, 8) for _ in range(2000)]
    for number in range(num_requests):
        if rng.random() < scan_share:
            yield extend([], *(("scan", number, page) for page in range(2 * rng.randint(1, 8))))
        else:
            prompt = popularity.draw(rng)
            yield extend([], *(("prompt", prompt, page) for page in range(lengths[prompt])))


def chat_turns(num_requests: int, seed: int, *, num_sessions: int = 40, document_share: float = 0.0) -> Iterator[Chain]:
    """Turns of chats that are open at the same time: each repeats its history and adds 1 to 3 pages.

    A chat starts with one of four system prompts of 2 pages, and is replaced by a new one after 20 turns on average.

    Args:
        document_share: share of requests that are not turns but questions about one of 200 documents of 20 pages,
            popular by Zipf 0.9: read whole, answered once.
    """
    rng, popularity = random.Random(seed), Zipf(200, 0.9)
    numbers = itertools.count()

    def start() -> Chain:
        system, session = rng.randrange(4), next(numbers)
        return extend([], ("system", system, 0), ("system", system, 1), ("session", session))

    sessions = [start() for _ in range(num_sessions)]
    for number in range(num_requests):
        if rng.random() < document_share:
            document = popularity.draw(rng)
            yield extend([], *(("document", document, page) for page in range(20)), ("question", number))
            continue
        at = rng.randrange(num_sessions)
        sessions[at] = extend(sessions[at], *(("turn", number, page) for page in range(rng.randint(1, 3))))
        yield sessions[at]
        if rng.random() < 1 / 20:
            sessions[at] = start()


def rag_questions(num_requests: int, seed: int) -> Iterator[Chain]:
    """A system prompt of 2 pages, one of 1,500 documents of 4 to 12 pages, popular by Zipf 0.9, and a new question."""
    rng, popularity = random.Random(seed), Zipf(1500, 0.9)
    lengths = [rng.randint(4, 12) for _ in range(1500)]
    system = extend([], "system 0", "system 1")
    for number in range(num_requests):
        document = popularity.draw(rng)
        yield extend(system, *(("document", document, page) for page in range(lengths[document])), ("question", number))


def _scans(num_requests: int, seed: int) -> Iterator[Chain]:
    return zipf_prompts(num_requests, seed, scan_share=0.23)


def _chat_and_documents(num_requests: int, seed: int) -> Iterator[Chain]:
    return chat_turns(num_requests, seed, document_share=0.3)


TRACES: Mapping[str, TraceCase] = {
    case.name: case
    for case in (
        TraceCase("zipf", zipf_prompts, 1000, 20_000),
        TraceCase("scans", _scans, 1000, 20_000),
        TraceCase("chat 500", chat_turns, 500, 8_000),
        TraceCase("chat 1000", chat_turns, 1000, 8_000),
        TraceCase("chat and documents 500", _chat_and_documents, 500, 8_000),
        TraceCase("chat and documents 1000", _chat_and_documents, 1000, 8_000),
        TraceCase("rag", rag_questions, 1500, 12_000),
    )
}
