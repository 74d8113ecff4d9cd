"""A stream of rows from one stage to the next: a ring with credits, written while it is read.

A relay opens one for a request (``Streams.open_stream``); its reference, that of the ring, travels like a tensor's,
and whoever gets it reads (``Streams.read_stream``). The number of a row is the chunk id of SGLang-Omni's streams; the
ring's length is the credit: a writer so many rows ahead of its reader may not write, and knows it before it tries.

From: SGLang-Omni (communication, Streaming Flow).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

import torch

from vllm_omni.errors import PoolExhausted
from vllm_omni.messages.payload import TensorRef
from vllm_omni.relay.base import TIMEOUT_S

CREDITS = 256  # rows


class StreamWriter(ABC):
    """The producer's end. One thread writes."""

    ref: TensorRef  # shape: [credits, *row]

    @property
    @abstractmethod
    def num_credits(self) -> int:
        """Rows that can be written now; as many as ever when the reader has closed, because what follows is dropped."""

    @abstractmethod
    def write_nowait(self, rows: torch.Tensor) -> None:
        """Append rows, [n, *row].

        Raises:
            PoolExhausted: not enough credits; nothing was written.
            ValueError: rows of another shape or dtype.
            RelayClosed: after ``end``.
        """

    @abstractmethod
    async def write(self, rows: torch.Tensor, *, timeout_s: float = TIMEOUT_S) -> None:
        """``write_nowait``, once there are credits.

        Raises:
            RelayTimeout: the reader did not read enough in time.
        """

    @abstractmethod
    def end(self, error: str = "") -> None:
        """Nothing follows; with an ``error`` the reader meets it behind the rows written. Twice does nothing."""


class StreamReader(ABC):
    """The consumer's end. One thread reads."""

    @property
    @abstractmethod
    def num_unread(self) -> int:
        """Rows that ``read_nowait`` would return."""

    @property
    @abstractmethod
    def has_ended(self) -> bool:
        """Whether nothing follows the unread rows."""

    @property
    @abstractmethod
    def is_broken(self) -> bool:
        """Whether ``read_nowait`` would raise ``RelayBroken`` behind the unread rows."""

    @abstractmethod
    def read_nowait(self) -> torch.Tensor:
        """All rows that have come since the last call, [n, *row], n >= 0; they belong to the caller.

        Raises:
            RelayBroken: the producer has gone, was aborted, or ended with an error; after the rows before that.
        """

    @abstractmethod
    async def read(self, *, timeout_s: float = TIMEOUT_S) -> torch.Tensor:
        """``read_nowait`` once there is a row or the end; no rows then mean the end.

        Raises:
            RelayTimeout: neither came in time.
        """

    @abstractmethod
    def close(self) -> None:
        """Read no further; the writer is held back no more. Twice does nothing."""


def check_rows(rows: torch.Tensor, ring: torch.Tensor) -> None:
    """Raises ``ValueError`` for rows that are not the ring's."""
    if rows.shape[1:] != ring.shape[1:] or rows.dtype != ring.dtype:
        raise ValueError(
            f"{rows.dtype} {list(rows.shape[1:])} in a stream whose rows are {ring.dtype} {list(ring.shape[1:])}"
        )


def write_ring(ring: torch.Tensor, num_written: int, rows: torch.Tensor, num_credits: int) -> None:
    """Copy rows behind those already written; ``PoolExhausted``, and nothing copied, if credit is short."""
    num_rows, credits = len(rows), len(ring)
    if num_rows > num_credits:
        raise PoolExhausted(
            f"{num_rows} rows for a stream with {num_credits} of {credits} credits left", is_final=num_rows > credits
        )
    first = num_written % credits
    head = min(num_rows, credits - first)
    ring[first : first + head] = rows[:head]
    if head < num_rows:
        ring[: num_rows - head] = rows[head:]


class Streams(ABC):
    """A relay that has streams."""

    @abstractmethod
    def open_stream(
        self, request_id: str, row_shape: tuple[int, ...], dtype: torch.dtype, *, credits: int = CREDITS
    ) -> StreamWriter:
        """A ring for a request; ``Relay.abort`` of it breaks the stream.

        Raises:
            PoolExhausted: no room for the ring.
        """

    @abstractmethod
    async def read_stream(self, ref: TensorRef, *, timeout_s: float = TIMEOUT_S) -> StreamReader:
        """Raises:
        RelayBroken: the producer is gone, or the stream was aborted.
        RelayTimeout: the producer did not answer.
        """

    @abstractmethod
    def read_stream_blocking(self, ref: TensorRef, timeout_s: float = TIMEOUT_S) -> StreamReader:
        """``read_stream`` for a thread without an event loop."""

    @abstractmethod
    def credits_of(self, ref: TensorRef) -> Callable[[], int] | None:
        """How many rows its writer may still write, for whoever decides whether it works; None if that is not known in
        this process.

        Raises:
            RelayBroken: the producer is gone.
        """
