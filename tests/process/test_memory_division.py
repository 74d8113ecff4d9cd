"""Stages that divide a device: each rank is a thread, the device counts what they allocate."""

import shutil
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path

import pytest

from vllm_omni.errors import DeadlineExceeded
from vllm_omni.process.memory import Device, DoesNotFit, StageMemory
from vllm_omni.process.memory_division import MemoryDivision
from vllm_omni.process.supervisor import in_thread

MIB = 1 << 20
TIMEOUT_S = 20.0


class CountingDevice:
    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self.allocated = 0
        self._lock = threading.Lock()

    def allocate(self, num_bytes: int) -> None:
        with self._lock:
            self.allocated += num_bytes
            assert self.allocated <= self.num_bytes, "out of memory"

    def now(self) -> Device:
        return Device(name="cuda:0", total=self.num_bytes, free=self.num_bytes - self.allocated)


class Rank:
    """A rank that loads its weights when it is started, and then its cache."""

    def __init__(self, directory: Path, device: CountingDevice, needs: StageMemory, ranks: Sequence[str]) -> None:
        self.division = MemoryDivision(directory, "cuda:0", ranks)
        self.device, self.needs = device, needs

    def start(self, timeout_s: float = TIMEOUT_S) -> int:
        self.device.allocate(self.needs.weights)
        self.division.publish(self.needs)
        cache = self.division.share_of(self.needs.stage, self.device.now, timeout_s)
        self.device.allocate(cache)
        return cache


def make_ranks(directory: Path, device: CountingDevice, *weights: int) -> list[Rank]:
    names = [f"stage{number}" for number in range(len(weights))]
    needs = [
        StageMemory(stage=name, weights=size, activations=MIB, cache_min=MIB, cache_max=1000 * MIB * (1 + number))
        for number, (name, size) in enumerate(zip(names, weights, strict=True))
    ]
    return [Rank(directory, device, need, names) for need in needs]


def in_threads(ranks: Sequence[Rank], timeout_s: float = TIMEOUT_S) -> list["Future[int]"]:
    caches: list[Future[int]] = [Future() for _ in ranks]

    def run(rank: Rank, cache: "Future[int]") -> None:
        try:
            cache.set_result(rank.start(timeout_s))
        except BaseException as exc:
            cache.set_exception(exc)

    for one, cache in zip(ranks, caches, strict=True):
        in_thread(run, one, cache)
    return caches


def test_ranks_that_start_together_fill_the_device_and_no_more(tmp_path: Path) -> None:
    device = CountingDevice(1000 * MIB)
    ranks = make_ranks(tmp_path, device, 100 * MIB, 300 * MIB, 50 * MIB)
    caches = [one.result(TIMEOUT_S) for one in in_threads(ranks)]
    assert sum(caches) == pytest.approx((920 - 450 - 3) * MIB, abs=4)
    assert caches[2] == pytest.approx(3 * caches[0], abs=3)
    assert device.allocated <= 0.92 * device.num_bytes


def test_no_rank_allocates_its_cache_before_all_have_measured(tmp_path: Path) -> None:
    device = CountingDevice(1000 * MIB)
    first, late = make_ranks(tmp_path, device, 100 * MIB, 300 * MIB)
    (cache,) = in_threads([first])
    time.sleep(0.1)  # long enough for several looks
    assert not cache.done()
    assert device.allocated == 100 * MIB
    late.start()
    assert cache.result(TIMEOUT_S) > 0


def test_a_rank_that_starts_again_gets_the_share_that_it_had(tmp_path: Path) -> None:
    device = CountingDevice(1000 * MIB)
    ranks = make_ranks(tmp_path, device, 100 * MIB, 300 * MIB)
    before = [one.result(TIMEOUT_S) for one in in_threads(ranks)]
    device.allocated -= before[0] + 100 * MIB
    assert Rank(tmp_path, device, ranks[0].needs, ranks[0].division.ranks).start(timeout_s=0.0) == before[0]


def test_a_rank_that_never_measures_is_named_at_the_deadline(tmp_path: Path) -> None:
    device = CountingDevice(1000 * MIB)
    ranks = make_ranks(tmp_path, device, MIB, MIB, MIB)
    for cache in in_threads([ranks[0], ranks[2]], timeout_s=0.2):
        with pytest.raises(DeadlineExceeded, match=r"the memory of stage1 was not measured within 0\.2 s"):
            cache.result(TIMEOUT_S)


def test_a_wait_ends_with_the_server(tmp_path: Path) -> None:
    first, _ = make_ranks(tmp_path, CountingDevice(1000 * MIB), MIB, MIB)
    (cache,) = in_threads([first])
    time.sleep(0.05)
    shutil.rmtree(tmp_path)
    with pytest.raises(DeadlineExceeded, match="stage1"):
        cache.result(TIMEOUT_S)


def test_every_rank_reports_why_they_do_not_fit(tmp_path: Path) -> None:
    device = CountingDevice(1000 * MIB)
    for cache in in_threads(make_ranks(tmp_path, device, 500 * MIB, 499 * MIB)):
        with pytest.raises(DoesNotFit, match=r"device cuda:0: .* missing .*stage0: weights 500\.0 MiB"):
            cache.result(TIMEOUT_S)


def test_the_plan_can_be_read_once_there_is_one(tmp_path: Path) -> None:
    ranks = make_ranks(tmp_path, CountingDevice(1000 * MIB), MIB)
    assert ranks[0].division.plan() is None
    cache = ranks[0].start()
    plan = ranks[0].division.plan()
    assert plan is not None
    assert plan.caches == {"stage0": cache}
