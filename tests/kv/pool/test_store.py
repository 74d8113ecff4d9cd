"""The contract of every store of pages: what is found is what was stored, and what is in use stays."""

import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.fuzz import num_cases
from tests.kv.pool.stores import (
    BACKENDS,
    PAGE_BYTES,
    Backend,
    abandon,
    fill,
    flip,
    key_of,
    keys_of,
    load,
    page_of,
    place_of,
    start,
)
from vllm_omni.errors import ConfigError
from vllm_omni.kv.pool.store import PageStore

Make = Callable[..., PageStore]
TIMEOUT_S = 60.0


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> Backend:
    return BACKENDS[request.param]


@pytest.fixture
def make(backend: Backend, tmp_path: Path) -> Make:
    return lambda *args, **options: backend.make(tmp_path, *args, **options)


# -- pages ------------------------------------------------------------------------------------------------------------


def test_a_page_is_loaded_as_it_was_stored(make: Make) -> None:
    with make() as store:
        for number, num_bytes in enumerate((1, 63, 4095, 4096)):
            assert store.store(key_of(number), bytearray(page_of(number, num_bytes)))
            assert load(store, number) == page_of(number, num_bytes)
        assert load(store, 9) is None
        store.check_integrity()
        statistics = store.statistics()
    assert (statistics.num_pages, statistics.num_bytes) == (4, 1 + 63 + 4095 + 4096)
    assert (statistics.num_hits, statistics.num_misses, statistics.num_stored) == (4, 1, 4)
    assert statistics.num_bytes_stored == statistics.num_bytes_loaded == statistics.num_bytes


def test_a_prefix_is_matched_up_to_the_first_page_that_is_missing(make: Make) -> None:
    with make() as store:
        fill(store, 0, 1, 3)
        assert [store.match(keys_of(*numbers)) for numbers in ((0, 1, 2, 3), (0, 3), (2, 0), ())] == [2, 2, 0, 0]


def test_a_page_that_is_there_is_not_stored_again(make: Make) -> None:
    with make() as store:
        fill(store, 1)
        assert not store.store(key_of(1), page_of(2))
        assert load(store, 1) == page_of(1)
        assert store.statistics().num_duplicates == 1


def test_wrong_sizes_are_rejected_with_the_right_ones(make: Make) -> None:
    with make() as store:
        for key, page in ((b"short", b"x"), (bytes(41), b"x"), (key_of(1), b""), (key_of(1), bytes(PAGE_BYTES + 1))):
            with pytest.raises(ValueError, match="a key has 16 to 40, a page 1 to 4096"):
                store.store(key, page)
        fill(store, 1)
        with pytest.raises(ValueError, match="4096 bytes cannot be copied into 4095"):
            store.load(key_of(1), memoryview(bytearray(PAGE_BYTES - 1)))
        with pytest.raises(TypeError):  # not contiguous
            store.load(key_of(1), memoryview(bytearray(2 * PAGE_BYTES))[::2])
        assert store.load(key_of(1), memoryview(bytearray(PAGE_BYTES)).cast("I")) == PAGE_BYTES
        store.check_integrity()
        assert not any(store.statistics().num_in_use.values())


def test_a_removed_page_is_a_miss_and_its_slot_is_used_again(make: Make) -> None:
    with make(2) as store:
        fill(store, 1, 2)
        store.remove(keys_of(1, 7))
        assert load(store, 1) is None
        fill(store, 3)
        assert (load(store, 2), load(store, 3)) == (page_of(2), page_of(3))
        store.clear()
        assert len(store) == 0
        store.check_integrity()


# -- eviction ---------------------------------------------------------------------------------------------------------


def test_a_full_store_evicts_the_page_that_was_used_longest_ago(make: Make) -> None:
    gone: list[bytes] = []
    with make(3, on_evicted=gone.extend) as store:
        fill(store, 1, 2, 3)
        store.access(keys_of(1))
        fill(store, 4)
        assert gone == keys_of(2)
        assert [load(store, number) for number in (1, 2, 3, 4)] == [page_of(1), None, page_of(3), page_of(4)]
        assert store.statistics().num_evicted == 1


