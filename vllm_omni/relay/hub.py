"""``RelayHub``: all relays of a process.

A process publishes by one backend, the one chosen for its stage's edges, and reads by any backend that a reference
names. Small tensors travel inline in their reference, and so does a tensor for which there is no room: the front end
then carries the bytes, which is slow but works.

From: vLLM-Omni (paper), section 3.4: inline for small payloads, another transport for large ones.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any

import msgspec
import torch

from vllm_omni.errors import ConfigError, PoolExhausted, RelayBroken, RelayError
from vllm_omni.messages.payload import Payload, TensorRef
from vllm_omni.relay.base import LEASE_S, TIMEOUT_S, Relay, RelayStatistics
from vllm_omni.relay.codec import extract, restore
from vllm_omni.relay.inline import InlineRelay
from vllm_omni.relay.io_thread import io_thread
from vllm_omni.relay.select import BACKENDS, make_relay
from vllm_omni.relay.slab import NUM_BYTES
from vllm_omni.relay.stream import CREDITS, StreamReader, Streams, StreamWriter

logger = logging.getLogger(__name__)

INLINE_BYTES = 16 << 10  # larger tensors go into the slab
UNTIL_RELEASED_FOR_ALL = 1 << 30
"""``num_readers`` of a tensor that its owner releases with ``for_all=True``, however many have read it."""


class RelayOptions(msgspec.Struct, frozen=True):
    """How a stage publishes; travels to its processes in vLLM's configuration."""

    transport: str = "inline"  # a backend's name
    num_bytes: int = NUM_BYTES  # of the slab
    num_readers: int = 1  # processes that read each tensor: the next stage's ranks
    stream: bool = False  # rows go to the next stage as they are computed, not when the request has ended
    credits: int = CREDITS  # of a stream, rows
    host: str = "127.0.0.1"  # where a transport between hosts listens
    inline_bytes: int = INLINE_BYTES  # a tensor of at most this size travels in its reference


OPTIONS = "relay"
"""Key of vLLM's ``additional_config`` under which the options travel, as plain types."""


