"""The common part of relays whose library reads the producer's memory without the producer's program.

The slab is registered with the library once. A consumer asks the producer over the connection to keep a tensor, and
receives its address; then the library fetches it into the consumer's landing slab, which is registered once, too, and
where it stays until it is released. A tensor for which there is no room lands in memory of its own, which has to be
registered first.

From: SGLang-Omni (communication, Backends: ``nixl``, ``mooncake``); Omni-Flow section 4.2.
"""

from __future__ import annotations

import asyncio
import contextlib
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import msgspec
import torch

from vllm_omni.errors import PoolExhausted, RelayBroken, RelayError
from vllm_omni.messages.payload import Layout, TensorRef
from vllm_omni.relay.io_thread import io_thread
from vllm_omni.relay.pool import BufferPool
from vllm_omni.relay.remote.messages import Location, parse_location
from vllm_omni.relay.remote.producer import Producer
from vllm_omni.relay.remote.relay import HOST, RemoteRelay
from vllm_omni.relay.secret import Secret
from vllm_omni.relay.slab import CHUNK_BYTES, NUM_BYTES

KEEP_S = 5.0

Remote = TypeVar("Remote")


class Access(msgspec.Struct, frozen=True, array_like=True):
    """What a consumer's library needs to read a producer's slab; part of ``Welcome``."""

    peer: bytes  # address of the producer's library
    base: int  # the slab's address in the producer's memory


_encode = msgspec.msgpack.Encoder().encode
_decode_access = msgspec.msgpack.Decoder(Access).decode


@dataclass(slots=True, eq=False)
class Place:
    """Memory that a tensor lands in."""

    memory: torch.Tensor  # uint8 [n], registered
    free: Callable[[], object]


class OneSidedRelay(RemoteRelay, Generic[Remote]):
    """Fetches bytes with a library. ``get`` returns a view of the landing slab, valid until it is released."""

    landing_bytes = 64 << 20  # of the slab that this process reads into, whole chunks; made with the first read

    def __init__(self, num_bytes: int = NUM_BYTES, *, host: str = HOST, secret: Secret | None = None):
        self._start(host)
        super().__init__(num_bytes, host=host, secret=secret)
        if num_bytes:
            self._register(self.memory)
        self._landing: torch.Tensor | None = None
        self._landing_pool = BufferPool(self.landing_bytes, CHUNK_BYTES)
        self._landed: dict[tuple[Location, int], list[Place]] = {}  # by producer and lease
        # The following belongs to the I/O thread.
        self._remotes: dict[Producer, Remote] = {}
        self._running: set[asyncio.Task[None]] = set()

    # -- what a library's backend implements --------------------------------------------------------------------------

    @abstractmethod
    def _start(self, host: str) -> None:
        """Load the library. Raises ``MissingDependency`` if it is not installed."""

    @abstractmethod
    def _stop(self) -> None:
        """Release the library; a running read keeps what it needs."""

    @abstractmethod
    def _register(self, memory: torch.Tensor) -> Any:
        """Register memory with the library; returns what ``_unregister`` needs."""

    @abstractmethod
    def _unregister(self, registration: Any) -> None: ...

    @abstractmethod
    def _peer(self) -> bytes:
        """Return the address of this process's library."""

    @abstractmethod
    def _open(self, peer: bytes) -> Remote:
        """Connect to a producer's library. May raise anything."""

    def _forget_remote(self, remote: Remote) -> None:
        """Called when the producer is gone."""
        return

    @abstractmethod
    async def _read(self, remote: Remote, address: int, memory: torch.Tensor) -> None:
        """Fetch a producer's bytes; on the I/O thread, without blocking it. May raise anything."""

    # -- producer -----------------------------------------------------------------------------------------------------

    def access(self) -> bytes:
        return _encode(Access(self._peer(), self._base))

    # -- consumer -----------------------------------------------------------------------------------------------------

    async def _pull(self, producer: Producer, ref: TensorRef, layout: Layout) -> torch.Tensor:
        location = parse_location(ref)
        async with producer.fetching(ref.lease, layout.num_bytes) as (offset, failed):
            producer.check_size(offset + layout.num_bytes)
            if location.token == self.token:  # a library does not read from itself
                memory = self.memory[offset : offset + layout.num_bytes].clone()
            else:
                remote, base = self._remote_of(producer)
                place = self._take_place(layout.num_bytes)
                await self._fill(place, remote, base + offset, failed)
                with self.lock:
                    self._landed.setdefault((location, ref.lease), []).append(place)
                memory = place.memory
        return memory.view(layout.dtype).reshape(layout.shape)

    async def _fill(self, place: Place, remote: Remote, address: int, failed: asyncio.Future[int]) -> None:
        """Let the library read into a place; frees the place if that fails, or if the producer dies first."""
        reading = asyncio.ensure_future(self._read(remote, address, place.memory))
        self._running.add(reading)
        reading.add_done_callback(self._running.discard)
        reading.add_done_callback(lambda _: _settle(failed))
        try:
            await failed
            await reading
        except BaseException as exc:
            # Freed after the read: the library may still write there.
            reading.add_done_callback(lambda reading: _drop(reading, place))
            if isinstance(exc, Exception) and not isinstance(exc, RelayError):
                raise RelayBroken(f"{self.backend} could not read a tensor: {exc}") from exc
            raise

    def _remote_of(self, producer: Producer) -> tuple[Remote, int]:
        try:
            access = _decode_access(producer.welcomed.result().access)
            if producer not in self._remotes:
                self._remotes[producer] = self._open(access.peer)
        except Exception as exc:  # a library's errors are of many kinds
            raise RelayBroken(f"a producer's memory cannot be reached by {self.backend}: {exc}") from exc
        return self._remotes[producer], access.base

    def _take_place(self, num_bytes: int) -> Place:
        if self._landing is None:
            landing = torch.empty(self.landing_bytes, dtype=torch.uint8)
            landing.fill_(0)
            self._register(landing)
            self._landing = landing
        try:
            with self.lock:
                block = self._landing_pool.allocate(num_bytes)
        except PoolExhausted:
            own = torch.empty(num_bytes, dtype=torch.uint8)
            registration = self._register(own)
            return Place(own, lambda: self.is_closed or self._unregister(registration))
        memory = self._landing[block.offset : block.offset + num_bytes]

        def free() -> None:
            with self.lock:
                self._landing_pool.free(block)

        return Place(memory, free)

    def release(self, ref: TensorRef, *, for_all: bool = False) -> None:
        if ref.lease:
            with self.lock:
                places = self._landed.pop((parse_location(ref), ref.lease), [])
            for place in places:
                place.free()
        super().release(ref, for_all=for_all)

    def on_producer_lost(self, producer: Producer) -> None:
        remote = self._remotes.pop(producer, None)
        if remote is not None:
            with contextlib.suppress(Exception):  # it is gone
                self._forget_remote(remote)

    def _close(self) -> None:
        super()._close()
        self._stop()
        # Other processes' libraries may be in the middle of a read, of which this program does not know.
        io_thread().loop.call_later(KEEP_S, lambda *_: None, self.memory, self._landing)

    def check_integrity(self) -> None:
        super().check_integrity()
        with self.lock:
            self._landing_pool.check_integrity()


def _drop(reading: asyncio.Task[None], place: Place) -> None:
    """End a read that no caller waits for."""
    if not reading.cancelled():
        reading.exception()  # retrieved, so that asyncio does not log it
    place.free()


def _settle(future: asyncio.Future[int]) -> None:
    if not future.done():
        future.set_result(0)
