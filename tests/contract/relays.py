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
from vllm_omni.relay.slab import SlabRelay

NUM_BYTES = 4 << 20  # of a producer's slab


class Pair(NamedTuple):
    producer: Relay
    consumer: Relay


class Backend(NamedTuple):
    make: Callable[[], Relay]  # a relay that can both produce and consume
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


class SmallNixlRelay(NixlRelay):
    landing_bytes = NUM_BYTES


class SmallMooncakeRelay(MooncakeRelay):
    landing_bytes = NUM_BYTES


BACKENDS: dict[str, Backend] = {
    "inline": Backend(InlineRelay, leases=False),
    "local": Backend(LocalRelay, copies=False),
    "shm": Backend(lambda: ShmRelay(NUM_BYTES), crosses=True, streams=True),
    "cuda_ipc": Backend(lambda: HostCudaIpcRelay(NUM_BYTES), needs="cuda"),
    "nixl": Backend(lambda: SmallNixlRelay(NUM_BYTES), streams=True, needs="nixl"),
    "mooncake": Backend(lambda: SmallMooncakeRelay(NUM_BYTES), streams=True, needs="mooncake"),
    "tcp": Backend(lambda: TcpRelay(NUM_BYTES), crosses=True, streams=True),
}


@contextmanager
def make_pair(name: str, lease_s: float = 60.0) -> Iterator[Pair]:
    producer, consumer = BACKENDS[name].make(), BACKENDS[name].make()
    for relay in (producer, consumer):
        if isinstance(relay, SlabRelay):
            relay.lease_s = lease_s
    try:
        yield Pair(producer, consumer)
    finally:
        consumer.close()
        producer.close()
