"""``ImageStore``: embeddings of images, kept for later requests with the same image.

From: HydraInfer, section 4.3 (image cache), here kept between requests.
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

TTL_S = 0.8 * LEASE_S  # shorter than the relay's lease: a request that takes an image has time left to pull it


@dataclass
class StoredImage:
    """Embeddings of one image, in the relay of the instance that computed them."""

    identifier: str  # name of the image, made from its content
    source: str  # the instance that computed the embeddings
    packed: bytes  # ``payload`` as it is sent to a reader
    payload: Payload
    num_bytes: int
    stored_at: float
    num_users: int = 1  # requests that may still read the embeddings


class ImageStoreStatistics(NamedTuple):
    """Images and bytes kept now; look-ups since the start, and hits."""

    num_images: int
    num_bytes: int
    num_lookups: int
    num_hits: int


class ImageStore:
    """Keeps the most recently used images of each source. A lease ends when the image is dropped and has no user.

    One ``OrderedDict`` for all sources, with a sum of bytes for each: a look-up does not know the source. Making room
    walks from the least recently used image to one of that source, which is cheap because sources are few.

    Args:
        max_bytes: limit for each source; its relay must have room for results that are not kept as well.
        release: ends a lease for all readers.
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
        """Find an image for a request, which must call ``give_back``. None: the image must be encoded."""
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
        """Take over an image's lease for a request, which must call ``give_back``; keep the image if there is room."""
        num_bytes = sum(math.prod(ref.shape) * DTYPES[ref.dtype].itemsize for ref in payload.tensors.values())
        image = StoredImage(identifier, source, packed, payload, num_bytes, self._clock())
        if num_bytes <= self._max_bytes and identifier not in self._images:
            self._make_room(source, num_bytes)
            self._images[identifier] = image
            self._num_bytes[source] = self._num_bytes.get(source, 0) + num_bytes
        return image

    def give_back(self, image: StoredImage) -> None:
        """End a request's use of an image."""
        image.num_users -= 1
        self._release_unused(image)

    def forget_source(self, source: str) -> None:
        """Drop the images of an instance that has terminated, and its relay with it."""
        for image in [image for image in self._images.values() if image.source == source]:
            self._drop(image)

    def clear(self) -> None:
        """Drop all images: the weights have changed, or memory is needed."""
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
        self._release_unused(image)

    def _release_unused(self, image: StoredImage) -> None:
        if not image.num_users and self._images.get(image.identifier) is not image:
            self._release(image.payload)
