"""Names of page layouts: two nodes can exchange pages only if their layouts have the same id."""

import hashlib
import json
import re
from collections.abc import Mapping
from typing import NamedTuple

MAX_PARTS = 32  # bits of a mask: an unsigned integer of the bit operations in Redis
MAX_KEY_BYTES = 64
DEFAULT_KEY_BYTES = 36  # vLLM's OffloadKey: a SHA-256 and the cache group in 4 bytes

_ID = re.compile(r"[0-9A-Za-z_-]{1,64}")


class Layout(NamedTuple):
    """What all nodes of a directory agree on; ``check`` says whether the values are valid."""

    id: str
    num_parts: int = 1  # of a page, such as its heads by tensor-parallel rank; a replica has some or all of them
    key_bytes: int = DEFAULT_KEY_BYTES  # of every page's key

    @property
    def full_mask(self) -> int:
        """The mask of a replica that has all parts."""
        return (1 << self.num_parts) - 1

    def check(self) -> None:
        """Raise ``ValueError`` if a value is outside its range."""
        if not _ID.fullmatch(self.id):
            raise ValueError(f"layout id {self.id!r}: must be 1 to 64 letters, digits, '-' or '_'")
        if not 1 <= self.num_parts <= MAX_PARTS:
            raise ValueError(f"layout {self.id}: {self.num_parts} parts of a page: must be 1 to {MAX_PARTS}")
        if not 1 <= self.key_bytes <= MAX_KEY_BYTES:
            raise ValueError(f"layout {self.id}: keys of {self.key_bytes} bytes: must be 1 to {MAX_KEY_BYTES}")


def layout_id(fields: Mapping[str, object], *, checkpoint: str, cache_salt: str = "") -> str:
    """Return the first 16 hexadecimal digits of the SHA-256 of a JSON document.

    Args:
        fields: everything of the configuration that the bytes of a page depend on: model, dtype, block size, cache
            groups, parallel sizes unless pages are canonical. Values are JSON's; the order of keys does not matter.
        checkpoint: a hash of the weights. A path would let two models that were served from it share pages.
        cache_salt: the tenant whose pages are apart from all others'.

    Raises:
        TypeError, ValueError: a field has no JSON.

    From: Omni-Flow section 4.1.3, Layout Identification.
    """
    document = {"fields": dict(fields), "checkpoint": checkpoint, "cache_salt": cache_salt}
    text = json.dumps(document, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def make_layout(
    fields: Mapping[str, object],
    *,
    checkpoint: str,
    cache_salt: str = "",
    num_parts: int = 1,
    key_bytes: int = DEFAULT_KEY_BYTES,
) -> Layout:
    """Return a layout whose id also covers its parts and its keys."""
    all_fields = {**fields, "num_parts": num_parts, "key_bytes": key_bytes}
    layout = Layout(layout_id(all_fields, checkpoint=checkpoint, cache_salt=cache_salt), num_parts, key_bytes)
    layout.check()
    return layout
