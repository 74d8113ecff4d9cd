"""What killed engines left in shared memory: slabs of KV pages, and the files of vLLM's offloading connector."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from vllm_omni.entrypoints.cli.doctor.report import Report
from vllm_omni.kv.pool.slab_leftovers import find_slabs, find_vllm_files, remove
from vllm_omni.process.memory import format_bytes
from vllm_omni.process.proc import SHM

KINDS = {
    "slabs": "KV pages without an engine, which the next engine of this layout adopts",
    "vllm_files": "left by vLLM's offloading connector, whose engine was killed",
}
"""Section's key -> description."""


def examine_shared_memory(report: Report, now_s: float, *, clean: bool, shm: Path = SHM) -> None:
    """Find slabs without an owner, of any stage with a ``kv_pool``, and files of dead engines; remove them if asked to.

    Args:
        now_s: seconds since the epoch.
    """
    found = zip(KINDS, (find_slabs(), find_vllm_files(now_s, shm)), strict=True)
    report.sections["shared_memory"] = {
        kind: [
            {"path": str(one.path), "num_bytes": one.num_bytes, "removed": clean and remove(one)} for one in leftovers
        ]
        for kind, leftovers in found
    }


def shared_memory_lines(section: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for kind, description in KINDS.items():
        for one in section[kind]:
            fate = "removed" if one["removed"] else description
            yield "leftovers", f"{fate}: {one['path']} ({format_bytes(one['num_bytes'])})"
