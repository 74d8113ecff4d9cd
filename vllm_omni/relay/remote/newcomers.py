"""``Newcomers``: the connections of a listening ZMQ socket from which no message has come yet."""

from __future__ import annotations

import os
import resource
import socket
from typing import Any

# Whatever reaches the port can take a descriptor for each, until the deadline of its handshake; a process without free
# descriptors accepts no requests and starts no engines. Hosts that join are newcomers for milliseconds.
MAX_NEWCOMERS = 1024
SHARE = 4  # newcomers have at most one of so many descriptors that the process may have
MAX_ENDED = 64  # that are kept because the event of their start came too late

Ends = tuple[Any, Any]  # the addresses of a connection, here and there: no two have the same


class Newcomers:
    """Keeps them in the order in which they came, and ends the oldest beyond a limit.

    ZMQ has no such limit, and names a connection by its descriptor alone, in its events and in each message. When these
    are read, it may be that of another connection, or of another file: so what counts is the addresses that it has
    then, and a connection is ended only where they are still the same. A message may be read before the event of its
    connection.

    Args:
        port: at which the socket listens.
        limit: how many connections may be newcomers; None: by what the process may have.
    """

    def __init__(self, port: int, limit: int | None = None) -> None:
        self._port = port
        self._limit = limit or min(MAX_NEWCOMERS, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // SHARE)
        self._connections: dict[int, Ends] = {}  # by descriptor
        self._waiting: dict[Ends, int] = {}  # -> descriptor
        self._heard: dict[Ends, bytes] = {}  # -> the connection's name in ZMQ
        self._names: set[bytes] = set()  # of those that were heard
        self._nothing = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        self._copy = os.dup(self._nothing)  # kept, so that connections can be ended while no descriptor is free

    def __len__(self) -> int:
        return len(self._waiting)

    def accepted(self, descriptor: int) -> None:
        """A connection was made."""
        if (ends := self._ends(descriptor)) is None:
            return  # and has ended
        self._connections[descriptor] = ends
        if ends not in self._heard:
            self._waiting[ends] = descriptor
        while len(self._waiting) > self._limit:
            oldest = next(iter(self._waiting))
            self._ends(self._waiting.pop(oldest), end=oldest)

    def knows(self, name: bytes) -> bool:
        """Whether a message of this connection was heard before."""
        return name in self._names

    def heard(self, name: bytes, descriptor: int) -> None:
        """A first message came over a connection."""
        if (ends := self._ends(descriptor)) is not None:
            self._waiting.pop(ends, None)
            self._heard[ends] = name
            self._names.add(name)
            if len(self._heard) > len(self._connections) + MAX_ENDED:
                self._forget_ended()

    def closed(self, descriptor: int) -> bool:
        """A connection has ended; returns whether it was a newcomer, or had been ended as one."""
        ends = self._connections.pop(descriptor, None)
        if ends is None:
            return False
        self._waiting.pop(ends, None)
        name = self._heard.pop(ends, None)
        if name is not None:
            self._names.discard(name)
        return name is None

    def _forget_ended(self) -> None:
        """Forget connections that had ended before the event of their start was read: no other event names them."""
        alive = set(self._connections.values())
        self._heard = {ends: name for ends, name in self._heard.items() if ends in alive}
        self._names = set(self._heard.values())

    def close(self) -> None:
        """Close its own two descriptors, and no connection."""
        os.close(self._copy)
        os.close(self._nothing)

    def _ends(self, descriptor: int, *, end: Ends | None = None) -> Ends | None:
        """The addresses of a descriptor that is a connection to the port. It is ended if they are ``end``."""
        try:
            os.dup2(descriptor, self._copy, inheritable=False)  # stays this file if the descriptor is closed
            connection = socket.socket(fileno=self._copy)
        except OSError:  # it is closed, or another kind of file
            return None
        try:
            ends = connection.getsockname(), connection.getpeername()
            if end is not None and ends == end:
                connection.shutdown(socket.SHUT_RDWR)
        except OSError:  # it is not connected any longer
            return None
        finally:
            is_tcp = connection.family in (socket.AF_INET, socket.AF_INET6)
            connection.detach()
            os.dup2(self._nothing, self._copy, inheritable=False)
        return ends if is_tcp and ends[0][1] == self._port else None
