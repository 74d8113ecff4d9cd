"""The contract of every way in which a tensor gets from one stage to the next.

From: vLLM-Omni's unified connector (paper, section 3.4) and SGLang-Omni's data plane (communication, Relay Interface).
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import itertools
import os
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future
from typing import Any, ClassVar, NamedTuple, TypeAlias, TypeVar

import torch

from vllm_omni.errors import PoolExhausted, RelayClosed, RelayTimeout
from vllm_omni.messages.payload import TensorRef

TIMEOUT_S = 30.0  # of a wait, unless its caller says otherwise
LEASE_S = 300.0  # after that nobody comes for a tensor any more
EXIT_S = 1.0  # the I/O thread's last work may take, when the process ends

Clock: TypeAlias = Callable[[], float]  # seconds, monotonic


class RelayStatistics(NamedTuple):
    """Counts since the relay was made; ``num_leases`` and ``num_bytes_leased`` are what is put and not yet released."""

    num_puts: int
    num_gets: int
    num_bytes_put: int
    num_leases: int
    num_bytes_leased: int = 0
    num_expired: int = 0  # leases that nobody came for


class Relay(ABC):
    """Moves tensors between two stages: write once, announce, pull, release.

    A producer puts, and sends the reference by whatever control plane there is; the consumer, another relay of the same
    backend in whatever process, gets and releases. A method that waits has a deadline. All methods may be called from
    any thread; the forms without ``async`` are for the thread of an engine, and those with ``_nowait`` never wait.

    Cancelling a waiting method leaves nothing behind.
    """

    backend: ClassVar[str]

    def __init__(self) -> None:
        self._num_puts = self._num_gets = self._num_bytes = 0
        self._closed = False
        self._lock = threading.RLock()
        self._waiting_for_room: list[Future[None]] = []

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
        """``put_nowait``, once there is room.

        Raises:
            RelayTimeout: there was none in time.
            PoolExhausted: there never will be: the tensor is larger than the whole pool.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                return self.put_nowait(request_id, tensor, num_readers=num_readers)
            except PoolExhausted as exc:
                if exc.is_final:
                    raise
                with self._room() as room:
                    # Once more behind the announcement: what was released before it tells nobody.
                    with contextlib.suppress(PoolExhausted):
                        return self.put_nowait(request_id, tensor, num_readers=num_readers)
                    await self._await_room(room, deadline - time.monotonic(), exc)

    def empty(self, request_id: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A buffer to write into, which ``put`` then publishes without a copy, once; it belongs to the request.

        Raises:
            PoolExhausted, RelayClosed: as ``put_nowait``.
        """
        self._check_open()
        return torch.empty(shape, dtype=dtype)

    @abstractmethod
    def abort(self, request_id: str) -> None:
        """Take back everything that was put for a request; what is being read goes when it has been."""

    def renew(self, ref: TensorRef) -> bool:
        """Let the time of a lease of this relay begin anew; False: it is over, and its memory may be another's."""
        return True

    # -- consumer -----------------------------------------------------------------------------------------------------

    @abstractmethod
    def get_nowait(self, ref: TensorRef) -> torch.Tensor | None:
        """A published tensor if it is at hand; None if ``get`` has to wait for it. May be a view: see ``get``."""

    async def get(self, ref: TensorRef, *, timeout_s: float = TIMEOUT_S) -> torch.Tensor:
        """Pull a published tensor: only to be read, and only until it is released.

        Raises:
            RelayBroken: the producer is gone, has taken the tensor back, or the reference is wrong.
            RelayTimeout: it did not come in time.
            RelayClosed: the relay was closed.
        """
        tensor = self.get_nowait(ref)
        if tensor is None:
            tensor = await wait_for(self._fetch(ref), timeout_s, f"a tensor of {ref.backend!r}")
        return tensor

    def get_blocking(self, ref: TensorRef, timeout_s: float = TIMEOUT_S) -> torch.Tensor:
        """``get`` for a thread without an event loop."""
        tensor = self.get_nowait(ref)
        return block_on(self._fetch(ref), timeout_s, f"a tensor of {ref.backend!r}") if tensor is None else tensor

    async def _fetch(self, ref: TensorRef) -> torch.Tensor:
        """What ``get`` waits for; runs on the I/O thread's loop."""
        raise NotImplementedError

    @abstractmethod
    def release(self, ref: TensorRef, *, for_all: bool = False) -> None:
        """The tensor is not read here any more. Twice does nothing, nor does it if the producer is gone.

        Args:
            for_all: nor will it be anywhere else, but by those who are reading it now.
        """

    # -- both ---------------------------------------------------------------------------------------------------------

    @abstractmethod
    def statistics(self) -> RelayStatistics: ...

    def close(self) -> None:
        """Nobody can put, get or pull from here any more. Twice does nothing."""
        self._closed = True
        self._tell_room()

    def _check_open(self) -> None:
        if self._closed:
            raise RelayClosed(f"this {self.backend!r} relay was closed")

    @contextlib.contextmanager
    def _room(self) -> Iterator[Future[None]]:
        """Hear of it when something is released."""
        room: Future[None] = Future()
        with self._lock:
            self._waiting_for_room.append(room)
        try:
            yield room
        finally:
            with self._lock, contextlib.suppress(ValueError):
                self._waiting_for_room.remove(room)

    def _tell_room(self) -> None:
        with self._lock:
            waiting, self._waiting_for_room = self._waiting_for_room, []
        for room in waiting:
            if room.set_running_or_notify_cancel():
                room.set_result(None)

    @staticmethod
    async def _await_room(room: Future[None], timeout_s: float, cause: Exception) -> None:
        try:
            await asyncio.wait_for(asyncio.wrap_future(room), max(timeout_s, 0))
        except TimeoutError:
            raise RelayTimeout(f"nothing was released in time: {cause}") from cause


# -- the thread on which relays wait ----------------------------------------------------------------------------------

T = TypeVar("T")


class IOThread:
    """One event loop in a daemon thread for all relays of a process: connections, and whatever is waited for.

    A runner has no loop of its own, and a program's loop may be busy or gone while another process reads from this one.
    """

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="relay-io", daemon=True)
        self._thread.start()
        atexit.register(self._stop)

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_forever()

    def _stop(self) -> None:
        """Let it end before the interpreter does: a thread that drops its last tensor meanwhile aborts the process."""
        if self.pid == os.getpid():
            self.call(self.loop.stop)
            self._thread.join(EXIT_S)

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop)

    def call(self, function: Callable[..., object], *args: object) -> None:
        self.loop.call_soon_threadsafe(function, *args)


_io_thread: IOThread | None = None
_io_lock = threading.Lock()


def io_thread() -> IOThread:
    """This process's; a forked child gets its own."""
    global _io_thread
    with _io_lock:
        if _io_thread is None or _io_thread.pid != os.getpid():
            _io_thread = IOThread()
        return _io_thread


async def wait_for(coroutine: Coroutine[Any, Any, T], timeout_s: float, what: str) -> T:
    """Run it on the I/O thread and await it here; ``RelayTimeout`` names ``what``."""
    try:
        return await asyncio.wait_for(asyncio.wrap_future(io_thread().submit(coroutine)), timeout_s)
    except TimeoutError as exc:
        raise RelayTimeout(f"{what} did not come within {timeout_s:g} s") from exc


def block_on(coroutine: Coroutine[Any, Any, T], timeout_s: float, what: str) -> T:
    """``wait_for`` for a thread without an event loop."""
    future = io_thread().submit(coroutine)
    try:
        return future.result(timeout_s)
    except TimeoutError as exc:
        future.cancel()
        raise RelayTimeout(f"{what} did not come within {timeout_s:g} s") from exc


new_lease = itertools.count(1).__next__
"""Numbers of leases, never used twice in a process."""
