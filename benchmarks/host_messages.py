"""What a small message costs between two hosts: the part of ``benchmarks/hosts.py`` without engines.

Baseline: plain ZMQ, with and without CURVE.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.host_ways import RAY, TIMEOUT_S, WAYS
from tests.hosts.machines import network
from tests.hosts.ray_cluster import VARIABLES, cluster

RAY_PORT = 6401  # tests that run beside the benchmark have another one


class Figures(NamedTuple):
    p50_us: float
    p99_us: float
    per_s: float  # there and back
    per_s_range: tuple[float, float]  # of the rounds
    p50_us_range: tuple[float, float]
    cpu_us: float  # of the near process, for each of them


class Near:
    """A near program that has reached its far one."""

    def __init__(self, way: str, arguments: Sequence[str], **variables: str) -> None:
        command = [sys.executable, "-m", "benchmarks.host_ways", "near", way, *arguments]
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self.process = subprocess.Popen(command, env=os.environ | variables, **pipes)
        self.way = way
        self.rounds: list[tuple[list[float], float, float]] = []

    def read(self) -> Any:
        assert self.process.stdout is not None
        for line in self.process.stdout:  # a library may print lines of its own
            if line.startswith("["):
                return json.loads(line)
        raise RuntimeError(f"a program of the benchmark ended with code {self.process.wait(TIMEOUT_S)}")

    def run(self, num_trips: int, seconds: float) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps([num_trips, seconds]) + "\n")
        self.process.stdin.flush()
        trips, rate, cpu_s = self.read()
        self.rounds.append((trips, rate, cpu_s))
        print(f"{self.way}: p50 {1e6 * statistics.median(trips):.0f} us, {rate:,.0f}/s", file=sys.stderr, flush=True)

    def figures(self) -> Figures:
        medians = [1e6 * statistics.median(trips) for trips, _, _ in self.rounds]
        trips = sorted(1e6 * one for trips, _, _ in self.rounds for one in trips)
        rates = [rate for _, rate, _ in self.rounds]
        return Figures(
            round(statistics.median(medians), 1),
            round(trips[int(0.99 * (len(trips) - 1))], 1),
            round(statistics.median(rates)),
            (round(min(rates)), round(max(rates))),
            (round(min(medians), 1), round(max(medians), 1)),
            round(1e6 * statistics.median(cpu_s for _, _, cpu_s in self.rounds), 1),
        )

    def close(self) -> None:
        self.process.kill()
        self.process.communicate(timeout=TIMEOUT_S)


def measure_messages(num_rounds: int, num_trips: int, seconds: float, *, with_ray: bool) -> dict[str, Figures]:
    """Figures of each way; the ways take turns."""
    with tempfile.TemporaryDirectory(prefix="vo") as name, ExitStack() as stack:
        directory = Path(name)
        near: dict[str, Near] = {}

        def start(way: str, *arguments: str, **variables: str) -> None:
            near[way] = Near(way, arguments, **variables)
            stack.callback(near[way].close)

        if with_ray:
            (directory / "r").mkdir()
            (directory / "h").mkdir()
            nodes = stack.enter_context(cluster(directory / "r", directory / "h", port=RAY_PORT))
            for way in RAY:
                start(way, nodes.address, "-", "-", **VARIABLES)
        net = stack.enter_context(network(directory))
        host = net.add()
        stack.callback(host.kill)
        for way in [one for one in WAYS if one not in RAY]:
            own = directory / way
            own.mkdir()
            start(way, net.address, host.address, str(own))
            far = [sys.executable, "-m", "benchmarks.host_ways", "far", way, net.address, host.address]
            if way == "local":
                program = subprocess.Popen([*far, str(own)])
                stack.callback(program.wait, TIMEOUT_S)
                stack.callback(program.kill)
            else:
                host.start([*far, str(host.directory)], directory / f"{way}.log")
        for one in near.values():
            one.read()
        for number in range(num_rounds):
            for one in list(near.values())[:: -1 if number % 2 else 1]:
                one.run(num_trips, seconds)
        return {way: near[way].figures() for way in WAYS if way in near}
