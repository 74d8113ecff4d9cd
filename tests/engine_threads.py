"""Engine cores as threads of this process: vLLM's own, with its clients, sockets and messages, without a process each.

They start in a second, end in a moment, and may be killed as often as a test likes. Steps of different engines, and
starts, do not overlap: vLLM keeps what belongs to the current forward in globals of a process.
"""

from __future__ import annotations

import os
import pickle
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import zmq
from vllm import envs
from vllm.distributed import cleanup_dist_env_and_memory
from vllm.v1.engine import EngineCoreRequestType, core, utils
from vllm.v1.engine.core import EngineCoreProc, EngineShutdownState

from vllm_omni.engine.stage import StageEngine
from vllm_omni.process import supervisor
from vllm_omni.relay import hub as relay_hub
from vllm_omni.relay.hub import RelayHub

NO_PID = 1 << 30  # above any process id: vLLM kills what does not end
POLL_MS = 50
SIGKILLED = -9
END_TIMEOUT_S = 20.0
BATCHES = 3

_one_at_a_time = threading.RLock()
_input = threading.local()  # of a thread that reads an engine's sockets: ``engine``


class Killed(BaseException):
    """Ends an engine without a word, as SIGKILL does."""


class Crashed(RuntimeError):
    """Ends an engine as an error of its model does: it says so to its client."""


class EngineThread:
    """What vLLM takes for the process of an engine core (``multiprocessing.Process``)."""

    def __init__(self, *, target: Any, name: str, kwargs: dict[str, Any]) -> None:
        self.name = name
        self.pid = NO_PID
        self.exitcode: int | None = None
        self.core: _EngineCore | None = None
        self.end: BaseException | None = None  # raised by the engine at its next look
        self.sentinel, self._life = os.pipe()  # readable once the thread has ended
        self._kwargs = kwargs
        self._must_end = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        self._kwargs = pickle.loads(pickle.dumps(self._kwargs))  # as a process gets them
        self._thread.start()

    def is_alive(self) -> bool:
        return self.exitcode is None

    def join(self, timeout: float | None = None) -> None:
        self._thread.join(timeout)

    def terminate(self) -> None:
        self._must_end = True
        if (core := self.core) is not None:
            core.shutdown_state = EngineShutdownState.REQUESTED
            core.wake()

    def kill(self, end: BaseException | None = None) -> None:
        """End it at its next look, which is at most a step away."""
        self.end = end or Killed()
        if self.core is not None:
            self.core.wake()

    def _run(self) -> None:
        code = 1
        try:
            engine = self._start()
            if self._must_end:
                self.terminate()
            engine.run_busy_loop()
        except SystemExit:
            code = 0
        except Killed:
            code = SIGKILLED
        except Exception as exc:
            if self.core is not None:
                self.core._send_engine_dead()
            if not isinstance(exc, Crashed):
                raise
        finally:
            if self.core is not None:
                self.core.end()
            self.exitcode = code
            os.close(self._life)

    def _start(self) -> _EngineCore:
        with _one_at_a_time:
            relay_hub._process_hub = None
            self._kwargs["vllm_config"].parallel_config.reconfigure_for_independent_dp_rank()
            try:
                self.core = _EngineCore(self, **self._kwargs)
                self.core.hub, relay_hub._process_hub = relay_hub._process_hub, None
            finally:
                envs.disable_envs_cache()  # an engine core turns it on, for its process
        return self.core


class _EngineCore(EngineCoreProc):
    hub: RelayHub | None

    def __init__(self, thread: EngineThread, *, dp_rank: int, local_dp_rank: int, **kwargs: Any) -> None:
        self._thread = thread
        self.has_ended = False
        super().__init__(**kwargs, engine_index=dp_rank)
        self.num_preemptions = 0
        self._preempt = self.scheduler._preempt_request
        self.scheduler._preempt_request = self._count_preemption
        self.step_fn = partial(self._step_alone, self.step_fn)

    def _count_preemption(self, *args: Any, **kwargs: Any) -> None:
        self.num_preemptions += 1
        self._preempt(*args, **kwargs)

    def _step_alone(self, step: Any) -> Any:
        with _one_at_a_time:
            self._look()
            made = step()
        self._look()  # what it has computed may be lost
        return made

    def _handle_shutdown(self) -> bool:
        self._look()
        return super()._handle_shutdown()

    def _look(self) -> None:
        if self._thread.end is not None:
            raise self._thread.end

    def wake(self) -> None:
        self.input_queue.put_nowait((EngineCoreRequestType.WAKEUP, None))

    def end(self) -> None:
        """Release what a process would release by ending."""
        self.has_ended = True
        self.output_queue.put_nowait(None)  # type: ignore[arg-type]
        if self.hub is not None:
            self.hub.close()

    def process_input_sockets(self, *args: Any) -> None:
        _input.engine = self
        self._until_end(super().process_input_sockets, *args)

    def process_output_sockets(self, *args: Any) -> None:
        self._until_end(super().process_output_sockets, *args)

    def _until_end(self, run: Callable[..., None], *args: Any) -> None:
        """What ends a thread at the end of its engine is no error."""
        try:
            run(*args)
        except (Killed, Exception):
            if not self.has_ended:
                raise


class _Poller(zmq.Poller):
    """Ends with its engine."""

    def poll(self, timeout: float | None = None) -> list[tuple[Any, int]]:
        while not (events := super().poll(POLL_MS)):
            if _input.engine.has_ended:
                raise Killed
        return events


class _Context(zmq.Context):  # type: ignore[type-arg]
    def destroy(self, linger: int | None = None) -> None:
        self._warn_destroy_close = False  # it closes the sockets of its thread
        super().destroy(linger)


class _Zmq(ModuleType):
    Poller = _Poller
    Context = _Context

    def __getattr__(self, name: str) -> Any:
        return getattr(zmq, name)


@contextmanager
def engine_threads() -> Iterator[None]:
    """Engine cores that start inside the block, or again after their end, are threads of this process.

    A dead engine is restarted at once, and as often as it dies.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(utils, "get_mp_context", lambda: SimpleNamespace(Process=EngineThread))
        patch.setattr(core, "zmq", _Zmq("zmq"))
        patch.setattr(core, "freeze_gc_heap", lambda: None)
        patch.setattr(relay_hub, "_process_hub", None)
        patch.setattr(supervisor, "FIRST_DELAY_S", 0.02)
        patch.setattr(supervisor, "MAX_DELAY_S", 0.02)
        patch.setattr(supervisor, "POLL_S", 0.02)
        patch.setenv("VLLM_OMNI_STAGE_RESTARTS", "1000000")
        patch.setenv("VLLM_OMNI_FORK_SERVER", "0")  # it would choose the context
        try:
            yield
        finally:
            cleanup_dist_env_and_memory()
            envs.disable_envs_cache()


@contextmanager
def held_steps() -> Iterator[None]:
    """No engine makes a step inside the block; requests are sent to them all the same."""
    with _one_at_a_time:
        yield


def thread_of(engine: StageEngine) -> EngineThread:
    """The thread of an engine that was started inside ``engine_threads``."""
    (thread,) = engine.llm.engine_core.resources.engine_manager.processes
    assert isinstance(thread, EngineThread)
    return thread


def num_preemptions(engine: StageEngine) -> int:
    """Of the requests of an engine that was started inside ``engine_threads``, since its start.

    How many requests run at once depends on the machine: a test that needs a preemption sends ``BATCHES`` of them.
    """
    core = thread_of(engine).core
    assert core is not None
    return core.num_preemptions
