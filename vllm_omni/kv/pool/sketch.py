"""``FrequencySketch``: about how often each page was used lately, in a few bytes for each page that a tier holds."""

from __future__ import annotations

import struct

NUM_ROWS = 4
MAX_COUNT = 15  # of 4 bits
_HALVED = bytes((byte >> 5) << 4 | (byte & 15) >> 1 for byte in range(256))  # both counters of a byte
_words = struct.Struct("<4I").unpack_from


class FrequencySketch:
    """A count-min sketch of 4-bit counters that are halved periodically.

    A key is a digest with at least 16 bytes, so its first four words already are independent hashes: each selects a
    counter of one row. Its last byte is mixed in, because keys of several KV cache groups differ in their last bytes
    only. An update raises only the smallest of a key's counters, which overestimates less than raising all four.

    Counters lie two in a byte in a ``bytearray`` for each row. ``translate`` halves a row at the speed of C, 30 us for
    64 Ki counters, and an update takes 1.3 us in plain Python: numpy needs 11 us for a single key, and is faster only
    for requests of more than about 16 pages.

    Args:
        num_keys: how many keys are of interest: the pages of a tier.
        counters_per_key: in each row, at least; the number is rounded up to a power of two.
        sample_factor: counters are halved after this many updates for each of ``num_keys``.

    From: Omni-Flow section 4.1.2; TinyLFU (Einziger & Friedman, 2014), sections 3.2 to 3.4.
    """

    def __init__(self, num_keys: int, *, counters_per_key: int = 4, sample_factor: int = 16) -> None:
        if num_keys < 1:
            raise ValueError(f"a sketch of at least 1 key, not {num_keys}")
        self.num_counters = 1 << max(6, (num_keys * counters_per_key - 1).bit_length())  # in each row
        self.sample_size = num_keys * sample_factor  # updates between two halvings
        self.num_halved = 0
        self._num_added = 0  # since the last halving; itself halved then
        self._mask = self.num_counters - 1
        self._rows = [bytearray(self.num_counters // 2) for _ in range(NUM_ROWS)]

    @property
    def num_bytes(self) -> int:
        return NUM_ROWS * self.num_counters // 2

    def add(self, key: bytes) -> int:
        """Count a use of a key; returns its new estimate, 1 to 15."""
        row0, row1, row2, row3 = self._rows
        mask, last = self._mask, key[-1]
        at0, at1, at2, at3 = _words(key)
        at0, at1, at2, at3 = (at0 ^ last) & mask, (at1 ^ last) & mask, (at2 ^ last) & mask, (at3 ^ last) & mask
        shift0, shift1, shift2, shift3 = (at0 & 1) << 2, (at1 & 1) << 2, (at2 & 1) << 2, (at3 & 1) << 2
        at0, at1, at2, at3 = at0 >> 1, at1 >> 1, at2 >> 1, at3 >> 1
        count0, count1 = row0[at0] >> shift0 & 15, row1[at1] >> shift1 & 15
        count2, count3 = row2[at2] >> shift2 & 15, row3[at3] >> shift3 & 15
        least = min(count0, count1, count2, count3)
        self._num_added += 1
        if least == MAX_COUNT:
            return MAX_COUNT
        if count0 == least:
            row0[at0] += 1 << shift0
        if count1 == least:
            row1[at1] += 1 << shift1
        if count2 == least:
            row2[at2] += 1 << shift2
        if count3 == least:
            row3[at3] += 1 << shift3
        return least + 1

    def estimate(self, key: bytes) -> int:
        """How often a key was used: at least as often as it was added since counters were last halved; 0 to 15."""
        mask, last = self._mask, key[-1]
        least = MAX_COUNT
        for row, word in zip(self._rows, _words(key), strict=True):
            at = (word ^ last) & mask
            least = min(least, row[at >> 1] >> ((at & 1) << 2) & 15)
        return least

    @property
    def is_due(self) -> bool:
        """Whether counters should be halved."""
        return self._num_added >= self.sample_size

    def halve(self) -> None:
        """Halve all counters, so that what was popular once does not stay."""
        self._rows = [bytearray(row.translate(_HALVED)) for row in self._rows]
        self._num_added //= 2
        self.num_halved += 1

    def clear(self) -> None:
        self._rows = [bytearray(self.num_counters // 2) for _ in range(NUM_ROWS)]
        self._num_added = 0
