"""``RemoteProcesses``: an engine's processes on another host, in the place of ``StageProcesses``."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from vllm.v1.engine.core import EngineCoreProc

from vllm_omni import envs
from vllm_omni.hosts.remote_engine import RemoteEngine
from vllm_omni.process.stage_processes import StageProcesses
from vllm_omni.process.tether import ServerTether
from vllm_omni.relay.hub import OPTIONS


def make_processes(
    tether: ServerTether, engine: RemoteEngine | None, *, log_stats: bool
) -> StageProcesses | RemoteProcesses:
    """The processes of an engine, not started.

    Args:
        engine: on another host; None: it is on this one.
    """
    if engine is None:
        return StageProcesses(tether)
    return RemoteProcesses(engine, tether.directory, tether[OPTIONS], log_stats=log_stats)


class RemoteProcesses:
    """What a stage asks about its engine's processes, and does to them; their host watches them.

    Args:
        directory: of this server's sockets.
        options: ``RelayOptions`` of the engine, as plain types.
    """

    def __init__(self, engine: RemoteEngine, directory: Path, options: dict[str, Any], *, log_stats: bool) -> None:
        self._engine = engine
        self._directory = directory
        self._options = options
        self._log_stats = log_stats

    def starting(self, device_type: str) -> AbstractContextManager[None]:
        """Nothing to do here: the host forks them."""
        return nullcontext()

    def launch(self) -> dict[str, str]:
        """See ``RemoteEngine.launch``."""
        return self._engine.launch(
            self._directory,
            self._options,
            log_stats=self._log_stats,
            farewell=EngineCoreProc.ENGINE_CORE_DEAD,
            timeout_s=envs.VLLM_OMNI_STAGE_READY_TIMEOUT_S,
        )

    @property
    def has_ended(self) -> bool:
        return self._engine.has_ended

    def can_start(self) -> bool:
        return self._engine.has_host

    def failure(self) -> str | None:
        return self._engine.failure()

    def pids(self) -> list[int]:
        return self._engine.pids()

    def cpu_s(self) -> float:
        return self._engine.cpu_s()

    def has_lost_one(self) -> bool:
        """False: the host ends an engine that has lost a process, and reports it."""
        return False

    def kill(self) -> None:
        self._engine.kill()

    def end(self) -> None:
        self._engine.end()

    def note(self) -> None:
        """Nothing to remember here: the host does."""

    def remove_dead_sockets(self) -> None:
        """Nothing to remove: vLLM's client removes its own."""
