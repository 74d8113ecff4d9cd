from importlib.metadata import EntryPoint, EntryPoints

import pytest

from vllm_omni.errors import ConfigError
from vllm_omni.worker import platforms


def test_every_known_platform_names_a_worker() -> None:
    assert platforms.ar_worker_cls("cpu") == "vllm_omni.worker.worker.CPUARWorker"
    assert platforms.ar_worker_cls("cuda") == "vllm_omni.worker.worker.CUDAARWorker"


def test_an_unknown_platform_is_rejected_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"'abacus'.*cpu, cuda.*vllm_omni.platforms"):
        platforms.ar_worker_cls("abacus")


def test_another_package_adds_a_platform(monkeypatch: pytest.MonkeyPatch) -> None:
    entries = EntryPoints([EntryPoint("abacus", "abacus.worker:Worker", platforms.ENTRY_POINT_GROUP)])
    monkeypatch.setattr(platforms, "entry_points", lambda group: entries.select(group=group))
    assert platforms.ar_worker_cls("abacus") == "abacus.worker.Worker"


def test_the_cpu_worker_is_a_class_that_vllm_can_import() -> None:
    from vllm.utils.import_utils import resolve_obj_by_qualname
    from vllm.v1.worker.cpu_worker import CPUWorker

    assert issubclass(resolve_obj_by_qualname(platforms.ar_worker_cls("cpu")), CPUWorker)
