"""``Playback``: how a stream of sound would have been heard that is played as it arrives."""

from __future__ import annotations

from dataclasses import dataclass, field

WAV_HEADER_BYTES = 44


@dataclass
class Playback:
    """Playing starts with the first piece, and pauses where the next one is late.

    Attributes:
        first_at: when the first piece arrived; None: none did. Times are seconds of one clock.
        seconds: of sound.
        gaps: the pauses, in seconds.
    """

    first_at: float | None = None
    seconds: float = 0.0
    gaps: list[float] = field(default_factory=list)
    _played_until: float = 0.0  # when what has arrived will have been played

    def add(self, seconds: float, at: float) -> None:
        """A piece of sound arrives; one without sound changes nothing."""
        if seconds <= 0.0:
            return
        if self.first_at is None:
            self.first_at = self._played_until = at
        if at > self._played_until:
            self.gaps.append(at - self._played_until)
            self._played_until = at
        self.seconds += seconds
        self._played_until += seconds

    @property
    def paused_s(self) -> float:
        """All pauses together: how far playing is behind a clock that started with the first piece."""
        return sum(self.gaps)

    def is_continuous(self, longest_gap_s: float) -> bool:
        return self.first_at is not None and max(self.gaps, default=0.0) <= longest_gap_s


class WavStream:
    """Measures pieces of a WAV file, whose header may be divided among them."""

    def __init__(self) -> None:
        self._header = b""
        self._num_bytes_per_s = 0

    def add(self, data: bytes) -> float:
        """The seconds of sound in a piece.

        Raises:
            ValueError: it is no WAV file.
        """
        if not self._num_bytes_per_s:
            needed = WAV_HEADER_BYTES - len(self._header)
            self._header, data = self._header + data[:needed], data[needed:]
            if len(self._header) < WAV_HEADER_BYTES:
                return 0.0
            if self._header[:4] != b"RIFF" or self._header[8:12] != b"WAVE":
                raise ValueError(f"not a WAV file: it begins with {self._header[:12]!r}")
            self._num_bytes_per_s = int.from_bytes(self._header[28:32], "little")
        return len(data) / self._num_bytes_per_s
