"""What the runner asks of the pool of encoded media: it is read in front of an encode, and written behind it."""

import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vllm_omni.kv.pool.tensors import TensorStore, open_tensors, page_bytes
from vllm_omni.messages.media_counts import MEDIA_POOL, MediaCounts
from vllm_omni.worker import media_pool
from vllm_omni.worker.media_pool import EMBEDS, MediaPool, MediaView, Split

WIDTH = 8
SIZE = page_bytes(WIDTH, torch.float32)
NUM_EMBEDS = 100


def embeds(seed: int) -> torch.Tensor:
    return torch.randn(NUM_EMBEDS, WIDTH, generator=torch.Generator().manual_seed(seed))


def batch(*names: str, modality: str = "image", num_embeds: int = NUM_EMBEDS) -> Any:
    place = SimpleNamespace(get_num_embeds=lambda: num_embeds)
    return list(names), [(modality, f"data of {name}") for name in names], [("request", place) for _ in names]


def encode(pool: MediaPool, split: Split) -> list[str]:
    """What the runner does with the rest of a batch."""
    for name in split.rest[0]:
        pool.keep(name, embeds(int(name)))
    return split.rest[0]


class Host:
    def __init__(self, root: Path) -> None:
        self.root = root
        self.pools: list[MediaPool] = []

    def tensors(self, num_slots: int = 16, **more: Any) -> TensorStore:
        return open_tensors("layout", SIZE, num_slots * SIZE, directory=str(self.root / "slabs"), **more)

    def engine(self, *args: Any, **more: Any) -> MediaPool:
        self.pools.append(MediaPool(self.tensors(**more), *args))
        return self.pools[-1]

    def stop(self, pool: MediaPool) -> None:
        """With what is queued stored."""
        self.pools.remove(pool)
        pool.close()


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Host]:
    host = Host(tmp_path)
    yield host
    for pool in list(host.pools):
        host.stop(pool)


def test_what_one_engine_encoded_the_next_one_finds(host: Host) -> None:
    first = host.engine()
    assert encode(first, first.split(batch("1", "2"))) == ["1", "2"]
    host.stop(first)
    pool = host.engine()
    split = pool.split(batch("1", "3", "2"))
    assert split.found.keys() == {"1", "2"} == pool.loaded and split.rest[:2] == batch("3")[:2]
    assert all(torch.equal(split.found[name], embeds(int(name))) for name in ("1", "2"))
    counts = pool.counts()
    assert (counts.hits["memory"], counts.encoded, counts.kept) == (2, 1, {"memory": 2})


def test_items_of_another_size_are_encoded(host: Host) -> None:
    first = host.engine()
    encode(first, first.split(batch("1")))
    host.stop(first)
    assert not host.engine().split(batch("1", num_embeds=NUM_EMBEDS - 1)).found


def test_names_from_a_counter_and_given_embeddings_are_neither_stored_nor_found(host: Host) -> None:
    pool = host.engine()
    for one in (batch("renderer0-mm-1-image-0"), batch("1", modality="prompt_embeds")):
        assert pool.split(one) == Split({}, one)
        pool.keep(one[0][0], embeds(1))
    host.stop(pool)
    assert host.tensors().statistics().num_stored == 0 and host.engine().counts().kept == {"memory": 0}


def test_what_was_cancelled_is_not_stored(host: Host) -> None:
    pool = host.engine()
    pool.split(batch("1"))
    pool.forget()
    pool.keep("1", embeds(1))
    host.stop(pool)
    assert host.engine().counts().kept == {"memory": 0}


def test_a_damaged_item_is_encoded_and_stored_again(host: Host) -> None:
    first = host.engine()
    encode(first, first.split(batch("1")))
    host.stop(first)
    (slab,) = (host.root / "slabs").iterdir()
    data = bytearray(slab.read_bytes())
    data[4096 + 200 :: 512] = bytes(byte ^ 1 for byte in data[4096 + 200 :: 512])
    slab.write_bytes(data)
    pool = host.engine()
    assert encode(pool, pool.split(batch("1"))) == ["1"]
    host.stop(pool)
    again = host.engine()
    assert torch.equal(again.split(batch("1")).found["1"], embeds(1))


class HangingDisk(TensorStore):
    """Reads do not end before the test says so."""

    end: threading.Event

    def get(self, *args: Any, **kwargs: Any) -> Any:
        assert self.end.wait(20)
        return super().get(*args, **kwargs)


def test_a_step_does_not_wait_for_a_medium_that_hangs(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(media_pool, "LOAD_TIMEOUT_S", 0.01)
    tensors = host.tensors()
    tensors.put("1", embeds(1), EMBEDS)
    tensors.__class__, HangingDisk.end = HangingDisk, threading.Event()
    pool = MediaPool(tensors)
    host.pools.append(pool)
    assert not pool.split(batch("1")).found
    late = set(pool._late)
    assert late and not pool.split(batch("1")).found and pool._late == late, "no further read was started"
    HangingDisk.end.set()
    assert all(one.result(20) for one in late)
    assert pool.split(batch("1")).found


def test_items_beyond_the_queue_are_dropped(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(media_pool, "MAX_QUEUED", 0)
    pool = host.engine()
    encode(pool, pool.split(batch("1")))
    assert pool.counts().dropped == 1


class Ranks:
    """Two ranks of a tensor-parallel group, one after the other."""

    sent: Any = None

    def broadcast_tensor_dict(self, values: Any, src: int) -> Any:
        self.sent = values if self.sent is None else self.sent
        return self.sent


def test_all_ranks_get_what_the_first_has_read(host: Host) -> None:
    first = host.engine()
    encode(first, first.split(batch("1")))
    host.stop(first)
    group = Ranks()
    pools = [host.engine(group), MediaPool(None, group)]  # type: ignore[arg-type]
    splits = [pool.split(batch("1", "2")) for pool in pools]
    for pool, split in zip(pools, splits, strict=True):
        assert split.rest[0] == ["2"] and torch.equal(split.found["1"], embeds(1))
        assert encode(pool, split) == ["2"]
    assert pools[1].take_counts() is None
    pools[1].close()


def test_a_front_end_sees_what_engines_of_the_host_have(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(media_pool, "media_layout", lambda *_: "layout")
    options = {MEDIA_POOL: {"directory": str(host.root / "slabs")}}
    pool, view = host.engine(), MediaView(SimpleNamespace(additional_config=options))  # type: ignore[arg-type]
    assert view.find(["1", "2"]) == set()
    encode(pool, pool.split(batch("1")))
    host.stop(pool)
    assert view.find(["1", "2"]) == {"1"}, "an engine has ended, and its media stay"
    tensors = host.tensors()
    tensors.remove("1", EMBEDS)
    assert view.find(["1", "2"]) == set()
    tensors.close()


def test_counts_are_reported_once(host: Host) -> None:
    pool = host.engine()
    assert pool.take_counts() is not None  # what is kept
    assert pool.take_counts() is None
    pool.split(batch("1"))
    counts = pool.take_counts()
    assert counts is not None and counts.encoded == 1
    pool.split(batch("2", "3"))
    counts = pool.take_counts()
    assert counts is not None and counts.encoded == 2
    statistics = {"other": 1, **counts.to_statistics()}
    assert MediaCounts.of_statistics(statistics) == counts and statistics == {"other": 1}
    assert MediaCounts.of_statistics(statistics) is None is MediaCounts.of_statistics(None)
