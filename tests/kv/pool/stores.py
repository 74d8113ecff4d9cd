"""The stores of pages, made small; what their contract (``test_store.py``) and their own tests use."""

import hashlib
import random
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from vllm_omni.kv.pool import ownership
from vllm_omni.kv.pool.disk import PAGES, DiskPages, DiskReader
from vllm_omni.kv.pool.disk_index import max_index_bytes
from vllm_omni.kv.pool.slab import Slab, SlabReader
from vllm_omni.kv.pool.store import PageReader, PageStore

PAGE_BYTES = 4096
LAYOUT = "layout.1"


def quota_for(num_slots: int, page_bytes: int = PAGE_BYTES) -> int:
    return num_slots * page_bytes + max_index_bytes(num_slots)


def make_slab(directory: Path, num_slots: int = 4, layout: str = LAYOUT, **options: Callable) -> Slab:
    return Slab(layout, PAGE_BYTES, num_slots, directory=directory / "slabs", **options)


def make_disk(directory: Path, num_slots: int = 4, layout: str = LAYOUT, **options: Callable) -> DiskPages:
    return DiskPages(directory / "disk", layout, PAGE_BYTES, quota_for(num_slots), **options)


class Backend(NamedTuple):
    make: Callable[..., PageStore]
    read: Callable[[PageStore], PageReader]  # a reader of what another process owns


BACKENDS = {
    "slab": Backend(make_slab, lambda slab: SlabReader(slab.path, LAYOUT)),
    "disk": Backend(make_disk, lambda disk: DiskReader(disk.path, LAYOUT, PAGE_BYTES)),
}


def key_of(number: int) -> bytes:
    return hashlib.sha256(str(number).encode()).digest() + bytes(4)


def keys_of(*numbers: int) -> list[bytes]:
    return [key_of(number) for number in numbers]


def page_of(number: int, num_bytes: int = PAGE_BYTES) -> bytes:
    """The only right contents of a page."""
    return random.Random(number).randbytes(num_bytes)


def fill(store: PageStore, *numbers: int) -> None:
    for number in numbers:
        assert store.store(key_of(number), page_of(number)), number
        store.access(keys_of(number))


def load(store: PageStore, number: int) -> bytes | None:
    buffer = bytearray(PAGE_BYTES)
    num_bytes = store.load(key_of(number), memoryview(buffer))
    return None if num_bytes is None else bytes(buffer[:num_bytes])


def place_of(store: PageStore, key: bytes) -> tuple[Path, int]:
    """The file and the offset of a page."""
    location = store.locate(key)
    assert location is not None
    if isinstance(store, Slab):
        shape = store._shape
        return store.path, shape.pages_offset + location.slot * shape.stride
    return store.path / PAGES, location.slot * PAGE_BYTES


def overwrite(path: Path, offset: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(data)


def flip(path: Path, offset: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 1]))


def start(program: str) -> tuple[subprocess.Popen[str], str]:
    """Run a program; returns its process and the first line that it prints, once it has."""
    command = [sys.executable, "-c", textwrap.dedent(program)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[3])
    assert process.stdout is not None
    line = process.stdout.readline().strip()
    assert line, "the program has failed"
    return process, line


def abandon(store: PageStore) -> None:
    """Release a store's lock as the kernel does for a killed process: nothing else is done."""
    ownership.unlock(store._fd if isinstance(store, Slab) else store._owner)
    store._fd = store._owner = -1
