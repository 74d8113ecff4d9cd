"""Every backend, as a producer and a consumer that are two relays; the contract suites run over all of them."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import NamedTuple

import torch

from vllm_omni.messages.payload import Layout, TensorRef
from vllm_omni.relay import InlineRelay, Relay
from vllm_omni.relay.cuda_ipc import CudaIpcRelay
from vllm_omni.relay.local import LocalRelay
from vllm_omni.relay.remote.mooncake import MooncakeRelay
from vllm_omni.relay.remote.nixl import NixlRelay
from vllm_omni.relay.remote.tcp import TcpRelay
from vllm_omni.relay.shm import ShmRelay

NUM_BYTES = 4 << 20  # of a producer's slab


class Pair(NamedTuple):
    producer: Relay
    consumer: Relay


class Backend(NamedTuple):
    make: Callable[[float], Relay]  # lease_s -> a relay that can do both
    copies: bool = True  # whether put copies: a consumer has what was there at that moment
    leases: bool = True  # whether something stays with the producer until it is released
    crosses: bool = False  # whether it crosses processes, so that one end can die without the other
    streams: bool = False
    reason: str = ""  # why it cannot be tested here


def reason_without(module: str) -> str:
    """Why a library cannot be used here."""
    try:
        import_module(module)
    except ImportError as exc:
        return str(exc)
    return ""


class HostCudaIpcRelay(CudaIpcRelay):
    """Hands out copies on the host, which the suites can compare."""

    def _take(self, ref: TensorRef, layout: Layout, held: TensorRef, data: torch.Tensor) -> torch.Tensor:
        return super()._take(ref, layout, held, data).cpu()


BACKENDS: dict[str, Backend] = {
    "inline": Backend(lambda lease_s: InlineRelay(), leases=False),
    "local": Backend(lambda lease_s: LocalRelay(), copies=False),
    "shm": Backend(lambda lease_s: ShmRelay(NUM_BYTES, lease_s=lease_s), crosses=True, streams=True),
    "cuda_ipc": Backend(
        lambda lease_s: HostCudaIpcRelay(NUM_BYTES, lease_s=lease_s),
        reason="" if torch.cuda.is_available() else "torch sees no CUDA device",
    ),
    "nixl": Backend(
        lambda lease_s: NixlRelay(NUM_BYTES, landing_bytes=NUM_BYTES, lease_s=lease_s),
        streams=True,
        reason=reason_without("nixl._api"),
    ),
    "mooncake": Backend(
        lambda lease_s: MooncakeRelay(NUM_BYTES, landing_bytes=NUM_BYTES, lease_s=lease_s),
        streams=True,
        reason=reason_without("mooncake.engine"),
    ),
    "tcp": Backend(lambda lease_s: TcpRelay(NUM_BYTES, lease_s=lease_s), crosses=True, streams=True),
}
LEASING = [name for name, backend in BACKENDS.items() if backend.leases]
CROSSING = [name for name, backend in BACKENDS.items() if backend.crosses]
STREAMING = [name for name, backend in BACKENDS.items() if backend.streams]
COPYING = [name for name, backend in BACKENDS.items() if backend.copies]


@contextmanager
def make_pair(name: str, lease_s: float = 60.0) -> Iterator[Pair]:
    producer = BACKENDS[name].make(lease_s)
    consumer = BACKENDS[name].make(lease_s)
    try:
        yield Pair(producer, consumer)
    finally:
        consumer.close()
        producer.close()
