"""``PrivateDirectory``: folders with files, in a directory that servers share and that no other user can read.

A folder is created and removed by a rename, so a listing has only complete ones, also after a server was killed.
Changes that depend on others, such as a quota, take turns by a lock on a file in the directory.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from vllm_omni.errors import ConfigError

LOCK = ".lock"
UNFINISHED = ".unfinished-"  # start of the name of what is being written or removed


class PrivateDirectory:
    """Creates, reads and removes folders. Its methods block: they belong in a thread.

    Args:
        path: created with its parents, for its owner alone.
        variable: the environment variable that names it, for errors.
        contents: what it has: "voices".

    Raises:
        ConfigError: it cannot be created, or others may read it.
    """

    def __init__(self, path: Path, variable: str, contents: str) -> None:
        self.path = path
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            about = path.stat()
        except OSError as exc:
            raise ConfigError(
                f"no directory for {contents} at {path}: {exc.strerror}: set {variable} to a writable one"
            ) from exc
        if about.st_mode & 0o077 or about.st_uid != os.geteuid():
            raise ConfigError(
                f"{variable}: {path} is open to other users, and {contents} are private: "
                f"chmod 700 {path}, or name another directory"
            )
        try:
            with self.locked():
                for left in path.glob(f"{UNFINISHED}*"):  # of a server that was killed
                    shutil.rmtree(left, ignore_errors=True)
        except OSError as exc:
            raise ConfigError(f"{variable}: {path} cannot be written: {exc.strerror}: name another directory") from exc

    def names(self) -> list[str]:
        """The names of all folders, in no order."""
        with os.scandir(self.path) as entries:
            return [entry.name for entry in entries if not entry.name.startswith(".")]

    def read(self, name: str, file: str) -> bytes:
        """Raises:
        OSError: there is no such folder, or no such file in it.
        """
        return (self.path / name / file).read_bytes()

    def num_bytes(self, name: str) -> int:
        """The bytes of all files in a folder; 0 if it is gone."""
        num_bytes = 0
        with suppress(FileNotFoundError), os.scandir(self.path / name) as files:
            for file in files:
                with suppress(FileNotFoundError):  # replaced meanwhile
                    num_bytes += file.stat().st_size
        return num_bytes

    def create(self, name: str, files: Mapping[str, bytes]) -> None:
        """Make a folder with these files. The caller holds the lock.

        Raises:
            OSError: nothing was made; see ``is_full``.
        """
        made = Path(tempfile.mkdtemp(prefix=UNFINISHED, dir=self.path))
        try:
            for file, data in files.items():
                _write(made / file, data, is_durable=True)
            made.rename(self.path / name)
        except OSError:
            shutil.rmtree(made, ignore_errors=True)
            raise

    def put(self, name: str, file: str, data: bytes, *, is_durable: bool = True) -> None:
        """Write a file of a folder, or replace it: a reader sees the old one or the new one.

        Args:
            is_durable: also after a loss of power.

        Raises:
            FileNotFoundError: there is no such folder, or it has been removed meanwhile.
            OSError: the file is as it was; see ``is_full``.
        """
        folder = self.path / name
        written = folder / f"{UNFINISHED}{os.urandom(4).hex()}"
        try:
            _write(written, data, is_durable=is_durable)
            written.replace(folder / file)
        except OSError:
            written.unlink(missing_ok=True)
            raise

    def remove(self, name: str) -> bool:
        """Remove a folder with its files; returns whether there was one. The caller holds the lock."""
        gone = Path(tempfile.mkdtemp(prefix=UNFINISHED, dir=self.path))
        try:
            (self.path / name).rename(gone / name)
        except FileNotFoundError:
            return False
        finally:
            shutil.rmtree(gone, ignore_errors=True)
        return True

    @contextmanager
    def locked(self) -> Iterator[None]:
        """One change at a time, of all servers."""
        with (self.path / LOCK).open("a") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield


def is_full(error: OSError) -> bool:
    """Whether the disk, or what the user may have of it, is full."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT)


def _write(path: Path, data: bytes, *, is_durable: bool) -> None:
    with path.open("wb") as file:
        file.write(data)
        if is_durable:
            file.flush()
            os.fsync(file.fileno())
