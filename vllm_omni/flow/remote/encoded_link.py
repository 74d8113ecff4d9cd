"""``EncodedLink``: a link whose messages leave the process as bytes, whatever carries them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from vllm_omni.complaints import Complaints
from vllm_omni.errors import LinkError
from vllm_omni.flow.graph.transfer import ENTRY
from vllm_omni.flow.remote.messages import NOT_VALID, MessageCodec, PayloadCodec, Unreadable
from vllm_omni.flow.run.frame import EndReason, Frame
from vllm_omni.flow.run.link import InProcessLink, Message

logger = logging.getLogger(__name__)

MAX_MESSAGE_BYTES = 16 << 20  # large tensors travel by the relay
MAX_TOGETHER = 64  # our messages in one array


class Outbox:
    """The way to another process, which keeps messages in order.

    The first message of an iteration of the event loop is sent at once; further ones are sent together at its end, or
    when there are ``MAX_TOGETHER``: sending costs as much as making and encoding several messages.

    Args:
        send: called with an array of msgpack, the messages.
        max_bytes: of messages that are sent together.
    """

    def __init__(self, send: Callable[[bytes], None], max_bytes: int = MAX_MESSAGE_BYTES) -> None:
        self._send = send
        self._max_bytes = max_bytes
        self._waiting: list[bytes] | None = None  # encoded; None before the first message of an iteration
        self._num_bytes = 0  # of them

    def put(self, data: bytes) -> None:
        """Send an encoded message, on the event loop."""
        if self._waiting is None:
            self._waiting = []
            asyncio.get_running_loop().call_soon(self._flush)
            self._send_now([data])
            return
        self._waiting.append(data)
        self._num_bytes += len(data)
        if len(self._waiting) == MAX_TOGETHER or self._num_bytes >= self._max_bytes:
            self._send_now(self._waiting)
            self._waiting = []

    def _flush(self) -> None:
        waiting, self._waiting = self._waiting, None
        if waiting:
            self._send_now(waiting)

    def _send_now(self, messages: list[bytes]) -> None:
        self._num_bytes = 0
        count = len(messages)
        header = bytes((0x90 | count,)) if count < 16 else b"\xdc" + count.to_bytes(2, "big")  # of a msgpack array
        self._send(header + b"".join(messages))


class EncodedLink(InProcessLink):
    """A link between processes: calls receivers that are bound here, and sends to the others as arrays of msgpack.

    A message that cannot be decoded fails its call. Where its call cannot be read either, what arrives is counted and
    dropped with a warning.

    Args:
        find_outbox: the way to the process of a message's target; raises ``LinkError`` if there is none.
        is_here: whether a message is for the receiver of its target that is bound here, and not for that of another
            process, which serves the target for other calls; None: it always is.
        payloads: encodes payloads and contexts, the same in all processes; None: they are msgpack types.
        max_message_bytes: of one message, the same in all processes.

    Attributes:
        num_dropped: what arrived here for no call that is known.
    """

    def __init__(
        self,
        find_outbox: Callable[[Message], Outbox],
        payloads: PayloadCodec | None = None,
        *,
        is_here: Callable[[Message], bool] | None = None,
        max_message_bytes: int = MAX_MESSAGE_BYTES,
    ) -> None:
        super().__init__()
        self.max_message_bytes = max_message_bytes
        self.num_dropped = 0
        self._find_outbox, self._is_here = find_outbox, is_here
        self._codec = MessageCodec(payloads)
        self._complaints = Complaints(logger)

    def send(self, message: Message) -> None:
        """Send a message.

        Raises:
            LinkError: its target has no process, or the message is too long or cannot be encoded.
        """
        if message.target in self._receivers and (self._is_here is None or self._is_here(message)):
            super().send(message)
            return
        try:
            data = self._codec.encode(message)
            if len(data) > self.max_message_bytes:
                raise ValueError(
                    f"it has {len(data):,} bytes, and may have {self.max_message_bytes:,} (max_message_bytes of the "
                    "link); a stage publishes large tensors through the relay, and sends references"
                )
        except (TypeError, ValueError, OverflowError, RecursionError) as exc:
            raise LinkError(f"a message for {message.target!r} cannot leave this process: {exc}") from exc
        self._find_outbox(message).put(data)

    def receive(self, data: bytes | memoryview) -> None:
        """Deliver what another process has sent; on the event loop."""
        try:
            messages = self._codec.decode(data)
        except NOT_VALID as exc:
            self.drop("dropped %d bytes that are not valid messages: %s", len(data), exc)
            return
        for message in messages:
            if isinstance(message, Unreadable):
                self._reject(message)
            else:
                self._dispatch(message)

    def drop(self, text: str, *args: object) -> None:
        """Count what is dropped, with a warning."""
        self.num_dropped += 1
        self._complaints.warn(text, *args)

    def report(self, call_id: str, node: str, error: Exception) -> None:
        """Report to the entry what ends a call."""
        try:
            self.send(Frame(call_id, node, ENTRY, 0, "", 0, 0, True, error, EndReason.ERROR))
        except LinkError as exc:
            logger.warning("call %r: the entry cannot be notified of an error: %s", call_id, exc)

    def _reject(self, message: Unreadable) -> None:
        """Fail the call of a message that is lost: it would wait for it until its deadline."""
        if message.call_id is None:
            self.drop("dropped a message that is not valid: %s", message.reason)
        else:
            error = LinkError(f"a message of call {message.call_id!r} cannot be read: {message.reason}")
            self.report(message.call_id, "", error)

    def _dispatch(self, message: Message) -> None:
        receive = self._receivers.get(message.target)
        if receive is None:
            self.drop("dropped a message for %r, which is not bound in this process", message.target)
            return
        try:
            receive(message)
        except Exception as exc:  # the remaining messages must be delivered
            logger.exception("call %r: delivering a message to %r failed", message.call_id, message.target)
            if message.target != ENTRY:
                self.report(message.call_id, message.target, exc)
