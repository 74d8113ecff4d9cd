"""Functions that the processes of this folder's tests run.

A spawned child imports the module of its function; these need no vLLM, which takes seconds to import on an idle machine
and many times that on a busy one.
"""

import logging
import multiprocessing
import signal
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.shared_memory import SharedMemory

from vllm_omni.process.tether import SURVIVED, ServerTether, enter_stage_process

LIFE_S = 200.0
TIMEOUT_S = 60.0


def wait_for(is_true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not is_true():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def sleep(tether: ServerTether) -> None:
    time.sleep(LIFE_S)


def start_stage(tether: ServerTether) -> multiprocessing.process.BaseProcess:
    process = multiprocessing.get_context("spawn").Process(target=sleep, args=(tether,), daemon=True)
    process.start()
    return process


def share(tether: ServerTether, ready: Connection) -> None:
    """Make what an engine core shares with its workers, and send its names in /dev/shm."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    block = SharedMemory(create=True, size=64)
    semaphore = multiprocessing.get_context("spawn").Semaphore()
    name: str = semaphore._semlock.name  # type: ignore[attr-defined]
    ready.send([block.name, f"sem.{name.removeprefix('/')}"])
    time.sleep(LIFE_S)
    block.close()


def handle_signals(tether: ServerTether, server: Connection) -> None:
    """End at SIGTERM as vLLM's engine core does, which sets its handler before it loads plugins."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())
    enter_stage_process()
    server.send("ready")
    server.send(server.recv())
    time.sleep(LIFE_S)


def fail(tether: ServerTether) -> None:
    enter_stage_process()
    logger = logging.getLogger("vllm.v1.engine.core")
    logger.error("no exception")
    for reason in ("the cause", "its consequence"):
        try:
            raise ValueError(reason)
        except ValueError:
            logger.exception("failed")


def survive(tether: ServerTether) -> None:
    """Log a failure in a function named as the one in which vLLM answers a call with its failure."""
    enter_stage_process()
    logger = logging.getLogger("vllm.v1.engine.core")

    def _invoke_utility_method() -> None:
        try:
            raise IndexError
        except IndexError:
            logger.exception("failed")

    assert _invoke_utility_method.__name__ in SURVIVED
    _invoke_utility_method()


def survive_in_vllm(tether: ServerTether) -> None:
    from vllm.v1.engine import UtilityOutput
    from vllm.v1.engine.core import EngineCoreProc

    enter_stage_process()
    answer = UtilityOutput(0)
    EngineCoreProc._invoke_utility_method("f", lambda: [][1], answer, lambda _: None)
    assert answer.failure_message