class RelayHub:
    """Publishes by one backend, reads by any. Thread-safe.

    Args:
        prefault: see ``make_relay``.
    """

    def __init__(self, options: RelayOptions, *, prefault: bool = True) -> None:
        self.options = options
        self._prefault = prefault
        self._inline = InlineRelay()
        self._relays: dict[str, Relay] = {"inline": self._inline}
        self._lock = threading.Lock()
        self._has_warned = False

    # -- producer -----------------------------------------------------------------------------------------------------

    def prepare(self) -> None:
        """Make the slab now instead of with the first tensor."""
        self._relay(self.options.transport)

    def publish(self, request_id: str, tree: Any) -> Payload:
        """Put every tensor of nested containers; never waits.

        Raises:
            TypeError: something in it cannot travel; nothing stays published.
        """
        values, tensors = extract(tree)
        refs: dict[str, TensorRef] = {}
        try:
            for path, tensor in tensors.items():
                refs[path] = self.put(request_id, tensor)
        except BaseException:
            for ref in refs.values():
                self.release(ref)
            raise
        return Payload(refs, values)

    def put(self, request_id: str, tensor: torch.Tensor) -> TensorRef:
        """Publish one tensor: inline if it is small or there is no room."""
        try:
            return self.put_nowait(request_id, tensor, num_readers=self.options.num_readers)
        except PoolExhausted as exc:
            if not self._has_warned:
                self._has_warned = True
                logger.warning(
                    "tensors go through the front end while the %s relay is full: %s; "
                    "VLLM_OMNI_RELAY_BYTES makes it larger",
                    self.options.transport,
                    exc,
                )
            return self._inline.put_nowait(request_id, tensor)

    def put_nowait(self, request_id: str, tensor: torch.Tensor, *, num_readers: int = 1) -> TensorRef:
        """Publish one tensor for a producer that can wait: inline only if it is small.

        Raises:
            PoolExhausted: there is no room; with ``is_final`` there never will be.
        """
        is_small = tensor.numel() * tensor.element_size() <= self.options.inline_bytes
        relay = self._inline if is_small else self._publisher
        return relay.put_nowait(request_id, tensor, num_readers=num_readers)

    def lease(self, request_id: str, shape: tuple[int, ...], dtype: torch.dtype) -> tuple[torch.Tensor, TensorRef]:
        """Lease a buffer that is written before its reference is sent, and stays until it is released for all readers.

        Call ``renew`` before a later write: the lease may have expired.

        Raises:
            PoolExhausted: there is no room; with ``is_final`` there never will be. ``abort`` takes back other leases.
            ConfigError: the transport is inline, which has no buffers.
        """
        relay = self._publisher
        if relay is self._inline:
            raise ConfigError('the "inline" relay has no buffers; name another transport, for example "shm" or "tcp"')
        buffer = relay.empty(request_id, shape, dtype)
        return buffer, relay.put_nowait(request_id, buffer, num_readers=UNTIL_RELEASED_FOR_ALL)

    @property
    def num_bytes_leased(self) -> int:
        """Bytes of ``options.num_bytes`` that are put and not yet released."""
        return self._publisher.statistics().num_bytes_leased

    def renew(self, ref: TensorRef) -> bool:
        """See ``Relay.renew``."""
        return self._publisher.renew(ref)

    def abort(self, request_id: str) -> None:
        """See ``Relay.abort``."""
        self._publisher.abort(request_id)

    def open_stream(self, request_id: str, row: torch.Tensor) -> StreamWriter | None:
        """Open a stream of rows like this one; None if the transport has no streams, or no room for one."""
        publisher = self._publisher
        if isinstance(publisher, Streams):
            with contextlib.suppress(PoolExhausted):
                return publisher.open_stream(request_id, tuple(row.shape), row.dtype, credits=self.options.credits)
        return None

    def finish_stream(self, writer: StreamWriter, rows: torch.Tensor | None = None) -> None:
        """End a stream behind the rows that are left, without waiting for the reader to make room for them."""
        if rows is None or not len(rows):
            writer.end()
            return

        async def finish() -> None:
            try:
                await writer.write(rows, timeout_s=LEASE_S)
                writer.end()
            except RelayError as exc:
                writer.end(str(exc))

        io_thread().submit(finish())

    # -- consumer -----------------------------------------------------------------------------------------------------

    def get_blocking(self, ref: TensorRef, timeout_s: float = TIMEOUT_S) -> torch.Tensor:
        """See ``Relay.get``: read-only, valid until it is released."""
        return self._relay(ref.backend).get_blocking(ref, timeout_s)

    def pull_blocking(self, payload: Payload, timeout_s: float = TIMEOUT_S) -> Any:
        """Pull what was published; its tensors are read-only, and valid until ``release_payload``."""
        return restore(
            payload.values, {path: self.get_blocking(ref, timeout_s) for path, ref in payload.tensors.items()}
        )

    def release(self, ref: TensorRef, *, for_all: bool = False) -> None:
        """See ``Relay.release``."""
        if ref.lease:
            self._relay(ref.backend).release(ref, for_all=for_all)

    def release_payload(self, payload: Payload, *, for_all: bool = False) -> None:
        """Release a payload's tensors and streams; an invalid reference does not stop the others."""
        for ref in (*payload.tensors.values(), *payload.streams.values()):
            try:
                self.release(ref, for_all=for_all)
            except RelayError as exc:
                logger.warning("a reference could not be released: %s", exc)

    def read_stream(self, ref: TensorRef) -> Future[StreamReader]:
        """Connect to a stream without waiting."""
        return io_thread().submit(self._streams(ref).read_stream(ref))

    def credits_of(self, ref: TensorRef) -> Callable[[], int] | None:
        """See ``Streams.credits_of``; works in any process of the writing stage."""
        return self._streams(ref).credits_of(ref)

    # -- both ---------------------------------------------------------------------------------------------------------

    def statistics(self) -> Mapping[str, RelayStatistics]:
        """By backend."""
        return {name: relay.statistics() for name, relay in self._relays.items()}

    def plain_statistics(self) -> dict[str, dict[str, int]]:
        """The same in msgpack types."""
        return {name: one._asdict() for name, one in self.statistics().items()}

    def close(self) -> None:
        """Close all relays. Closing twice does nothing."""
        with self._lock:
            relays = list(self._relays.values())
        for relay in relays:
            relay.close()

    @property
    def _publisher(self) -> Relay:
        return self._relay(self.options.transport)

    def _relay(self, backend: str) -> Relay:
        """Return the relay of a backend, made at its first use. There is one of each: the publisher reads, too."""
        with self._lock:
            relay = self._relays.get(backend)
            if relay is None:
                if backend not in BACKENDS:
                    raise RelayBroken(f"a reference names the backend {backend!r}; known: {', '.join(BACKENDS)}")
                num_bytes = self.options.num_bytes if backend == self.options.transport else 0
                try:
                    relay = make_relay(backend, num_bytes, prefault=self._prefault, host=self.options.host)
                except OSError as exc:  # no file descriptor is free, or no memory
                    raise RelayBroken(f"this process cannot use the {backend} relay: {exc}") from exc
                self._relays[backend] = relay
            return relay

    def _streams(self, ref: TensorRef) -> Streams:
        relay = self._relay(ref.backend)
        if not isinstance(relay, Streams):
            raise RelayBroken(f"the backend {ref.backend!r} has no streams")
        return relay


_process_hub: RelayHub | None = None


def process_hub(additional_config: Mapping[str, Any]) -> RelayHub:
    """Return the hub of a stage's process, which scheduler and runner may share."""
    global _process_hub
    if _process_hub is None:
        options = additional_config.get(OPTIONS)
        _process_hub = RelayHub(RelayOptions() if options is None else msgspec.convert(options, RelayOptions))
    return _process_hub
