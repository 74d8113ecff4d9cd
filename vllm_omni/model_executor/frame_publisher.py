"""``FramePublisher``: sends the frames of a talker to the stages that decode them, and to the front end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from msgspec.structs import replace

from vllm_omni.messages.payload import Payload
from vllm_omni.model_executor.row_publisher import RowStream
from vllm_omni.relay.hub import RelayHub

FRAME = "frame"
"""Key of a frame's codes in the values of a payload."""


@dataclass
class FramePublisher:
    """The frames of one request.

    Each goes to the front end, in the values of a payload. A reader with a stream gets all of them there, from the
    first one on; the payload of the first frame names the streams.
    """

    hub: RelayHub
    request_id: str
    readers: list[str]  # nodes of the graph
    _streams: Mapping[str, RowStream] | None = None  # by reader; None before the first frame

    def publish(self, frame: Sequence[int]) -> Payload:
        """Send the next frame; returns what the front end is notified of."""
        payload = Payload(values={FRAME: list(frame)})
        rows = torch.tensor([frame], dtype=torch.int64)
        if self._streams is None:
            self._streams = self._open_streams(rows[0])
            payload = replace(payload, streams={node: one.writer.ref for node, one in self._streams.items()})
        for stream in self._streams.values():
            stream.write(rows)
        return payload

    def _open_streams(self, row: torch.Tensor) -> dict[str, RowStream]:
        writers = {node: self.hub.open_stream(self.request_id, row, node) for node in self.readers}
        return {node: RowStream(writer) for node, writer in writers.items() if writer is not None}

    def finish(self) -> None:
        """End the streams behind the frames that are left."""
        for stream in (self._streams or {}).values():
            stream.finish(self.hub)
