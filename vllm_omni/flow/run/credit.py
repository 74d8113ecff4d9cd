"""Back-pressure: a producer may be so many frames ahead of its reader and no further.

The book is kept by the reader: each ``ReceiveWindow`` belongs to one field of one activation. A reader that waits for
one of its fields opens all others that are full, for the frame that it waits for may stand behind them: so a slow
reader holds its producers back, and a waiting one never does. Memory is bounded where the reader reads.
"""

from collections.abc import Callable, Iterable, Mapping

from vllm_omni.flow.graph.plan import Reader

WINDOW = 64  # frames; the same in all processes
UNLIMITED = 1 << 62  # the reader has stopped reading


class ReceiveWindow:
    """How many frames of one field were let in.

    Args:
        grant: told the new limit (see ``Credit``) whenever it grows.
    """

    __slots__ = ("_grant", "_limit", "_num_read", "num_received", "size")

    def __init__(self, grant: Callable[[int], None], size: int | None = None):
        self.size = size = size or WINDOW
        self.num_received = 0  # up to the one furthest ahead
        self._num_read = 0
        self._limit = size
        self._grant = grant

    def on_received(self, seq: int) -> None:
        """A frame has come, be it ahead of its turn."""
        if seq >= self.num_received:
            self.num_received = seq + 1

    def on_read(self, _: object = None) -> None:
        """The reader has taken a frame. Half a window at a time is given back: credit costs a message."""
        self._num_read += 1
        if self._limit - self._num_read <= self.size // 2:
            self._extend(self._num_read + self.size)

    def open_if_full(self) -> None:
        if self.num_received >= self._limit:
            self._extend(self.num_received + self.size)

    def lift(self) -> None:
        """The reader has stopped reading."""
        self._extend(UNLIMITED)

    def _extend(self, limit: int) -> None:
        if limit > self._limit:
            self._limit = limit
            self._grant(limit)


def open_all(windows: Iterable[ReceiveWindow]) -> None:
    """For a reader that begins to wait."""
    for window in windows:
        window.open_if_full()


class SendLimits:
    """The producer's side, for one activation: how far each field may go, by the slowest of its readers.

    Args:
        readers: streamed output field -> who reads it.
    """

    __slots__ = ("_limits", "_readers", "_room", "_size", "full")

    def __init__(self, readers: Mapping[str, tuple[Reader, ...]], size: int | None = None):
        self._readers = readers
        self._size = size = size or WINDOW
        self._limits: dict[Reader, int] = {}  # of readers that have granted more
        self._room = dict.fromkeys(readers, size)  # frames that may still be sent
        self.full: set[str] | None = None  # fields that may not go on

    def on_sent(self, field: str) -> None:
        self._room[field] = room = self._room[field] - 1
        if room <= 0:
            if self.full is None:
                self.full = set()
            self.full.add(field)

    def on_credit(self, reader: Reader, limit: int) -> None:
        """A limit smaller than one that came before is old news."""
        old = self._limits.get(reader, self._size)
        if limit <= old:
            return
        for field, readers in self._readers.items():
            if reader in readers:
                before = self._lowest(readers)
                self._limits[reader] = limit
                self._room[field] += self._lowest(readers) - before
                if self.full and self._room[field] > 0:
                    self.full.discard(field)

    def _lowest(self, readers: tuple[Reader, ...]) -> int:
        return min(self._limits.get(reader, self._size) for reader in readers)
