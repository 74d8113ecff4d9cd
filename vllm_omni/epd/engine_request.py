"""What the planning of encodes reads of vLLM's objects, as protocols: this room works without vLLM.

``Request`` is vLLM's ``Request``, ``ImageCache`` the subclass of its ``EncoderCacheManager`` in
``core/sched/image_cache.py``, and ``ImageRelay`` the EC connector in ``kv/ec_connector.py``.
"""

from __future__ import annotations

from collections import Counter
from typing import Any, Protocol

from vllm_omni.messages.images import Put, PutRejection


class Request(Protocol):
    request_id: str
    arrival_time: float
    max_tokens: int
    num_tokens: int
    num_tokens_with_spec: int
    num_output_placeholders: int
    num_computed_tokens: int
    mm_features: list[Any]  # ``MultiModalFeatureSpec``; its ``data`` is None where only its embeddings exist, elsewhere

    def get_num_encoder_embeds(self, input_id: int) -> int: ...


class ImageCache(Protocol):
    """Room for embeddings; an image takes its room when its encode or pull starts."""

    in_flight: set[str]

    def is_ready(self, request: Any, input_id: int) -> bool: ...
    def is_elsewhere(self, identifier: str) -> bool: ...
    def can_start(self, request: Any, input_id: int) -> bool: ...
    def start(self, request: Any, input_id: int) -> bool: ...
    def refer(self, request: Any, input_id: int) -> None: ...
    def finish(self, identifier: str) -> None: ...
    def lose(self, identifier: str) -> None: ...
    def drop(self, identifier: str) -> None: ...
    def get_cached_input_ids(self, request: Any) -> set[int]: ...
    def get_cached_num_encoder_embeds(self, request: Any, input_id: int) -> int | None: ...
    def free_encoder_input(self, request: Any, input_id: int) -> None: ...
    def free(self, request: Any) -> None: ...


class TransferReport(Protocol):
    """Puts and pulls that ended with a step."""

    put: dict[Put, bytes]
    rejected: dict[Put, PutRejection]
    pulled: Counter[str]  # identifier -> on how many ranks
    lost: dict[str, str]  # identifier -> why


class ImageRelay(Protocol):
    """Sends puts and pulls with the next step."""

    put_timeout_s: float

    def start_put(self, request_id: str, identifier: str) -> None: ...
    def start_pull(self, identifier: str, payload: bytes, num_embeds: int) -> None: ...
    def add_image(self, request_id: str, identifier: str, payload: bytes) -> None: ...
    def count_encode(self, request_id: str) -> None: ...
    def release(self, payload: bytes) -> None: ...
