"""What it costs to place stages on several hosts: Qwen2.5-Omni with each stage on a host of its own.

    python -m benchmarks.hosts [--runs 5] [--parts pipeline messages replicas starts recovery idle] [--short]

Hosts are network namespaces of this machine (``tests/hosts/machines.py``), each with a network, a /dev/shm and
processes of its own: so what is measured is the work of a deployment on several hosts, on the same cores, and not a
network, which these hosts have without latency. Machines that make no namespaces measure nothing.

Baseline: one machine with all stages; for messages, plain ZMQ.

* ``pipeline``: speech over HTTP, 16 tokens of text and 100 codes: the first audio and the completion of one request,
  and requests per second of sixteen at once. Baseline: the same server with all stages on one machine. Both are alive,
  and one waits while the other works; texts and lengths of sounds are compared.
* ``messages``: 256 bytes there and back (``benchmarks/host_messages.py``): from a front end to an engine core on a
  host, and frames of two controllers. Baselines: vLLM's sockets on one machine; between the same hosts plain ZMQ, with
  and without CURVE, a call of a Ray actor and Ray's compiled graph.
* ``replicas``: two talkers, each on a host: requests per second of sixteen at once, and the front end's CPU time for
  each (``benchmarks/host_replicas.py``). Baseline: their controllers in the front end.
* ``starts``: from the commands to the first ``/health`` that says yes. Baseline: one machine.
* ``recovery``: from a fault until ``/health`` reports it, and until a request is answered again. Baseline: an engine
  that is killed on one machine.
* ``idle``: CPU time of each process while no request runs. Baseline: one machine.

Models: random parameters, 34 and 33 million for thinker and talker (``benchmarks/qwen_omni.py``), float32, without
compilation. Ray is measured where it is installed. Medians, and in parentheses the least and the largest.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")  # read at import, also by the servers

import httpx
import psutil

from benchmarks.host_deployments import (
    HOSTS,
    ONE,
    RAY,
    Answer,
    Deployment,
    ask_at_once,
    label_of,
    processes_of,
    server_of,
    speech_of,
    started,
)
from benchmarks.host_messages import RAY_PORT, Figures, measure_messages
from benchmarks.host_replicas import cpu_s, measure_replicas
from benchmarks.host_ways import WAYS
from benchmarks.qwen_omni import SHAPE
from benchmarks.serve import Server
from tests.hosts import machines
from tests.hosts.ray_cluster import Cluster, cluster
from vllm_omni.testing.qwen2_5_omni import build

PARTS = ("pipeline", "messages", "replicas", "starts", "recovery", "idle")
NUM_AT_ONCE = 16
SETTLE_S = 2.0  # after the last request, before idle processes are measured
NOTICED_S, RECOVERED_S, POLL_S = 30.0, 180.0, 0.02
FIRST_AUDIO, COMPLETION, RATE = "first audio, s", "completion, s", "requests/s"


# -- the parts ---------------------------------------------------------------------------------------------------------

Spread = dict[str, float]
Values = dict[str, dict[str, list[float]]]  # by what, and by deployment


def spread(values: Sequence[float]) -> Spread:
    return {"median": statistics.median(values), "least": min(values), "largest": max(values)}


def spreads(values: Values) -> dict[str, dict[str, Spread]]:
    return {what: {name: spread(ones) for name, ones in of.items() if ones} for what, of in values.items()}


def measure_pipeline(servers: Mapping[str, Server], options: argparse.Namespace) -> Values:
    found: Values = {what: {name: [] for name in servers} for what in (FIRST_AUDIO, COMPLETION, RATE)}
    for run in range(-1, options.runs):  # the first warms up
        answers: dict[str, list[Answer]] = {name: [] for name in servers}
        for number in range(options.requests):
            body = speech_of(100 * run + number, options.tokens, options.codes)
            for name, server in list(servers.items())[:: 1 if (run + number) % 2 else -1]:
                answers[name] += ask_at_once(server, [body])
                if run >= 0:
                    found[FIRST_AUDIO][name].append(answers[name][-1].first_audio_s)
                    found[COMPLETION][name].append(answers[name][-1].completion_s)
        bodies = [speech_of(100 * run + number, options.tokens, options.codes) for number in range(options.at_once)]
        for name, server in list(servers.items())[:: 1 if run % 2 else -1]:
            started_at = time.perf_counter()
            answers[name] += ask_at_once(server, bodies)
            if run >= 0:
                found[RATE][name].append(len(bodies) / (time.perf_counter() - started_at))
        one, other = ([(answer.text, answer.num_bytes) for answer in answers[name]] for name in (ONE, HOSTS))
        assert one == other, "the two sides do not answer alike"
        say(f"pipeline: {found}")
    return found


def measure_idle(sides: Mapping[str, Deployment | Server], options: argparse.Namespace) -> Values:
    """Milliseconds of CPU per second, by process; both sides at once."""
    processes = {name: processes_of(one) for name, one in sides.items()}
    found: Values = {}
    time.sleep(SETTLE_S)
    for _ in range(options.runs):
        before = {name: {what: cpu_s(one) for what, one in of.items()} for name, of in processes.items()}
        started_at = time.perf_counter()
        time.sleep(options.seconds)
        seconds = time.perf_counter() - started_at
        for name, of in processes.items():
            for what, one in of.items():
                values = found.setdefault(what, {name: [] for name in sides})[name]
                values.append(1e3 * (cpu_s(one) - before[name][what]) / seconds)
    return found


class Starts:
    """Starts servers, and keeps how long each start took."""

    def __init__(self, model: Path, directory: Path, ray: Cluster | None = None) -> None:
        self.model, self.directory, self.ray = model, directory, ray
        self.ready_s: dict[str, list[float]] = {kind: [] for kind in (ONE, HOSTS, RAY)}

    @contextmanager
    def start(self, kind: str) -> Iterator[Deployment | Server]:
        with started(kind, self.model, self.directory, self.ray) as one:
            self.ready_s[kind].append(server_of(one).ready_s)
            say(f"{kind}: ready after {self.ready_s[kind][-1]:.1f} s")
            yield one

    def repeat(self, num_runs: int) -> None:
        """Start each kind until it was started as often as that; they take turns."""
        kinds = [kind for kind in self.ready_s if kind != RAY or self.ray is not None]
        while missing := [kind for kind in kinds if len(self.ready_s[kind]) < num_runs]:
            for kind in missing[:: 1 if len(self.ready_s[missing[0]]) % 2 else -1]:
                with self.start(kind):
                    pass


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def is_healthy(server: Server) -> bool:
    try:
        return httpx.get(f"{server.url}/health", timeout=10).status_code == 200
    except httpx.TransportError:
        return False


def wait_until(what: str, is_true: Callable[[], bool], timeout_s: float) -> None:
    deadline = time.perf_counter() + timeout_s
    while not is_true():
        if time.perf_counter() > deadline:
            raise TimeoutError(f"not within {timeout_s:g} s: {what}")
        time.sleep(POLL_S)


def does_answer(server: Server) -> bool:
    try:
        ask_at_once(server, [speech_of(0, 8, 12)])
    except (httpx.HTTPStatusError, httpx.TransportError):
        return False
    return True


Fault = Callable[[], None]


def measure_fault(server_now: Callable[[], Server], fault: Fault, mend: Fault) -> dict[str, float]:
    """Seconds from the fault until it is noticed and until a request is answered, and from ``mend``, which follows the
    former, until the latter."""
    wait_until("a request is answered", lambda: does_answer(server_now()), RECOVERED_S)
    started_at = time.perf_counter()
    fault()
    wait_until("the fault is noticed", lambda: not is_healthy(server_now()), NOTICED_S)
    noticed_at = time.perf_counter()
    mend()
    wait_until("a request is answered", lambda: does_answer(server_now()), RECOVERED_S)
    answered_at = time.perf_counter()
    return {
        "noticed after, s": noticed_at - started_at,
        "answers after, s": answered_at - started_at,
        "from mending on, s": answered_at - noticed_at,
    }


def kill_engine(processes: Callable[[], Sequence[psutil.Process]], stage: str) -> Fault:
    def kill() -> None:
        (engine,) = [one for one in processes() if label_of(one) == f"engine {stage}"]
        engine.send_signal(signal.SIGKILL)

    return kill


def nothing() -> None:
    """What mends itself."""


def faults_of(local: Server, hosts: Deployment) -> dict[str, tuple[Callable[[], Server], Fault, Fault]]:
    """What happens, and how it is mended."""
    talker = hosts.hosts["talker"]

    def join() -> None:
        hosts.join("talker")

    def start_front_end() -> None:
        hosts.start_front_end()

    return {
        "an engine is killed, one machine": (
            lambda: local,
            kill_engine(lambda: local.process.children(recursive=True), "talker"),
            nothing,
        ),
        "an engine is killed, on its host": (
            lambda: hosts.server,
            kill_engine(lambda: hosts.processes("talker"), "talker"),
            nothing,
        ),
        "a host is killed, and started again at once": (lambda: hosts.server, talker.kill, join),
        "a host is cut off until it is noticed": (lambda: hosts.server, talker.cut, talker.mend),
        "the front end is killed, and started again at once": (
            lambda: hosts.server,
            hosts.kill_front_end,
            start_front_end,
        ),
    }


def faults_by_ray(server: Server, ray: Cluster) -> dict[str, tuple[Callable[[], Server], Fault, Fault]]:
    def kill_actor() -> None:
        (actor,) = [one for one in ray.programs() if "HostActor" in " ".join(one.cmdline())]
        actor.kill()

    return {"Ray's actor of a host is killed": (lambda: server, kill_actor, nothing)}


def measure_recovery(
    faults: Mapping[str, tuple[Callable[[], Server], Fault, Fault]], options: argparse.Namespace
) -> dict[str, Values]:
    found: dict[str, Values] = {}
    for _ in range(options.runs):
        for name, fault in faults.items():
            if not options.faults or name in options.faults:
                take(found, name, measure_fault(*fault))
    return found


def take(found: dict[str, Values], name: str, measured: dict[str, float]) -> None:
    say(f"{name}: {measured}")
    for what, seconds in measured.items():
        found.setdefault(name, {}).setdefault(what, {"": []})[""].append(seconds)


# -- what is said ------------------------------------------------------------------------------------------------------


def cell(one: Spread, digits: int) -> str:
    return "{median:.{d}f} ({least:.{d}f}-{largest:.{d}f})".format(**one, d=digits)


def print_sides(title: str, figures: Mapping[str, Mapping[str, Spread]], digits: int = 2) -> None:
    names = list(dict.fromkeys(name for of in figures.values() for name in of))
    print(f"\n| {title} | " + " | ".join(names) + " |\n|---|" + "---|" * len(names))
    for what, of in figures.items():
        print(f"| {what} | " + " | ".join(cell(of[name], digits) if name in of else "" for name in names) + " |")


def print_messages(figures: Mapping[str, Figures]) -> None:
    print("\n| 256 bytes there and back | p50, us | p99, us | per second, 64 on their way | CPU of the near side, us |")
    print("|---|---|---|---|---|")
    for way, one in figures.items():
        p50 = f"{one.p50_us:.0f} ({one.p50_us_range[0]:.0f}-{one.p50_us_range[1]:.0f})"
        rate = f"{one.per_s:,.0f} ({one.per_s_range[0]:,.0f}-{one.per_s_range[1]:,.0f})"
        print(f"| {WAYS[way]} | {p50} | {one.p99_us:.0f} | {rate} | {one.cpu_us:.0f} |")


class Goal(NamedTuple):
    what: str
    is_most: bool  # else the least
    goal: float
    got: float

    @property
    def is_reached(self) -> bool:
        return self.got <= self.goal if self.is_most else self.got >= self.goal


def goals_of(found: Mapping[str, Any]) -> list[Goal]:
    goals = []
    if "pipeline" in found:
        ratios = {what: of[HOSTS]["median"] / of[ONE]["median"] for what, of in found["pipeline"].items()}
        goals += [
            Goal("first audio of one request, times one machine's", True, 1.15, ratios[FIRST_AUDIO]),
            Goal("completion of one request, times one machine's", True, 1.15, ratios[COMPLETION]),
            Goal("requests per second of many, times one machine's", False, 0.95, ratios[RATE]),
        ]
    if RAY in (starts := found.get("starts", {}).get("ready after, s", {})):
        more_s = starts[RAY]["median"] - starts[ONE]["median"]
        goals.append(Goal("start by Ray, seconds more than one machine's", True, 15.0, more_s))
    return goals


def print_tables(found: Mapping[str, Any]) -> None:
    if "pipeline" in found:
        print_sides("speech", found["pipeline"])
    if "messages" in found:
        print_messages(found["messages"])
    if "replicas" in found:
        print_sides("speech, two talkers", found["replicas"])
    if "starts" in found:
        print_sides("start", found["starts"], 1)
    if "recovery" in found:
        print("\n| fault | noticed after, s | answers after, s | of which from mending on, s |\n|---|---|---|---|")
        for name, of in found["recovery"].items():
            print(f"| {name} | " + " | ".join(cell(one[""], 2) for one in of.values()) + " |")
    if "idle" in found:
        print_sides("idle, ms of CPU a second", found["idle"], 1)
    print("\n| goal | at least / at most | measured | |\n|---|---|---|---|")
    for one in goals_of(found):
        word = "at most" if one.is_most else "at least"
        said = "reached" if one.is_reached else "MISSED"
        print(f"| {one.what} | {word} {one.goal:g} | {one.got:.2f} | {said} |")


# -- main --------------------------------------------------------------------------------------------------------------


def measure(parts: Sequence[str], directory: Path, *, with_ray: bool, options: argparse.Namespace) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if "messages" in parts:
        rounds = options.runs, options.trips, options.seconds / 3
        found["messages"] = measure_messages(*rounds, with_ray=with_ray)
    starts = Starts(build(directory / "model", shape=None if options.short else SHAPE), directory)
    if {"pipeline", "idle", "recovery"} & set(parts):
        with starts.start(ONE) as local, starts.start(HOSTS) as hosts:
            assert isinstance(local, Server) and isinstance(hosts, Deployment)
            servers = {ONE: local, HOSTS: hosts.server}
            if "pipeline" in parts:
                found["pipeline"] = spreads(measure_pipeline(servers, options))
            if "idle" in parts:
                for server in servers.values():
                    ask_at_once(server, [speech_of(0, 8, 12)])
                found["idle"] = spreads(measure_idle({ONE: local, HOSTS: hosts}, options))
                say(f"idle: {found['idle']}")
            if "recovery" in parts:
                recovery = measure_recovery(faults_of(local, hosts), options)
    if "replicas" in parts:
        sizes = options.runs, options.at_once, options.tokens, options.codes
        found["replicas"] = spreads(measure_replicas(starts.model, directory, *sizes))
        say(f"replicas: {found['replicas']}")
    with ExitStack() as stack:
        if with_ray and {"starts", "recovery"} & set(parts):
            for name in "rh":
                (directory / name).mkdir()
            starts.ray = stack.enter_context(cluster(directory / "r", directory / "h", port=RAY_PORT))
            if "recovery" in parts:
                with starts.start(RAY) as placed:
                    recovery |= measure_recovery(faults_by_ray(server_of(placed), starts.ray), options)
        if "starts" in parts:
            starts.repeat(options.runs)
            found["starts"] = spreads({"ready after, s": starts.ready_s})
    if "recovery" in parts:
        found["recovery"] = {name: spreads(of) for name, of in recovery.items()}
    return found


def end(*_: object) -> None:
    """End with everything that was started; a second signal does not interrupt that."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sys.exit("ended by SIGTERM")


