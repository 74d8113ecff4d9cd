"""``Supervisor``: starts a stage again when its engine has died, a bounded number of times."""

from __future__ import annotations

import contextlib
import logging
import signal
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import replace
from multiprocessing import resource_tracker
from typing import Protocol

from vllm_omni import envs
from vllm_omni.descriptors import check_free_descriptors
from vllm_omni.errors import StageFailed
from vllm_omni.process.run_directory import RunDirectory
from vllm_omni.process.status import StageState, StageStatus

logger = logging.getLogger(__name__)

FIRST_DELAY_S = 1.0
MAX_DELAY_S = 60.0
POLL_S = 0.1  # how late a termination is noticed here; requests notice it by themselves, and sooner
NUM_DESCRIPTORS = 40  # that must be free in the server before an engine is started: sockets, pipes, ZMQ's threads
END_TIMEOUT_S = 10.0  # how long an attempt that was cancelled may need to end


class Supervised(Protocol):
    """The engine that a supervisor watches; its methods are called from the supervisor's thread."""

    name: str
    was_ended: bool
    """Whether the server has killed it for a request: it is then restarted at once, and this does not count."""

    @property
    def has_died(self) -> bool:
        """Whether requests on the engine fail."""
        ...

    def has_lost_process(self) -> bool:
        """Whether one of its processes has ended."""
        ...

    def termination_reason(self) -> str:
        """Why it died, as a clause: "its engine has died: ..."."""
        ...

    def current_status(self) -> StageStatus: ...

    def set_status(self, status: StageStatus) -> None: ...

    def kill(self) -> None:
        """Kill its processes."""
        ...

    def can_start(self) -> bool:
        """Whether it has a host; one on another host waits until that has joined again."""
        ...

    def restart(self) -> None:
        """Start another engine in its place; blocks until that is ready, and raises ``StageFailed``."""
        ...


