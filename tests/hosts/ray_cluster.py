"""A Ray cluster of two machines: this one with the head, and another one that is a network namespace.

``python -m tests.hosts.ray_cluster ADDRESS`` prints as JSON what a cluster has, for each line that it reads: a process
of its own, because Ray's client keeps threads, and no driver, for each of which Ray starts workers.
"""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import psutil

from tests.hosts.deployments import wait_for
from tests.hosts.machines import Host, network

VARIABLES = {
    "RAY_AUTH_MODE": "disabled",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_memory_monitor_refresh_ms": "0",  # else Ray ends programs when other tests fill this machine
    "RAY_prestart_worker_first_driver": "0",  # actors have workers of their own
}
START = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--disable-usage-stats"]
SIZE = ["--object-store-memory=80000000", "--num-cpus=2"]
PORT = 6399
OURS = re.compile(r"vllm_omni|HostActor|multiprocessing|VLLM|EngineCore")
END_TIMEOUT_S = 30.0
POLL_S = 0.1


class Cluster:
    """Nodes "box-a", which is this machine, and "box-b"."""

    def __init__(
        self,
        address: str,
        directory: Path,
        head: "subprocess.Popen[bytes]",
        host: Host,
        other: "subprocess.Popen[bytes]",
    ) -> None:
        self.address, self.directory = address, directory
        self._head, self._host, self._other = head, host, other
        command = [sys.executable, "-m", "tests.hosts.ray_cluster", address]
        self._reader = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def close(self) -> None:
        """Stop reading."""
        self._reader.kill()
        self._reader.communicate()

    def state(self) -> dict[str, Any]:
        """Nodes, actors and placement groups that have not ended."""
        assert self._reader.stdin is not None and self._reader.stdout is not None
        self._reader.stdin.write("\n")
        self._reader.stdin.flush()
        line = self._reader.stdout.readline()
        assert line, f"its reader has ended with {self._reader.wait()}"
        state: dict[str, Any] = json.loads(line)
        return state

    def head_server(self) -> psutil.Process:
        """The process of Ray's that knows the cluster, the GCS."""
        (found,) = [
            one for one in psutil.Process(self._head.pid).children(recursive=True) if "gcs_server" in one.name()
        ]
        return found

    def programs(self) -> list[psutil.Process]:
        """Those of a server on box-b, actors included."""
        found = []
        for one in psutil.Process(self._other.pid).children(recursive=True):
            try:
                if OURS.search(" ".join(one.cmdline())):
                    found.append(one)
            except psutil.Error:  # it has just ended
                continue
        return found

    def files(self) -> list[str]:
        """What a server has in box-b's shared memory."""
        return self._named("dev/shm")

    def directories(self) -> list[str]:
        """Those of servers on box-b. Of a killed one it stays if Ray has killed all that would remove it."""
        return self._named(str(self._host.directory).lstrip("/"))

    def _named(self, place: str) -> list[str]:
        inner = psutil.Process(self._other.pid).children(recursive=True)[-1]
        return sorted(path.name for path in Path(f"/proc/{inner.pid}/root", place).glob("*vllm-omni-*"))

    def left(self) -> dict[str, Any]:
        """What is left of servers: programs and files on box-b, actors and groups."""
        found: dict[str, Any] = {"programs": [one.cmdline() for one in self.programs()], "files": self.files()}
        if not any(found.values()):
            state = self.state()
            found = {name: state[name] for name in ("actors", "groups")}
        return {name: those for name, those in found.items() if those}

    def wait_until_clean(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while left := self.left():
            assert time.monotonic() < deadline, f"left in the cluster after {timeout_s:g} s: {left}"
            time.sleep(POLL_S)


@contextmanager
def cluster(directory: Path, hosts_dir: Path, *, port: int = PORT) -> Iterator[Cluster]:
    """Start it; ends with everything that it runs.

    Args:
        directory: for logs and Ray's files; a short path, for its sockets.
        hosts_dir: likewise.
        port: of the head, at all addresses of this machine: no other cluster on it has the same.
    """
    for name in ("head.log", "box-b.log"):
        (directory / name).touch()
    with network(hosts_dir) as net:
        where = f"{net.address}:{port}"
        flags = ["--head", f"--node-ip-address={net.address}", f"--port={port}", "--node-name=box-a"]
        flags += ["--include-dashboard=false", f"--temp-dir={directory}"]
        with (directory / "head.log").open("wb") as log:
            head = subprocess.Popen(
                [*START, *SIZE, *flags],
                stdout=log,
                stderr=subprocess.STDOUT,
                env=os.environ | VARIABLES,
                start_new_session=True,
            )
        try:
            host = net.add()
            flags = [f"--address={where}", f"--node-ip-address={host.address}", "--node-name=box-b"]
            wait_for("Ray's head", lambda: b"Ray runtime started" in (directory / "head.log").read_bytes(), 60.0)
            other = host.start([*START, *SIZE, *flags], directory / "box-b.log", **VARIABLES)
            made = Cluster(where, directory, head, host, other)
            with closing(made):
                wait_for("two nodes", lambda: len(made.state()["nodes"]) == 2, 60.0)
                yield made
        except Exception:
            print(*((directory / name).read_text()[-2000:] for name in ("head.log", "box-b.log")), sep="\n")
            raise
        finally:
            for one in net.hosts:
                one.kill()  # at SIGTERM, Ray's programs take half a minute
            left = psutil.Process(head.pid).children(recursive=True)
            os.killpg(head.pid, signal.SIGKILL)
            for one in left:
                if one.is_running():
                    one.kill()
            psutil.wait_procs(left, END_TIMEOUT_S)
            head.wait(END_TIMEOUT_S)


def main(address: str) -> None:
    from ray._private.state import GlobalState
    from ray._raylet import GcsClientOptions

    state = GlobalState()
    state._initialize_global_state(GcsClientOptions.create(address, None, True, False))
    for _ in sys.stdin:
        groups = [one for one in state.placement_group_table().values() if one["state"] != "REMOVED"]
        alive = [one for one in state.actor_table(None).values() if one["State"] != "DEAD"]
        nodes = {one["NodeName"]: one["NodeID"] for one in state.node_table() if one["Alive"]}
        where = [one["Address"]["NodeID"] for one in alive]
        placed = [name for name, node in nodes.items() if node in where]
        print(json.dumps({"nodes": nodes, "actors": placed, "groups": [one["state"] for one in groups]}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
