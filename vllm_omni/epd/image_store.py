"""``ImageStore``: embeddings of images that a request may find instead of having them encoded.

From: HydraInfer, section 4.3 (image cache), kept here from one request to the next.
"""

from __future__ import annotations

import math
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from vllm_omni.messages.payload import DTYPES, Payload
from vllm_omni.relay.base import LEASE_S, Clock

TTL_S = 0.8 * LEASE_S  # the relay frees what nobody came for; whoever finds an image here still has time to pull it


@dataclass
class StoredImage:
    """One image's embeddings, which lie in the relay of the instance that computed them."""

    identifier: str  # names the image by its content
    source: str  # that instance
    packed: bytes  # of ``payload``, as the one who reads it is given it
    payload: Payload
    num_bytes: int
    stored_at: float
    num_users: int = 0  # requests that may still read it
    is_kept: bool = False


class ImageStoreStatistics(NamedTuple):
    """Images and bytes that are kept now; requests for one since the start, and those that found it."""

    num_images: int
    num_bytes: int
    num_lookups: int
    num_hits: int


class ImageStore:
    """Least recently used images of each source, in order of use; a lease ends when nobody may need it any more.

    An ``OrderedDict`` of all sources with a sum for each: sources are few, and whoever looks an image up does not know
    which one has it. Making room walks from the oldest to the first of that source.

    Args:
        max_bytes: of each source: its relay must have room for what is not kept.
        release: ends a lease for all.
    """

    def __init__(
        self, max_bytes: int, release: Callable[[Payload], None], ttl_s: float = TTL_S, clock: Clock = time.monotonic
    ) -> None:
        self._max_bytes = max_bytes
        self._release = release
        self._ttl_s = ttl_s
        self._clock = clock
        self._images: OrderedDict[str, StoredImage] = OrderedDict()
        self._num_bytes: dict[str, int] = {}  # by source
        self._num_lookups = self._num_hits = 0

    def take(self, identifier: str) -> StoredImage | None:
        """Find an image, for a request that gives it back; None: it is to be encoded."""
        self._num_lookups += 1
        image = self._images.get(identifier)
        if image is None:
            return None
        if self._clock() - image.stored_at > self._ttl_s:
            self._drop(image)
            return None
        self._images.move_to_end(identifier)
        self._num_hits += 1
        image.num_users += 1
        return image

    def put(self, identifier: str, source: str, packed: bytes, payload: Payload) -> StoredImage:
        """Take over an image's lease, for a request that gives it back; it is kept if there is room."""
        num_bytes = sum(math.prod(ref.shape) * DTYPES[ref.dtype].itemsize for ref in payload.tensors.values())
        image = StoredImage(identifier, source, packed, payload, num_bytes, self._clock(), num_users=1)
        if num_bytes <= self._max_bytes and identifier not in self._images:
            self._make_room(source, num_bytes)
            self._images[identifier] = image
            self._num_bytes[source] = self._num_bytes.get(source, 0) + num_bytes
            image.is_kept = True
        return image

    def give_back(self, image: StoredImage) -> None:
        """The request does not need it any more."""
        image.num_users -= 1
        self._release_unused(image)

    def forget_source(self, source: str) -> None:
        """Its relay is gone, and with it what lay there."""
        for image in [image for image in self._images.values() if image.source == source]:
            self._drop(image)

    def clear(self) -> None:
        """Forget all of them: the weights have changed, or memory is wanted."""
        for image in list(self._images.values()):
            self._drop(image)

    def statistics(self) -> ImageStoreStatistics:
        return ImageStoreStatistics(len(self._images), sum(self._num_bytes.values()), self._num_lookups, self._num_hits)

    def _make_room(self, source: str, num_bytes: int) -> None:
        for image in list(self._images.values()):
            if self._num_bytes.get(source, 0) + num_bytes <= self._max_bytes:
                return
            if image.source == source:
                self._drop(image)

    def _drop(self, image: StoredImage) -> None:
        del self._images[image.identifier]
        self._num_bytes[image.source] -= image.num_bytes
        image.is_kept = False
        self._release_unused(image)

    def _release_unused(self, image: StoredImage) -> None:
        if not image.num_users and not image.is_kept:
            self._release(image.payload)
