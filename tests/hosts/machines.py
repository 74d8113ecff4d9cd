"""Hosts for tests, on one machine: each with a network of its own, joined by a bridge, and with a /dev/shm, System V
IPC, processes and a directory of sockets of its own, so that nothing passes between them but over the network.

Where network namespaces cannot be made (``why_not``), hosts are processes of this machine with loopback addresses of
their own, and tests that cut a connection are skipped.
"""

import itertools
import os
import secrets
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import IO

from tests import zygote

END_TIMEOUT_S = 30.0
ENTER = 'mount -t tmpfs tmpfs /dev/shm && mount -t tmpfs tmpfs {directory} && {how} "$@"; exit $?'
_numbers = itertools.count(1)


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True, timeout=20)


@cache
def why_not() -> str:
    """Why this machine makes no network namespaces; empty: it does."""
    name = f"vo-try-{os.getpid()}"
    try:
        ip("netns", "add", name)
        unshare = ["unshare", "-m", "-i", "-p", "--fork", "--mount-proc", "mount", "-t", "tmpfs", "tmpfs", "/dev/shm"]
        subprocess.run(["ip", "netns", "exec", name, *unshare], check=True, capture_output=True, timeout=20)
        ip("link", "add", f"{name[:9]}a", "type", "veth", "peer", "name", f"{name[:9]}b")
        ip("link", "del", f"{name[:9]}a")
    except (OSError, subprocess.SubprocessError) as exc:
        return f"no network namespaces: {getattr(exc, 'stderr', None) or exc}"
    finally:
        with suppress(OSError, subprocess.SubprocessError):
            ip("netns", "del", name)
    return ""


class Host:
    """One host; see ``network``.

    Attributes:
        directory: of its own, which no other host sees.
    """

    def __init__(self, address: str, directory: Path, namespace: str, link: str, device: str) -> None:
        self.address = address
        self.directory = directory
        self._namespace, self._link, self._device = namespace, link, device
        self._processes: list[subprocess.Popen[bytes]] = []

    def start(self, command: list[str], log: Path, **variables: str) -> subprocess.Popen[bytes]:
        """Start a program on it; its children end with it."""
        output: IO[bytes]
        environ = os.environ | {"VLLM_OMNI_RUNTIME_DIR": str(self.directory), "TMPDIR": str(self.directory)} | variables
        if self._namespace:
            unshare = ["unshare", "-m", "-i", "-p", "--fork", "--mount-proc", "--kill-child"]
            inner = zygote.stand_in(command, environ)
            how = "exec" if inner != command else ""
            enter = ["sh", "-c", ENTER.format(directory=self.directory, how=how), "sh"]
            # UCX takes hosts of one kernel for one, and would use shared memory or the loopback device.
            environ |= {"UCX_TLS": "tcp", "UCX_NET_DEVICES": self._device}
            command = ["ip", "netns", "exec", self._namespace, *unshare, *enter, *inner]
        else:
            environ |= {"VLLM_OMNI_RELAY_HOST": self.address}
        with log.open("ab") as output:
            process = zygote.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environ)
        self._processes.append(process)
        return process

    def kill(self) -> None:
        """End all that runs on it, as a loss of power does."""
        for process in self._processes:
            process.kill()
            process.wait(END_TIMEOUT_S)
        self._processes.clear()

    def has_ended(self) -> bool:
        """Whether no program runs on it."""
        return not self.running()

    def running(self) -> list[subprocess.Popen[bytes]]:
        """Its programs that have not ended."""
        return [process for process in self._processes if process.poll() is None]

    def listening(self) -> list[tuple[str, int]]:
        """Addresses and ports of TCP (IPv4) at which its programs listen; those of this machine, without namespaces."""
        read = ["cat", "/proc/net/tcp"]
        enter = ["ip", "netns", "exec", self._namespace] if self._namespace else []
        table = subprocess.run([*enter, *read], check=True, capture_output=True, text=True, timeout=20).stdout
        local = [line.split()[1].split(":") for line in table.splitlines()[1:] if line.split()[3] == "0A"]
        return [(socket.inet_ntoa(bytes.fromhex(host)[::-1]), int(port, 16)) for host, port in local]

    def cut(self) -> None:
        """Let nothing pass between it and the others; connections are not closed."""
        ip("link", "set", self._link, "down")

    def mend(self) -> None:
        ip("link", "set", self._link, "up")

    def part(self, other: "Host") -> None:
        """Let nothing that it sends reach another host, until ``meet``; connections are not closed."""
        ip("-n", self._namespace, "route", "add", "blackhole", f"{other.address}/32")

    def meet(self, other: "Host") -> None:
        ip("-n", self._namespace, "route", "del", "blackhole", f"{other.address}/32")


def _unused_thirds() -> list[int]:
    """Numbers N for which 10.77.N.0/24 is no other test's network; a run that was killed leaves its own behind."""
    shown = "" if why_not() else subprocess.run(["ip", "-4", "addr"], capture_output=True, text=True, timeout=20).stdout
    return [number for number in range(1, 251) if f" 10.77.{number}.1/" not in shown]


class Network:
    """This process's host, and others.

    Attributes:
        address: of this process, for the others.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._name = f"vo{os.getpid() % 100_000}{next(_numbers)}"
        self._third = secrets.choice(_unused_thirds())
        self.address = f"10.77.{self._third}.1" if not why_not() else "127.0.1.1"
        self.hosts: list[Host] = []
        if not why_not():
            ip("link", "add", self._name, "type", "bridge")
            ip("addr", "add", f"{self.address}/24", "dev", self._name)
            ip("link", "set", self._name, "up")

    def add(self) -> Host:
        number = len(self.hosts) + 2
        directory = self._directory / f"h{number}"
        directory.mkdir()
        if why_not():
            self.hosts.append(Host(f"127.0.1.{number}", directory, "", "", ""))
            return self.hosts[-1]
        namespace, inner, outer = (f"{self._name}{kind}{number}" for kind in "nio")
        address = f"10.77.{self._third}.{number}"
        ip("netns", "add", namespace)
        self.hosts.append(Host(address, directory, namespace, outer, inner))  # ``close`` removes it from here on
        ip("link", "add", outer, "type", "veth", "peer", "name", inner, "netns", namespace)
        ip("link", "set", outer, "master", self._name, "up")
        for words in (["lo", "up"], [inner, "up"]):
            ip("-n", namespace, "link", "set", *words)
        ip("-n", namespace, "addr", "add", f"{address}/24", "dev", inner)
        return self.hosts[-1]

    def close(self) -> None:
        for host in self.hosts:
            host.kill()
        if not why_not():
            for host in self.hosts:
                ip("netns", "del", host._namespace)
            ip("link", "del", self._name)


@contextmanager
def network(directory: Path) -> Iterator[Network]:
    """A network with this process; ``directory``: with a short path, for the hosts' sockets."""
    made = Network(directory)
    try:
        yield made
    finally:
        made.close()
