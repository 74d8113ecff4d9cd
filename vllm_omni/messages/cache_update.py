"""``DiTCacheUpdate``: what the scheduler tells the runner's cache."""

from __future__ import annotations

from typing import NamedTuple


class DiTCacheUpdate(NamedTuple):
    """What the runner must do before its next step: first drop, then grant."""

    granted: dict[str, int]  # request id -> bytes that its entries may take, also when it was granted others before
    dropped: list[str]  # ids of requests that lose their entries
