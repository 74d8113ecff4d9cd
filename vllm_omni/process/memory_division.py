"""``MemoryDivision``: stages that start on one device measure, wait for one another, and divide what is left.

Each rank writes its measurement into the run directory. Once all of the device's are there, nothing allocates:
every rank that waits reads the free memory and computes a plan, and the first one that is written is everybody's. It
stays in the directory, so that a stage which is restarted gets the share that it had.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec

from vllm_omni.errors import DeadlineExceeded
from vllm_omni.process.memory import Device, DevicePlan, DoesNotFit, StageMemory, divide

MEMORY = "memory"
"""Key of the section in a stage's ``additional_config``: the fields of ``MemorySection``."""
POLL_S = 0.02


class MemorySection(msgspec.Struct, frozen=True):
    """Which ranks share the devices of a stage."""

    devices: list[str]  # of its ranks
    ranks: dict[str, list[str]]  # device -> names of all ranks on it, of every stage
    memory_share: float | None = None  # of each device, for this stage: gpu_memory_utilization, if that is configured
    division: str = ""  # of an engine that starts later and divides what is free then: its own


class _Outcome(msgspec.Struct, frozen=True):
    plan: DevicePlan | None = None
    error: str | None = None


def _outcome(device: Device, measured: Sequence[StageMemory]) -> _Outcome:
    try:
        return _Outcome(divide(device, measured, are_loaded=True))
    except DoesNotFit as exc:
        return _Outcome(error=str(exc))


class MemoryDivision:
    """One device's, as one of its ranks sees it.

    Args:
        directory: the server's ``RunDirectory``.
        ranks: the names of all ranks on the device that divide it.
        division: which division it is, where engines start later.
    """

    def __init__(self, directory: Path, device: str, ranks: Sequence[str], division: str = "") -> None:
        self.device = device
        self.ranks = ranks
        self._directory = directory / MEMORY / division / device.replace(":", "-")

    def publish(self, measured: StageMemory) -> None:
        """Report what a rank has allocated and will allocate; it allocates nothing more before it has its share."""
        self._directory.mkdir(parents=True, exist_ok=True)
        self._write(measured, self._measurement(measured.stage), replaces=True)

    def share_of(self, rank: str, device_now: Callable[[], Device], timeout_s: float) -> int:
        """Wait until every rank of the device has measured; returns the bytes of this rank's cache.

        Args:
            device_now: reads the device's free memory.

        Raises:
            DoesNotFit: there is too little memory.
            DeadlineExceeded: a rank has not measured in time, or the server has ended; the message names the ranks.
        """
        deadline = time.monotonic() + timeout_s
        while (outcome := self._read_outcome()) is None:
            measured = self._measured()
            missing = [one for one in self.ranks if one not in measured]
            if not missing:
                self._write(_outcome(device_now(), list(measured.values())), self._outcome_file, replaces=False)
            elif time.monotonic() > deadline or not self._directory.exists():
                raise DeadlineExceeded(
                    f"device {self.device}: the memory of {', '.join(missing)} was not measured within {timeout_s:g} s "
                    "(VLLM_OMNI_STAGE_READY_TIMEOUT_S)"
                )
            else:
                time.sleep(POLL_S)
        if outcome.plan is None:
            raise DoesNotFit(outcome.error)
        return outcome.plan.caches[rank]

    def has_measured(self, rank: str) -> bool:
        return self._measurement(rank).exists()

    def plan(self) -> DevicePlan | None:
        """The division, once there is one."""
        outcome = self._read_outcome()
        return None if outcome is None else outcome.plan

    @property
    def _outcome_file(self) -> Path:
        return self._directory / "plan.json"

    def _measurement(self, rank: str) -> Path:
        return self._directory / f"{self.ranks.index(rank)}.measured.json"

    def _measured(self) -> Mapping[str, StageMemory]:
        found = {}
        for rank in self.ranks:
            try:
                found[rank] = msgspec.json.decode(self._measurement(rank).read_bytes(), type=StageMemory)
            except FileNotFoundError:
                continue
        return found

    def _read_outcome(self) -> _Outcome | None:
        try:
            return msgspec.json.decode(self._outcome_file.read_bytes(), type=_Outcome)
        except FileNotFoundError:
            return None

    def _write(self, value: msgspec.Struct, path: Path, *, replaces: bool) -> None:
        """Write a file that is complete once it has its name; without ``replaces``, the first one stays."""
        temporary = path.with_name(f"{path.name}.{os.getpid()}-{threading.get_ident()}")
        temporary.write_bytes(msgspec.json.encode(value))
        try:
            if replaces:
                temporary.replace(path)
            else:
                path.hardlink_to(temporary)
                temporary.unlink()
        except FileExistsError:
            temporary.unlink()
