"""Removes what failed tests leave in /dev/shm: their killed processes could not do it themselves."""

import contextlib
import re
import time
from pathlib import Path

DIRECTORY = Path("/dev/shm")
# Names given by vLLM (message queues of ranks), Python's SharedMemory, torch and the benchmarks.
NAMES = re.compile(r"(sem\.)?(vllm_dist_|psm_|torch_\d|vllm-omni-)")
LOOK_TWICE_S = 0.1


def mapped_files() -> set[str]:
    """Paths in /dev/shm that a living process has mapped, or has open."""
    found: set[str] = set()
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has just ended, or is another user's
            found |= set(re.findall(rf"{DIRECTORY}/.*", (process / "maps").read_text()))
            for link in (process / "fd").iterdir():
                with contextlib.suppress(OSError):  # just closed
                    found.add(str(link.readlink()))
    return found


def orphans(since: float) -> set[Path]:
    """Files made since a time (``time.time``) that no process uses."""
    used = mapped_files()
    found = set()
    for path in DIRECTORY.glob("*"):
        try:
            is_new = path.stat().st_ctime >= since
        except OSError:
            continue
        if is_new and NAMES.match(path.name) and str(path) not in used:
            found.add(path)
    return found


def remove_orphans(since: float) -> list[str]:
    """Remove them; returns their names. A file is only removed if it was unused at two looks."""
    suspects = orphans(since)
    if suspects:
        time.sleep(LOOK_TWICE_S)  # one of them may have been made a moment ago, and be mapped now
        suspects &= orphans(since)
    for path in suspects:
        path.unlink(missing_ok=True)
    return sorted(path.name for path in suspects)
