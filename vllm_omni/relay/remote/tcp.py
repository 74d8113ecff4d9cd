"""TCP between hosts, or processes that share nothing else: a consumer asks for a tensor piece by piece.

Several pieces are under way at once, so that neither end waits for the other; each is sent from the slab and received
into its place, with one copy on the way. The same idea as a read by RDMA, and the fallback where there is none.

From: SGLang-Omni (communication, Backends).
"""

from __future__ import annotations

import asyncio

import torch

from vllm_omni.errors import RelayBroken
from vllm_omni.messages.payload import Layout, TensorRef
from vllm_omni.relay.remote.relay import PIECE_BYTES, Producer, RemoteRelay
from vllm_omni.relay.remote.wire import Read

WINDOW = 4  # pieces under way


class TcpRelay(RemoteRelay):
    """What ``get`` returns belongs to its caller."""

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
                transfer.ask()
            await finished
        return memory.view(layout.dtype).reshape(layout.shape)


class Transfer:
    """A tensor on its way."""

    def __init__(
        self, producer: Producer, request: int, lease: int, memory: torch.Tensor, finished: asyncio.Future[int]
    ):
        self._producer = producer
        self._request = request
        self._lease = lease
        self._finished = finished
        self._bytes = memoryview(memory.numpy())
        self._asked = 0  # bytes
        self._under_way: dict[int, int] = {}  # offset of a piece -> its size

    def ask(self) -> None:
        """For the next piece, if there is one."""
        size = min(PIECE_BYTES, len(self._bytes) - self._asked)
        if size:
            self._under_way[self._asked] = size
            self._producer.send(Read(self._request, self._lease, len(self._bytes), self._asked, size))
            self._asked += size

    def take(self, offset: int, piece: memoryview) -> None:
        """Raises ``ValueError`` for a piece that was not asked for."""
        if self._under_way.get(offset) != len(piece):
            raise ValueError(f"a piece of {len(piece)} bytes at {offset}, which was not asked for")
        del self._under_way[offset]
        self._bytes[offset : offset + len(piece)] = piece
        self.ask()
        if not self._under_way and not self._finished.done():
            self._finished.set_result(0)
