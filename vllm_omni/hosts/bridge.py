"""The two ends of the way between vLLM's client and its engine core, each with vLLM's sockets on its own host.

vLLM's client binds a ROUTER for requests and a PULL for outputs, and its engine core connects to both. ``ClientBridge``
stands for the engine core where the client is, ``EngineBridge`` for the client where the engine core is; what one of
them takes from its sockets, the other one puts into its own. Both belong to the I/O thread.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import zmq

from vllm_omni.relay.remote.wire import DrainedSocket

IDENTITY = bytes(2)  # of an engine core of rank 0, to its client
FIRST_RETRY_MS = 10  # the client's sockets are bound a moment after these are connected
LINGER_MS = 100  # for the last message to a client
NOT_READY = b"\xc1"  # no message of msgpack: the client fails at once instead of at its deadline

Frames = Sequence[Any]


class ClientBridge:
    """Connects to vLLM's client as its engine core would.

    Args:
        input_address, output_address: where the client binds.
        on_request: called with the frames of each request.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        input_address: str,
        output_address: str,
        on_request: Callable[[Frames], None],
    ) -> None:
        with contextlib.ExitStack() as unless_they_connect:
            self._input = DrainedSocket(context, zmq.DEALER, on_request)
            unless_they_connect.callback(self._input.close)
            self._output = DrainedSocket(context, zmq.PUSH, on_request)
            unless_they_connect.callback(self._output.close)
            self._input.socket.setsockopt(zmq.IDENTITY, IDENTITY)
            for one, address in ((self._input, input_address), (self._output, output_address)):
                one.socket.setsockopt(zmq.RECONNECT_IVL, FIRST_RETRY_MS)
                one.socket.connect(address)
            unless_they_connect.pop_all()
        self.is_ready = False

    def ready(self, frames: Frames) -> None:
        """Give the client the engine core's first message."""
        self.is_ready = True
        self._input.send(frames)

    def put(self, frames: Frames) -> None:
        """Give the client what its engine core sent."""
        self._output.send(frames)

    def fail(self, farewell: bytes) -> None:
        """Let the client fail: with ``farewell``, the message of a dying engine core, or in its start."""
        if self.is_ready:
            self.put([farewell])
        else:
            self.ready([NOT_READY])

    def close(self) -> None:
        """Close the sockets; a client that still waits for its engine core fails."""
        if not self.is_ready:
            self.ready([NOT_READY])
        self._input.close(LINGER_MS)
        self._output.close(LINGER_MS)


class EngineBridge:
    """Waits for an engine core as its client would.

    Attributes:
        on_ready: called with the engine core's first message, without its identity.
        on_output: called with the frames of each output.
        first: the engine core's first message, once it has come: another client needs it, too.
        is_held: ``on_ready`` waits for ``release``.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        input_address: str,
        output_address: str,
        on_ready: Callable[[Frames], None],
        on_output: Callable[[Frames], None],
    ) -> None:
        self.on_ready, self.on_output = on_ready, on_output
        self.first: list[bytes] = []
        self.is_held = False
        with contextlib.ExitStack() as unless_they_listen:
            self._input = DrainedSocket(context, zmq.ROUTER, self._take_first)
            unless_they_listen.callback(self._input.close)
            self._output = DrainedSocket(context, zmq.PULL, lambda frames: self.on_output(frames))
            unless_they_listen.callback(self._output.close)
            self._input.socket.bind(input_address)
            self._output.socket.bind(output_address)
            unless_they_listen.pop_all()

    def _take_first(self, frames: list[zmq.Frame]) -> None:
        self.first = [frame.bytes for frame in frames[1:]]
        if not self.is_held:
            self.on_ready(self.first)

    def release(self) -> None:
        """Report the engine core's first message, now or once it has come."""
        self.is_held = False
        if self.first:
            self.on_ready(self.first)

    def mute(self) -> None:
        """Drop what the engine core sends."""
        self.on_ready = self.on_output = lambda frames: None

    def request(self, frames: Frames) -> None:
        """Give the engine core a request; one that has died gets none."""
        with contextlib.suppress(ConnectionError):
            self._input.send([IDENTITY, *frames])

    def close(self) -> None:
        self._input.close()
        self._output.close()