def test_pages_that_are_held_stay_until_all_requests_have_released_them(make: Make) -> None:
    with make(2) as store:
        fill(store, 1, 2)
        assert store.hold("a", keys_of(1, 2, 3)) == 2
        assert store.hold("a", keys_of(1)) == 1, "holding twice is holding once"
        assert store.hold("b", keys_of(1)) == 1
        assert not store.store(key_of(4), page_of(4))
        assert store.statistics().num_dropped == 1
        store.release("a")
        store.release("a")
        store.check_integrity()
        fill(store, 4)
        assert not store.store(key_of(5), page_of(5)) or load(store, 1) == page_of(1)
        store.release("b")
        store.check_integrity()
        assert store.statistics().num_in_use == {"request": 0, "write": 0, "read": 0, "eviction": 0}


def test_a_page_removed_while_it_is_held_keeps_its_bytes(make: Make) -> None:
    with make(2) as store:
        fill(store, 1)
        store.hold("a", keys_of(1))
        path, offset = place_of(store, key_of(1))
        store.remove(keys_of(1))
        assert load(store, 1) is None
        fill(store, 2)
        fill(store, 3)
        assert path.read_bytes()[offset : offset + PAGE_BYTES] == page_of(1)
        store.check_integrity()
        store.release("a")
        store.check_integrity()
        fill(store, 4, 5)
        assert len(store) == 2


def test_pages_that_may_not_be_evicted_are_asked_for_in_few_calls_and_stay(make: Make) -> None:
    asked: list[list[bytes]] = []

    def may_evict(keys: list[bytes]) -> list[bytes]:
        asked.append(keys)
        return [key for key in keys if key == key_of(39)]

    with make(40, may_evict=may_evict) as store:
        fill(store, *range(40))
        store.access(keys_of(*range(39)))  # 39 is the first victim
        fill(store, 40)
        assert len(asked) == 1 and asked[0][0] == key_of(39)
        assert not store.store(key_of(41), page_of(41))
        assert [len(keys) for keys in asked[1:]] == [8] * 5
        assert len(set().union(*asked[1:])) == 40, "a page was asked for twice"
        store.check_integrity()
        assert len(store) == 40


def test_a_directory_that_fails_evicts_nothing(make: Make) -> None:
    def may_evict(keys: list[bytes]) -> list[bytes]:
        raise ConnectionResetError("the directory is away")

    with make(1, may_evict=may_evict) as store:
        fill(store, 1)
        with pytest.raises(ConnectionResetError):
            store.store(key_of(2), page_of(2))
        store.check_integrity()
        assert load(store, 1) == page_of(1)


def test_a_page_that_is_used_while_its_eviction_is_agreed_upon_stays(make: Make) -> None:
    def may_evict(keys: list[bytes]) -> list[bytes]:
        store.hold("request", keys_of(1))
        return keys

    with make(2, may_evict=may_evict) as store:
        fill(store, 1, 2)
        fill(store, 3)
        assert [load(store, number) for number in (1, 2, 3)] == [page_of(1), None, page_of(3)]
        store.release("request")
        store.check_integrity()


def test_pages_that_may_be_evicted_and_stay_are_reported(make: Make) -> None:
    kept: list[bytes] = []
    evicted: list[bytes] = []

    def may_evict(keys: list[bytes]) -> list[bytes]:
        store.hold("request", keys_of(1))
        return keys

    with make(2, may_evict=may_evict, on_evicted=evicted.extend, on_kept=kept.extend) as store:
        fill(store, 1, 2, 3)
        assert (kept, evicted) == (keys_of(1), keys_of(2))
        store.release("request")


# -- damage -----------------------------------------------------------------------------------------------------------


def test_a_damaged_page_is_a_miss_is_removed_and_counted(make: Make) -> None:
    gone: list[bytes] = []
    with make(4, on_evicted=gone.extend) as store:
        fill(store, 1, 2, 3)
        for number, offset in ((1, 0), (3, PAGE_BYTES - 1)):
            path, start = place_of(store, key_of(number))
            flip(path, start + offset)
        assert [load(store, number) for number in (1, 2, 3, 1)] == [None, page_of(2), None, None]
        assert gone == keys_of(1, 3)
        assert store.statistics().num_corrupt == 2
        store.check_integrity()
        fill(store, 1)
        assert load(store, 1) == page_of(1)


