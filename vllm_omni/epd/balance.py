"""Which of several instances gets a request's next tasks.

From: HydraInfer, section 4.3 (among several targets: round robin), and Omni-Flow, section 3.5 (sessions).
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any

from vllm_omni.config.epd import Balance, Tasks

NUM_PREFIX_TOKENS = 64  # tokens in a chunk of a prompt; cached prefixes are recognised by whole chunks
MAX_CHUNKS = 64  # per prompt: longer prefixes rarely distinguish instances
MAX_KNOWN = 1 << 16  # chunks, images and sessions whose instance is remembered, the least recently used go first
MAX_LEAD = 4.0  # a cache does not attract a request if its instance has more than this many times the least work


class InstanceBalance:
    """Choose by outstanding work, by round robin, by sessions, or by the contents of caches.

    Args:
        policy: "least_work"; "round_robin"; "session": a session stays on its instance; "affinity": it does, too, and
            an image or a prefix goes to the instance that had it last, unless that instance has far more work than
            another.
    """

    def __init__(self, policy: Balance) -> None:
        self._policy = policy
        # One counter for each task. With a common one, requests that alternate between two encoders and two other
        # instances would leave one of each idle.
        self._num_chosen: Counter[Tasks] = Counter()
        self._known: OrderedDict[Hashable, str] = OrderedDict()  # chunk, image or session -> the last instance

    def choose(
        self,
        names: Sequence[str],
        task: Tasks,
        work: Mapping[str, float],
        session: str | None = None,
        keys: Sequence[Hashable] = (),
    ) -> str:
        """Choose one of the names.

        Args:
            task: the next task; a session has an instance for each.
            work: instance -> outstanding work.
            keys: what an instance's caches may hold of the request, the longest prefix first (``cache_keys``).
        """
        if self._policy in ("least_work", "round_robin"):
            return self._next(names, task, work)
        keys = keys if self._policy == "affinity" else ()
        name = self._cached(names, work, keys)
        if name is None:
            bound = ("session", task, session)
            name = self._known.get(bound) if session is not None else None
            if name is None or name not in names:
                name = self._next(names, task, work)
            if session is not None:
                self._remember(bound, name)
        for key in keys:
            self._remember(key, name)
        return name

    def _next(self, names: Sequence[str], task: Tasks, work: Mapping[str, float]) -> str:
        names = sorted(names)
        if self._policy != "round_robin":
            least = min(work.get(name, 0) for name in names)
            names = [name for name in names if work.get(name, 0) == least]
        self._num_chosen[task] += 1
        return names[(self._num_chosen[task] - 1) % len(names)]

    def _cached(self, names: Sequence[str], work: Mapping[str, float], keys: Sequence[Hashable]) -> str | None:
        least = min(work.get(name, 0) for name in names)
        for key in keys:
            name = self._known.get(key)
            if name is not None and name in names:
                has = work.get(name, 0)
                return name if has <= MAX_LEAD * least or not has else None
        return None

    def _remember(self, key: Hashable, name: str) -> None:
        self._known[key] = name
        self._known.move_to_end(key)
        if len(self._known) > MAX_KNOWN:
            self._known.popitem(last=False)


def cache_keys(prompt: Mapping[str, Any], tasks: Tasks) -> list[Hashable]:
    """Name what caches may hold of a rendered prompt: its images, for an encode; else its prefixes, longest first.

    Placeholders of different images are equal, so an image is part of the chunk in which it starts.
    """
    hashes = prompt.get("mm_hashes", {})
    if Tasks.P not in tasks:
        return [("image", one) for modality in hashes.values() for one in modality] if Tasks.E in tasks else []
    starts = sorted(
        (place.offset, one)
        for modality, places in prompt.get("mm_placeholders", {}).items()
        for place, one in zip(places, hashes[modality], strict=True)
    )
    return [("prefix", one) for one in reversed(list(_prefixes(prompt.get("prompt_token_ids") or (), starts)))]


def _prefixes(token_ids: Sequence[int], starts: Sequence[tuple[int, str]]) -> Iterator[int]:
    chain = 0
    for start in range(0, min(len(token_ids), MAX_CHUNKS * NUM_PREFIX_TOKENS), NUM_PREFIX_TOKENS):
        end = start + NUM_PREFIX_TOKENS
        if end > len(token_ids):
            return
        chain = hash((chain, tuple(token_ids[start:end]), *(one for at, one in starts if start <= at < end)))
        yield chain
