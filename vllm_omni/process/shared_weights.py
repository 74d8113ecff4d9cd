"""``SharedWeights``: one copy of a model's weights for all engines of a server that load them.

On the host it is a file (``WeightsFile``), on a GPU a block of its memory (``model_executor/device_block.py``).

From: Omni-Flow, section 4.3. There, the process that loads serves the others for as long as they live, and those poll.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec

from vllm_omni.errors import ConfigError
from vllm_omni.process.memory import format_bytes
from vllm_omni.process.proc import SHM
from vllm_omni.process.run_directory import weights_file

LOAD_FORMAT = "omni_shared"
"""Value of the engine argument ``load_format``."""
SHARED_WEIGHTS = "shared_weights"
"""Key in a stage's ``additional_config``: true, if the stage has that load format."""
ALIGNMENT = 64  # of each tensor, in bytes: a cache line, and the widest vector register
LENGTH_BYTES = 8  # of the contents, at the start of the file
_CREATE = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW


class TensorPlace(msgspec.Struct, frozen=True):
    """Where a tensor is in the file; tensors of several names may have one place."""

    dtype: str  # torch's name: "bfloat16"
    shape: list[int]
    offset: int  # bytes, behind the contents
    num_bytes: int


class SharedWeights:
    """The weights that are identified by ``key``, as one process sees them.

    Args:
        directory: the server's ``RunDirectory``.
        key: of everything that determines the bytes; letters and digits.
        path: a file that exists once they are complete.
    """

    def __init__(self, directory: Path, key: str, path: Path) -> None:
        self.path = path
        self._lock_file = directory / f"{key}.weights-lock"

    def is_published(self) -> bool:
        return self.path.exists()

    @contextlib.contextmanager
    def claim(self) -> Iterator[bool]:
        """Yield whether the caller has to load the weights and publish them, which one process does at a time.

        The others wait in ``flock``, which wakes them when it has published, failed or died; then the first of them
        loads in its place. A start has a deadline (``VLLM_OMNI_STAGE_READY_TIMEOUT_S``), at which the server ends those
        that wait.
        """
        if self.is_published():
            yield False
            return
        lock = os.open(self._lock_file, _CREATE, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            must_load = not self.is_published()
            if not must_load:
                fcntl.flock(lock, fcntl.LOCK_UN)  # the others need not wait until this one has made its model
            yield must_load
        finally:
            os.close(lock)


class WeightsFile(SharedWeights):
    """Weights in a file of /dev/shm.

    It is named after the server's run directory and removed with it, however the server ends (``ServerTether``,
    ``vllm-omni doctor``). It is complete once it has its name, and is never written again. Engines map it
    copy-on-write: what one of them writes, none of the others sees. So no engine owns it, and an engine that is
    restarted maps it again.
    """

    def __init__(self, directory: Path, key: str) -> None:
        super().__init__(directory, key, weights_file(directory, key))
        self._unfinished = self.path.with_name(f"{self.path.name}-unfinished")

    def check_room(self, num_bytes: int) -> None:
        """Raises ``ConfigError`` if shared memory has too little room for so many bytes."""
        found = os.statvfs(SHM)
        if num_bytes > found.f_bavail * found.f_frsize:
            raise self._no_room(num_bytes)

    def write(self, places: dict[str, TensorPlace], tensors: Iterable[tuple[str, memoryview]]) -> None:
        """Write the file; the caller has claimed the weights.

        Args:
            tensors: the bytes of each place, under one of its names. The next one is asked for when the last one is
                in the file, so that the caller can free what it has.

        Raises:
            ConfigError: shared memory is full.
        """
        contents = msgspec.json.encode(places)
        start, size = _data_start(len(contents)), num_bytes_of(places)
        self._unfinished.unlink(missing_ok=True)  # of a process that died
        fd = os.open(self._unfinished, _CREATE | os.O_EXCL, 0o600)
        try:
            _write(fd, memoryview(len(contents).to_bytes(LENGTH_BYTES, "little") + contents), 0)
            for name, data in tensors:
                _write(fd, data, start + places[name].offset)
            os.ftruncate(fd, start + size)
            self._unfinished.rename(self.path)
        except OSError as exc:
            if exc.errno != errno.ENOSPC:
                raise
            raise self._no_room(size) from exc
        finally:
            os.close(fd)
            self._unfinished.unlink(missing_ok=True)

    def map(self) -> tuple[dict[str, TensorPlace], memoryview]:
        """Map the file copy-on-write; returns the places, and the bytes that their offsets refer to.

        Raises:
            FileNotFoundError: the weights are not published.
            PermissionError: the file is another user's.
        """
        fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            if os.fstat(fd).st_uid != os.geteuid():
                raise PermissionError(f"{self.path} is another user's")
            length = int.from_bytes(os.pread(fd, LENGTH_BYTES, 0), "little")
            places = msgspec.json.decode(os.pread(fd, length, LENGTH_BYTES), type=dict[str, TensorPlace])
            mapping = mmap.mmap(fd, 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        finally:
            os.close(fd)
        return places, memoryview(mapping)[_data_start(length) :]

    def _no_room(self, num_bytes: int) -> ConfigError:
        return ConfigError(
            f"load_format = {LOAD_FORMAT!r}: {SHM} has no room for {format_bytes(num_bytes)} of weights: enlarge it "
            "(in a container: --shm-size, --ipc=host), or leave load_format out"
        )


def place_tensors(sizes: dict[str, tuple[str, list[int], int]], alignment: int = ALIGNMENT) -> dict[str, TensorPlace]:
    """Give each tensor a place, in order.

    Args:
        sizes: name -> (dtype, shape, bytes).
        alignment: of each, in bytes.
    """
    places, offset = {}, 0
    for name, (dtype, shape, num_bytes) in sizes.items():
        places[name] = TensorPlace(dtype, shape, offset, num_bytes)
        offset += -(-num_bytes // alignment) * alignment
    return places


def num_bytes_of(places: dict[str, TensorPlace]) -> int:
    """Bytes of all tensors."""
    return max((place.offset + place.num_bytes for place in places.values()), default=0)


def _data_start(contents_length: int) -> int:
    return -(-(LENGTH_BYTES + contents_length) // mmap.PAGESIZE) * mmap.PAGESIZE


def _write(fd: int, data: memoryview, offset: int) -> None:
    while data:
        written = os.pwrite(fd, data, offset)  # at most 2 GiB
        data, offset = data[written:], offset + written
