"""The device of a stage without tokens. Without a GPU: upstream's platform, of which only the numbers are read."""

import pytest
import torch
from vllm.config import ParallelConfig
from vllm.platforms import interface

from vllm_omni.model_executor import stage_device


class Gpus(interface.Platform):
    device_type = "cuda"
    device_control_env_var = "CUDA_VISIBLE_DEVICES"


@pytest.mark.parametrize(
    ("assigned", "visible", "index"),
    [(None, None, 0), (None, "3,2", 0), ([2], None, 2), ([2], "3,2", 1)],
)
def test_a_stage_runs_on_the_gpu_that_device_ids_name(
    assigned: list[int] | None, visible: str | None, index: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    current: list[torch.device] = []
    monkeypatch.setattr(interface, "_assigned_physical_gpu_ids", None)
    monkeypatch.setattr(stage_device, "current_platform", Gpus())
    monkeypatch.setattr(torch.accelerator, "set_device_index", current.append)
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    device = stage_device.select_device(ParallelConfig(assigned_physical_gpu_ids=assigned))
    assert [device] == current == [torch.device("cuda", index)]


def test_a_stage_on_a_cpu_has_no_device_of_its_own() -> None:
    assert stage_device.select_device(ParallelConfig()) == torch.device("cpu")
