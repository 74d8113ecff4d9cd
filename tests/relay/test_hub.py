"""``RelayHub``: all relays of a process."""

from collections.abc import Iterator

import pytest
import torch

from vllm_omni.errors import ConfigError, RelayBroken
from vllm_omni.messages.payload import Payload, TensorRef, decode, encode
from vllm_omni.relay.hub import INLINE_BYTES, RelayHub, RelayOptions

SMALL, LARGE = torch.arange(10.0), torch.arange(float(INLINE_BYTES))


def make_hub(transport: str = "shm", num_bytes: int = 1 << 20, **options: object) -> RelayHub:
    return RelayHub(RelayOptions(transport, num_bytes, **options))


@pytest.fixture
def producer() -> Iterator[RelayHub]:
    hub = make_hub()
    yield hub
    hub.close()


@pytest.fixture
def consumer() -> Iterator[RelayHub]:
    hub = RelayHub(RelayOptions(), prefault=False)
    yield hub
    hub.close()


def test_nested_containers_arrive_with_their_tensors(producer: RelayHub, consumer: RelayHub) -> None:
    tree = {"layers": [{"hidden": LARGE}, {"hidden": SMALL}], "n": 3, "names": ("a", None), "key/with~both": SMALL}
    payload = decode(encode(producer.publish("request", tree)))
    assert set(payload.tensors) == {"layers/0/hidden", "layers/1/hidden", "key~1with~0both"}
    arrived = consumer.pull_blocking(payload)
    assert torch.equal(arrived["layers"][0]["hidden"], LARGE)
    assert torch.equal(arrived["layers"][1]["hidden"], SMALL)
    assert torch.equal(arrived["key/with~both"], SMALL)
    assert (arrived["n"], arrived["names"]) == (3, ["a", None])


def test_two_readers_share_no_container(producer: RelayHub, consumer: RelayHub) -> None:
    payload = producer.publish("request", {"list": [1, SMALL]})
    consumer.pull_blocking(payload)["list"].append(2)
    assert len(consumer.pull_blocking(payload)["list"]) == 2


def test_small_tensors_travel_inline(producer: RelayHub) -> None:
    payload = producer.publish("request", {"small": SMALL, "large": LARGE})
    assert {path: ref.backend for path, ref in payload.tensors.items()} == {"small": "inline", "large": "shm"}


def test_a_payload_that_was_released_leaves_no_lease(producer: RelayHub, consumer: RelayHub) -> None:
    payload = producer.publish("request", {"a": LARGE, "b": LARGE})
    consumer.pull_blocking(payload)
    consumer.release_payload(payload)
    consumer.release_payload(payload)
    assert producer.statistics()["shm"].num_leases == 0


def test_without_room_a_tensor_travels_inline(producer: RelayHub, consumer: RelayHub) -> None:
    large = torch.zeros(1 << 20, dtype=torch.uint8)
    first, second = (producer.publish("request", {"a": large}) for _ in range(2))
    assert (first.tensors["a"].backend, second.tensors["a"].backend) == ("shm", "inline")
    assert torch.equal(consumer.pull_blocking(second)["a"], large)


def test_what_cannot_travel_is_named_and_nothing_stays(producer: RelayHub) -> None:
    with pytest.raises(TypeError, match="b/1: object cannot travel"):
        producer.publish("request", {"a": LARGE, "b": [1, object()]})
    with pytest.raises(TypeError, match="uint32"):
        producer.publish("request", {"a": LARGE, "b": LARGE.to(torch.uint32)})
    assert producer.statistics()["shm"].num_leases == 0


def test_an_unknown_backend_is_rejected(consumer: RelayHub) -> None:
    with pytest.raises(RelayBroken, match="'carrier'"):
        consumer.get_blocking(TensorRef("carrier", (1,), "uint8", b""))


def test_a_stream_goes_over_the_chosen_backend(producer: RelayHub, consumer: RelayHub) -> None:
    writer = producer.open_stream("request", SMALL)
    assert writer is not None
    reader = consumer.read_stream(writer.ref).result(10)
    writer.write_nowait(SMALL[None])
    producer.finish_stream(writer)
    assert torch.equal(reader.read_nowait(), SMALL[None])
    assert reader.has_ended
    reader.close()
    consumer.release_payload(Payload(streams={"rows": writer.ref}))


def test_a_stream_is_ended_behind_the_rows_that_had_no_credit() -> None:
    hub = make_hub(credits=2)
    writer = hub.open_stream("request", SMALL)
    assert writer is not None
    reader = hub.read_stream(writer.ref).result(10)
    writer.write_nowait(SMALL.expand(2, -1))
    hub.finish_stream(writer, SMALL.expand(1, -1))
    rows = 0
    while not reader.has_ended or reader.num_unread:
        rows += len(reader.read_nowait())
    assert rows == 3
    hub.close()


@pytest.mark.parametrize("transport", ["inline", "local"])
def test_a_backend_without_streams_has_none(transport: str) -> None:
    hub = make_hub(transport)
    assert hub.open_stream("request", SMALL) is None
    hub.close()


def test_without_room_there_is_no_stream() -> None:
    hub = make_hub(num_bytes=1 << 20, credits=1 << 16)
    assert hub.open_stream("request", SMALL) is None
    hub.close()


def test_a_leased_buffer_can_be_written_after_its_reference_is_known(producer: RelayHub, consumer: RelayHub) -> None:
    buffer, ref = producer.lease("request", (4, 1024), torch.float32)
    assert producer.num_bytes_leased == buffer.nbytes
    buffer.copy_(LARGE[:4096].view(4, 1024))
    for _ in range(2):  # each reader releases for itself
        assert torch.equal(consumer.get_blocking(ref), buffer)
        consumer.release(ref)
        assert producer.renew(ref)
    consumer.release(ref, for_all=True)
    assert producer.num_bytes_leased == 0 and not producer.renew(ref)


def test_an_abort_ends_leases(producer: RelayHub, consumer: RelayHub) -> None:
    _, ref = producer.lease("request", (4096,), torch.uint8)
    producer.abort("request")
    assert producer.num_bytes_leased == 0 and not producer.renew(ref)
    with pytest.raises(RelayBroken):
        consumer.get_blocking(ref)


def test_inline_bytes_cannot_be_leased(consumer: RelayHub) -> None:
    with pytest.raises(ConfigError, match="name another transport"):
        consumer.lease("request", (4,), torch.uint8)
