"""``Preface``: what a request writes in front of its picture, and the tokens that follow it there."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from vllm_omni.errors import InvalidRequest


class Preface(msgspec.Struct, frozen=True):
    """A text, then fixed tokens, then the token that chooses the picture's size; each may be left out.

    Attributes:
        stops: tokens that end the text; none: no text is written.
        kept: those of them that stay in the sequence.
        end: the tokens that end it in place of those, and behind a text that was cut off.
        behind: the tokens behind the text.
        first_size, grids: the token of the first size, and rows and columns of each; none: the size is known.
        default_size: the index of the size where the token is of none.
    """

    stops: tuple[int, ...] = ()
    kept: tuple[int, ...] = ()
    end: tuple[int, ...] = ()
    behind: tuple[int, ...] = ()
    first_size: int = 0
    grids: tuple[tuple[int, int], ...] = ()
    default_size: int = 0

    def __post_init__(self) -> None:
        if not self.stops and not self.grids:
            raise InvalidRequest("a preface of a picture has a text or chooses a size")

    @property
    def num_more_tokens(self) -> int:
        """The tokens in front of the picture that are not of the text, at most."""
        return len(self.end) + len(self.behind) + bool(self.grids)

    def ends_with(self, token: int) -> bool:
        return token in self.stops

    def tail(self, last: int, *, is_cut: bool) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """What ends a text in place of its last token.

        Args:
            is_cut: the text ended at a limit, and not with one of ``stops``.

        Returns:
            the tokens of the text's own; the tokens behind it.
        """
        if is_cut:
            return (last,), (*self.end, *self.behind)
        return (), (*((last,) if last in self.kept else self.end), *self.behind)

    def size_of(self, token: int) -> int:
        """The index of the size that a token chooses."""
        index = token - self.first_size
        return index if 0 <= index < len(self.grids) else self.default_size


def masked(ids: Sequence[int], ranges: Sequence[tuple[int, int]], mask: int) -> list[int]:
    """A sequence with another token in the place of some."""
    made = list(ids)
    for start, end in ranges:
        made[start:end] = [mask] * (end - start)
    return made
