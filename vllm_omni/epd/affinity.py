"""Which of several instances goes on with a request.

From: HydraInfer, section 4.3 (among several targets: round robin), and what Omni-Flow, section 3.5, has for sessions.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from vllm_omni.flow.remote.registry import Instance, MemoryRegistry
from vllm_omni.flow.remote.replicas import LeastOutstanding, LoadBalance, RoundRobin, SessionLoadBalance

NUM_PREFIX_TOKENS = 64  # of a piece of a prompt by which its cached prefix is found again
MAX_PIECES = 64  # of one prompt: what is behind them seldom differs in where it was
MAX_KNOWN = 1 << 16  # pieces and images of which is known where they were
MAX_LEAD = 4.0  # an instance with so many times the least work is not chosen for what it may have in its cache


class InstanceBalance:
    """Chooses by the work that instances have been given, by turns, or by what they have.

    Args:
        policy: "least_work"; "round_robin"; "affinity": a session stays where it is, an image and a prefix go where
            they were, unless that instance has far more to do than another.
    """

    def __init__(self, stage: str, policy: str) -> None:
        self._stage = stage
        self._is_sticky = policy == "affinity"
        # Of each task its own: with one turn for all, two instances that encode and two that do the rest, taken in
        # turn, would leave one of each without a request.
        self._first: defaultdict[str, LoadBalance] = defaultdict(
            RoundRobin if policy == "round_robin" else LeastOutstanding
        )
        self._registry = MemoryRegistry()
        self._known: OrderedDict[Any, str] = OrderedDict()  # piece or image -> the instance that had it last

    async def choose(
        self, names: Sequence[str], task: str, work: Mapping[str, float], session: str | None, keys: Sequence[Any]
    ) -> str:
        """One of the names.

        Args:
            task: what is to be done next, one of E, P, D: a session has an instance for each.
            work: instance -> what it has been given and not done.
            session: of the request.
            keys: what it would find in a cache, the longest first (``cache_keys``).
        """
        name = self._cached(names, work, keys) if self._is_sticky else None
        if name is None:
            role = f"{self._stage}:{task}"
            instances = [Instance(role, one) for one in sorted(names)]
            policy = self._first[task]
            if self._is_sticky and session is not None:
                policy = SessionLoadBalance(role, self._registry, policy)
            # What is outstanding is compared, never counted.
            name = (await policy.choose(instances, work, session)).instance_id  # type: ignore[arg-type]
        if self._is_sticky:
            for key in keys:
                self._known[key] = name
                self._known.move_to_end(key)
            while len(self._known) > MAX_KNOWN:
                self._known.popitem(last=False)
        return name

    def _cached(self, names: Sequence[str], work: Mapping[str, float], keys: Sequence[Any]) -> str | None:
        least = min(work.get(name, 0.0) for name in names)
        for key in keys:
            name = self._known.get(key)
            if name in names and name is not None:
                has = work.get(name, 0.0)
                return name if has <= MAX_LEAD * least or not has else None
        return None


def cache_keys(prompt: Mapping[str, Any], does: str) -> list[Any]:
    """What an instance may have of a rendered prompt: its images, for an encode; else its prefixes, the longest first.

    Placeholders of images look alike, so an image counts with the piece in which it begins.
    """
    hashes = prompt.get("mm_hashes", {})
    if "P" not in does:
        return [("image", one) for modality in hashes.values() for one in modality] if "E" in does else []
    starts = sorted(
        (place.offset, one)
        for modality, places in prompt.get("mm_placeholders", {}).items()
        for place, one in zip(places, hashes[modality], strict=True)
    )
    return [("prefix", one) for one in reversed(list(_prefixes(prompt.get("prompt_token_ids") or (), starts)))]


def _prefixes(token_ids: Sequence[int], starts: Sequence[tuple[int, str]]) -> Iterator[int]:
    chain = 0
    for begin in range(0, min(len(token_ids), MAX_PIECES * NUM_PREFIX_TOKENS), NUM_PREFIX_TOKENS):
        end = begin + NUM_PREFIX_TOKENS
        if end > len(token_ids):
            return
        chain = hash((chain, tuple(token_ids[begin:end]), *(one for at, one in starts if begin <= at < end)))
        yield chain
