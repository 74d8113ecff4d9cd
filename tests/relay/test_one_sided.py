"""Relays whose library reads the producer's memory: where the bytes land, and what happens when the producer dies."""

import asyncio
import subprocess
import sys
import time
from collections.abc import Iterator

import msgspec
import pytest
import torch

from tests.contract.usable import ONE_SIDED
from tests.relay.io import DEADLINE_S
from vllm_omni.errors import MissingDependency, RelayBroken
from vllm_omni.messages.payload import TensorRef
from vllm_omni.relay.remote.one_sided import OneSidedRelay
from vllm_omni.relay.select import make_relay

PRODUCER = """
import sys, torch, msgspec
from vllm_omni.relay.select import make_relay
relay = make_relay(sys.argv[1], 4 << 20)
refs = [relay.put_nowait("request", torch.full((1000,), float(number))) for number in range(2)]
print("refs", msgspec.json.encode(refs).decode(), flush=True)
sys.stdin.read()
"""


@pytest.fixture(params=ONE_SIDED)
def consumer(request: pytest.FixtureRequest) -> Iterator[OneSidedRelay]:
    relay = make_relay(request.param, 0)
    assert isinstance(relay, OneSidedRelay)
    yield relay
    relay.close()
    relay.check_integrity()


@pytest.fixture
def producer(consumer: OneSidedRelay) -> Iterator[OneSidedRelay]:
    relay = make_relay(consumer.backend, 160 << 20)
    assert isinstance(relay, OneSidedRelay)
    yield relay
    relay.close()


def num_bytes_landed(relay: OneSidedRelay) -> int:
    return relay._landing_pool.statistics().num_bytes_used


async def test_a_tensor_lies_in_the_landing_slab_until_it_is_released(
    producer: OneSidedRelay, consumer: OneSidedRelay
) -> None:
    ref = producer.put_nowait("request", torch.ones(1 << 18))
    await consumer.get(ref)
    await consumer.get(ref)
    assert num_bytes_landed(consumer) == 2 << 20
    consumer.release(ref)
    consumer.release(ref)
    assert num_bytes_landed(consumer) == 0


async def test_a_tensor_without_room_lands_in_separate_memory(producer: OneSidedRelay, consumer: OneSidedRelay) -> None:
    size = consumer.landing_bytes + 4096
    ref = producer.put_nowait("request", torch.full((size,), 7, dtype=torch.uint8))
    assert bool((await consumer.get(ref) == 7).all())
    assert num_bytes_landed(consumer) == 0
    consumer.release(ref)


async def test_a_rejected_read_leaves_no_place_taken(producer: OneSidedRelay, consumer: OneSidedRelay) -> None:
    ref = producer.put_nowait("request", torch.ones(1000))
    producer.abort("request")
    with pytest.raises(RelayBroken):
        await consumer.get(ref, timeout_s=DEADLINE_S)
    assert num_bytes_landed(consumer) == 0


@pytest.mark.parametrize(("backend", "module"), [("nixl", "nixl._api"), ("mooncake", "mooncake.engine")])
def test_a_missing_library_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch, backend: str, module: str) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(MissingDependency, match=rf"pip install -e '\.\[{backend}\]'"):
        make_relay(backend, 0)


@pytest.fixture
def process(consumer: OneSidedRelay) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", PRODUCER, consumer.backend]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        yield process
        process.kill()


async def test_the_end_of_a_producer_is_noticed(consumer: OneSidedRelay, process: subprocess.Popen[str]) -> None:
    while not (line := await asyncio.to_thread(process.stdout.readline)).startswith("refs "):
        assert line, "the producer did not start"
    first, second = msgspec.json.decode(line[5:], type=list[TensorRef])
    assert torch.equal(await consumer.get(first), torch.zeros(1000))
    process.kill()
    begin = time.monotonic()
    with pytest.raises(RelayBroken):
        await consumer.get(second)
    assert time.monotonic() - begin < 5  # before an unanswered heartbeat
    consumer.release(first)
    assert num_bytes_landed(consumer) == 0
