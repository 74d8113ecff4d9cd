"""``DiTCacheUpdate``: cache decisions of the scheduler for the runner. Imports no vLLM, as its manager does not."""

from __future__ import annotations

from typing import NamedTuple


class DiTCacheUpdate(NamedTuple):
    """Applied by the runner before its next step, which first drops, then grants."""

    granted: dict[str, int]  # request id -> bytes that its cache entries may take; replaces an earlier grant
    dropped: list[str]  # ids of requests whose entries are freed
