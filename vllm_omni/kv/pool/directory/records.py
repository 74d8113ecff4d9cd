"""What the scripts of Redis take and give, as bytes: nothing is pickled, and every length is checked."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence

from vllm_omni.errors import Unavailable
from vllm_omni.kv.pool.directory.base import Event, Match, MatchedPage, Member, Page, Replica, Tier

CHUNK_PAGES = 256  # of one script, so that none keeps Redis busy for long

_page = struct.Struct(">IBBQQ")  # mask, tier, is_recomputable, slot, checksum
_replica = struct.Struct(">QQIBBQQ")  # epoch, version, and the page as it was published
_number = struct.Struct(">Q")
_pair = struct.Struct(">QQ")
_tiers = {int(tier): tier for tier in Tier}

PAGE_BYTES = _page.size
REPLICA_BYTES = _replica.size
CLAIM_BYTES = 24  # epoch of the reader, number, deadline


def pack_epoch(member: Member) -> bytes:
    return _number.pack(member.epoch)


def read_epoch(data: bytes) -> int:
    (epoch,) = _number.unpack(data)
    return int(epoch)


def pack_page(page: Page) -> bytes:
    return _page.pack(page.mask, page.tier, page.is_recomputable, page.slot, page.checksum)


def pack_claim(member: Member, match: Match) -> bytes:
    return _pair.pack(member.epoch, match.claim)


def pack_claimed(match: Match) -> list[bytes]:
    """Name the replicas of a match, by holder and key."""
    return [_number.pack(one.epoch) + key for key, replicas in match.pages for one in replicas]


def pack_versions(match: Match) -> list[bytes]:
    """Name the replicas of a match, by holder, version and key."""
    return [_pair.pack(one.epoch, one.version) + key for key, replicas in match.pages for one in replicas]


def chunks(entries: Sequence[bytes]) -> Iterator[Sequence[bytes]]:
    return (entries[first : first + CHUNK_PAGES] for first in range(0, len(entries), CHUNK_PAGES))


def cut(data: bytes, size: int) -> list[bytes]:
    return [data[first : first + size] for first in range(0, len(data), size)]


def read_match(answer: bytes, keys: Sequence[bytes]) -> Match:
    """Read the answer of the script ``match``.

    Raises:
        Unavailable: something else than the scripts has written the records.
    """
    try:
        (claim,) = _number.unpack_from(answer)
        pages: list[MatchedPage] = []
        place = _number.size
        while place < len(answer):
            replicas = []
            num_replicas = answer[place]
            place += 1
            for _ in range(num_replicas):
                start = place + 1 + answer[place]
                node = answer[place + 1 : start].decode()
                epoch, version, mask, tier, is_recomputable, slot, checksum = _replica.unpack_from(answer, start)
                replicas.append(
                    Replica(node, epoch, version, mask, _tiers[tier], slot, checksum, bool(is_recomputable))
                )
                place = start + _replica.size
            pages.append((keys[len(pages)], tuple(replicas)))
    except (struct.error, ValueError, LookupError) as exc:
        raise Unavailable(f"Redis holds records that the directory has not written: {exc!r}") from exc
    return Match(claim, tuple(pages))


def read_deadline(data: bytes) -> int:
    (deadline,) = _number.unpack_from(data)
    return int(deadline)


def read_claims(data: bytes) -> list[tuple[bytes, int]]:
    """Return the epoch of the reader and the deadline of each claim on a replica."""
    return [(claim[:8], read_deadline(claim[16:])) for claim in cut(data, CLAIM_BYTES)]


def read_write(data: bytes) -> tuple[bytes, int]:
    """Return the epoch of the member that writes a page, and the deadline."""
    return data[8:], read_deadline(data)


def read_event(data: bytes, key_bytes: int) -> tuple[int, Event]:
    """Return the number of an event, and the event.

    Raises:
        ValueError: something else than the scripts has published it.
    """
    try:
        (number,) = _number.unpack_from(data)
        start = 9 + data[8]
        node, end = data[9:start].decode(), start + 1 + data[start]
        session = data[start + 1 : end].decode()
    except (struct.error, ValueError, LookupError) as exc:
        raise ValueError(f"an event in Redis that the directory has not published: {exc!r}") from exc
    return number, Event(node or None, session or None, tuple(cut(data[end:], key_bytes)))
