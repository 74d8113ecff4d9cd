"""``ImageCache``: the scheduler's book on encoder outputs, when they come later than the step that begins them."""

from __future__ import annotations

from collections.abc import Callable

from vllm.v1.core.encoder_cache_manager import EncoderCacheManager
from vllm.v1.request import Request

ENCODER = "\0encoder"
"""Stands among the requests that refer to an image while it is in flight, so that vLLM's own rules keep its room."""


class ImageCache(EncoderCacheManager):
    """vLLM's, where an image takes its room when its encode (or its pull) begins and is found when it has ended.

    vLLM's scheduler asks this cache before each chunk of a prompt, and cuts the chunk before an image that is neither
    found nor may be encoded with the step. Here none may: that alone holds a request until its next image is there.
    """

    def __init__(self, cache_size: int) -> None:
        super().__init__(cache_size)
        self.in_flight: set[str] = set()  # being encoded, or pulled from another engine
        self._dropped: list[str] = []
        # Whether an EC connector brings the image: then vLLM allocates its room, and loads it with the step.
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
        # Asked by vLLM's scheduler, which would encode in front of the language forward.
        if not self.is_elsewhere(request.mm_features[input_id].identifier):
            return False
        return super().can_allocate(request, input_id, encoder_compute_budget, num_embeds_to_schedule)

    def is_ready(self, request: Request, input_id: int) -> bool:
        identifier = request.mm_features[input_id].identifier
        return identifier in self.cached and identifier not in self.in_flight

    def can_begin(self, request: Request, input_id: int) -> bool:
        """Whether there is room for the image; what nobody refers to is evicted for it."""
        return super().can_allocate(request, input_id, self.cache_size, 0)

    def begin(self, request: Request, input_id: int) -> bool:
        """Take the room of an image; whether it must be encoded. ``can_begin`` has just said that there is room."""
        identifier = request.mm_features[input_id].identifier
        self.allocate(request, input_id)
        if identifier in self.freed:  # evicted in this very step: the runner still has it, and now is not told
            self.freed.remove(identifier)
            return False
        self.cached[identifier].add(ENCODER)
        self.in_flight.add(identifier)
        return True

    def refer(self, request: Request, input_id: int) -> None:
        """Keep an image for a request, whether it is ready or still encoded."""
        super().check_and_update_cache(request, input_id)

    def finish(self, identifier: str) -> None:
        """The image is there. It may have been forgotten meanwhile (``reset``)."""
        if identifier not in self.in_flight:
            return
        self.in_flight.remove(identifier)
        references = self.cached[identifier]
        references.remove(ENCODER)
        if not references:  # all that wanted it were aborted
            num_embeds = self.num_embeds_by_hash[identifier]
            self.freeable[identifier] = num_embeds
            self.num_freeable_slots += num_embeds

    def lose(self, identifier: str) -> None:
        """What was to come will not: its room is free again, and nobody refers to it."""
        if identifier not in self.in_flight:
            return
        self.in_flight.remove(identifier)
        del self.cached[identifier]
        num_embeds = self.num_embeds_by_hash.pop(identifier)
        self.num_free_slots += num_embeds
        self.num_freeable_slots += num_embeds
        self.drop(identifier)  # a rank may have it all the same

    def drop(self, identifier: str) -> None:
        """The runner is to forget what is not booked here."""
        self._dropped.append(identifier)

    def get_freed_mm_hashes(self) -> list[str]:
        dropped, self._dropped = self._dropped, []
        return super().get_freed_mm_hashes() + [one for one in dropped if one not in self.cached]

    def evict_unused(self) -> None:
        """What no request refers to, as if its room were needed."""
        for identifier, num_embeds in self.freeable.items():
            del self.cached[identifier]
            del self.num_embeds_by_hash[identifier]
            self.freed.append(identifier)
            self.num_free_slots += num_embeds
        self.freeable.clear()
