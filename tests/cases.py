"""Loops over cases inside one test."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any

import pytest


@contextmanager
def case(*values: object) -> Iterator[None]:
    """Name the case in a failure of the block."""
    try:
        yield
    except (Exception, pytest.fail.Exception) as exc:
        exc.add_note(f"case: {', '.join(map(repr, values))}")
        raise


class rejected:  # reads as pytest.raises
    """The block must raise this error with this message (a regular expression); a failure names the case."""

    error: Any  # after the block

    def __init__(self, error: type[Exception], message: str, case: object) -> None:
        self._type, self._message, self._case = error, message, case

    def __enter__(self) -> "rejected":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> bool:
        if error is None:
            pytest.fail(f"accepted: {self._case!r}")
        if not isinstance(error, self._type):
            return False
        assert re.search(self._message, str(error)), f"{self._case!r}: {error}"
        self.error = error
        return True
