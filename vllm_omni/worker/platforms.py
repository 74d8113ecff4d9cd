"""Worker class of an autoregressive stage on each platform.

Another package adds a platform by an entry point in the group ``vllm_omni.platforms``: its name is vLLM's device type
of the platform, its value the worker class (``package.module:Class``).

From: vLLM-Omni (paper), section 3.5.
"""

from __future__ import annotations

from importlib.metadata import entry_points

from vllm_omni.errors import ConfigError

ENTRY_POINT_GROUP = "vllm_omni.platforms"
WORKERS = {
    "cpu": "vllm_omni.worker.worker.CPUARWorker",
    "cuda": "vllm_omni.worker.worker.CUDAARWorker",
}


def ar_worker_cls(device_type: str) -> str:
    """Find the worker for a device type: its qualified name, as vLLM spawns workers by name.

    Raises:
        ConfigError: no worker is known for the platform.
    """
    workers = WORKERS | {e.name: e.value.replace(":", ".") for e in entry_points(group=ENTRY_POINT_GROUP)}
    if device_type not in workers:
        raise ConfigError(
            f"no worker for platform {device_type!r}: known are {', '.join(sorted(workers))}; a package can add one by "
            f"an entry point in the group {ENTRY_POINT_GROUP!r}"
        )
    return workers[device_type]
