"""What the processes of ``test_run_directory.py`` do.

Apart from it, since a child that is spawned imports the module of its function, and these need no vLLM, which takes
seconds to import on an idle machine and many times that on a busy one.
"""

import logging
import multiprocessing
import signal
import time
from multiprocessing.connection import Connection
from multiprocessing.shared_memory import SharedMemory

from vllm_omni.process.run_directory import Lease, enter_stage_process

LIFE_S = 200.0


def sleep(lease: Lease) -> None:
    time.sleep(LIFE_S)


def start_stage(lease: Lease) -> multiprocessing.process.BaseProcess:
    process = multiprocessing.get_context("spawn").Process(target=sleep, args=(lease,), daemon=True)
    process.start()
    return process


def share(lease: Lease, name: str, ready: Connection) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    block = SharedMemory(name, create=True, size=64)
    semaphore = multiprocessing.get_context("spawn").Semaphore()
    ready.send(semaphore._semlock.name)  # type: ignore[attr-defined]
    time.sleep(LIFE_S)
    block.close()


def fail(lease: Lease) -> None:
    enter_stage_process()
    logger = logging.getLogger("vllm.v1.engine.core")
    logger.error("no exception")
    for reason in ("the cause", "its consequence"):
        try:
            raise ValueError(reason)
        except ValueError:
            logger.exception("failed")


def survive(lease: Lease) -> None:
    from vllm.v1.engine import UtilityOutput
    from vllm.v1.engine.core import EngineCoreProc

    enter_stage_process()
    answer = UtilityOutput(0)
    EngineCoreProc._invoke_utility_method("f", lambda: [][1], answer, lambda _: None)
    assert answer.failure_message
