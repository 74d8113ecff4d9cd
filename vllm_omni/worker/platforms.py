"""``Platform``: the classes that run each kind of stage on one platform.

Another package adds a platform by an entry point in the group ``vllm_omni.platforms``: its name is vLLM's device type
of the platform, its value a ``Platform`` (``package.module:PLATFORM``).

From: vLLM-Omni (paper), section 3.5.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.metadata import entry_points

from vllm_omni.errors import ConfigError

ENTRY_POINT_GROUP = "vllm_omni.platforms"


@dataclass(frozen=True)
class Platform:
    """Qualified names of classes, as vLLM starts workers and executors by name."""

    ar_worker: str
    generation_executor: str = "vllm_omni.model_executor.generation_executor.GenerationExecutor"
    diffusion_executor: str = "vllm_omni.model_executor.diffusers_executor.DiffusersPipelineExecutor"
    diffusion_worker: str = "vllm_omni.worker.diffusion_worker.DiffusionWorker"  # for vLLM's own executors
    diffusion_dtype: str = "bfloat16"  # of pipelines, unless the deployment says otherwise
    divides_memory: bool = False  # its workers measure themselves and take a share of their device (``RankMemory``)


PLATFORMS = {
    "cpu": Platform("vllm_omni.worker.cpu_worker.CPUARWorker", diffusion_dtype="float32", divides_memory=True),
    "cuda": Platform("vllm_omni.worker.cuda_worker.CUDAARWorker", divides_memory=True),
}


def find_platform(device_type: str) -> Platform:
    """Find the platform of a device type of vLLM's.

    Raises:
        ConfigError: the platform is unknown, or another package's cannot be loaded.
    """
    entries = {entry.name: entry for entry in entry_points(group=ENTRY_POINT_GROUP)}
    if (entry := entries.get(device_type)) is not None:
        try:
            platform = entry.load()
        except Exception as exc:
            raise ConfigError(f"platform {device_type!r}: {entry.value} cannot be loaded: {exc}") from exc
        if not isinstance(platform, Platform):
            raise ConfigError(f"platform {device_type!r}: {entry.value} must be a Platform, and is {platform!r}")
        return platform
    if device_type not in PLATFORMS:
        known = ", ".join(sorted({*PLATFORMS, *entries}))
        raise ConfigError(
            f"no classes for platform {device_type!r}: known are {known}; a package "
            f"can add one by an entry point in the group {ENTRY_POINT_GROUP!r}"
        )
    return PLATFORMS[device_type]
