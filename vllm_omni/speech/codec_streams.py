"""``CodecStreams``: the states of the streams that a codec decoder serves, and their batches.

The states of all streams stand in one tensor for each layer, with a row for each stream. A step copies the rows of
its batch out and back: slicing views of scattered rows is not possible, and the copy (about 5 MB a stream at the
real size, most of it keys and values) is small beside the step's arithmetic.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

import torch
from torch import Tensor

from vllm_omni.errors import PoolExhausted
from vllm_omni.speech.codec_decoder import CodecDecoder


class CodecStreams:
    """Decodes many streams at once. Not thread-safe.

    Args:
        max_streams: rows that are reserved, in the dtype and on the device of the decoder's weights.
    """

    def __init__(self, decoder: CodecDecoder, max_streams: int) -> None:
        weight = next(decoder.parameters())
        self.decoder = decoder
        self._states = [
            torch.zeros(max_streams, *shape, dtype=weight.dtype, device=weight.device) for shape in decoder.state_shapes
        ]
        self._positions = torch.zeros(max_streams, dtype=torch.int64, device=weight.device)
        self._num_frames: dict[str, int] = {}  # of each open stream
        self._rows: dict[str, int] = {}
        self._free = list(range(max_streams))[::-1]

    @property
    def num_open(self) -> int:
        return len(self._rows)

    def open(self, stream_id: str) -> None:
        """Start a stream.

        Raises:
            PoolExhausted: ``max_streams`` are open.
        """
        if not self._free:
            raise PoolExhausted(f"all {len(self._rows)} codec streams are in use")
        assert stream_id not in self._rows, f"stream {stream_id} is open"
        row = self._rows[stream_id] = self._free.pop()
        self._num_frames[stream_id] = 0
        self._positions[row] = 0
        for states in self._states:
            states[row] = 0

    def close(self, stream_id: str) -> None:
        """End a stream and free its row; an unknown one is ignored, as an abort may come twice."""
        row = self._rows.pop(stream_id, None)
        if row is not None:
            del self._num_frames[stream_id]
            self._free.append(row)

    def copy(self, source_id: str, stream_id: str) -> None:
        """Start a stream where another one stands: behind the reference audio of a voice, for example."""
        self.open(stream_id)
        source, row = self._rows[source_id], self._rows[stream_id]
        self._num_frames[stream_id] = self._num_frames[source_id]
        self._positions[row] = self._positions[source]
        for states in self._states:
            states[row] = states[source]

    @torch.inference_mode()
    def push(self, codes: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Decode the next frames of streams; those with as many frames share a batch. If it raises, none has advanced.

        Args:
            codes: open stream -> [num_quantizers, n] int64, n > 0.

        Returns:
            Stream -> its next samples, [n * samples_per_frame], ``num_trimmed`` fewer at the start.
        """
        batches = defaultdict(list)
        for stream_id, frames in codes.items():
            batches[frames.shape[1], self._num_frames[stream_id] == 0].append(stream_id)
        samples: dict[str, Tensor] = {}
        advanced = []
        for (_, is_start), stream_ids in batches.items():
            rows = torch.tensor([self._rows[one] for one in stream_ids], device=self._positions.device)
            states = [states[rows] for states in self._states]
            batch = torch.stack([codes[one] for one in stream_ids]).to(rows.device)
            waves, states = self.decoder(batch, self._positions[rows], states, is_start=is_start)
            advanced.append((rows, batch.shape[2], states))
            samples |= dict(zip(stream_ids, waves, strict=True))
        for rows, num_frames, states in advanced:
            for kept, new in zip(self._states, states, strict=True):
                kept[rows] = new
            self._positions[rows] += num_frames
        for stream_id, frames in codes.items():
            self._num_frames[stream_id] += frames.shape[1]
        return samples
