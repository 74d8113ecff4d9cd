"""How many cases random tests run, from one setting.

``FUZZ`` scales the full size of every random test: 0.1 in ``make test`` (the default), 1 in ``make test-long``, 50 in
``make fuzz``. A failing case prints its seed; ``FUZZ_SEED=<seed>`` runs that case alone, and ``FUZZ_FIRST_SEED`` starts
from other seeds.
"""

import os

SCALE = float(os.environ.get("FUZZ", "0.1"))
ONLY_SEED = int(os.environ["FUZZ_SEED"]) if "FUZZ_SEED" in os.environ else None


def num_cases(full_size: int) -> int:
    """At this scale; at least one."""
    return max(1, round(full_size * SCALE))


def seeds(full_size: int, *, first: int = 1) -> range:
    """The seeds to run: as many as ``num_cases``, or the one of ``FUZZ_SEED``.

    Args:
        full_size: number of cases at ``FUZZ=1``.
        first: the first seed, unless ``FUZZ_FIRST_SEED`` names another.
    """
    if ONLY_SEED is not None:
        return range(ONLY_SEED, ONLY_SEED + 1)
    first = int(os.environ.get("FUZZ_FIRST_SEED", str(first)))
    return range(first, first + num_cases(full_size))