def main(arguments: Sequence[str] | None = None) -> None:
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")  # of the servers; not at import: tests import this module
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5, help="of each measurement")
    parser.add_argument("--codes", type=int, default=100, help="of each request's speech")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--short", action="store_true", help="a little of some parts, to see that it works")
    options = parser.parse_args(arguments)
    options.requests, options.tokens, options.at_once = 2, 16, NUM_AT_ONCE
    options.trips, options.seconds, options.faults = 1000, 5.0, []
    if reason := machines.why_not():
        sys.exit(f"hosts cannot be measured on this machine: {reason}")
    with_ray = importlib.util.find_spec("ray") is not None and not options.short
    if options.short:
        options.runs, options.requests, options.tokens, options.codes, options.at_once = 1, 1, 4, 12, 2
        options.trips, options.seconds, options.faults = 50, 1.0, ["an engine is killed, on its host"]
    if not with_ray:
        say("left out: Ray: " + ("a short run" if options.short else "no module ray (pip install ray)"))
    signal.signal(signal.SIGTERM, end)
    with tempfile.TemporaryDirectory(prefix="vo") as name:
        found = measure(options.parts, Path(name), with_ray=with_ray, options=options)
    machine = f"{os.cpu_count()} cores, {platform.machine()}"
    print(f"\n{machine}; medians of {options.runs} runs (least-largest)")
    print_tables(found)
    goals = [one._asdict() | {"is_reached": one.is_reached} for one in goals_of(found)]
    messages = {way: one._asdict() for way, one in found.get("messages", {}).items()}
    figures = found | ({"messages": messages} if messages else {})
    print(json.dumps({"benchmark": "hosts", "machine": machine, "runs": options.runs, **figures, "goals": goals}))


if __name__ == "__main__":
    main()
