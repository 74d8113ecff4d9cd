"""Every backend, as a producer and a consumer that are two relays; the contract suites run over all of them."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch

from tests import machine
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
    make: Callable[[float], Relay]  # lease_s -> a relay that can both produce and consume
    copies: bool = True  # put copies: a consumer reads what was there at that moment
    leases: bool = True  # something stays with the producer until it is released
    crosses: bool = False  # works between processes, so that one end can be killed without the other
    streams: bool = False
    needs: str = ""  # what the machine must have: a name of ``tests.machine.NEEDS``

    @property
    def is_usable(self) -> bool:
        return not (self.needs and machine.why_not(self.needs))


class HostCudaIpcRelay(CudaIpcRelay):
    """Hands out copies on the host, which the suites can compare."""

    def _take(self, ref: TensorRef, layout: Layout, held: TensorRef, data: torch.Tensor) -> torch.Tensor:
        return super()._take(ref, layout, held, data).cpu()


BACKENDS: dict[str, Backend] = {
    "inline": Backend(lambda lease_s: InlineRelay(), leases=False),
    "local": Backend(lambda lease_s: LocalRelay(), copies=False),
    "shm": Backend(lambda lease_s: ShmRelay(NUM_BYTES, lease_s=lease_s), crosses=True, streams=True),
    "cuda_ipc": Backend(lambda lease_s: HostCudaIpcRelay(NUM_BYTES, lease_s=lease_s), needs="cuda"),
    "nixl": Backend(
        lambda lease_s: NixlRelay(NUM_BYTES, landing_bytes=NUM_BYTES, lease_s=lease_s), streams=True, needs="nixl"
    ),
    "mooncake": Backend(
        lambda lease_s: MooncakeRelay(NUM_BYTES, landing_bytes=NUM_BYTES, lease_s=lease_s),
        streams=True,
        needs="mooncake",
    ),
    "tcp": Backend(lambda lease_s: TcpRelay(NUM_BYTES, lease_s=lease_s), crosses=True, streams=True),
}


@contextmanager
def make_pair(name: str, lease_s: float = 60.0) -> Iterator[Pair]:
    producer = BACKENDS[name].make(lease_s)
    consumer = BACKENDS[name].make(lease_s)
    try:
        yield Pair(producer, consumer)
    finally:
        consumer.close()
        producer.close()
