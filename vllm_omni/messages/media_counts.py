"""``MediaCounts``: what an engine's pool of encoded media has done, from its runner to the front end's metrics."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

MEDIA_POOL = "media_pool"
"""Key of a stage's ``additional_config`` for the pool of encoded media, and of a step's statistics for its counts."""


class MediaCounts(msgspec.Struct, frozen=True):
    """Counts of encoded items: images, sounds, videos. By medium: memory, disk, peer (another engine's memory)."""

    hits: dict[str, int] = {}  # that were loaded instead of encoded
    encoded: int = 0  # that were looked up, not found, and encoded
    stored: int = 0
    dropped: int = 0  # that were not stored: no room, too many at once, or the medium failed
    evicted: dict[str, int] = {}  # for others
    corrupt: dict[str, int] = {}  # that were damaged when they were read
    failures: dict[str, int] = {}  # of the medium
    kept: dict[str, int] = {}  # that are there now

    def since(self, before: MediaCounts) -> MediaCounts:
        """The changes since earlier counts; what is kept, as it is now."""

        def change(now: Mapping[str, int], then: Mapping[str, int]) -> dict[str, int]:
            return {medium: number - then.get(medium, 0) for medium, number in now.items()}

        return MediaCounts(
            hits=change(self.hits, before.hits),
            encoded=self.encoded - before.encoded,
            stored=self.stored - before.stored,
            dropped=self.dropped - before.dropped,
            evicted=change(self.evicted, before.evicted),
            corrupt=change(self.corrupt, before.corrupt),
            failures=change(self.failures, before.failures),
            kept=self.kept,
        )

    def to_statistics(self) -> dict[str, Any]:
        """As plain values, for vLLM's statistics of a step."""
        plain: dict[str, Any] = msgspec.to_builtins(self)
        return {MEDIA_POOL: plain}

    @classmethod
    def of_statistics(cls, statistics: dict[str, Any] | None) -> MediaCounts | None:
        """Take the counts out of a step's statistics; None: there are none."""
        plain = statistics.pop(MEDIA_POOL, None) if statistics else None
        return None if plain is None else msgspec.convert(plain, cls)
