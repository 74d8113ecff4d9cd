"""Removes what failed tests leave in /dev/shm: their killed processes could not do it themselves."""

import contextlib
import re
import time
from pathlib import Path

DIRECTORY = Path("/dev/shm")
# Names given by vLLM (message queues of ranks), Python's SharedMemory, torch and the benchmarks.
NAMES = re.compile(r"(sem\.)?(vllm_dist_|psm_|torch_\d|vllm-omni-)")
LOOK_TWICE_S = 0.1


def used_inodes() -> set[int]:
    """Files in /dev/shm that a living process has mapped, or has open; a semaphore is mapped under an earlier name."""
    found: set[int] = set()
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has just ended, or is another user's
            found |= set(map(int, re.findall(rf" (\d+) +{DIRECTORY}/", (process / "maps").read_text())))
            for link in (process / "fd").iterdir():
                with contextlib.suppress(OSError):  # just closed
                    if link.readlink().is_relative_to(DIRECTORY):
                        found.add(link.stat().st_ino)
    return found


def orphans(since: float) -> set[Path]:
    """Files made since a time (``time.time``) that no process uses."""
    used = used_inodes()
    found = set()
    for path in DIRECTORY.glob("*"):
        with contextlib.suppress(OSError):  # removed meanwhile
            stat = path.stat()
            if stat.st_ctime >= since and NAMES.match(path.name) and stat.st_ino not in used:
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
