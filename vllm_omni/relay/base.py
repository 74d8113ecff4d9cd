"""The contract of every way in which a tensor gets from one stage to the next.

From: vLLM-Omni's unified connector (paper, section 3.4) and SGLang-Omni's data plane.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import msgspec
import torch


class TensorRef(msgspec.Struct, frozen=True):
    """Where a tensor lies; what control messages carry in its stead."""

    backend: str  # which relay can pull it
    shape: tuple[int, ...]
    dtype: str  # torch's name without the prefix: "float32", "bfloat16", "int64"
    location: bytes  # understood by the backend alone; "inline" puts the bytes themselves here

    @property
    def num_rows(self) -> int:
        """Length of the first dimension; 0 for a scalar."""
        return self.shape[0] if self.shape else 0


class RelayStatistics(NamedTuple):
    """Counts since the relay was made; ``num_leases`` are payloads put and not yet released."""

    num_puts: int
    num_gets: int
    num_bytes_put: int
    num_leases: int


class Relay(Protocol):
    """Moves tensors between two stages: write once, announce, pull, release.

    Called from a runner's thread between two engine steps, hence synchronous; a call never waits for the other side.
    """

    backend: str

    def put(self, request_id: str, tensor: torch.Tensor) -> TensorRef:
        """Publish a tensor of a request. The tensor may be changed as soon as this returns.

        Raises:
            RelayClosed: the relay was closed.
        """
        ...

    def get(self, ref: TensorRef) -> torch.Tensor:
        """Pull a published tensor; the result belongs to the caller.

        Raises:
            RelayBroken: the bytes are missing or do not match the reference.
            RelayClosed: the relay was closed.
        """
        ...

    def release(self, ref: TensorRef) -> None:
        """Give the lease on a published tensor back; calling it twice does nothing."""
        ...

    def abort(self, request_id: str) -> None:
        """Release everything that was published for a request."""
        ...

    def statistics(self) -> RelayStatistics: ...

    def close(self) -> None: ...
