"""``FrameStream``: the frames that one request of a decoder reads, and how many of them each of its steps decodes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from vllm.v1.request import Request

from vllm_omni.core.sched.read_window import ReadWindow
from vllm_omni.core.sched.stream import StreamGate
from vllm_omni.messages.payload import Payload, decode
from vllm_omni.messages.stage_step import FRAME_CHUNKS, StreamUpdate, stage_args
from vllm_omni.model_executor.frame_publisher import FRAME
from vllm_omni.relay.hub import RelayHub


class FrameStream:
    """The first step decodes few frames, so that the first sound is early; each later one twice as many, up to a size.

    The sizes do not depend on when frames arrive, so that the steps of several requests can share a batch.

    Args:
        payloads: one that names the stream; or, where nothing is streamed, one for each frame.
        chunks: ``first`` and ``size``, in frames (``FrameChunks``).

    Attributes:
        window: of the pieces of sound; a slow reader holds the decoder back, and the stream then its talker.
        num_made: pieces so far.
    """

    window: ReadWindow | None = None
    num_made = 0

    def __init__(self, hub: RelayHub, payloads: Sequence[Payload], chunks: Mapping[str, int]) -> None:
        is_streamed = any(payload.streams for payload in payloads)
        self._gate = StreamGate(hub, payloads, 0) if is_streamed else None
        frames = [] if is_streamed else [payload.values[FRAME] for payload in payloads]
        self._waiting = torch.tensor(frames, dtype=torch.int64)  # [n, num_groups], arrived and not decoded
        self._has_ended = not is_streamed
        self._error = ""
        self._num_taken = 0
        self._chunk, self._max_chunk = chunks["first"], chunks["size"]

    @classmethod
    def of(cls, request: Request, hub: RelayHub) -> FrameStream | None:
        """The stream that the request reads, if its arguments say so."""
        args = stage_args(request.sampling_params)
        if FRAME_CHUNKS not in args:
            return None
        stream = cls(hub, [decode(data) for data in args["payloads"]], args[FRAME_CHUNKS])
        stream.window = ReadWindow.of(request)
        return stream

    def is_ready(self) -> bool:
        """Whether there is something for a step, enough frames or the end, and the reader is not behind."""
        if self.window is not None and self.window.is_full(self.num_made):
            return False
        if self._gate is None or self._has_ended or self._error:
            return True
        return self._gate.is_open(self._num_taken + self._chunk)

    def take(self) -> StreamUpdate:
        """Take the frames of the next step."""
        update = None if self._gate is None else self._gate.take()
        if update is not None:
            self._has_ended, self._error = update.last, update.error
            if update.rows is not None:
                self._waiting = torch.cat([self._waiting, update.rows]) if len(self._waiting) else update.rows
        rows, self._waiting = self._waiting[: self._chunk], self._waiting[self._chunk :]
        self._num_taken += len(rows)
        self._chunk = min(2 * self._chunk, self._max_chunk)
        is_last = self._has_ended and not len(self._waiting)
        return StreamUpdate(rows if len(rows) else None, is_last, self._error)

    def close(self) -> None:
        """Stop reading; the stream no longer holds its talker back."""
        if self._gate is not None:
            self._gate.close()