class RestartBudget:
    """When to restart: delays double with each attempt, and there are at most so many attempts within a window.

    An attempt counts for the window's length, whether it succeeded or not: an engine that starts well and dies of its
    first request must not restart for ever.
    """

    def __init__(self, max_restarts: int, window_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.max_restarts = max_restarts
        self._window_s = window_s
        self._clock = clock
        self._attempts: deque[float] = deque()

    def next_delay_s(self) -> float | None:
        """Count one more attempt; seconds to wait before it, or None when there are no more."""
        now = self._clock()
        while self._attempts and self._attempts[0] <= now - self._window_s:
            self._attempts.popleft()
        num_attempts = len(self._attempts)
        if num_attempts >= self.max_restarts:
            return None
        self._attempts.append(now)
        return min(FIRST_DELAY_S * 2.0**num_attempts, MAX_DELAY_S)


class Supervisor:
    """Watches one engine from a thread of its own, because starting an engine blocks."""

    def __init__(self, engine: Supervised, run_directory: RunDirectory) -> None:
        self._engine = engine
        self._run_directory = run_directory
        self._budget = RestartBudget(envs.VLLM_OMNI_STAGE_RESTARTS, envs.VLLM_OMNI_STAGE_RESTART_WINDOW_S)
        self._ready_timeout_s = envs.VLLM_OMNI_STAGE_READY_TIMEOUT_S
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"supervisor-{engine.name}", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Restart nothing from now on; an attempt in progress is cancelled."""
        self._stopping.set()

    def join(self) -> None:
        """Wait, after ``stop``, until the attempt in progress has ended."""
        self._thread.join(2 * END_TIMEOUT_S)

    def _run(self) -> None:
        is_watched = True
        try:
            while is_watched and not self._stopping.wait(POLL_S):
                is_watched = self._watch()
        finally:
            if is_watched and not self._stopping.is_set():  # an error that is no Exception has ended the thread
                status = replace(self._engine.current_status(), state=StageState.FAILED, reason="its supervisor ended")
                self._engine.set_status(status)

    def _watch(self) -> bool:
        """Restart the engine if it has died; returns False when there is nothing to watch any longer.

        An error says nothing about the engine: the next look may succeed. Without a free file descriptor, for example,
        the state of its processes is unknown.
        """
        engine = self._engine
        try:
            if engine.has_died:
                return self._restart()
            if engine.has_lost_process():
                # Without a worker the engine core would hang for seconds, and its requests with it.
                engine.kill()
            self._note_error(None)
        except Exception as exc:
            with contextlib.suppress(Exception):
                self._note_error(f"cannot be watched: {exc}")
        return True

    def _note_error(self, reason: str | None) -> None:
        """Report in the engine's status why it cannot be watched, while that is so."""
        status = self._engine.current_status()
        if status.state is StageState.RUNNING and status.reason != reason:
            if reason is not None:
                logger.warning("stage %s: %s", self._engine.name, reason, exc_info=True)
            self._engine.set_status(replace(status, reason=reason))

    def _restart(self) -> bool:
        """Restart the engine until it runs; returns False when there are no attempts left, or after ``stop``."""
        engine, num_restarts = self._engine, self._engine.current_status().num_restarts
        reason = engine.termination_reason()
        while (delay_s := 0.0 if engine.was_ended else self._budget.next_delay_s()) is not None:
            num_restarts += 1
            engine.set_status(StageStatus(StageState.RESTARTING, reason, num_restarts))
            logger.error("stage %s: %s; restart in %g s", engine.name, reason, delay_s)
            if self._stopping.wait(delay_s) or not self._wait_for_host():
                return False
            failure = self._attempt()
            if failure is None:
                engine.set_status(StageStatus(StageState.RUNNING, None, num_restarts))
                return True
            if self._stopping.is_set():
                return False
            reason = failure
        if self._budget.max_restarts:
            reason += f"; given up after {self._budget.max_restarts} restarts (VLLM_OMNI_STAGE_RESTARTS)"
        engine.set_status(StageStatus(StageState.FAILED, reason, num_restarts))
        logger.error("stage %s: %s", engine.name, reason)
        return False

    def _wait_for_host(self) -> bool:
        """Wait until the engine has a host; returns False after ``stop``."""
        while not self._engine.can_start():
            if self._stopping.wait(POLL_S):
                return False
        return True

    def _attempt(self) -> str | None:
        """Restart the engine once; returns why it failed, if it did."""
        try:
            self._restart_within_deadline()
        except StageFailed as exc:
            return exc.reason
        except Exception as exc:  # the supervisor must live: the next attempt may succeed
            logger.exception("stage %s: restart failed", self._engine.name)
            return f"did not start: {exc!r}"
        return None

    def _restart_within_deadline(self) -> None:
        deadline = time.monotonic() + self._ready_timeout_s
        self._wait_for_descriptors(deadline)
        run_within_deadline(self._engine.restart, self._engine, self._run_directory, deadline, self._stopping)

    def _wait_for_descriptors(self, deadline: float) -> None:
        is_logged = False
        while True:
            try:
                check_free_descriptors(NUM_DESCRIPTORS)
                return
            except OSError as exc:
                if not is_logged:
                    logger.warning("stage %s: the restart waits: %s", self._engine.name, exc)
                    is_logged = True
                if self._stopping.wait(POLL_S) or time.monotonic() > deadline:
                    raise StageFailed(self._engine.name, f"cannot be restarted: {exc}") from exc


def run_within_deadline(
    start: Callable[[], None],
    engine: Supervised,
    run_directory: RunDirectory,
    deadline: float,
    stopping: threading.Event,
) -> None:
    """Start an engine; killed at the deadline, and when the server is stopped.

    Args:
        start: blocks until the engine is ready.
        deadline: by ``time.monotonic``.
        stopping: set when the server is.

    Raises:
        StageFailed: it did not start, or not in time.
    """
    began = time.monotonic()
    with run_directory.inherited():
        attempt = in_thread(start)
        while not stopping.is_set() and time.monotonic() < deadline:
            if wait([attempt], POLL_S).done:
                return attempt.result()
        _end(attempt, engine, run_directory, stopping)
        late = f"not ready after {time.monotonic() - began:.0f} s (VLLM_OMNI_STAGE_READY_TIMEOUT_S)"
        raise StageFailed(engine.name, "the server is shut down" if stopping.is_set() else late)


def _end(attempt: Future[None], engine: Supervised, run_directory: RunDirectory, stopping: threading.Event) -> None:
    """Kill what the attempt starts until it has failed: its process may not be there yet, or not be tethered."""
    deadline = time.monotonic() + END_TIMEOUT_S
    while not wait([attempt], POLL_S).done and time.monotonic() < deadline:
        engine.kill()
        if stopping.is_set():  # otherwise it may be another stage's
            run_directory.kill_starting()


def in_thread(function: Callable[..., None], *args: object) -> Future[None]:
    """Submit a call as an executor does, but in a daemon thread, which does not delay the interpreter's exit.

    Processes that the call starts do not see Ctrl-C, which a terminal sends to all, and see SIGTERM only once they can
    ignore it (``enter_stage_process``): the server ends them.
    """
    future: Future[None] = Future()
    resource_tracker.ensure_running()  # starting it in the thread would unblock the signal

    def run() -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
        try:
            function(*args)
        except BaseException as exc:
            future.set_exception(exc)
        else:
            future.set_result(None)

    threading.Thread(target=run, name="stage-start", daemon=True).start()
    return future
