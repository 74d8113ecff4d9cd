"""The classes that run the stages on each platform."""

from dataclasses import fields
from importlib.metadata import EntryPoint, EntryPoints

import pytest

from vllm_omni.config import StageConfig
from vllm_omni.engine.kinds import ENGINE_KINDS
from vllm_omni.errors import ConfigError
from vllm_omni.worker import platforms
from vllm_omni.worker.platforms import PLATFORMS, Platform

ABACUS = Platform("abacus.Worker", "abacus.OneShot", "abacus.Steps", "abacus.DiffusionWorker", "int8")


def add(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    entries = EntryPoints([EntryPoint("abacus", value, platforms.ENTRY_POINT_GROUP)])
    monkeypatch.setattr(platforms, "entry_points", lambda group: entries.select(group=group))


def test_an_unknown_platform_is_rejected_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"'abacus'.*cpu, cuda.*vllm_omni.platforms"):
        platforms.find_platform("abacus")


def test_another_package_adds_the_classes_of_every_kind_of_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    add(monkeypatch, f"{__name__}:ABACUS")
    args = {
        kind: ENGINE_KINDS[kind].engine_args(
            StageConfig(stage_id=1, name="stage", model="m", engine_type=kind),  # type: ignore[arg-type]
            "abacus",
        )
        for kind in ENGINE_KINDS
    }
    assert args["ar"]["worker_cls"] == "abacus.Worker"
    assert args["generation"]["distributed_executor_backend"] == "abacus.OneShot"
    diffusion = args["diffusion"]
    assert diffusion["distributed_executor_backend"] == "abacus.Steps"
    assert (diffusion["worker_cls"], diffusion["dtype"]) == ("abacus.DiffusionWorker", "int8")


@pytest.mark.parametrize(
    ("value", "message"),
    [("nowhere:PLATFORM", "nowhere:PLATFORM cannot be loaded"), (f"{__name__}:add", "must be a Platform, and is")],
)
def test_a_platform_that_is_none_is_rejected(monkeypatch: pytest.MonkeyPatch, value: str, message: str) -> None:
    add(monkeypatch, value)
    with pytest.raises(ConfigError, match=message):
        platforms.find_platform("abacus")


def test_the_classes_of_the_cpu_can_be_imported() -> None:
    from vllm.utils.import_utils import resolve_obj_by_qualname
    from vllm.v1.worker.cpu_worker import CPUWorker

    assert issubclass(resolve_obj_by_qualname(PLATFORMS["cpu"].ar_worker), CPUWorker)
    for field in fields(Platform):
        name = getattr(PLATFORMS["cpu"], field.name)
        if isinstance(name, str) and "." in name:
            assert isinstance(resolve_obj_by_qualname(name), type)
