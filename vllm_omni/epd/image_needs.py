"""``ImageNeeds``: which images a request needs, now or later, to compute the tokens that are left."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from vllm_omni.epd.engine_request import ImageCache, Request


@dataclass(eq=False)
class ImageNeeds:
    """Remembers the prefix-cache hits of waiting requests, as looking them up hashes and searches each block."""

    cache: ImageCache
    num_cached_tokens: Callable[[Request], int]  # of a waiting request, that the prefix cache has
    num_external_tokens: Callable[[Request], int]  # of a waiting request, whose KV pages will be pulled
    _known_hits: dict[str, int] = field(default_factory=dict)

    def __len__(self) -> int:
        """Requests whose hits are remembered."""
        return len(self._known_hits)

    def remove(self, request_id: str) -> None:
        self._known_hits.pop(request_id, None)

    def num_computed(self, request: Request, is_fresh: bool = False) -> int:
        """Tokens that need no embeddings: computed, in the prefix cache, or to be pulled.

        Args:
            is_fresh: look up the prefix cache anew.
        """
        if request.num_computed_tokens or not request.mm_features:
            return request.num_computed_tokens
        if num_external := self.num_external_tokens(request):
            return num_external - 1  # the last one is computed again
        if is_fresh or request.request_id not in self._known_hits:
            self._known_hits[request.request_id] = self.num_cached_tokens(request)
        return self._known_hits[request.request_id]

    def needed(self, request: Request) -> list[int]:
        """Indices of the images that the request needs, in the prompt's order."""
        needed = list(self._behind(request, self.num_computed(request)))
        if not all(self.is_available(request, index) for index in needed):
            needed = list(self._behind(request, self.num_computed(request, is_fresh=True)))
        return needed

    def has_next(self, request: Request) -> bool:
        """Whether the next tokens can be computed: their image, if they have one, is there.

        A remembered hit decides cheaply that a request must wait; one that could be admitted is looked up anew.
        """
        for is_fresh in (False, True):
            first = next(self._behind(request, self.num_computed(request, is_fresh)), None)
            if first is not None and not self.is_available(request, first):
                return False
        return True

    def num_missing_embeds(self, request: Request) -> int:
        """Embeddings that must be computed before the request's next token."""
        return sum(
            request.get_num_encoder_embeds(index)
            for index in self._behind(request, self.num_computed(request))
            if not self.is_available(request, index)
        )

    def is_available(self, request: Request, index: int) -> bool:
        return self.cache.is_ready(request, index) or self.cache.is_elsewhere(request.mm_features[index].identifier)

    @staticmethod
    def _behind(request: Request, num_computed: int) -> Iterator[int]:
        """Indices of the images with embeddings behind the computed tokens."""
        for index, feature in enumerate(request.mm_features):
            position = feature.mm_position
            start = max(0, num_computed - position.offset)
            if start < position.length:
                first, last = position.get_embeds_indices_in_range(start, position.length)
                if first < last:
                    yield index
