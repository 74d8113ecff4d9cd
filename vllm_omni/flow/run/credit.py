"""Back-pressure: a producer may be a limited number of frames ahead of its reader.

The reader keeps the account: each ``ReceiveWindow`` belongs to one field of one activation. A reader that waits for
one of its fields opens all full windows of the others, because the frame that it waits for may be queued behind them.
So a slow reader holds its producers back and a waiting one never does. Memory is bounded wherever the reader reads.
"""

from collections.abc import Callable, Iterable, Mapping

from vllm_omni.flow.graph.plan import Reader

WINDOW = 64  # frames, unless the field declares another; the same in all processes
UNLIMITED = 1 << 62  # granted when the reader has stopped reading
NO_WINDOWS: Mapping[str, int] = {}


class ReceiveWindow:
    """The number of frames of one field that the reader admits.

    Args:
        grant: called with the new limit (see ``EdgeCredit``) whenever it grows.
    """

    __slots__ = ("_grant", "_limit", "_num_read", "num_received", "size")

    def __init__(self, grant: Callable[[int], None], size: int | None = None):
        self.size = size = size or WINDOW
        self.num_received = 0  # including gaps: 1 + the highest seq
        self._num_read = 0
        self._limit = size
        self._grant = grant

    def on_received(self, seq: int) -> None:
        """Count a frame that arrived, in order or ahead of others."""
        if seq >= self.num_received:
            self.num_received = seq + 1

    def on_read(self) -> None:
        """Count a frame that the reader took. Credit costs a message, so it is granted half a window at a time."""
        self._num_read += 1
        if self._limit - self._num_read <= self.size // 2:
            self._extend(self._num_read + self.size)

    def open_if_full(self) -> None:
        """Admit another window of frames if all admitted ones have arrived."""
        if self.num_received >= self._limit:
            self._extend(self.num_received + self.size)

    def lift(self) -> None:
        """Remove the limit: the reader has stopped reading."""
        self._extend(UNLIMITED)

    def _extend(self, limit: int) -> None:
        if limit > self._limit:
            self._limit = limit
            self._grant(limit)


def open_all(windows: Iterable[ReceiveWindow]) -> None:
    """Open the full windows of a reader that starts to wait."""
    for window in windows:
        window.open_if_full()


class SendLimits:
    """The producer's account, for one activation: the room left in each field, by the slowest of its readers.

    Args:
        readers: streamed output field -> its readers.
        windows: the fields whose window is not ``size``.
    """

    __slots__ = ("_limits", "_readers", "_room", "_size", "_windows", "full")

    def __init__(
        self,
        readers: Mapping[str, tuple[Reader, ...]],
        windows: Mapping[str, int] = NO_WINDOWS,
        size: int | None = None,
    ):
        self._readers = readers
        self._windows = windows
        self._size = size = size or WINDOW
        self._limits: dict[Reader, int] = {}  # readers that have granted credit -> their limit
        self._room = dict.fromkeys(readers, size)  # frames that may still be sent
        if windows:
            self._room.update(windows)
        self.full: set[str] | None = None  # fields without room

    def on_sent(self, field: str) -> None:
        self._room[field] = room = self._room[field] - 1
        if room <= 0:
            if self.full is None:
                self.full = set()
            self.full.add(field)

    def on_credit(self, reader: Reader, limit: int) -> None:
        """Raise the limit of a reader; a limit below an earlier one is out of date."""
        for field, readers in self._readers.items():
            size = self._windows.get(field, self._size)
            if reader in readers and limit > self._limits.get(reader, size):
                before = self._lowest(readers, size)
                self._limits[reader] = limit
                self._room[field] += self._lowest(readers, size) - before
                if self.full and self._room[field] > 0:
                    self.full.discard(field)

    def _lowest(self, readers: tuple[Reader, ...], size: int) -> int:
        return min(self._limits.get(reader, size) for reader in readers)
