"""Inline: the bytes travel in the reference itself, so that nothing is leased and nothing can leak."""

from __future__ import annotations

import torch

from vllm_omni.errors import RelayBroken
from vllm_omni.messages.payload import TensorRef, check_ref, dtype_name
from vllm_omni.relay.base import Relay, RelayStatistics


class InlineRelay(Relay):
    """Puts the bytes into the reference: right for small tensors, two copies for large ones."""

    backend = "inline"

    def put_nowait(self, request_id: str, tensor: torch.Tensor, *, num_readers: int = 1) -> TensorRef:
        self.check_open()
        name = dtype_name(tensor)
        # Viewed as bytes, since numpy has no bfloat16.
        data = b""
        if tensor.numel():
            data = tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
        self._num_puts += 1
        self._num_bytes += len(data)
        return TensorRef(self.backend, tuple(tensor.shape), name, data)

    def get_nowait(self, ref: TensorRef) -> torch.Tensor:
        layout = check_ref(ref, self.backend)
        self.check_open()
        if len(ref.location) != layout.num_bytes:
            raise RelayBroken(
                f"{ref.dtype} {list(ref.shape)} needs {layout.num_bytes} bytes, there are {len(ref.location)}"
            )
        self._num_gets += 1
        if not layout.num_bytes:
            return torch.empty(layout.shape, dtype=layout.dtype)
        return torch.frombuffer(bytearray(ref.location), dtype=layout.dtype).reshape(layout.shape)

    def release(self, ref: TensorRef, *, for_all: bool = False) -> None:
        pass

    def abort(self, request_id: str | None) -> None:
        pass

    def statistics(self) -> RelayStatistics:
        return RelayStatistics(self._num_puts, self._num_gets, self._num_bytes, num_leases=0)
