"""Cuts a growing sequence of codes into the overlapping windows that the vocoder decodes.

A chunk of codes becomes sound with some codes before it (``past``) and after it (``future``) for context:

    codes    ......[ past | chunk | future ]......
    sound            --     kept     --

The first chunk is small, so that the first sound is early; each one after it is twice as long as the one before, up to
``size``. What is cut depends on the codes alone and not on when they came: streamed or not, a request has the same
windows and therefore the same sound. docs/vocoder.md has what the sizes cost and how far the sound is from that of a
decode of the whole utterance.

From: vLLM-Omni (paper), section 3.4 (chunks that stream from stage to stage); the windows are this project's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from vllm_omni.errors import ConfigError


@dataclass(frozen=True)
class WindowSizes:
    """Lengths in codes, of which 50 make a second. A size of 0 decodes whole utterances, as transformers does.

    Raises:
        ConfigError: the first chunk is empty, or longer than the others.
    """

    first: int = 12
    size: int = 96
    past: int = 36
    future: int = 24

    def __post_init__(self) -> None:
        if self.size and not 0 < self.first <= self.size:
            raise ConfigError(f"first = {self.first}: must lie in [1, size = {self.size}]")


class Window(NamedTuple):
    codec_ids: list[int]  # context included
    start: int  # place of the first of them in the utterance
    keep: tuple[int, int]  # first code and end, in the utterance, of the chunk whose sound is kept


class WindowCutter:
    """Windows of one utterance, as soon as its codes allow.

    Args:
        block: windows start at multiples of it: the vocoder's attention works in blocks of so many codes, and a block
            must have the same members in every window.
    """

    def __init__(self, sizes: WindowSizes, block: int) -> None:
        self._sizes = sizes
        self._block = block
        self._codec_ids: list[int] = []
        self._num_kept = 0
        self._chunk = sizes.first

    def push(self, codec_ids: Sequence[int]) -> Iterator[Window]:
        """Take codes in; windows that are complete now."""
        self._codec_ids += codec_ids
        sizes = self._sizes
        while sizes.size and self._num_kept + self._chunk + sizes.future <= len(self._codec_ids):
            yield self._cut(self._num_kept + self._chunk)
            self._chunk = min(2 * self._chunk, sizes.size)

    def finish(self) -> Window:
        """The window with the rest of the utterance, which may have no codes."""
        return self._cut(len(self._codec_ids))

    def _cut(self, end: int) -> Window:
        first, self._num_kept = self._num_kept, end
        start = max(first - self._sizes.past, 0) // self._block * self._block
        return Window(self._codec_ids[start : end + self._sizes.future], start, (first, end))
