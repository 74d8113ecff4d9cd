"""``RelayHub``: all relays of a process."""

import asyncio
import time
from collections.abc import Iterator

import pytest
import torch

from tests.relay.io import DEADLINE_S
from vllm_omni.errors import ConfigError, RelayBroken
from vllm_omni.messages.payload import Payload, TensorRef, decode, encode
from vllm_omni.relay.hub import INLINE_BYTES, EdgeOptions, RelayHub, RelayOptions

SMALL, LARGE = torch.arange(10.0), torch.arange(float(INLINE_BYTES))


def make_hub(transport: str = "shm", num_bytes: int = 1 << 20, **options: object) -> RelayHub:
    return RelayHub(RelayOptions(transport, num_bytes, **options))


def make_publisher(num_bytes: int = 1 << 20, **edges: EdgeOptions) -> RelayHub:
    return RelayHub(RelayOptions(num_bytes=num_bytes, edges=edges))


def streaming(transport: str = "shm", credits: int = 8) -> EdgeOptions:
    return EdgeOptions(transport, stream=True, credits=credits)


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


# -- readers ----------------------------------------------------------------------------------------------------------


def test_readers_of_one_transport_share_a_tensor_that_ends_with_the_last_of_them() -> None:
    hub, *readers = (
        make_publisher(a=EdgeOptions("shm"), b=EdgeOptions("shm", num_ranks=2)),
        *map(make_hub, ["shm"] * 3),
    )
    payload = decode(encode(hub.publish("request", {"rows": LARGE}, ["a.read", "b.read"])))
    assert hub.statistics()["shm"].num_puts == 1 and not payload.apart
    for number, reader in enumerate(readers):
        assert hub.statistics()["shm"].num_leases == 1, number
        own = payload.of("a.read" if number == 0 else "b.read")
        assert torch.equal(reader.pull_blocking(own)["rows"], LARGE)
        reader.release_payload(own)
    assert hub.statistics()["shm"].num_leases == 0
    for one in (hub, *readers):
        one.close()


def test_each_edge_has_its_own_transport(consumer: RelayHub) -> None:
    hub = make_publisher(a=EdgeOptions("shm"), b=EdgeOptions("tcp"))
    payload = decode(encode(hub.publish("request", {"rows": LARGE, "small": SMALL}, ["a.read", "b.read"])))
    for node, backend in (("a.read", "shm"), ("b.read", "tcp")):
        own = payload.of(node)
        assert {path: ref.backend for path, ref in own.tensors.items()} == {"rows": backend, "small": "inline"}
        assert torch.equal(consumer.pull_blocking(own)["rows"], LARGE)
    consumer.release_payload(payload, for_all=True)
    assert leases_end(hub)
    hub.close()


def test_a_reader_that_a_request_does_not_need_holds_nothing(consumer: RelayHub) -> None:
    hub = make_publisher(a=EdgeOptions("shm"), b=EdgeOptions("tcp"))
    payload = hub.publish("request", {"rows": LARGE}, ["b.read", "function.read"])
    assert payload.tensors["rows"].backend == "tcp" and "shm" not in hub.statistics()
    consumer.release_payload(payload, for_all=True)
    assert leases_end(hub)
    hub.close()


def test_what_the_front_end_opens_has_one_more_reader(consumer: RelayHub) -> None:
    hub, reader = RelayHub(RelayOptions("shm", 1 << 20, {"a": EdgeOptions("shm")})), make_hub()
    payload = hub.publish("request", {"images": LARGE}, ["a.read", "entry"], is_opened=True)
    consumer.pull_blocking(payload)
    consumer.release_payload(payload)
    assert hub.statistics()["shm"].num_leases == 1
    reader.pull_blocking(payload.of("a.read"))
    reader.release_payload(payload.of("a.read"))
    assert hub.statistics()["shm"].num_leases == 0
    hub.close()
    reader.close()


@pytest.mark.parametrize(
    ("edge", "nodes"), [(EdgeOptions("shm", stays=True), ["a.read"]), (EdgeOptions("shm"), ["a.read", "a.repeat"])]
)
def test_what_one_process_reads_again_stays(edge: EdgeOptions, nodes: list[str], consumer: RelayHub) -> None:
    hub = make_publisher(a=edge)
    payload = hub.publish("request", {"rows": LARGE}, nodes)
    for _ in range(2):
        assert torch.equal(consumer.pull_blocking(payload)["rows"], LARGE)
        consumer.release_payload(payload)
    consumer.release_payload(payload, for_all=True)
    assert leases_end(hub)
    hub.close()


def leases_end(hub: RelayHub) -> bool:
    """Whether a release that travels over a connection arrives, too."""
    deadline = time.monotonic() + DEADLINE_S
    while any(one.num_leases for one in hub.statistics().values()):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.001)
    return True


# -- streams ----------------------------------------------------------------------------------------------------------


def test_a_stream_goes_over_the_backend_of_its_edge(consumer: RelayHub) -> None:
    for transport in ("shm", "tcp"):
        hub = make_publisher(a=streaming(transport))
        writer = hub.open_stream("request", SMALL, "a.read")
        assert writer is not None and writer.ref.backend == transport
        reader = consumer.read_stream(writer.ref).result(DEADLINE_S)
        writer.write_nowait(SMALL[None])
        hub.finish_stream(writer)
        rows = asyncio.run(reader.read(timeout_s=DEADLINE_S))
        assert torch.equal(rows, SMALL[None])
        reader.close()
        consumer.release_payload(Payload(streams={"a.read": writer.ref}), for_all=True)
        assert leases_end(hub)
        hub.close()


def test_a_stream_is_ended_behind_all_rows_that_had_no_credit() -> None:
    hub = make_publisher(a=streaming(credits=2))
    writer = hub.open_stream("request", SMALL, "a.read")
    assert writer is not None
    reader = hub.read_stream(writer.ref).result(DEADLINE_S)
    writer.write_nowait(SMALL.expand(2, -1))
    hub.finish_stream(writer, SMALL.expand(5, -1))
    rows = 0
    while not reader.has_ended or reader.num_unread:
        rows += len(reader.read_nowait())
    assert rows == 7
    hub.close()


@pytest.mark.parametrize("edge", [EdgeOptions("shm"), streaming("inline"), streaming("local"), None])
def test_an_edge_without_streams_has_none(edge: EdgeOptions | None) -> None:
    hub = make_publisher(**({} if edge is None else {"a": edge}))
    assert hub.open_stream("request", SMALL, "a.read") is None
    hub.close()


def test_without_room_there_is_no_stream() -> None:
    hub = make_publisher(a=streaming(credits=1 << 16))
    assert hub.open_stream("request", SMALL, "a.read") is None
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


def test_an_abort_of_all_ends_the_leases_of_every_transport() -> None:
    hub = make_publisher(reader=streaming("tcp"), other=EdgeOptions("shm"))
    hub.publish("one", {"rows": LARGE, "more": LARGE}, ["reader", "other"])
    hub.open_stream("another", SMALL, "reader")
    before = {name: one.num_leases for name, one in hub.statistics().items()}
    hub.abort_all()
    after = {name: one.num_leases for name, one in hub.statistics().items()}
    hub.close()
    assert (before["tcp"], before["shm"]) == (3, 2)
    assert not any(after.values())


def test_inline_bytes_cannot_be_leased(consumer: RelayHub) -> None:
    with pytest.raises(ConfigError, match="name another transport"):
        consumer.lease("request", (4,), torch.uint8)