def test_verify_finds_all_damaged_pages(make: Make) -> None:
    with make(8) as store:
        fill(store, *range(8))
        for number in (2, 5):
            path, start = place_of(store, key_of(number))
            flip(path, start + 1000)
        assert store.verify() == 2
        assert store.verify() == 0
        assert len(store) == 6


def test_a_write_that_fails_drops_the_page_alone(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    with make(2) as store:
        fill(store, 1)
        with monkeypatch.context() as patch:
            patch.setattr(store, "_write", fail)
            assert not store.store(key_of(2), page_of(2))
        statistics = store.statistics()
        assert (statistics.num_dropped, statistics.num_failures) == (1, 1)
        store.check_integrity()
        fill(store, 2)
        with monkeypatch.context() as patch:
            patch.setattr(store, "_read", fail)
            assert load(store, 1) is None
        assert (store.statistics().num_failures, store.statistics().num_corrupt) == (2, 0)
        assert load(store, 2) == page_of(2)
        store.check_integrity()


def fail(*_: object) -> bool:
    raise OSError(28, "No space left on device")


# -- owners -----------------------------------------------------------------------------------------------------------


def test_pages_survive_their_owner(make: Make) -> None:
    store = make()
    fill(store, 1, 2, 3)
    store.remove(keys_of(2))
    path = store.path
    store.close()
    store.close()
    with make() as store:
        assert store.path == path
        assert store.statistics().num_adopted == 2
        assert store.pages() == {key: store.locate(key) for key in keys_of(1, 3)}
        assert [load(store, number) for number in (1, 2, 3)] == [page_of(1), None, page_of(3)]
        fill(store, 4, 5)
        store.check_integrity()
        fill(store, 6)
        assert key_of(1) not in store, "the oldest of the adopted pages is the first victim"


def test_a_closed_store_stores_nothing(make: Make) -> None:
    store = make()
    store.close()
    assert not store.store(key_of(1), page_of(1))


def test_pages_that_another_process_owns_are_left_alone(make: Make) -> None:
    with make() as first, make() as second:
        assert first.path != second.path
        fill(first, 1)
        fill(second, 2)
        assert (load(first, 2), load(second, 1)) == (None, None)
    with make() as first, make() as second:
        assert {load(first, 1), load(second, 1)} == {None, page_of(1)}


def test_other_layouts_are_left_alone(make: Make) -> None:
    with make(layout="layout.2") as store:
        fill(store, 1)
    with make() as store:
        assert load(store, 1) is None
        fill(store, 2)
    with make(layout="layout.2") as store:
        assert load(store, 1) == page_of(1)


@pytest.mark.parametrize("layout", ["", "a-b", "../up", "a/b", ".hidden", "x" * 65, "a b"])
def test_a_layout_that_cannot_name_a_file_is_rejected(make: Make, layout: str) -> None:
    with pytest.raises(ValueError, match="the layout id"):
        make(layout=layout)


def test_all_files_are_private(make: Make, tmp_path: Path) -> None:
    with make() as store:
        fill(store, 1)
        for path in tmp_path.rglob("*"):
            assert path.stat().st_mode & 0o077 == 0, path


def test_a_directory_that_others_can_read_is_rejected(make: Make, tmp_path: Path) -> None:
    for name in ("slabs", "disk"):
        (tmp_path / name).mkdir(mode=0o755)
    with pytest.raises(ConfigError, match=r"must be a directory of this user with mode 0700"):
        make()


@pytest.mark.fuzz
def test_a_killed_owner_leaves_whole_pages(backend: Backend, tmp_path: Path) -> None:
    """Real processes, killed while two threads of theirs store and evict."""
    program = f"""
        import threading
        from pathlib import Path
        from tests.kv.pool.stores import {backend.make.__name__}, key_of, page_of
        store = {backend.make.__name__}(Path({str(tmp_path)!r}), 8)
        pages = [(key_of(number), page_of(number)) for number in range(40)]
        def run(step):
            while True:
                for key, page in pages[::step]:
                    store.store(key, page)
        threading.Thread(target=run, args=(1,), daemon=True).start()
        print("stores", flush=True)
        run(-1)
    """
    for delay in range(num_cases(20)):
        process, _ = start(program)
        time.sleep(0.05 + 0.013 * delay)
        process.send_signal(signal.SIGKILL)
        process.communicate(timeout=TIMEOUT_S)
        with backend.make(tmp_path, 8) as store:
            statistics = store.statistics()
            assert statistics.num_adopted >= 5, "two threads of a store of 8 pages had two of them in their hands"
            for number in range(40):
                assert load(store, number) in (None, page_of(number))
            assert store.statistics().num_corrupt <= 2
            store.check_integrity()


# -- threads and readers ----------------------------------------------------------------------------------------------


@pytest.mark.fuzz
def test_threads_that_store_load_and_evict_see_right_pages(make: Make) -> None:
    wrong: list[int] = []
    with make(6) as store:

        def run(first: int) -> None:
            for turn in range(num_cases(1000)):
                number = (first + turn * 7) % 20
                is_own = number % 4 == first  # no other thread removes it
                store.store(key_of(number), page_of(number))
                if load(store, number) not in (None, page_of(number)):
                    wrong.append(number)
                is_held = store.hold(f"{first}", keys_of(number))
                for other in (number + 1 + place for place in range(6)):  # evicts what may be
                    store.store(key_of(other % 20), page_of(other % 20))
                if is_held and is_own and load(store, number) != page_of(number):
                    wrong.append(number)
                store.access(keys_of(number, number + 1))
                store.release(f"{first}")
                if is_own and turn % 3 == 0:
                    store.remove(keys_of(number))

        threads = [threading.Thread(target=run, args=(first,)) for first in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(TIMEOUT_S)
        assert not wrong
        store.check_integrity()
        statistics = store.statistics()
        assert statistics.num_evicted > 0
        assert statistics.num_corrupt == 0
        assert not any(statistics.num_in_use.values())


def test_a_reader_sees_a_page_until_its_slot_is_reused(backend: Backend, make: Make) -> None:
    store = make(1)
    fill(store, 1)
    location = store.locate(key_of(1))
    assert location is not None
    reader, buffer = backend.read(store), memoryview(bytearray(PAGE_BYTES))
    assert reader.read(key_of(1), location, buffer) and buffer == page_of(1)
    assert not reader.read(key_of(2), location, buffer), "another key"
    assert not reader.read(key_of(1), location._replace(slot=10**6), buffer), "no such slot"
    assert not reader.read(key_of(1), location._replace(checksum=1), buffer)
    fill(store, 2)
    assert not reader.read(key_of(1), location, buffer)
    location = store.locate(key_of(2))
    abandon(store)
    assert location is not None
    assert reader.read(key_of(2), location, buffer) and buffer == page_of(2), "its owner is gone, the page is not"
    reader.close()


def test_a_reader_of_another_layout_is_rejected(backend: Backend, make: Make) -> None:
    with make(layout="layout.2") as store, pytest.raises(ConfigError, match=r"layout\.2"):
        backend.read(store)


@pytest.mark.fuzz
def test_a_reader_never_takes_a_page_for_another_while_slots_are_rewritten(backend: Backend, make: Make) -> None:
    with make(2) as store:
        reader, buffer = backend.read(store), memoryview(bytearray(PAGE_BYTES))
        is_done = threading.Event()

        def write() -> None:
            while not is_done.is_set():
                for number in range(5):
                    store.store(key_of(number), page_of(number))

        thread = threading.Thread(target=write)
        thread.start()
        try:
            num_read, deadline_s = 0, time.monotonic() + TIMEOUT_S
            while num_read < num_cases(10_000) and time.monotonic() < deadline_s:
                for number in range(5):
                    location = store.locate(key_of(number))
                    if location is not None and reader.read(key_of(number), location, buffer):
                        assert buffer[: location.num_bytes] == page_of(number)
                        num_read += 1
        finally:
            is_done.set()
            thread.join(TIMEOUT_S)
            reader.close()
        assert num_read
