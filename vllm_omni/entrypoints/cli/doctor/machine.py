"""The machine and the environment: cores, memory, shared memory, variables, the directory of sockets."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from vllm_omni import envs
from vllm_omni.cgroups import cpu_quota, memory_limit
from vllm_omni.entrypoints.cli.doctor.report import Report, format_size
from vllm_omni.names import suggest
from vllm_omni.process.proc import SHM
from vllm_omni.process.run_directory import path_too_long

MIN_SHM_BYTES = 256 * 2**20  # Docker's default, 64 MiB, is too little for workers that share tensors

# Variables beside this project's own that change how stages run. Values are shown, so none of them is a secret.
VARIABLES = (
    "VLLM_PLUGINS VLLM_LOGGING_LEVEL VLLM_CPU_KVCACHE_SPACE VLLM_CPU_OMP_THREADS_BIND VLLM_TARGET_DEVICE "
    "VLLM_USE_V2_MODEL_RUNNER VLLM_WORKER_MULTIPROC_METHOD VLLM_ENGINE_READY_TIMEOUT_S VLLM_MEDIA_CACHE "
    "OMP_NUM_THREADS OMP_WAIT_POLICY CUDA_VISIBLE_DEVICES HF_HOME HF_HUB_CACHE HF_HUB_OFFLINE TRANSFORMERS_OFFLINE "
    "TMPDIR PYTHONPATH"
).split()


def examine_machine(report: Report, cgroups: Sequence[Path], meminfo: Path) -> None:
    """Measure cores and memory, and how much of them the control groups leave to this process.

    Args:
        cgroups: directories of the process's control group and of those above it.
    """
    text = meminfo.read_text() if meminfo.is_file() else ""
    sizes = {name: int(kib) * 1024 for name, kib in re.findall(r"^(\w+):\s+(\d+) kB", text, re.MULTILINE)}
    total = sizes.get("MemTotal", 0)
    limit = memory_limit(cgroups)
    report.sections["cpu"] = {
        "cores": os.cpu_count(),
        "usable": len(os.sched_getaffinity(0)),
        "quota": cpu_quota(cgroups),
    }
    report.sections["memory"] = memory = {
        "total_bytes": total,
        "available_bytes": sizes.get("MemAvailable", 0),
        "cgroup_limit_bytes": limit if limit is not None and limit < total else None,
    }
    if not SHM.is_dir():
        report.problem(f"there is no {SHM}, and the stages' processes share memory there", f"mount a tmpfs at {SHM}")
        return
    shm = shutil.disk_usage(SHM)
    memory |= {"shm_bytes": shm.total, "shm_free_bytes": shm.free}
    if shm.free < MIN_SHM_BYTES:
        free, size = format_size(shm.free), format_size(shm.total)
        report.warn(
            f"{SHM} has {free} free of {size}: several workers of one stage may need more",
            "vllm-omni doctor --clean; in a container, start it with --shm-size=1g or --ipc=host",
        )


def examine_environment(report: Report, environ: Mapping[str, str]) -> None:
    """List the variables that concern servers, and check this project's own and the directory of sockets."""
    known = {name: environ[name] for name in (*envs.VARIABLES, *VARIABLES) if name in environ}
    report.sections["environment"] = {name: known[name] for name in sorted(known)}
    for name in sorted(environ):
        if name.startswith(envs.PREFIX):
            _examine_variable(report, name, environ[name])
    parents = runtime_directories(environ)
    if not parents:
        return
    parent = parents[0]  # the one in use
    if wrong := path_too_long(parent):
        report.problem(wrong, "set VLLM_OMNI_RUNTIME_DIR to a directory with a short path")
    elif not os.access(parent, os.W_OK | os.X_OK):
        report.problem(
            f"{parent}, where servers create their sockets, is not writable",
            "set VLLM_OMNI_RUNTIME_DIR to a writable directory",
        )


def _examine_variable(report: Report, name: str, value: str) -> None:
    if name not in envs.VARIABLES:
        report.problem(
            f"environment variable {name} is not one of this project's, and servers reject it: "
            f"{suggest(name, envs.VARIABLES)}",
            f"unset {name}",
        )
        return
    try:
        envs.VARIABLES[name].parse(value)
    except ValueError as exc:
        report.problem(f"environment variable {name}={value!r}: must be {exc}", f"unset or correct {name}")


def runtime_directories(environ: Mapping[str, str]) -> list[Path]:
    """Where servers of this user create their private directories: the one set now, and the default."""
    chosen = environ.get("VLLM_OMNI_RUNTIME_DIR")
    paths = [Path(chosen).expanduser()] if chosen else []
    return [path for path in dict.fromkeys([*paths, Path(tempfile.gettempdir())]) if path.is_dir()]
