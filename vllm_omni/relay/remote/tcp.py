"""TCP between hosts, or between processes that share nothing else: a consumer requests a tensor piece by piece.

Several pieces are in flight, so that neither end waits for the other; each is sent from the slab and copied once, into
its place. It works like a read by RDMA, and replaces it where there is none.

From: SGLang-Omni (communication, Backends).
"""

from __future__ import annotations

import asyncio

import torch

from vllm_omni.errors import RelayBroken
from vllm_omni.messages.payload import Layout, TensorRef
from vllm_omni.relay.remote.consumers import PIECE_BYTES
from vllm_omni.relay.remote.messages import Read
from vllm_omni.relay.remote.producer import Producer
from vllm_omni.relay.remote.relay import RemoteRelay

WINDOW = 4  # pieces in flight


class TcpRelay(RemoteRelay):
    """``get`` returns a tensor of the caller's own."""

    backend = "tcp"

    async def _pull(self, producer: Producer, ref: TensorRef, layout: Layout) -> torch.Tensor:
        try:
            memory = torch.empty(layout.num_bytes, dtype=torch.uint8)
        except RuntimeError as exc:
            raise RelayBroken(f"no memory for a tensor of {layout.num_bytes} bytes") from exc
        with producer.request(ref.lease) as (request, finished):
            transfer = Transfer(producer, request, ref.lease, memory, finished)
            producer.pieces[request] = transfer.take
            for _ in range(WINDOW):
                transfer.request_next()
            await finished
        return memory.view(layout.dtype).reshape(layout.shape)


class Transfer:
    """A tensor in flight."""

    def __init__(
        self, producer: Producer, request: int, lease: int, memory: torch.Tensor, finished: asyncio.Future[int]
    ):
        self._producer = producer
        self._request = request
        self._lease = lease
        self._finished = finished
        self._bytes = memoryview(memory.numpy())
        self._num_requested = 0  # bytes
        self._in_flight: dict[int, int] = {}  # offset of a piece -> its size

    def request_next(self) -> None:
        """Request the next piece, if there is one."""
        size = min(PIECE_BYTES, len(self._bytes) - self._num_requested)
        if size:
            self._in_flight[self._num_requested] = size
            self._producer.send(Read(self._request, self._lease, len(self._bytes), self._num_requested, size))
            self._num_requested += size

    def take(self, offset: int, piece: memoryview) -> None:
        """Copy a piece into its place. Raises ``ValueError`` for one that was not requested."""
        if self._in_flight.get(offset) != len(piece):
            raise ValueError(f"a piece of {len(piece)} bytes at {offset}, which was not requested")
        del self._in_flight[offset]
        self._bytes[offset : offset + len(piece)] = piece
        self.request_next()
        if not self._in_flight and not self._finished.done():
            self._finished.set_result(0)
