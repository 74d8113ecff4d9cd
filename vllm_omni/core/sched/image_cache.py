"""``ImageCache``: the scheduler's bookkeeping of encoder outputs that arrive later than the step that starts them."""

from __future__ import annotations

from collections.abc import Callable

from vllm.v1.core.encoder_cache_manager import EncoderCacheManager
from vllm.v1.request import Request

ENCODER = "\0encoder"
"""Listed among the requests that refer to an image in flight, so that vLLM's own rules keep its room."""


class ImageCache(EncoderCacheManager):
    """vLLM's, where an image takes its room when its encode (or pull) starts, and is found when that has ended.

    vLLM's scheduler asks this cache before each chunk of a prompt, and cuts the chunk before an image that is neither
    found nor may be encoded with the step. Here none may, which holds a request until its next image is ready.
    """

    def __init__(self, cache_size: int) -> None:
        super().__init__(cache_size)
        self.in_flight: set[str] = set()  # being encoded, or pulled from another engine
        self._dropped: list[str] = []
        # Whether an EC connector loads the image: then vLLM allocates its room, and loads it with the step.
        self.is_elsewhere: Callable[[str], bool] = lambda identifier: False

    def reset(self) -> None:
        super().reset()
        self.in_flight.clear()
        self._dropped.clear()

    def check_and_update_cache(self, request: Request, input_id: int) -> bool:
        return self.is_ready(request, input_id) and super().check_and_update_cache(request, input_id)

    def can_allocate(
        self, request: Request, input_id: int, encoder_compute_budget: int, num_embeds_to_schedule: int
    ) -> bool:
        # Called by vLLM's scheduler, which would encode in front of the language forward.
        if not self.is_elsewhere(request.mm_features[input_id].identifier):
            return False
        return super().can_allocate(request, input_id, encoder_compute_budget, num_embeds_to_schedule)

    def is_ready(self, request: Request, input_id: int) -> bool:
        identifier = request.mm_features[input_id].identifier
        return identifier in self.cached and identifier not in self.in_flight

    def can_start(self, request: Request, input_id: int) -> bool:
        """Whether there is room for the image; evicts images without a reference for it."""
        return super().can_allocate(request, input_id, self.cache_size, 0)

    def start(self, request: Request, input_id: int) -> bool:
        """Take the room of an image, after ``can_start`` said yes; returns whether it must be encoded."""
        identifier = request.mm_features[input_id].identifier
        self.allocate(request, input_id)
        if identifier in self.freed:  # evicted in this very step: the runner has it, and is not asked to free it
            self.freed.remove(identifier)
            return False
        self.cached[identifier].add(ENCODER)
        self.in_flight.add(identifier)
        return True

    def refer(self, request: Request, input_id: int) -> None:
        """Keep an image for a request, whether it is ready or in flight."""
        super().check_and_update_cache(request, input_id)

    def finish(self, identifier: str) -> None:
        """Make an image ready; one that a ``reset`` removed is ignored."""
        if identifier not in self.in_flight:
            return
        self.in_flight.remove(identifier)
        references = self.cached[identifier]
        references.remove(ENCODER)
        if not references:  # all requests that wanted it were aborted
            num_embeds = self.num_embeds_by_hash[identifier]
            self.freeable[identifier] = num_embeds
            self.num_freeable_slots += num_embeds

    def lose(self, identifier: str) -> None:
        """Free the room of an image that will not come, and drop all references to it."""
        if identifier not in self.in_flight:
            return
        self.in_flight.remove(identifier)
        del self.cached[identifier]
        num_embeds = self.num_embeds_by_hash.pop(identifier)
        self.num_free_slots += num_embeds
        self.num_freeable_slots += num_embeds
        self.drop(identifier)  # one of the ranks may have it

    def drop(self, identifier: str) -> None:
        """Have the runner free an image that has no room here."""
        self._dropped.append(identifier)

    def get_freed_mm_hashes(self) -> list[str]:
        dropped, self._dropped = self._dropped, []
        return super().get_freed_mm_hashes() + [one for one in dropped if one not in self.cached]

    def evict_unused(self) -> None:
        """Evict all images without a reference, as if their room were needed."""
        for identifier, num_embeds in self.freeable.items():
            del self.cached[identifier]
            del self.num_embeds_by_hash[identifier]
            self.freed.append(identifier)
            self.num_free_slots += num_embeds
        self.freeable.clear()
