"""``RayWorkers``: lets Ray place, start and watch the hosts of a deployment, for a front end (``worker_backend``: ray).

It speaks to Ray through a process of its own (``deploy/ray.py``). If that ends, as it does when the cluster's head
stays away, this server continues with the hosts that it has, and connects again.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import secrets
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TypeVar

from vllm_omni import envs
from vllm_omni.config import OmniConfig
from vllm_omni.deploy import ray_messages as msg
from vllm_omni.deploy.cluster import NotYet, Share, describe, move, spread
from vllm_omni.engine.relay_options import secret_file_of
from vllm_omni.errors import MissingDependency, OmniError, how_to_install
from vllm_omni.hosts.endpoint import Endpoint
from vllm_omni.hosts.listener import HostListener
from vllm_omni.process.supervisor import FIRST_DELAY_S, MAX_DELAY_S
from vllm_omni.relay.secret import MIN_BYTES, Secret

logger = logging.getLogger(__name__)

REPORT_S = 10.0  # how often to say what is waited for
ANSWER_TIMEOUT_S = 60.0  # of the process that speaks to Ray, beyond what it was told to wait
WATCH_S = 1.0
FINISH_TIMEOUT_S = 10.0  # for hosts whose front end has ended
STEADY_S = 60.0  # a program that ran for so long is started again at once
A = TypeVar("A")


class ClusterLost(OmniError):
    """Ray cannot be reached, or does not do what it was asked."""


class RayProcess:
    """The process that speaks to Ray; its methods raise ``ClusterLost``."""

    def __init__(self) -> None:
        code = f"from vllm_omni.deploy.ray import main; main({os.getpid()})"
        # In a session of its own: Ctrl-C is the front end's, which then lets the hosts end first.
        self._process = subprocess.Popen(
            [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
        )

    def ask(self, order: msg.Order, kind: type[A], timeout_s: float = ANSWER_TIMEOUT_S) -> A:
        """Give an order, and return its answer; without one in time, the process is killed."""
        assert self._process.stdin is not None and self._process.stdout is not None
        timer = threading.Timer(timeout_s, self._process.kill)
        timer.daemon = True
        timer.start()
        try:
            self._process.stdin.write(msg.encode(order) + b"\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except (OSError, ValueError):
            line = b""
        finally:
            timer.cancel()
        if not line:
            raise ClusterLost(f"Ray did not answer, or has ended (code {self._process.wait()})")
        answer = msg.decode(line, msg.Answer)
        if isinstance(answer, msg.Failed):
            raise ClusterLost(answer.reason)
        assert isinstance(answer, kind)
        return answer

    def close(self) -> None:
        """End it, and what it has of the cluster."""
        assert self._process.stdin is not None and self._process.stdout is not None
        with suppress(BrokenPipeError):  # it has ended, before it had read an order
            self._process.stdin.close()
        try:
            self._process.wait(2 * FINISH_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()


class RayWorkers:
    """The hosts of one server. ``close`` ends them, and this server's part of the cluster.

    Raises:
        ConfigError: the deployment does not fit the cluster, or cannot be on other hosts.
        MissingDependency: Ray is not installed.
        ClusterLost, NotYet: the cluster cannot be reached, or has had no room, for ``VLLM_OMNI_STAGE_READY_TIMEOUT_S``.

    Attributes:
        config: the deployment, with hosts, and where they join.
    """

    def __init__(self, config: OmniConfig) -> None:
        if importlib.util.find_spec("ray") is None:
            raise MissingDependency(f"worker_backend = 'ray' needs ray; {how_to_install('ray')}")
        self._address = config.ray_address
        self._ending = threading.Event()
        self._thread: threading.Thread | None = None
        self._listener: HostListener | None = None
        self._secret_fd: int | None = None
        self._ray = RayProcess()
        try:
            address = self._wait(self._connect)
            config, self._shares = self._wait(lambda: self._place(config))
            self.config = self._with_endpoint(config, address)
            self._secret = _read(self.config)
        except BaseException:
            self.close()
            raise
        for share in self._shares:
            logger.info("node %s runs %s", share.bundle.host, ", ".join(share.engines))

    def _wait(self, attempt: Callable[[], A]) -> A:
        """Try until it succeeds, and report every ``REPORT_S`` why it does not."""
        timeout_s = envs.VLLM_OMNI_STAGE_READY_TIMEOUT_S
        deadline = time.monotonic() + timeout_s
        while True:
            next_at = min(time.monotonic() + REPORT_S, deadline)
            try:
                return attempt()
            except (ClusterLost, NotYet) as exc:
                if time.monotonic() >= deadline:
                    raise type(exc)(
                        f"Ray: not within {timeout_s:g} s (VLLM_OMNI_STAGE_READY_TIMEOUT_S): {exc}"
                    ) from exc
                logger.warning("waits for Ray's cluster %s: %s", self._address or "", exc)
            if self._ending.wait(max(0.0, next_at - time.monotonic())):
                raise ClusterLost("the server is shut down")

    def _connect(self) -> str:
        try:
            return self._ray.ask(msg.Connect(self._address), msg.Connected).address
        except ClusterLost:
            self._ray.close()
            self._ray = RayProcess()
            raise

    def _place(self, config: OmniConfig) -> tuple[OmniConfig, list[Share]]:
        nodes = self._ray.ask(msg.ListNodes(), msg.Nodes).nodes
        placed, shares = spread(config, nodes)
        self._reserve([share.bundle for share in shares], nodes)
        return placed, shares

    def _reserve(self, bundles: list[msg.Bundle], nodes: list[msg.Node]) -> None:
        order = msg.Reserve(bundles, REPORT_S)
        if not self._ray.ask(order, msg.Reserved, REPORT_S + ANSWER_TIMEOUT_S).is_ready:
            needs = "; ".join(f"{describe(one.resources)} on {one.host}" for one in bundles)
            free = "; ".join(f"{node.name} has {node.num_cards} GPU, {node.num_cpus:g} CPU" for node in nodes)
            raise NotYet(f"it has not granted {needs}; free: {free}")

    def _with_endpoint(self, config: OmniConfig, address: str) -> OmniConfig:
        """The deployment with a port where hosts join, and a secret for them, unless it has its own."""
        if config.listen:
            return config
        with socket.create_server((address, 0), family=socket.AF_INET6 if ":" in address else socket.AF_INET) as one:
            endpoint = Endpoint(address, one.getsockname()[1])
        self._secret_fd = os.memfd_create("vllm-omni-secret")
        os.fchmod(self._secret_fd, 0o600)
        os.write(self._secret_fd, secrets.token_hex(MIN_BYTES).encode())
        return replace(config, listen=str(endpoint), token_file=f"/proc/{os.getpid()}/fd/{self._secret_fd}")

    def start(self, listener: HostListener) -> None:
        """Start the hosts, and watch them from a thread; called once they can join."""
        self._listener = listener
        self._thread = threading.Thread(target=self._watch, name="ray-workers", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End; after the front end, whose hosts have ended with it. A second call does nothing."""
        if self._ending.is_set():
            return
        self._ending.set()
        if self._thread is not None:
            self._thread.join()
            try:
                self._ray.ask(msg.Finish(FINISH_TIMEOUT_S), msg.Ended)
            except ClusterLost as exc:
                logger.warning("Ray: %s", exc)
        self._ray.close()
        if self._secret_fd is not None:
            os.close(self._secret_fd)

    # -- in a thread --------------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        due = {share.bundle.host: 0.0 for share in self._shares}  # hosts to start -> when
        delays: dict[str, float] = {}
        started: dict[str, float] = {}
        while not self._ending.is_set():
            try:
                self._run_due(due, started)
                ended = self._ray.ask(msg.Watch(WATCH_S), msg.Ended, WATCH_S + ANSWER_TIMEOUT_S).outcomes
            except ClusterLost as exc:
                if self._ending.is_set():
                    return
                logger.error("Ray: %s; what runs continues, and hosts that end are awaited", exc)
                due = dict.fromkeys((share.bundle.host for share in self._shares), 0.0)
                self._connect_again()
                continue
            for one in ended:
                if self._ending.is_set():
                    return
                is_steady = time.monotonic() - started[one.host] > STEADY_S
                delay = FIRST_DELAY_S if is_steady else min(2 * delays.get(one.host, FIRST_DELAY_S / 2), MAX_DELAY_S)
                due[one.host], delays[one.host] = time.monotonic() + delay, delay
                self._report_end(one, delay)

    def _run_due(self, due: dict[str, float], started: dict[str, float]) -> None:
        """Start the programs of the hosts that are due; those without room are due again later."""
        for host in [one for one, at in due.items() if at <= time.monotonic()]:
            if self._run(host):
                started[host] = time.monotonic()
                del due[host]
            else:
                due[host] = time.monotonic() + REPORT_S

    def _report_end(self, ended: msg.Outcome, delay_s: float) -> None:
        reason = ended.reason or "it ended by itself"
        logger.error("node %s: %s; it is started again in %g s", ended.host, reason, delay_s)
        if ended.is_rejected and self._listener is not None:
            self._listener.fail(ended.host, reason)

    def _run(self, host: str) -> bool:
        """Start the program of a host, on another node if its own is gone; returns whether the cluster has room."""
        (share,) = [one for one in self._shares if one.bundle.host == host]
        nodes = self._ray.ask(msg.ListNodes(), msg.Nodes).nodes
        if not _is_alive(share, nodes):
            try:
                moved = move(share, self._shares, nodes)
                self._reserve([moved.bundle], nodes)
            except NotYet as exc:
                logger.warning("waits for Ray's cluster: %s", exc)
                return False
            self._shares = [moved if one is share else one for one in self._shares]
        stages = [_join_name(self.config, name) for name in share.engines]
        revision = self.config.stages[0].engine_args.get("revision")
        work = msg.Work(host, self.config.model, stages, self.config.listen, revision, self._secret)
        self._ray.ask(msg.Run(work), msg.Running)
        return True

    def _connect_again(self) -> None:
        """Connect, and reserve again what this server had: Ray has ended it, or will."""
        while not self._ending.is_set():
            try:
                self._connect()
                nodes = self._ray.ask(msg.ListNodes(), msg.Nodes).nodes
                self._reserve([one.bundle for one in self._shares], nodes)
                return
            except (ClusterLost, NotYet) as exc:
                logger.warning("waits for Ray's cluster %s: %s", self._address, exc)
                self._ending.wait(REPORT_S)


def _is_alive(share: Share, nodes: Sequence[msg.Node]) -> bool:
    """Whether the node of a share is in the cluster; where Ray has chosen it, Ray also replaces it."""
    return not share.bundle.node or share.bundle.node in {node.id for node in nodes}


def _join_name(config: OmniConfig, name: str) -> str:
    """The name by which a host joins for an engine, or for its part: "thinker" would mean any part of the thinker."""
    is_first_part = any(stage.name == name and stage.nodes > 1 for stage in config.stages)
    return f"{name}/node0" if is_first_part else name


def _read(config: OmniConfig) -> bytes:
    """The secret, which the hosts are given by a call from process to process."""
    Secret.read(secret_file_of(config))  # checks it
    with open(secret_file_of(config), "rb") as file:
        return file.read()
