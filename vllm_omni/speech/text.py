"""Texts to speak: no part of what a user writes becomes a control token."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator


def cut(text: str, control_tokens: Iterable[str]) -> Iterator[str]:
    """Split the text so that no part holds a whole control token.

    A tokenizer's own switch for this is state that requests in other threads would see.
    """
    spelled = re.compile("|".join(re.escape(one) for one in sorted(control_tokens) if len(one) > 1) or "(?!)")
    start = 0
    while found := spelled.search(text, start):
        yield text[start : found.start() + 1]
        start = found.start() + 1
    yield text[start:]
