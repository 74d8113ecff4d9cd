"""``ResultStore``: results of requests that are fetched later, within a quota and until they expire.

Each result is a folder of a ``PrivateDirectory`` with ``about.json``, which says when it expires. A file by URL has a
signature by a secret that all servers of the directory share, so that its address alone gives access until then.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import re
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import msgspec

from vllm_omni.errors import StorageFull
from vllm_omni.files.private import UNFINISHED, PrivateDirectory, is_full

ABOUT, CONTENT = "about.json", "content"
SECRET = ".secret"
FILE_ID = re.compile(r"file-[0-9a-f]{32}")


class StoredFile(msgspec.Struct, frozen=True):
    """A file that is fetched by URL."""

    id: str
    media_type: str
    created_at: int  # seconds since 1970
    expires_at: int


class _Expiring(msgspec.Struct, frozen=True):
    """What every kind of result says of itself."""

    expires_at: int | None = None


class _Kept(NamedTuple):
    """A result that does not change before it is removed."""

    num_bytes: int
    expires_at: int


class Limits(NamedTuple):
    """Of all results together, and of each."""

    max_bytes: int
    ttl_s: float


class ResultStore:
    """Adds, finds and removes results. Its methods block: they belong in a thread.

    Args:
        clock: seconds since 1970.

    Raises:
        ConfigError: the directory cannot be used.
    """

    def __init__(self, directory: Path, limits: Limits, clock: Callable[[], float] = time.time) -> None:
        self.directory = PrivateDirectory(directory, "VLLM_OMNI_FILES_DIR", "results")
        self.limits = limits
        self.clock = clock
        self._secret = self._read_secret()
        self._kept: dict[str, _Kept] = {}  # by name; read and written by the holder of the lock
        self._changing: list[str] = []  # names of the others

    # -- files by URL -------------------------------------------------------------------------------------------------

    def add(self, content: bytes, media_type: str) -> StoredFile:
        """Store a file.

        Raises:
            StorageFull: the quota is used up, or the disk is full.
        """
        now = int(self.clock())
        file = StoredFile(f"file-{secrets.token_hex(16)}", media_type, now, self.expiry())
        with self.changing(len(content)):
            self.directory.create(file.id, {CONTENT: content, ABOUT: msgspec.json.encode(file)})
        return file

    def find(self, file_id: str) -> StoredFile | None:
        """The file of an id, if there is one; any text may be asked for."""
        if not FILE_ID.fullmatch(file_id):
            return None
        try:
            return msgspec.json.decode(self.directory.read(file_id, ABOUT), type=StoredFile)
        except (OSError, msgspec.MsgspecError):
            return None

    def path(self, name: str, file: str = CONTENT) -> Path:
        return self.directory.path / name / file

    def sign(self, file_id: str, expires_at: int) -> str:
        """The signature by which anyone may read a file until it expires."""
        return hmac.new(self._secret, f"{file_id} {expires_at}".encode(), hashlib.sha256).hexdigest()

    def is_signed(self, file_id: str, expires_at: int, signature: str) -> bool:
        """Whether a signature is right; takes as long for a wrong one."""
        return hmac.compare_digest(self.sign(file_id, expires_at).encode(), signature.encode())

    # -- quota and expiry ---------------------------------------------------------------------------------------------

    def expiry(self) -> int:
        """When a result that is added now expires."""
        return int(self.clock() + self.limits.ttl_s)

    def check_room(self) -> None:
        """Raise ``StorageFull`` before work whose result could not be stored."""
        with self.changing(1):
            pass

    @contextmanager
    def changing(self, num_bytes: int) -> Iterator[None]:
        """Add so many bytes inside the block, as the only one of all servers.

        Raises:
            StorageFull: the quota would be exceeded, or the block found the disk full.
        """
        with self.directory.locked():
            self._remove_expired()
            used, most = self._num_bytes(), self.limits.max_bytes
            if used + num_bytes > most:
                raise StorageFull(
                    f"results use {used:,} of {most:,} bytes (VLLM_OMNI_MAX_FILE_BYTES), too many for {num_bytes:,} "
                    f"more: delete videos, or wait until results expire, after {self.limits.ttl_s:g} s "
                    "(VLLM_OMNI_FILE_TTL_S)"
                )
            try:
                yield
            except OSError as exc:
                if is_full(exc):
                    raise StorageFull(f"the disk of {self.directory.path} is full") from exc
                raise

    def remove_expired(self) -> int:
        """Remove the results that have expired; returns how many."""
        with self.directory.locked():
            return self._remove_expired()

    def _remove_expired(self) -> int:
        self._survey()
        now = self.clock()
        expired = [name for name, kept in self._kept.items() if kept.expires_at <= now]
        for name in expired:
            del self._kept[name]
        return sum(self.directory.remove(name) for name in expired)

    def _survey(self) -> None:
        """Note what has been added to the directory and removed from it; of the rest, nothing is read again."""
        names = self.directory.names()
        self._kept = {name: kept for name in names if (kept := self._kept.get(name) or self._read(name)) is not None}
        self._changing = [name for name in names if name not in self._kept]

    def _num_bytes(self) -> int:
        changing = sum(map(self.directory.num_bytes, self._changing))
        return changing + sum(kept.num_bytes for kept in self._kept.values())

    def _read(self, name: str) -> _Kept | None:
        """What is known of a result; None: it still changes, was removed since the listing, or is none."""
        try:
            expires_at = msgspec.json.decode(self.directory.read(name, ABOUT), type=_Expiring).expires_at
        except (OSError, msgspec.MsgspecError):
            return None
        return None if expires_at is None else _Kept(self.directory.num_bytes(name), expires_at)

    def _read_secret(self) -> bytes:
        """The servers' common secret; the first of them makes it."""
        path = self.directory.path / SECRET
        with self.directory.locked():
            if not path.exists():
                made = self.directory.path / f"{UNFINISHED}secret"
                with open(os.open(made, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
                    file.write(secrets.token_bytes(32))
                    file.flush()
                    os.fsync(file.fileno())
                made.rename(path)
            return path.read_bytes()
