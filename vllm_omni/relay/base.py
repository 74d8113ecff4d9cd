"""The contract of every relay.

From: vLLM-Omni's unified connector (paper, section 3.4) and SGLang-Omni's data plane (communication, Relay Interface).
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import ClassVar, NamedTuple, TypeAlias, TypeVar

import torch

from vllm_omni.errors import PoolExhausted, RelayClosed, RelayTimeout
from vllm_omni.messages.payload import TensorRef
from vllm_omni.relay.io_thread import block_on, wait_for

TIMEOUT_S = 30.0  # of a wait, unless its caller gives another
LEASE_S = 300.0  # a tensor that was not released by then is freed
T = TypeVar("T")

Clock: TypeAlias = Callable[[], float]  # seconds, monotonic


class RelayStatistics(NamedTuple):
    """Counts since the relay was made; ``num_leases`` and ``num_bytes_leased`` are what is put and not yet released."""

    num_puts: int
    num_gets: int
    num_bytes_put: int
    num_leases: int
    num_bytes_leased: int = 0
    num_expired: int = 0  # leases whose readers did not come in time


class Relay(ABC):
    """Moves tensors between two stages: write once, announce, pull, release.

    A producer puts a tensor and sends the reference by whatever control plane there is; the consumer, another relay of
    the same backend in any process, gets and releases it. A method that waits has a deadline. All methods may be called
    from any thread; those without ``async`` are for the thread of an engine, and those with ``_nowait`` never wait.

    Cancelling a waiting method leaves nothing behind.
    """

    backend: ClassVar[str]

    def __init__(self) -> None:
        self._num_puts = self._num_gets = self._num_bytes = 0
        self._waiting_for_room: list[Future[None]] = []
        self.is_closed = False
        self.lock = threading.RLock()  # guards the relay's state; see the inner interface below

    # -- producer -----------------------------------------------------------------------------------------------------

    @abstractmethod
    def put_nowait(self, request_id: str, tensor: torch.Tensor, *, num_readers: int = 1) -> TensorRef:
        """Publish a tensor of a request. The tensor may be changed as soon as this returns, unless it is a buffer of
        the relay itself (``empty``), which is not copied.

        Args:
            num_readers: how often it will be released: once by each process that reads it.

        Raises:
            PoolExhausted: no room: the consumers have not released enough of what they were sent.
            RelayClosed: the relay was closed.
            TypeError: a dtype that cannot travel.
        """

    async def put(
        self, request_id: str, tensor: torch.Tensor, *, num_readers: int = 1, timeout_s: float = TIMEOUT_S
    ) -> TensorRef:
        """Publish a tensor as soon as there is room.

        Raises:
            RelayTimeout: there was no room in time.
            PoolExhausted: there never will be: the tensor is larger than the whole pool.
        """
        return await self.when_room(lambda: self.put_nowait(request_id, tensor, num_readers=num_readers), timeout_s)

    def empty(self, request_id: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Allocate a buffer of a request, which ``put`` then publishes without a copy, once.

        Raises:
            PoolExhausted, RelayClosed: as ``put_nowait``.
        """
        self.check_open()
        return torch.empty(shape, dtype=dtype)

    @abstractmethod
    def abort(self, request_id: str | None) -> None:
        """Take back everything that was put for a request; a tensor that is being read is freed afterwards.

        Args:
            request_id: None: for every request.
        """

    def renew(self, ref: TensorRef) -> bool:
        """Restart the expiry time of a lease of this relay; False: it has ended, and its memory may be in other use."""
        return True

    # -- consumer -----------------------------------------------------------------------------------------------------

    @abstractmethod
    def get_nowait(self, ref: TensorRef) -> torch.Tensor | None:
        """Return a published tensor, perhaps a view (see ``get``); None if ``get`` would have to wait for it."""

    async def get(self, ref: TensorRef, *, timeout_s: float = TIMEOUT_S) -> torch.Tensor:
        """Pull a published tensor: read-only, and valid until it is released.

        Raises:
            RelayBroken: the producer is gone, has taken the tensor back, or the reference is wrong.
            RelayTimeout: it did not arrive in time.
            RelayClosed: the relay was closed.
        """
        tensor = self.get_nowait(ref)
        if tensor is None:
            tensor = await wait_for(self._fetch(ref, timeout_s), timeout_s, f"a tensor of {ref.backend!r}")
        return tensor

    def get_blocking(self, ref: TensorRef, timeout_s: float = TIMEOUT_S) -> torch.Tensor:
        """``get`` for a thread without an event loop."""
        tensor = self.get_nowait(ref)
        if tensor is None:
            tensor = block_on(self._fetch(ref, timeout_s), timeout_s, f"a tensor of {ref.backend!r}")
        return tensor

    async def _fetch(self, ref: TensorRef, timeout_s: float) -> torch.Tensor:
        """Pull a tensor that is not at hand; runs on the I/O thread's loop."""
        raise NotImplementedError

    @abstractmethod
    def release(self, ref: TensorRef, *, for_all: bool = False) -> None:
        """Say that this process does not read the tensor any longer. Releasing twice, or after the producer is gone,
        does nothing.

        Args:
            for_all: nor will any other process start to read it.
        """

    # -- both ---------------------------------------------------------------------------------------------------------

    @abstractmethod
    def statistics(self) -> RelayStatistics: ...

    def close(self) -> None:
        """End puts, gets and pulls through this relay. Closing twice does nothing."""
        self.is_closed = True
        self.notify_room()

    # -- inner interface: for the files of a backend, not for users ---------------------------------------------------

    def check_open(self) -> None:
        """Raises ``RelayClosed`` after ``close``."""
        if self.is_closed:
            raise RelayClosed(f"this {self.backend!r} relay was closed")

    async def when_room(
        self, attempt: Callable[[], T], timeout_s: float, announce: Callable[[], None] = lambda: None
    ) -> T:
        """Call ``attempt`` until it does not raise ``PoolExhausted``, each time after something was released.

        Args:
            announce: called before the wait: notifies the other side that this one waits.

        Raises:
            RelayTimeout: nothing was released in time.
            PoolExhausted: with ``is_final``.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                return attempt()
            except PoolExhausted as exc:
                if exc.is_final:
                    raise
            with self.waiting_for_room() as room:
                announce()
                try:
                    return attempt()  # again: a release before the announcement was not notified
                except PoolExhausted as exc:
                    cause = exc
                try:
                    await asyncio.wait_for(asyncio.wrap_future(room), max(deadline - time.monotonic(), 0))
                except TimeoutError:
                    raise RelayTimeout(f"nothing was released in time: {cause}") from cause

    @contextlib.contextmanager
    def waiting_for_room(self) -> Iterator[Future[None]]:
        """Yields a future that is done when something is released."""
        room: Future[None] = Future()
        with self.lock:
            self._waiting_for_room.append(room)
        try:
            yield room
        finally:
            with self.lock, contextlib.suppress(ValueError):
                self._waiting_for_room.remove(room)

    def notify_room(self) -> None:
        """Wake everything that waits for room."""
        with self.lock:
            waiting, self._waiting_for_room = self._waiting_for_room, []
        for room in waiting:
            if room.set_running_or_notify_cancel():
                room.set_result(None)


new_lease = itertools.count(1).__next__
"""Returns a lease number, never used twice in a process."""
