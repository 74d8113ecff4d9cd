"""``StageProcesses``: the processes of one stage, and what they share, as the server sees them."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import time
from collections.abc import Iterable
from contextlib import AbstractContextManager
from pathlib import Path

from vllm_omni.process.fork_server import forked_stages
from vllm_omni.process.proc import ProcessId, bound_sockets, cpu_s, mapped_shared_memory
from vllm_omni.process.run_directory import has_weights, remove_block
from vllm_omni.process.tether import ServerTether

KILL_TIMEOUT_S = 10.0
MEMORY_HINT = "by the system if memory ran out: see dmesg"
NO_REPORT = f"its process ended without a report (killed {MEMORY_HINT})"


class StageProcesses:
    """Finds, watches and ends the engine core and its workers; each left a file when it was tethered."""

    def __init__(self, tether: ServerTether) -> None:
        self._tether = tether
        self._directory = tether.directory
        self._started: list[ProcessId] = []  # since the stage was ready
        self._shared_memory: set[Path] = set()  # blocks in /dev/shm that they have mapped

    def failure(self) -> str | None:
        """The exception that ended one of the processes, if it was reported: "ValueError: ..."."""
        try:
            return self._tether.failure_file.read_text(encoding="utf-8") or None
        except OSError:
            return None

    has_ended = False  # beyond what vLLM's client of the engine notices

    def starting(self, device_type: str) -> AbstractContextManager[None]:
        """Encloses a start by vLLM's client."""
        return forked_stages(device_type)

    def launch(self) -> None:
        """Nothing: vLLM's client starts them."""

    def can_start(self) -> bool:
        """Whether there is a host for them: this one."""
        return True

    def note(self) -> None:
        """Remember the processes and their shared memory, which cannot be found once they have died."""
        self._started = self._find()
        self._note_shared_memory(self._started)

    def pids(self) -> list[int]:
        """The processes that live."""
        return [process.pid for process in self._find()]

    def cpu_s(self) -> float:
        """Seconds of CPU time that the processes noted and their children have used."""
        return cpu_s([process.pid for process in self._started])

    def has_lost_one(self) -> bool:
        """Whether one of the processes noted, the engine core or a worker, has ended.

        Raises:
            OSError: it cannot be determined.
        """
        return not all(process.is_alive() for process in self._started)

    def kill(self) -> list[ProcessId]:
        """Send SIGKILL to those that live; returns them."""
        processes = self._find()
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)
        return processes

    def end(self) -> None:
        """Kill the processes that live and remove what all of them left, so that the stage can be started again.

        Raises:
            TimeoutError: a process has not ended within ``KILL_TIMEOUT_S``.
        """
        self._note_shared_memory(self._find())
        self._started = []
        processes = self.kill()
        deadline = time.monotonic() + KILL_TIMEOUT_S
        while left := [process.pid for process in processes if process.is_alive()]:
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"processes {left} of stage {self._tether.stage!r} still run {KILL_TIMEOUT_S:g} s after SIGKILL"
                )
            time.sleep(0.01)
        for block in self._shared_memory - mapped_shared_memory(os.getpid()):
            remove_block(block, has_tracker=True)
            # Of a block of a CPU worker, also the rendezvous file after which it is named.
            (self._directory / block.name.partition("-")[0]).unlink(missing_ok=True)
        self._shared_memory.clear()
        for file in self._directory.glob(f"{self._tether.file_stem}.*"):
            file.unlink(missing_ok=True)
        self.remove_dead_sockets()

    def remove_dead_sockets(self) -> None:
        """Remove the files of sockets that no process holds, also those of other stages: vLLM leaves them."""
        sockets = [path for path in self._directory.iterdir() if path.is_socket()]
        bound = bound_sockets()  # read after the listing: a socket has its file before it is bound
        for path in sockets:
            if str(path) not in bound:
                path.unlink(missing_ok=True)

    def _find(self) -> list[ProcessId]:
        processes = []
        for file in self._directory.glob(f"{self._tether.file_stem}.*.process"):
            with contextlib.suppress(FileNotFoundError, ValueError):
                processes.append(ProcessId(int(file.name.split(".")[-2]), int(file.read_text())))
        return [process for process in processes if process.is_alive()]

    def _note_shared_memory(self, processes: list[ProcessId]) -> None:
        for process in processes:
            self._shared_memory |= {one for one in mapped_shared_memory(process.pid) if not has_weights(one)}


def killed_by(exit_codes: Iterable[int]) -> str | None:
    """Describe the signal that ended one of these processes, if one did."""
    killed = next((-code for code in exit_codes if code < 0), None)
    if killed is None:
        return None
    return f"killed by {signal.Signals(killed).name}" + (f" ({MEMORY_HINT})" if killed == signal.SIGKILL else "")


def ended_early(error: Exception) -> str | None:
    """Describe the end of a process that left no report, from upstream's error, if that is one.

    It ends in "Failed core proc(s): {'EngineCore_DP0': -9}", or in "{}" where the exit code was not there yet. Where a
    process ends before it has read what to do, it is that of a pipe.
    """
    if isinstance(error, EOFError | BrokenPipeError | ConnectionResetError):
        return NO_REPORT
    found = re.search(r"Failed core proc\(s\): \{(?:.*?: (-?\d+))?", str(error))
    if found is None:
        return None
    return killed_by([int(found[1])]) if found[1] else NO_REPORT
