"""Ray: where the hosts of a deployment are, and who starts and watches their programs. The only module that imports it.

``main`` is a process of its own beside the front end, for two reasons: Ray ends a process that has lost its cluster,
and a call of Ray's may wait for ever. Ray carries the orders to start, and nothing of a request.
"""

from __future__ import annotations

import contextlib
import math
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping
from typing import Any, NoReturn

import ray
from ray._private.state import available_resources_per_node
from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from vllm_omni.deploy import ray_messages as msg
from vllm_omni.hosts.endpoint import Endpoint

NODE_ID = "ray.io/node-id"  # a label that Ray gives each node
ABORT_TIMEOUT_S = 10.0  # for the actors and groups, once the front end was killed
REACH_TIMEOUT_S = 5.0
MAX_REASON = 2000


class HostActor:
    """Starts the program of one host. Its arguments and results are bytes of ``ray_messages``.

    Not decorated: so Ray sends its name, and a node takes the class from its own package.
    """

    def run(self, work: bytes) -> bytes:
        """Returns the ``Outcome`` when the program has ended, and what is left to say if there is none."""
        command = [sys.executable, "-m", "vllm_omni.deploy.host_program"]
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        cards = [str(one) for one in ray.get_gpu_ids()]
        # In a session of its own: signals for Ray's processes are not for it.
        with subprocess.Popen(command, env=_environment(cards), start_new_session=True, **pipes) as program:
            assert program.stdin is not None and program.stdout is not None
            with contextlib.suppress(BrokenPipeError):
                program.stdin.write(work + b"\n")
                program.stdin.flush()  # stays open: its end is that of this process
            line = program.stdout.readline()
            code = program.wait()
        host = msg.decode(work, msg.Work).host
        return line.strip() or msg.encode(msg.Outcome(host, f"its program has ended with code {code}"))


def _environment(cards: list[str]) -> dict[str, str]:
    """That of the node, as its ``ray start`` was called, with the cards that Ray has assigned.

    What Ray has set in this process since is left out: OMP_NUM_THREADS by its count of CPUs, a debugger.
    """
    with open("/proc/self/environ", "rb") as file:
        pairs = [os.fsdecode(one).partition("=") for one in file.read().split(b"\0") if one]
    made = {name: value for name, _, value in pairs if not name.startswith("RAY_")}
    if cards:
        made["CUDA_VISIBLE_DEVICES"] = ",".join(cards)
    return made


class Cluster:
    """A connection to a cluster, and what this server has of it."""

    def __init__(self) -> None:
        self._groups: list[PlacementGroup] = []
        self._bundles: dict[str, tuple[PlacementGroup, int, dict[str, float]]] = {}  # by host
        self._actors: dict[str, Any] = {}
        self._running: dict[Any, str] = {}  # reference of a result -> host

    def answer(self, order: msg.Order) -> msg.Answer:
        match order:
            case msg.Connect(address):
                return self._connect(address)
            case msg.ListNodes():
                return msg.Nodes(list_nodes())
            case msg.Reserve(bundles, timeout_s):
                return msg.Reserved(self._reserve(bundles, timeout_s))
            case msg.Run(work):
                self._run(work)
                return msg.Running()
            case msg.Watch(timeout_s):
                return msg.Ended(self._watch(timeout_s))
            case msg.Finish(timeout_s):
                ray.wait(list(self._running), num_returns=len(self._running), timeout=timeout_s)
                self.close()
                return msg.Ended([])

    def _connect(self, address: str) -> msg.Connected:
        address = address or os.environ.get("RAY_ADDRESS") or "auto"
        own: dict[str, Any] = {}
        if address != "auto":
            endpoint = Endpoint.parse(address, "--ray-address")
            try:
                socket.create_connection(endpoint, REACH_TIMEOUT_S).close()  # Ray itself tries for a minute or more
            except OSError as exc:
                raise ConnectionError(f"no head at {endpoint}: {exc}") from exc
            own["_node_ip_address"] = endpoint.own_address()
        ray.init(address=address, namespace="vllm-omni", logging_level="warning", log_to_driver=True, **own)
        here = ray.get_runtime_context().get_node_id()
        (node,) = [one for one in ray.nodes() if one["NodeID"] == here]
        return msg.Connected(node["NodeManagerAddress"])

    def _reserve(self, bundles: list[msg.Bundle], timeout_s: float) -> bool:
        selectors = [{NODE_ID: one.node} if one.node else {} for one in bundles]
        group = placement_group([one.resources for one in bundles], "PACK", bundle_label_selector=selectors)
        if not group.wait(timeout_s):
            remove_placement_group(group)
            return False
        self._groups.append(group)
        for index, one in enumerate(bundles):
            self._bundles[one.host] = (group, index, one.resources)
        return True

    def _run(self, work: msg.Work) -> None:
        if (before := self._actors.pop(work.host, None)) is not None:
            ray.kill(before)
        group, index, resources = self._bundles[work.host]
        actor_class: Any = ray.remote(HostActor)
        actor = actor_class.options(
            max_restarts=0,  # the front end starts it again
            num_cpus=resources.get("CPU", 0),
            num_gpus=resources.get("GPU", 0),
            scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index),
        ).remote()
        self._actors[work.host] = actor
        # The secret is an argument of a call, which goes from process to process; those of a constructor are stored.
        self._running[actor.run.remote(msg.encode(work))] = work.host

    def _watch(self, timeout_s: float) -> list[msg.Outcome]:
        if not self._running:
            threading.Event().wait(timeout_s)
            return []
        done, _ = ray.wait(list(self._running), num_returns=1, timeout=timeout_s)
        return [_outcome(self._running.pop(one), one) for one in done]

    def close(self) -> None:
        """Remove all that this server has of the cluster."""
        for actor in self._actors.values():
            ray.kill(actor)
        for group in self._groups:
            remove_placement_group(group)
        ray.shutdown()


