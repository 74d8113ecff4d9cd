"""``ImagePulls``: embeddings of images that another engine computed, copied from its relay into the image cache.

From: HydraInfer, section 4.3 (pull-based migration of the image cache).
"""

from __future__ import annotations

from collections import Counter

from vllm_omni.epd.engine_request import ImageCache, ImageRelay, TransferReport


class ImagePulls:
    """Where the images of requests are, and which of them are being pulled.

    Args:
        num_ranks: ranks that pull each image, each for itself.
    """

    def __init__(self, relay: ImageRelay | None, cache: ImageCache, num_ranks: int) -> None:
        self._relay = relay
        self._cache = cache
        self._num_ranks = num_ranks
        self._sources: dict[str, dict[str, bytes]] = {}  # request -> identifier -> payload
        self._in_flight: dict[str, str] = {}  # identifier -> request whose payload is pulled
        self._num_ranks_done: Counter[str] = Counter()  # by identifier in flight

    def __len__(self) -> int:
        """Images in flight."""
        return len(self._in_flight)

    @property
    def has_sources(self) -> bool:
        """Whether a request has images elsewhere."""
        return bool(self._sources)

    def add(self, request_id: str, images: dict[str, bytes]) -> None:
        self._sources[request_id] = images

    def remove(self, request_id: str) -> None:
        self._sources.pop(request_id, None)

    def source_of(self, request_id: str, identifier: str) -> bytes | None:
        return self._sources.get(request_id, {}).get(identifier)

    def start(self, request_id: str, identifier: str, payload: bytes, num_embeds: int) -> None:
        assert self._relay is not None
        self._in_flight[identifier] = request_id
        self._relay.start_pull(identifier, payload, num_embeds)

    def take(self, report: TransferReport) -> tuple[list[str], list[str]]:
        """Process the pulls that ended: identifiers that are ready, and identifiers that are lost.

        An image that is lost is encoded here instead.
        """
        ready = [one for one in report.pulled.keys() - report.lost.keys() if self._add_rank(one, report.pulled[one])]
        lost = [identifier for identifier in report.lost if self._lose(identifier)]
        return ready, lost

    def _add_rank(self, identifier: str, num_ranks: int) -> bool:
        self._num_ranks_done[identifier] += num_ranks
        is_known = identifier in self._in_flight
        if is_known and self._num_ranks_done[identifier] < self._num_ranks:
            return False
        del self._num_ranks_done[identifier]
        if is_known:
            del self._in_flight[identifier]
            self._cache.finish(identifier)
        else:  # forgotten meanwhile
            self._cache.drop(identifier)
        return is_known

    def _lose(self, identifier: str) -> bool:
        self._num_ranks_done.pop(identifier, None)
        request_id = self._in_flight.pop(identifier, None)
        if request_id is None:
            return False
        self._sources.get(request_id, {}).pop(identifier, None)
        self._cache.lose(identifier)
        return True

    def reset(self) -> None:
        """Forget the images in flight: the cache has been emptied."""
        self._in_flight.clear()
