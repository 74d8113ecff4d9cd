"""Images between a scheduler and its runners: what is to be encoded, put into the relay or pulled, and what came of it.

From: HydraInfer, sections 4.2 (stage-level batching) and 4.3 (migration of the image cache).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from vllm.multimodal.inputs import MultiModalFeatureSpec


class EncodeItem(NamedTuple):
    """One image to encode. Its request may still wait, so that the runner does not know the request yet."""

    request_id: str
    feature: MultiModalFeatureSpec  # its ``identifier`` is the key in the runner's encoder cache

    @property
    def num_embeds(self) -> int:
        return self.feature.mm_position.get_num_embeds()


@dataclass
class EncodeReport:
    """What a step did for the batch of images in flight."""

    encoded: list[str]  # identifiers, now in the encoder cache; empty unless the batch has ended
    num_layers: float  # passed in this step; 0 for a batch that is encoded in a thread
    num_layers_of_batch: int  # from the first to the last
    seconds: float  # that this step spent on the batch
    failed: dict[str, str] = field(default_factory=dict)  # identifier -> error, of a batch that the encoder failed on
    loaded: frozenset[str] = frozenset()  # identifiers of the batch that were found in the pool instead


class Put(NamedTuple):
    """An image that a request wants in the relay; each put has a lease of its own."""

    request_id: str
    identifier: str


class Pull(NamedTuple):
    """An image that is to be copied from the relay into the encoder cache."""

    identifier: str
    payload: bytes  # encoded ``Payload``
    num_embeds: int


class PutRejection(NamedTuple):
    """Why an image could not be put into the relay."""

    message: str
    is_final: bool  # there will be no room, whatever is released
