"""Within one process: tensors by reference, without a copy. In a server, an engine that reads what it has published.

Producer and consumers hold the same tensor, and none of them may change it until it is released. Containers are not
shared: each reader gets new ones (``codec.restore``). A process cannot release for another one: the front end asks the
engine to (``RelayHub.release_encoded``), and a tensor that was not released expires.

From: SGLang-Omni (communication, ``LOCAL_OBJECT``).
"""

from __future__ import annotations

import secrets
import time
import weakref
from dataclasses import dataclass

import torch

from vllm_omni.errors import RelayBroken
from vllm_omni.messages.payload import TensorRef, check_ref, dtype_name
from vllm_omni.relay.base import LEASE_S, Clock, Relay, RelayStatistics, new_lease

_relays: weakref.WeakValueDictionary[bytes, LocalRelay] = weakref.WeakValueDictionary()  # of this process, by token


@dataclass(slots=True)
class Held:
    tensor: torch.Tensor
    request_id: str
    num_readers: int
    version: int | None  # torch's count of changes when it was put
    expires_at: float  # by the relay's clock; a reader that has taken it keeps it


class LocalRelay(Relay):
    """Keeps tensors until they are released.

    Args:
        check_versions: let ``release`` raise ``RelayBroken`` for a tensor that was changed since it was put.
    """

    backend = "local"

    def __init__(self, *, check_versions: bool = False) -> None:
        super().__init__()
        self._token = secrets.token_bytes(16)
        self._check_versions = check_versions
        self.held: dict[int, Held] = {}  # by lease, the oldest first; for the relay that reads
        self.lease_s = LEASE_S
        self.clock: Clock = time.monotonic
        self._num_expired = 0
        _relays[self._token] = self

    def put_nowait(self, request_id: str, tensor: torch.Tensor, *, num_readers: int = 1) -> TensorRef:
        dtype = dtype_name(tensor)
        with self.lock:
            self.check_open()
            self._collect()
            # Inference tensors have no count of changes.
            version = tensor._version if self._check_versions and not tensor.is_inference() else None
            lease = new_lease()
            self.held[lease] = Held(tensor.detach(), request_id, num_readers, version, self.clock() + self.lease_s)
            self._num_puts += 1
            self._num_bytes += tensor.numel() * tensor.element_size()
        return TensorRef(self.backend, tuple(tensor.shape), dtype, self._token, lease)

    def renew(self, ref: TensorRef) -> bool:
        with self.lock:
            held = self.held.pop(ref.lease, None)
            if held is not None:
                held.expires_at = self.clock() + self.lease_s
                self.held[ref.lease] = held  # the last to expire
            return held is not None

    def _collect(self) -> None:
        """Drop what has expired."""
        now = self.clock()
        while self.held and (first := next(iter(self.held.items())))[1].expires_at <= now:
            del self.held[first[0]]
            self._num_expired += 1

    def get_nowait(self, ref: TensorRef) -> torch.Tensor:
        layout = check_ref(ref, self.backend)
        self.check_open()
        self._num_gets += 1
        producer = _relays.get(ref.location)
        held = producer.held.get(ref.lease) if producer is not None else None
        if held is None:
            raise RelayBroken("the tensor is not in this process: released, aborted, or put in another process")
        if held.tensor.dtype != layout.dtype or tuple(held.tensor.shape) != layout.shape:
            raise RelayBroken(f"a reference says {ref.dtype} {list(ref.shape)}, the tensor has another layout")
        return held.tensor

    def release(self, ref: TensorRef, *, for_all: bool = False) -> None:
        producer = _relays.get(ref.location)
        if producer is None:
            return
        with producer.lock:
            held = producer.held.get(ref.lease)
            if held is None:
                return
            held.num_readers -= 1
            if not held.num_readers or for_all:
                del producer.held[ref.lease]
        if held.version is not None and held.tensor._version != held.version:
            raise RelayBroken(f"request {held.request_id}: a tensor was changed between put and release")

    def abort(self, request_id: str | None) -> None:
        with self.lock:
            for lease in [lease for lease, held in self.held.items() if request_id in (None, held.request_id)]:
                del self.held[lease]

    def statistics(self) -> RelayStatistics:
        with self.lock:
            self._collect()
            num_bytes = sum(held.tensor.numel() * held.tensor.element_size() for held in self.held.values())
            counts = (self._num_puts, self._num_gets, self._num_bytes)
            return RelayStatistics(*counts, len(self.held), num_bytes, self._num_expired)

    def close(self) -> None:
        super().close()
        _relays.pop(self._token, None)
        self.held.clear()
