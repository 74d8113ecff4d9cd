"""A word for whoever mistyped a name: the nearest valid one, and the valid ones where they are few."""

import difflib
from collections.abc import Iterable

_MAX_LISTED = 16


def suggest(name: str, valid: Iterable[str]) -> str:
    """``"did you mean 'x'? valid: ..."`` for the end of an error message; never empty."""
    names = list(dict.fromkeys(valid))
    if not names:
        return "there are none"
    parts = []
    # A part of a name (`seqs`) finds the whole (`max_num_seqs`) only when nothing is spelled more alike.
    near = difflib.get_close_matches(name, names, n=1) or [n for n in names if len(name) > 2 and name in n][:1]
    if near:
        parts.append(f"did you mean {near[0]!r}?")
    if len(names) <= _MAX_LISTED or not near:
        parts.append("valid: " + ", ".join(names[:_MAX_LISTED]) + (", ..." if len(names) > _MAX_LISTED else ""))
    return " ".join(parts)
