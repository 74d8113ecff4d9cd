"""Strangers at a port: a program that makes as many half-open connections as it may, and what a test knows of it.

They come from several source addresses, since one has some 28,000 ports. Every second one sends the start of ZMQ's
greeting, and none says any more. A connection that the listener ends is made again, until the total is reached.
"""

import os
import resource
import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple, Self

GREETING = b"\xff\x00\x00\x00\x00\x00\x00\x00\x01\x7f"
SOURCES = 4
SPARE = 64  # descriptors of the program's own
DEADLINE_S = 60.0


class Strangers(NamedTuple):
    at_once: int
    total: int
    process: subprocess.Popen[str]
    deadline: float

    def is_making(self) -> bool:
        """Whether some connections are still to be made; then, those that were not ended stay open."""
        assert time.monotonic() < self.deadline, "the listener does not end those for which others come"
        assert self.process.stdout is not None
        return not select.select([self.process.stdout], [], [], 0)[0]


@contextmanager
def strangers(host: str, port: int, at_once: int, total: int = 0) -> Iterator[Strangers]:
    """Half-open connections to a port: ``at_once``, or as many as descriptors allow (printed); ``total`` in all.

    They are closed at the end of the ``with``. Within it, this process may have as many descriptors as it can.
    """
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    possible = min(at_once, limits[1] - SPARE)
    total = max(possible, total)
    print(f"{possible} half-open connections at once, {total} in all")
    command = [sys.executable, str(Path(__file__)), host, str(port), str(possible), str(total)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    resource.setrlimit(resource.RLIMIT_NOFILE, (limits[1], limits[1]))
    with subprocess.Popen(command, text=True, **pipes) as process:
        try:
            yield Strangers(possible, total, process, time.monotonic() + DEADLINE_S)
        finally:
            process.kill()
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def have_ended(connections: Iterable[socket.socket]) -> None:
    """Wait until the other side has ended each of them."""
    for one in connections:
        with suppress(ConnectionResetError):
            while one.recv(4096):
                pass


class Recorder:
    """Stands between one client and a listener, and keeps what the client sends."""

    def __init__(self, listener: tuple[str, int]) -> None:
        self._listener = listener
        self._port = socket.create_server(("127.0.0.1", 0))
        self.address: tuple[str, int] = self._port.getsockname()
        self.sent = bytearray()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._thread.join(DEADLINE_S)  # the client has ended the connection
        self._port.close()
        assert not self._thread.is_alive()

    def _run(self) -> None:
        client, _ = self._port.accept()
        with client, socket.create_connection(self._listener) as listener:
            while True:
                for one in select.select([client, listener], [], [])[0]:
                    if not (data := one.recv(1 << 16)):
                        return
                    if one is client:
                        self.sent += data
                    (listener if one is client else client).sendall(data)


def wait_for(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def count_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def main(host: str, port: int, at_once: int, total: int) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    open_ones: dict[int, socket.socket] = {}
    with select.epoll() as poll:

        def connect(number: int) -> None:
            one = socket.socket()
            one.setblocking(False)
            one.bind((f"127.0.0.{2 + number % SOURCES}", 0))
            one.connect_ex((host, port))
            open_ones[one.fileno()] = one
            poll.register(one, select.EPOLLOUT if number % 2 else select.EPOLLIN)

        num_made = 0
        while num_made < total:
            while len(open_ones) < at_once and num_made < total:
                connect(num_made)
                num_made += 1
            for descriptor, event in poll.poll():
                if event & (select.EPOLLHUP | select.EPOLLERR | select.EPOLLIN):
                    try:
                        has_ended = not open_ones[descriptor].recv(4096)
                    except OSError:
                        has_ended = True
                    if has_ended:
                        open_ones.pop(descriptor).close()
                elif event & select.EPOLLOUT:
                    open_ones[descriptor].send(GREETING)
                    poll.modify(descriptor, select.EPOLLIN)
    print(num_made, flush=True)
    sys.stdin.readline()


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
