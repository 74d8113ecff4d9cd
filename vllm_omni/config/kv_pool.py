"""``KVPoolConfig``: the ``kv_pool:`` section of a stage: KV pages, and what encoders compute, that outlive requests,
engines and restarts.

From: Omni-Flow section 4.1, Global Params Pool.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from vllm_omni.config.checks import NumBytes, Problem, check_section

ROW_BYTES = "row_bytes"
"""Key of the connector's configuration: bytes of a token's row, for which a page has room behind its layers."""


@dataclass(frozen=True, kw_only=True)
class KVPoolConfig:
    """Keep KV pages of a stage's prompts and replies, and its encoded media, in host memory, and on disk behind it."""

    memory_bytes: NumBytes = 1 << 30  # of shared memory, for each engine; 0: none
    disk: str | None = None  # a directory; None: pages are not kept on disk
    disk_bytes: NumBytes = 10 << 30  # for each engine
    # Through which pages pass on their way from and to the engine, and which is a cache of its own, for each engine.
    staging_bytes: NumBytes = 256 << 20
    directory: str | None = None  # of the shared memory; None: this user's, in /dev/shm
    redis: str | None = None  # URL of the directory of several hosts, which read each other's pages; None: of this one
    token_file: str | None = (
        None  # with the secret that all hosts of the pool have; None: who reaches the ports may ask
    )
    canonical_layout: bool = False  # engines of other tensor parallel sizes read the pages, too; see vLLM's documents
    media_bytes: NumBytes = 0  # of shared memory for what encoders of images, audio and video compute; 0: none is kept
    media_disk_bytes: NumBytes = 1 << 30  # on disk, if there is one; both for each engine

    @property
    def keeps_pages(self) -> bool:
        """Whether KV pages are kept."""
        return self.memory_bytes > 0 or (self.disk is not None and self.disk_bytes > 0)

    @property
    def keeps_media(self) -> bool:
        """Whether encoded media are kept."""
        return self.media_bytes > 0

    @classmethod
    def of(cls, section: Mapping[str, Any]) -> KVPoolConfig | None:
        """Convert a section that has been checked; None: it is empty, and the stage has no pool."""
        return cls(**section) if section else None


def check_kv_pool_section(section: Mapping[str, Any]) -> dict[str, Any]:
    """Check the values of a section, which may be one of several layers: what goes together is checked in their sum.

    Raises:
        Problem: a key or value is wrong.
    """
    checked = check_section(KVPoolConfig, section)
    if checked.get("staging_bytes") == 0:
        raise Problem("must be above 0: pages pass through it", "staging_bytes")
    if "redis" in checked and checked["redis"] is not None and not _is_url(checked["redis"]):
        raise Problem("must be a URL of Redis, such as redis://HOST:6379/0 or unix:///PATH", "redis")
    return checked


def _is_url(text: str) -> bool:
    try:
        url = urlsplit(text)
    except ValueError:
        return False
    return url.scheme == "unix" or (url.scheme in ("redis", "rediss") and bool(url.hostname))


def find_conflicts(section: Mapping[str, Any]) -> Iterator[str]:
    """What does not go together in a whole section: keys without an effect, or nothing that is kept."""
    pool = KVPoolConfig.of(section)
    if pool is None:
        return
    yield from _keeps_nothing(pool)
    for key, needed in _needs(pool).items():
        if needed and key in section:
            yield f"kv_pool.{key} = {section[key]}: has no effect without {needed}"


def _keeps_nothing(pool: KVPoolConfig) -> Iterator[str]:
    if pool.disk is not None and not pool.disk_bytes and not pool.keeps_media:
        yield "kv_pool.disk_bytes = 0: must be above 0 with disk"
    elif not pool.keeps_pages and not pool.keeps_media:
        yield "kv_pool.memory_bytes = 0: without disk keeps no pages: give one of them, or leave the section out"
    if pool.redis is not None and not pool.memory_bytes:
        yield "kv_pool.memory_bytes = 0: must be above 0 with redis: other hosts read pages from memory"


def _needs(pool: KVPoolConfig) -> dict[str, str]:
    """Key -> the keys without which it has no effect; "": it has one."""
    of_pages = "" if pool.keeps_pages else "memory_bytes or disk_bytes"
    return {
        "disk_bytes": "" if pool.disk is not None else "disk",
        "media_disk_bytes": "" if pool.disk is not None and pool.keeps_media else "disk and media_bytes",
        "staging_bytes": of_pages,
        "canonical_layout": of_pages,
        "token_file": "" if pool.redis is not None else "redis",
    }
