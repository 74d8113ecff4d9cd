"""Limits of the control groups (cgroups(7), version 2 or 1) that a container sets for its processes."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path


def control_groups() -> list[Path]:
    """Directories of this process's control group and of those above it."""
    root = Path("/sys/fs/cgroup")
    own = re.search(r"^0::/(.*)$", _read(Path("/proc/self/cgroup")), re.MULTILINE)
    path = root / (own[1] if own else "")
    return [path, *(parent for parent in path.parents if parent.is_relative_to(root))]


def cpu_quota(groups: Iterable[Path]) -> float | None:
    """Number of cores whose time a process in all these groups may use; None: no limit."""
    return min((quota for group in groups if (quota := _cpu_quota(group)) is not None), default=None)


def memory_limit(groups: Iterable[Path]) -> int | None:
    """Bytes that a process in all these groups may use; None: no limit."""
    return min((limit for group in groups if (limit := _memory_limit(group)) is not None), default=None)


def usable_memory() -> int:
    """Bytes of the machine's memory, or of the part that the control groups leave to this process."""
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = memory_limit(control_groups())
    return physical if limit is None else min(limit, physical)


def _cpu_quota(group: Path) -> float | None:
    words = _read(group / "cpu.max").split()
    if not words:  # version 1
        words = [_read(group / "cpu" / f"cpu.cfs_{name}_us").strip() for name in ("quota", "period")]
    if len(words) != 2 or not all(word.isdigit() for word in words):  # "max", or -1
        return None
    return int(words[0]) / int(words[1])


def _memory_limit(group: Path) -> int | None:
    """Version 1 writes a number near 2**63 for no limit."""
    text = (_read(group / "memory.max") or _read(group / "memory" / "memory.limit_in_bytes")).strip()
    return int(text) if text.isdigit() else None


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
