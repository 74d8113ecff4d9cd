"""What the planning of encodes reads of vLLM's objects, as protocols: a simulator can bring its own.

``EngineRequest`` is vLLM's ``Request``, ``Image`` its ``MultiModalFeatureSpec``, ``ImageCache`` the subclass of its
``EncoderCacheManager`` in ``core/sched/image_cache.py``, and ``ImageRelay`` the EC connector in ``kv/ec_connector.py``.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol

from vllm_omni.messages.images import Put, PutRejection


class Position(Protocol):
    """Placeholder tokens of an image in a prompt."""

    @property
    def offset(self) -> int: ...

    @property
    def length(self) -> int: ...

    def get_embeds_indices_in_range(self, start_idx: int, end_idx: int) -> tuple[int, int]: ...


class Image(Protocol):
    @property
    def identifier(self) -> str: ...  # by content; the key in the encoder cache

    @property
    def mm_position(self) -> Position: ...

    @property
    def data(self) -> Any: ...  # processed, for the encoder; None: only its embeddings exist, elsewhere


class EngineRequest(Protocol):
    @property
    def request_id(self) -> str: ...

    @property
    def arrival_time(self) -> float: ...

    @property
    def max_tokens(self) -> int: ...

    @property
    def num_tokens(self) -> int: ...

    @property
    def num_tokens_with_spec(self) -> int: ...

    @property
    def num_output_placeholders(self) -> int: ...

    @property
    def num_computed_tokens(self) -> int: ...

    @property
    def mm_features(self) -> Sequence[Any]: ...  # of Image

    def get_num_encoder_embeds(self, input_id: int) -> int: ...


class ImageCache(Protocol):
    """Room for embeddings; an image takes its room when its encode or pull starts."""

    @property
    def in_flight(self) -> Collection[str]: ...

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

    @property
    def put(self) -> Mapping[Put, bytes]: ...

    @property
    def rejected(self) -> Mapping[Put, PutRejection]: ...

    @property
    def pulled(self) -> Mapping[str, int]: ...  # identifier -> on how many ranks

    @property
    def lost(self) -> Mapping[str, str]: ...  # identifier -> why


class ImageRelay(Protocol):
    """Sends puts and pulls with the next step."""

    @property
    def put_timeout_s(self) -> float: ...

    def start_put(self, request_id: str, identifier: str) -> None: ...

    def start_pull(self, identifier: str, payload: bytes, num_embeds: int) -> None: ...

    def add_image(self, request_id: str, identifier: str, payload: bytes) -> None: ...

    def count_encode(self, request_id: str) -> None: ...

    def release(self, payload: bytes) -> None: ...
