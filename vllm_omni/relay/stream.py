"""The contract of streams: rows go from one stage to the next while the request runs, with credits.

A relay opens a stream for a request (``Streams.open_stream``). The stream's reference travels like a tensor's, and the
process that receives it reads the rows (``Streams.read_stream``). The number of a row is the chunk id of SGLang-Omni's
streams. Credits bound how many rows the writer may be ahead of its reader; a writer knows them before it writes.

From: SGLang-Omni (communication, Streaming Flow).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

import torch

from vllm_omni.messages.payload import TensorRef
from vllm_omni.relay.base import TIMEOUT_S

CREDITS = 256  # rows


class StreamWriter(ABC):
    """The producer's end. One thread writes."""

    ref: TensorRef  # shape: [credits, *row]

    @property
    @abstractmethod
    def num_credits(self) -> int:
        """Rows that can be written now; all of them when the reader has closed, because rows are dropped then."""

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
        """Append rows as soon as there are credits.

        Raises:
            RelayTimeout: the reader did not read enough in time.
        """

    @abstractmethod
    def end(self, error: str = "") -> None:
        """End the stream; the reader raises ``error``, if there is one, behind the rows written. Twice does nothing."""


class StreamReader(ABC):
    """The consumer's end. One thread reads."""

    @property
    @abstractmethod
    def num_unread(self) -> int:
        """Rows that ``read_nowait`` would return."""

    @property
    @abstractmethod
    def has_ended(self) -> bool:
        """Whether the stream ends behind the unread rows."""

    @property
    @abstractmethod
    def is_broken(self) -> bool:
        """Whether ``read_nowait`` would raise ``RelayBroken`` behind the unread rows."""

    @abstractmethod
    def read_nowait(self) -> torch.Tensor:
        """Return all rows that have arrived since the last call, [n, *row], n >= 0; they belong to the caller.

        Raises:
            RelayBroken: the producer has gone, was aborted, or ended with an error; after the rows before that.
        """

    @abstractmethod
    async def read(self, *, timeout_s: float = TIMEOUT_S) -> torch.Tensor:
        """Return rows as soon as there are some; no rows mean that the stream has ended.

        Raises:
            RelayTimeout: neither a row nor the end came in time.
        """

    @abstractmethod
    def close(self) -> None:
        """Stop reading; the writer then never waits for credits. Closing twice does nothing."""


class Streams(ABC):
    """The part of a relay that has streams."""

    @abstractmethod
    def open_stream(
        self, request_id: str, row_shape: tuple[int, ...], dtype: torch.dtype, *, credits: int = CREDITS
    ) -> StreamWriter:
        """Open a stream of a request; ``Relay.abort`` of the request breaks it.

        Raises:
            PoolExhausted: no room for the ring.
        """

    @abstractmethod
    async def read_stream(self, ref: TensorRef, *, timeout_s: float = TIMEOUT_S) -> StreamReader:
        """Connect to a stream.

        Raises:
            RelayBroken: the producer is gone, or the stream was aborted.
            RelayTimeout: the producer did not answer.
        """

    @abstractmethod
    def read_stream_blocking(self, ref: TensorRef, timeout_s: float = TIMEOUT_S) -> StreamReader:
        """``read_stream`` for a thread without an event loop."""

    @abstractmethod
    def credits_of(self, ref: TensorRef) -> Callable[[], int] | None:
        """Return a function that counts the rows its writer may still write, for the scheduler of the writing stage;
        None if that is not known in this process.

        Raises:
            RelayBroken: the producer is gone.
        """
