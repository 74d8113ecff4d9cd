"""``RelayHub``: all relays of a process.

A process publishes by the backends that were chosen for the edges of its stage, and reads by any backend that a
reference names. Small tensors travel inline in their reference, and so does a tensor for which there is no room: the
front end then carries the bytes, which is slow but works.

From: vLLM-Omni (paper), section 3.4: inline for small payloads, another transport for large ones.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import Future
from typing import Any

import msgspec
import torch

from vllm_omni.errors import ConfigError, PoolExhausted, RelayBroken, RelayError
from vllm_omni.messages.payload import Payload, TensorRef, decode
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


class EdgeOptions(msgspec.Struct, frozen=True):
    """How tensors travel to one of the stages that read them."""

    transport: str  # a backend's name
    num_ranks: int = 1  # processes of the reading stage, each of which reads each tensor
    stream: bool = False  # rows follow as they are computed, not when the request has ended
    credits: int = CREDITS  # of a stream, rows
    stays: bool = False  # tensors stay until the request ends: they may be read again


class RelayOptions(msgspec.Struct, frozen=True):
    """How a stage publishes; travels to its processes in vLLM's configuration."""

    transport: str = "inline"  # a backend's name; for the user, and between the instances of the stage
    num_bytes: int = NUM_BYTES  # of the slab of each backend
    edges: dict[str, EdgeOptions] = {}  # by reading stage
    host: str = "127.0.0.1"  # where a transport between hosts listens
    secret_file: str = ""  # of a deployment on several hosts; its path on the host of the process
    inline_bytes: int = INLINE_BYTES  # a tensor of at most this size travels in its reference

    def edge(self, node: str) -> EdgeOptions | None:
        """How tensors travel to a node of the graph, ``stage.interface``; None if it reads none."""
        return self.edges.get(node.partition(".")[0])

    @property
    def transports(self) -> set[str]:
        """The backends by which the stage publishes."""
        return {self.transport, *(edge.transport for edge in self.edges.values())}


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
        """Make the slabs now instead of with the first tensor."""
        for backend in sorted(self.options.transports):
            self._relay(backend)

    def publish(self, request_id: str, tree: Any, readers: Collection[str] = (), *, is_opened: bool = False) -> Payload:
        """Put every tensor of nested containers, once for each transport of the readers; never waits.

        Args:
            readers: nodes of the graph that read it; those of stages that read no tensors are left out.
            is_opened: whether the front end reads it, too; it does if no node reads it.

        Raises:
            TypeError: something in it cannot travel; nothing stays published.
        """
        values, tensors = extract(tree)
        edges = {node: edge for node in readers if (edge := self.options.edge(node)) is not None}
        ways = self._ways(edges, is_opened or not edges)
        sent: list[dict[str, TensorRef]] = []
        try:
            for backend, num_readers in ways.items():
                sent.append(refs := {})
                for path, tensor in tensors.items():
                    refs[path] = self.put(request_id, tensor, num_readers, backend)
        except BaseException:
            for ref in (ref for refs in sent for ref in refs.values()):
                self.release(ref, for_all=True)
            raise
        first, *others = ways
        by_backend = dict(zip(others, sent[1:], strict=True))
        apart = {node: by_backend[edge.transport] for node, edge in edges.items() if edge.transport != first}
        return Payload(sent[0], values, apart=apart)

    def _ways(self, edges: Mapping[str, EdgeOptions], is_opened: bool) -> dict[str, int]:
        """The backends by which tensors travel to these nodes -> how often each tensor will be released."""
        ways = {self.options.transport: 1} if is_opened else {}
        stages: set[str] = set()
        for node, edge in edges.items():
            # A process releases a tensor once: of two nodes of one stage, the first would release it for the second.
            is_again = (stage := node.partition(".")[0]) in stages
            stages.add(stage)
            num_readers = UNTIL_RELEASED_FOR_ALL if edge.stays or is_again else edge.num_ranks
            ways[edge.transport] = min(ways.get(edge.transport, 0) + num_readers, UNTIL_RELEASED_FOR_ALL)
        return ways

    def put(self, request_id: str, tensor: torch.Tensor, num_readers: int = 1, backend: str | None = None) -> TensorRef:
        """Publish one tensor: inline if it is small or there is no room."""
        backend = backend or self.options.transport
        try:
            return self._put(request_id, tensor, num_readers, backend)
        except PoolExhausted as exc:
            if not self._has_warned:
                self._has_warned = True
                logger.warning(
                    "tensors go through the front end while the %s relay is full: %s; "
                    "VLLM_OMNI_RELAY_BYTES makes it larger",
                    backend,
                    exc,
                )
            return self._inline.put_nowait(request_id, tensor)

    def put_nowait(self, request_id: str, tensor: torch.Tensor, *, num_readers: int = 1) -> TensorRef:
        """Publish one tensor for a producer that can wait: inline only if it is small.

        Raises:
            PoolExhausted: there is no room; with ``is_final`` there never will be.
        """
        return self._put(request_id, tensor, num_readers, self.options.transport)

    def _put(self, request_id: str, tensor: torch.Tensor, num_readers: int, backend: str) -> TensorRef:
        is_small = tensor.numel() * tensor.element_size() <= self.options.inline_bytes
        relay = self._inline if is_small else self._relay(backend)
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

    def abort_all(self) -> None:
        """Take back everything that this process has published, whichever request it belongs to."""
        with self._lock:
            relays = list(self._relays.values())
        for relay in relays:
            relay.abort(None)

    def open_stream(self, request_id: str, row: torch.Tensor, reader: str) -> StreamWriter | None:
        """Open a stream of rows like this one for a node of the graph; None if nothing is streamed to it, its transport
        has no streams, or no room for one."""
        edge = self.options.edge(reader)
        if edge is not None and edge.stream and isinstance(relay := self._relay(edge.transport), Streams):
            with contextlib.suppress(PoolExhausted):
                return relay.open_stream(request_id, tuple(row.shape), row.dtype, credits=edge.credits)
        return None

    def finish_stream(self, writer: StreamWriter, rows: torch.Tensor | None = None) -> None:
        """End a stream behind the rows that are left, without waiting for the reader to make room for them."""
        if rows is None or not len(rows):
            writer.end()
            return

        async def finish() -> None:
            try:
                for part in rows.split(writer.ref.shape[0]):
                    await writer.write(part, timeout_s=LEASE_S)
                writer.end()
            except Exception as exc:  # whatever it was: a stream without an end would hold its reader for ever
                if not isinstance(exc, RelayError):
                    logger.exception("the rest of a stream could not be written")
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
        """Release the tensors that this process has read, or everything; an invalid reference does not stop the others.

        Args:
            for_all: whatever any reader was given, streams included.
        """
        for ref in payload.refs() if for_all else payload.tensors.values():
            try:
                self.release(ref, for_all=for_all)
            except RelayError as exc:
                logger.warning("a reference could not be released: %s", exc)

    def release_encoded(self, payloads: Iterable[bytes]) -> None:
        """Release everything of payloads that this process has published, for the front end."""
        for payload in payloads:
            self.release_payload(decode(payload), for_all=True)

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
                num_bytes = self.options.num_bytes if backend in self.options.transports else 0
                try:
                    relay = make_relay(
                        backend,
                        num_bytes,
                        prefault=self._prefault,
                        host=self.options.host,
                        secret_file=self.options.secret_file,
                    )
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
        _process_hub = RelayHub(unpack_options(additional_config))
    return _process_hub


def unpack_options(additional_config: Mapping[str, Any]) -> RelayOptions:
    """The options of a stage's process."""
    options = additional_config.get(OPTIONS)
    return RelayOptions() if options is None else msgspec.convert(options, RelayOptions)
