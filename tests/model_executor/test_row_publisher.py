"""The rows of one request to several readers, each at its own pace, over the real relays."""

from collections.abc import Iterator, Sequence
from contextlib import suppress

import pytest
import torch

from tests.relay.io import DEADLINE_S
from tests.relay.test_hub import leases_end
from vllm_omni.errors import RelayTimeout
from vllm_omni.messages.payload import Payload
from vllm_omni.model_executor.row_publisher import RowPublisher
from vllm_omni.relay import StreamReader
from vllm_omni.relay.hub import EdgeOptions, RelayHub, RelayOptions

WIDTH = 4
CREDITS = 4
EDGES = {
    "near": EdgeOptions("shm", stream=True, credits=CREDITS),
    "far": EdgeOptions("tcp", stream=True, credits=2 * CREDITS),
    "late": EdgeOptions("shm"),
}


@pytest.fixture
def hub() -> Iterator[RelayHub]:
    hub = RelayHub(RelayOptions(num_bytes=1 << 20, edges=EDGES, inline_bytes=0))
    yield hub
    assert leases_end(hub)
    hub.close()


@pytest.fixture
def consumer() -> Iterator[RelayHub]:
    hub = RelayHub(RelayOptions())
    yield hub
    hub.close()


def rows_of(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.float32)[:, None].expand(-1, WIDTH).contiguous()


class Producer:
    def __init__(self, hub: RelayHub, *readers: str) -> None:
        self.rows = RowPublisher(hub, "request", [f"{name}.read" for name in readers])
        self.payloads: list[Payload] = []

    def step(self, *numbers: int) -> Payload | None:
        """One step of the engine; rows are their own numbers."""
        self.rows.add(rows_of(*numbers), numbers[0])
        payload = self.rows.publish(dict)
        self.payloads += [] if payload is None else [payload]
        return payload

    def end(self, consumer: RelayHub) -> None:
        """The request ends, and with it what no reader has released."""
        for payload in self.payloads:
            consumer.release_payload(payload, for_all=True)


def open_streams(consumer: RelayHub, payload: Payload | None) -> list[StreamReader]:
    assert payload is not None
    return [consumer.read_stream(ref).result(DEADLINE_S) for ref in payload.streams.values()]


async def numbers_of(reader: StreamReader, num_rows: int) -> list[int]:
    numbers: list[int] = []
    while len(numbers) < num_rows:
        numbers += reader_numbers(await reader.read(timeout_s=DEADLINE_S))
    return numbers


def reader_numbers(rows: torch.Tensor) -> list[int]:
    return [int(number) for number in rows[:, 0]]


def pulled(consumer: RelayHub, payloads: Sequence[Payload], node: str) -> list[int]:
    own = [one for payload in payloads if (one := payload.of(node)).tensors]
    return [number for one in own for number in reader_numbers(consumer.pull_blocking(one)["rows"])]


async def test_two_readers_of_two_transports_get_every_row(hub: RelayHub, consumer: RelayHub) -> None:
    producer = Producer(hub, "near", "far")
    first = producer.step(0, 1, 2)
    near, far = open_streams(consumer, first)
    for node in ("near.read", "far.read"):
        assert pulled(consumer, producer.payloads, node) == [0, 1, 2]
    assert producer.step(3) == Payload(values={"num_rows": 1})  # the front end is notified once
    assert await numbers_of(near, 1) == [3]
    for number in range(4, 12):
        assert producer.step(number) is None
        assert await numbers_of(near, 1) == [number]
    producer.rows.finish()
    assert await numbers_of(far, 9) == list(range(3, 12))
    for reader in (near, far):
        assert not len(await reader.read(timeout_s=DEADLINE_S)) and reader.has_ended
        reader.close()
    producer.end(consumer)


async def test_a_reader_that_is_behind_gets_its_rows_later(hub: RelayHub, consumer: RelayHub) -> None:
    producer = Producer(hub, "near", "far")
    near, far = open_streams(consumer, producer.step(0))
    read: list[int] = []
    for number in range(1, 30):  # more than either ring holds
        producer.step(number)
        if number % 2 == 0:
            with suppress(RelayTimeout):  # on a busy machine its credits come back after this step
                read += reader_numbers(await far.read(timeout_s=0.5))
    assert near.num_unread == CREDITS
    producer.rows.finish()
    assert read + await numbers_of(far, 29 - len(read)) == list(range(1, 30))
    assert await numbers_of(near, 29) == list(range(1, 30))
    near.close()
    far.close()
    producer.end(consumer)


@pytest.mark.parametrize("name", ["near", "far"])
async def test_what_an_engine_has_computed_is_written_after_its_last_step(
    name: str, hub: RelayHub, consumer: RelayHub
) -> None:
    with torch.inference_mode():
        producer = Producer(hub, name)
        first = producer.step(0)
        for number in range(1, 30):
            producer.step(number)
        producer.rows.finish()
    (reader,) = open_streams(consumer, first)
    assert await numbers_of(reader, 29) == list(range(1, 30))
    assert not len(await reader.read(timeout_s=DEADLINE_S)) and reader.has_ended
    reader.close()
    producer.end(consumer)


async def test_a_reader_that_leaves_releases_its_share_alone(hub: RelayHub, consumer: RelayHub) -> None:
    producer = Producer(hub, "near", "far")
    near, far = open_streams(consumer, producer.step(0))
    for number in range(1, CREDITS + 3):
        producer.step(number)
    near.close()
    for number in range(CREDITS + 3, 2 * CREDITS):
        producer.step(number)
    assert await numbers_of(far, 2 * CREDITS - 1) == list(range(1, 2 * CREDITS))
    far.close()
    producer.rows.finish()
    producer.end(consumer)


async def test_beside_a_stream_another_reader_pulls_step_by_step(hub: RelayHub, consumer: RelayHub) -> None:
    producer = Producer(hub, "near", "late")
    (near,) = open_streams(consumer, producer.step(0, 1))
    for number in range(2, 5):
        producer.step(number)
    assert pulled(consumer, producer.payloads, "near.read") == [0, 1]
    assert pulled(consumer, producer.payloads, "late.read") == [0, 1, 2, 3, 4]
    assert await numbers_of(near, 3) == [2, 3, 4]
    assert [bool(payload.of("late.read").streams) for payload in producer.payloads] == [False] * 4
    near.close()
    producer.rows.finish()
    producer.end(consumer)


def test_rows_that_a_preempted_request_computes_again_are_sent_once(hub: RelayHub, consumer: RelayHub) -> None:
    producer = Producer(hub, "late")
    producer.step(0, 1)
    producer.step(2)
    producer.step(0, 1, 2, 3)
    assert pulled(consumer, producer.payloads, "late.read") == [0, 1, 2, 3]
    producer.end(consumer)
