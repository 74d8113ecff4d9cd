"""``RowPublisher``: sends the rows of an autoregressive stage to the stages that read them, each in its own way.

The first payload of a request has the rows of its prompt, for all readers. Those that follow are written into a stream
for each reader that has one, and published step by step for the others.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from msgspec.structs import replace

from vllm_omni.messages.payload import NUM_CACHED, ROWS, Payload
from vllm_omni.relay import StreamWriter
from vllm_omni.relay.hub import RelayHub


@dataclass
class RowStream:
    """The stream to one reader, and the rows for which it had no credit."""

    writer: StreamWriter
    waiting: deque[torch.Tensor] = field(default_factory=deque)

    def write(self, rows: torch.Tensor) -> None:
        """Write as many rows as there are credits for, those that wait first."""
        self.waiting.append(rows)
        while self.waiting and (num_rows := min(len(self.waiting[0]), self.writer.num_credits)):
            first = self.waiting.popleft()
            self.writer.write_nowait(first[:num_rows])
            if num_rows < len(first):
                self.waiting.appendleft(first[num_rows:])

    def finish(self, hub: RelayHub, more: Sequence[torch.Tensor] = ()) -> None:
        """End the stream behind the rows that wait, and more of them."""
        rows = [*self.waiting, *more]
        hub.finish_stream(self.writer, torch.cat(rows) if rows else None)


@dataclass
class RowPublisher:
    """The rows of one request.

    Attributes:
        readers: nodes of the graph that read them.
        next_row: earlier rows were added; a preempted request computes them a second time.
        num_cached: of those that are not published yet, the rows that were not computed for this request, but kept.
    """

    hub: RelayHub
    request_id: str
    readers: list[str]
    next_row: int = 0
    num_cached: int = 0
    _pending: list[torch.Tensor] = field(default_factory=list)  # of prompt chunks, until the first token
    _streams: dict[str, RowStream] = field(default_factory=dict)  # by reader
    _unstreamed: list[str] = field(default_factory=list)
    _has_announced: bool = False  # the front end was notified that the streams have a row

    def add(self, rows: torch.Tensor, start: int) -> None:
        """Add the rows of a step, whose first one is number ``start``; they belong to the publisher."""
        num_known = max(0, self.next_row - start)
        if num_known < len(rows):
            self._pending.append(rows[num_known:])
            self.next_row = start + len(rows)

    def add_cached(self, rows: torch.Tensor) -> None:
        """Add the rows of tokens that were found in the prefix cache, from ``next_row`` on."""
        self.num_cached += len(rows)
        self.add(rows, self.next_row)

    def publish(self, more: Callable[[], dict[str, torch.Tensor]]) -> Payload | None:
        """Send what was added; returns what the front end is notified of.

        Args:
            more: makes what goes with the rows of the prompt.
        """
        if not self._pending:
            return None
        rows = torch.cat(self._pending)
        self._pending = []
        first_row = self.next_row - len(rows)
        tree = {ROWS: rows, "first_row": first_row, "num_rows": len(rows)}
        if self.num_cached:
            tree[NUM_CACHED], self.num_cached = self.num_cached, 0
        if not first_row:
            payload = self.hub.publish(self.request_id, {**tree, **more()}, self.readers)
            self._open_streams(rows[0])
            return replace(payload, streams={node: one.writer.ref for node, one in self._streams.items()})
        if self._streams:
            on_host = rows.cpu()
            for stream in self._streams.values():
                stream.write(on_host)
        if self._unstreamed or not self._streams:
            payload = self.hub.publish(self.request_id, tree, self._unstreamed)
            return replace(payload, apart=payload.apart | {node: {} for node in self._streams})
        if self._has_announced:
            return None
        self._has_announced = True
        return Payload(values={"num_rows": len(rows)})

    def _open_streams(self, row: torch.Tensor) -> None:
        for node in self.readers:
            writer = self.hub.open_stream(self.request_id, row, node)
            if writer is not None:
                self._streams[node] = RowStream(writer)
        self._unstreamed = [node for node in self.readers if node not in self._streams]

    def finish(self) -> None:
        """End the streams behind the rows that are left."""
        for stream in self._streams.values():
            stream.finish(self.hub, [one.cpu() for one in self._pending])
