"""``WindowCutter``: cut a growing sequence of codes into the overlapping windows that the vocoder decodes.

A chunk of codes is decoded with some codes before it (``past``) and after it (``future``) as context:

    codes    ......[ past | chunk | future ]......
    sound            --     kept     --

The first chunk is small, so that the first sound is early; each following one is twice as long as the one before, up to
``size``. Windows depend on the codes only, not on their arrival, so that a request sounds the same streamed or not.
docs/vocoder.md says what the sizes cost and how far the sound is from that of decoding the whole utterance.

From: vLLM-Omni (paper), section 3.4 (chunks that stream from stage to stage); the windows are this project's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from vllm_omni.errors import ConfigError


@dataclass(frozen=True)
class WindowSizes:
    """Lengths in codes, 50 per second. A size of 0 decodes whole utterances, as transformers does.

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
    start: int  # position of the first one in the utterance
    keep: tuple[int, int]  # first code and end, in the utterance, of the chunk whose sound is kept


class WindowCutter:
    """Cuts one utterance; each window is returned as soon as its codes are there.

    Args:
        block: size of the blocks of the vocoder's attention, in codes. Windows start at multiples of it, so that a
            block has the same members in every window.
    """

    def __init__(self, sizes: WindowSizes, block: int) -> None:
        self._sizes = sizes
        self._block = block
        self._codec_ids: list[int] = []
        self._num_kept = 0
        self._chunk = sizes.first

    def push(self, codec_ids: Sequence[int]) -> Iterator[Window]:
        """Append codes; return the windows that are now complete."""
        self._codec_ids += codec_ids
        sizes = self._sizes
        while sizes.size and self._num_kept + self._chunk + sizes.future <= len(self._codec_ids):
            yield self._cut(self._num_kept + self._chunk)
            self._chunk = min(2 * self._chunk, sizes.size)

    def finish(self) -> Window:
        """Return the window with the rest of the utterance, which may have no codes."""
        return self._cut(len(self._codec_ids))

    def _cut(self, end: int) -> Window:
        first, self._num_kept = self._num_kept, end
        start = max(first - self._sizes.past, 0) // self._block * self._block
        return Window(self._codec_ids[start : end + self._sizes.future], start, (first, end))
