"""``select_device``: the device of a stage without tokens, which upstream's workers choose for the others."""

import torch
from vllm.config import ParallelConfig
from vllm.platforms import current_platform
from vllm.platforms.interface import set_assigned_physical_gpu_ids


def select_device(config: ParallelConfig, local_rank: int = 0) -> torch.device:
    """Return the device of a rank, by ``device_ids`` and the environment; a GPU becomes this process's current one."""
    if current_platform.device_type == "cpu":
        return torch.device("cpu")
    if config.assigned_physical_gpu_ids is not None:
        set_assigned_physical_gpu_ids(config.assigned_physical_gpu_ids)
    index = current_platform.logical_device_id_to_visible_device_id(local_rank)
    device = torch.device(current_platform.device_type, index)
    torch.accelerator.set_device_index(device)
    return device
