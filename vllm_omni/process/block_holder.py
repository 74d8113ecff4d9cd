"""``BlockHolder``: the server keeps blocks of memory that its engines share, by their file descriptors.

A block of GPU memory has no name in a file system: it exists while a process holds its descriptor or has mapped it. So
the server holds it, without a CUDA context: a replica that is restarted finds the block, and when the server ends,
however it does, the block ends with the last engine. Descriptors go through a UNIX socket in the run directory
(SCM_RIGHTS); pidfd_getfd would need the permission to trace.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

SOCKET = "blocks.sock"
ANSWER_TIMEOUT_S = 10.0
MAX_NAME = 1024  # bytes


class BlockHolder:
    """Holds descriptors for the processes of a run directory, in a thread, until it is closed."""

    def __init__(self, directory: Path) -> None:
        self._held: dict[bytes, int] = {}
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(directory / SOCKET))
        self._listener.listen()
        self._thread = threading.Thread(target=self._serve, name="block-holder", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Close all descriptors: blocks that no process has mapped are free then. A second call does nothing."""
        with contextlib.suppress(OSError):  # it was closed
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread
        self._thread.join()
        self._listener.close()
        while self._held:
            os.close(self._held.popitem()[1])

    def _serve(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:  # closed
                return
            with client, contextlib.suppress(OSError):  # a client that has died, or does not read
                client.settimeout(ANSWER_TIMEOUT_S)
                self._answer(client)

    def _answer(self, client: socket.socket) -> None:
        name, descriptors = _receive(client)
        if descriptors:
            if (replaced := self._held.pop(name, None)) is not None:
                os.close(replaced)
            self._held[name] = descriptors[0]
            client.sendall(b"held")
        elif (held := self._held.get(name)) is not None:
            socket.send_fds(client, [b"sent"], [held])


def hand_over(directory: Path, name: str, descriptor: int) -> None:
    """Let the server hold a descriptor, in place of another one with the name; the caller may close its own.

    Raises:
        OSError: the server has ended, or does not answer.
    """
    with _connected(directory) as client:
        socket.send_fds(client, [name.encode()], [descriptor])
        if not client.recv(MAX_NAME):
            raise ConnectionResetError(f"{directory / SOCKET}: the server has not taken {name}")


def fetch(directory: Path, name: str) -> int:
    """Return a descriptor that the server holds; the caller closes it.

    Raises:
        KeyError: it holds none with that name.
        OSError: the server has ended, or does not answer.
    """
    with _connected(directory) as client:
        client.sendall(name.encode())
        _, descriptors = _receive(client)
        if not descriptors:
            raise KeyError(name)
        return descriptors[0]


def _receive(client: socket.socket) -> tuple[bytes, list[int]]:
    data, descriptors, *_ = socket.recv_fds(client, MAX_NAME, 1)
    for descriptor in descriptors:
        os.set_inheritable(descriptor, False)
    return data, descriptors


@contextlib.contextmanager
def _connected(directory: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX) as client:
        client.settimeout(ANSWER_TIMEOUT_S)
        client.connect(str(directory / SOCKET))
        yield client
