"""Suggestions for error messages about unknown names, and URLs without their passwords."""

import difflib
import re
from collections.abc import Iterable

_MAX_LISTED = 16


def nearest(name: str, valid: Iterable[str]) -> str | None:
    """The valid name that is most similar, if any is."""
    names = list(valid)
    # A part of a name (`seqs`) matches the whole (`max_num_seqs`) only if no name is spelled similarly.
    near = difflib.get_close_matches(name, names, n=1) or [one for one in names if len(name) > 2 and name in one][:1]
    return near[0] if near else None


def suggest(name: str, valid: Iterable[str]) -> str:
    """``"did you mean 'x'? valid: ..."`` for the end of an error message; never empty."""
    names = list(dict.fromkeys(valid))
    if not names:
        return "there are none"
    near = nearest(name, names)
    parts = [] if near is None else [f"did you mean {near!r}?"]
    if len(names) <= _MAX_LISTED or near is None:
        parts.append("valid: " + ", ".join(names[:_MAX_LISTED]) + (", ..." if len(names) > _MAX_LISTED else ""))
    return " ".join(parts)


def hide_password(text: str) -> str:
    """A text in which URLs name no user and no password."""
    return re.sub(r"([?&]password=)[^&'\"\s]*", r"\1...", re.sub(r"(\w://)\S*@", r"\1", text))