def _outcome(host: str, result: Any) -> msg.Outcome:
    try:
        outcome: msg.Outcome = msg.decode(ray.get(result), msg.Outcome)
    except RayError as exc:
        lines = [line for line in str(exc).splitlines() if line.strip()]
        return msg.Outcome(host, f"its actor has ended: {' '.join(lines)[-MAX_REASON:]}")
    return outcome


def list_nodes() -> list[msg.Node]:
    """The nodes that are alive, with what is free on them."""
    free: Mapping[str, Mapping[str, float]] = available_resources_per_node()
    found = []
    for one in ray.nodes():
        if one["Alive"]:
            has = free.get(one["NodeID"], {})
            cards, cpus, memory = (has.get(name, 0.0) for name in ("GPU", "CPU", "memory"))
            names = one["NodeName"], one["NodeManagerAddress"], one["NodeManagerHostname"]
            has_cards = one["Resources"].get("GPU", 0) >= 1
            found.append(msg.Node(one["NodeID"], *names, has_cards, math.floor(cards), cpus, int(memory)))
    return sorted(found, key=lambda one: (one.name, one.id))


def main(parent: int) -> None:
    """Obey the front end's orders; end with it, and let nothing stay in the cluster."""
    answers = msg.take_stdout()
    signal.signal(signal.SIGTERM, _end)
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    cluster, order = Cluster(), None
    try:
        while line := sys.stdin.buffer.readline():
            order = msg.decode(line, msg.Order)
            try:
                answer = cluster.answer(order)
            except (RayError, ConnectionError, RuntimeError, ValueError, OSError) as exc:
                answer = msg.Failed(" ".join(str(exc).split())[:MAX_REASON] or repr(exc))
            answers.write(msg.encode(answer) + b"\n")
    finally:
        if not isinstance(order, msg.Finish):
            cluster.close()


def _end_with(parent: int) -> None:
    """End when the front end has ended, also while a call of Ray's waits.

    A pipe would not tell: processes that the user's program has forked hold its other end as well.
    """
    with contextlib.suppress(ProcessLookupError):
        front_end = os.pidfd_open(parent)
        if os.getppid() == parent:
            select.select([front_end], [], [])
    os.kill(os.getpid(), signal.SIGTERM)
    threading.Event().wait(ABORT_TIMEOUT_S)
    os._exit(1)  # Ray ends the actors of a process that has ended, and removes its placement groups


def _end(*_: object) -> NoReturn:
    raise SystemExit(0)
