"""Pages in memory that has another owner: another process reads them by their slot, over the connection of ``tcp``.

Nothing is put and nothing leased. A slot may be written while it is sent, so that readers have to verify what they have
received; a pool's directory and checksums do (``kv/pool/remote_pages.py``).

From: Omni-Flow section 4.1.4, Cross-Node Demand Pulling.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import torch

from vllm_omni.errors import RelayBroken
from vllm_omni.messages.payload import TensorRef, make_layout
from vllm_omni.relay.io_thread import block_on
from vllm_omni.relay.remote.messages import Location, encode, parse_location
from vllm_omni.relay.remote.tcp import TcpRelay
from vllm_omni.relay.secret import Secret
from vllm_omni.relay.slab import CHUNK_BYTES

_SEPARATOR = "#"


class PageRelay(TcpRelay):
    """Serves the slots of a slab, and pulls slots from relays of slabs with pages of the same size.

    Args:
        slots: the slab, [num_slots x stride] bytes; slot i has its page at i x stride.
        page_bytes: of each page, which are read whole.
        host, secret: see ``RemoteRelay``.

    Raises:
        RelayError: the address cannot be listened at.
    """

    def __init__(
        self, slots: memoryview, page_bytes: int, stride: int, *, host: str, secret: Secret | None = None
    ) -> None:
        self._layout = make_layout(torch.uint8, (page_bytes,))
        self._stride = stride
        super().__init__(CHUNK_BYTES, host=host, secret=secret)
        self.slab = slots

    @property
    def name(self) -> str:
        """What others pull by: the address, and a token without which nothing can be read. Not for logs."""
        return f"{self.address}{_SEPARATOR}{self.token.hex()}"

    def pull(self, source: str, slots: Sequence[int], timeout_s: float) -> list[torch.Tensor]:
        """Copy slots of another process; blocks the calling thread.

        Args:
            source: its ``name``.

        Returns:
            Memory of the caller's own for each slot, uint8 [page_bytes].

        Raises:
            RelayBroken: the other process is gone or has no such slot, or the name is wrong.
            RelayTimeout: not all of them arrived in time.
        """
        return block_on(self._pull_all(source, slots), timeout_s, f"pages of {address_of(source)}")

    async def _pull_all(self, source: str, slots: Sequence[int]) -> list[torch.Tensor]:
        refs = [TensorRef(self.backend, self._layout.shape, "uint8", _location(source), slot + 1) for slot in slots]
        producer = await self._connect(parse_location(refs[0]))
        return await asyncio.gather(*(self._pull(producer, ref, self._layout) for ref in refs))

    # -- for the connections: a lease's number is that of a slot, plus 1 ----------------------------------------------

    def start_reading(self, reader: bytes, number: int, num_bytes: int, *, is_stream: bool = False) -> int | None:
        offset = (number - 1) * self._stride
        is_page = num_bytes == self._layout.num_bytes and offset + num_bytes <= len(self.slab) and not is_stream
        return offset if is_page else None

    def end_reading(self, reader: bytes, number: int, *, is_released: bool, for_all: bool = False) -> None:
        return

    def _close(self) -> None:
        super()._close()
        self.slab = memoryview(b"")  # its owner unmaps it


def address_of(name: str) -> str:
    """The part of a relay's name that may be logged."""
    return name.partition(_SEPARATOR)[0]


def _location(name: str) -> bytes:
    address, _, token = name.partition(_SEPARATOR)
    try:
        return encode(Location(address, bytes.fromhex(token)))
    except ValueError as exc:
        raise RelayBroken(f"{address} is named without a token by which to read from it") from exc
