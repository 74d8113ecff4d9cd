"""The memory that this host's kernel and control groups leave to the stages."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from vllm_omni.cgroups import control_groups, memory_limit

MEMINFO = Path("/proc/meminfo")


class HostMemory(NamedTuple):
    """In bytes."""

    total: int  # of the machine, or the lowest limit of a control group
    available: int  # without swapping; page cache counts as available


def host_memory(cgroups: Sequence[Path] | None = None, meminfo: Path = MEMINFO) -> HostMemory:
    """Read how much memory there is, and how much is available.

    Args:
        cgroups: directories of the process's control group and of those above it.
    """
    sizes = {name: int(kib) * 1024 for name, kib in re.findall(r"^(\w+):\s+(\d+) kB", _read(meminfo), re.MULTILINE)}
    total, available = sizes.get("MemTotal", 0), sizes.get("MemAvailable", 0)
    for group in control_groups() if cgroups is None else cgroups:
        if (limit := memory_limit([group])) is not None and limit < sizes.get("MemTotal", 0):
            total, available = min(total, limit), min(available, max(0, limit - _used(group)))
    return HostMemory(total, available)


def _used(group: Path) -> int:
    """Bytes that the group has allocated, without files that the kernel would drop for it."""
    used = (_read(group / "memory.current") or _read(group / "memory" / "memory.usage_in_bytes")).strip()
    stat = _read(group / "memory.stat") or _read(group / "memory" / "memory.stat")
    dropped = re.search(r"^(?:total_)?inactive_file (\d+)$", stat, re.MULTILINE)
    return int(used or 0) - (int(dropped[1]) if dropped else 0)


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
