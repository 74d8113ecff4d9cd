"""``Channel``: messages between two processes of a server, over a pair of sockets."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import cast

HEADER_BYTES = 4
MAX_MESSAGE_BYTES = 1 << 30


class Channel(asyncio.Protocol):
    """Messages in the order in which they were sent; those that cannot be sent at once wait in memory.

    Args:
        receive: called with each message.
        on_lost: called once, when the other end or this one is closed.
    """

    def __init__(self, receive: Callable[[bytes], None], on_lost: Callable[[], None]) -> None:
        self._receive = receive
        self._on_lost = on_lost
        self._transport: asyncio.Transport | None = None
        self._received = bytearray()

    @classmethod
    async def over(cls, sock: socket.socket, receive: Callable[[bytes], None], on_lost: Callable[[], None]) -> Channel:
        """Make the channel over a socket, whose owner it then is."""
        loop = asyncio.get_running_loop()
        _, channel = await loop.create_unix_connection(lambda: cls(receive, on_lost), sock=sock)
        return channel

    def send(self, message: bytes) -> None:
        """Send a message; one behind the end is dropped.

        Raises:
            ValueError: it is too long.
        """
        if len(message) > MAX_MESSAGE_BYTES:
            raise ValueError(f"it has {len(message):,} bytes, and may have {MAX_MESSAGE_BYTES:,}")
        if self._transport is not None:
            self._transport.write(len(message).to_bytes(HEADER_BYTES) + message)

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    # -- for asyncio --------------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._received += data
        while len(self._received) >= HEADER_BYTES:
            end = HEADER_BYTES + int.from_bytes(self._received[:HEADER_BYTES])
            if len(self._received) < end:
                return
            message = bytes(self._received[HEADER_BYTES:end])
            del self._received[:end]
            self._receive(message)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._on_lost()


def receive_blocking(sock: socket.socket, timeout_s: float) -> bytes | None:
    """Receive one message before there is a channel; None if the other end is closed.

    Raises:
        TimeoutError: none came in time.
    """
    sock.settimeout(timeout_s)
    header = _receive_exactly(sock, HEADER_BYTES)
    return None if header is None else _receive_exactly(sock, int.from_bytes(header))


def _receive_exactly(sock: socket.socket, num_bytes: int) -> bytes | None:
    data = bytearray()
    while len(data) < num_bytes:
        try:
            more = sock.recv(num_bytes - len(data))
        except ConnectionError:
            return None
        if not more:
            return None
        data += more
    return bytes(data)
