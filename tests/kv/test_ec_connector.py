"""Two connectors with a relay each: the images that one puts, the other pulls, or reports as lost."""

import time
from collections.abc import Callable, Iterator
from concurrent.futures import wait
from types import SimpleNamespace

import pytest
import torch
from vllm.distributed.ec_transfer.ec_connector.base import ECConnectorRole
from vllm.v1.request import RequestStatus

from tests.core.sched.drive import make_config, make_request
from tests.core.sched.random_requests import Engine, Image, PlannedRequest
from vllm_omni.errors import ConfigError
from vllm_omni.kv.ec_connector import EMBEDS, RelayECConnector, RelayECMetadata, RelayECReport
from vllm_omni.messages.images import Pull, Put, PutRejection
from vllm_omni.messages.payload import Payload, decode, encode
from vllm_omni.relay import InlineRelay
from vllm_omni.relay.hub import RelayHub, RelayOptions

WIDTH = 8  # of the language model
EMBEDDINGS = torch.arange(5.0 * WIDTH).view(5, WIDTH)
PUT = Put("request", "image")


class Half:
    """A connector and an encoder cache of one engine; both halves are one object here."""

    def __init__(self, ec_role: str, hub: RelayHub, **extra: object) -> None:
        config = make_config(Engine(ec_role=ec_role))
        assert config.ec_transfer_config is not None
        config.ec_transfer_config.ec_connector_extra_config.update(extra)
        self.connector = RelayECConnector(config, ECConnectorRole.WORKER)
        self.connector.hub = hub
        self.encoder_cache: dict[str, torch.Tensor] = {}

    def step(self, *news: Put | Pull, encoded: dict[str, torch.Tensor] | None = None) -> RelayECReport:
        """Run a step as the runner does: start puts and pulls, encode, and report what has ended."""
        metadata = RelayECMetadata(
            [one for one in news if isinstance(one, Put)], [one for one in news if isinstance(one, Pull)]
        )
        self.connector.bind_connector_metadata(metadata)
        self.connector.start_save_caches(encoder_cache=self.encoder_cache)
        self.connector.start_load_caches(self.encoder_cache)
        for identifier, embeds in (encoded or {}).items():
            self.encoder_cache[identifier] = embeds
            self.connector.save_caches(self.encoder_cache, identifier)
        wait(self.connector._pulling.values(), timeout=20)
        self.connector.get_finished(set())
        return self.connector.build_connector_worker_meta() or RelayECReport()


@pytest.fixture(params=["shm", "tcp"])
def producer(request: pytest.FixtureRequest) -> Iterator[Half]:
    hub = RelayHub(RelayOptions(request.param, 1 << 20, inline_bytes=0))
    half = Half("ec_producer", hub)
    yield half
    half.connector.shutdown()
    hub.close()


@pytest.fixture
def consumer() -> Iterator[Half]:
    hub = RelayHub(RelayOptions(), prefault=False)
    half = Half("ec_consumer", hub, pull_timeout_s=5)
    yield half
    half.connector.shutdown()
    hub.close()


def put(producer: Half, embeds: torch.Tensor = EMBEDDINGS, put: Put = PUT) -> bytes:
    return producer.step(put, encoded={put.identifier: embeds}).put[put]


def num_leases(half: Half) -> int:
    return half.connector.hub.statistics()[half.connector.hub.options.transport].num_leases


def until(condition: Callable[[], bool], timeout_s: float = 60.0) -> bool:
    """Wait: a release may be a message in flight."""
    deadline = time.monotonic() + timeout_s
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.005)
    return condition()


def release(half: Half, payload: bytes) -> None:
    half.connector.release(payload)
    assert until(lambda: not num_leases(half))


# -- what arrives -----------------------------------------------------------------------------------------------------


def test_an_image_put_by_one_engine_is_pulled_by_another(producer: Half, consumer: Half) -> None:
    report = consumer.step(Pull("image", put(producer), 5))
    assert report.pulled == {"image": 1} and not report.lost
    assert torch.equal(consumer.encoder_cache["image"], EMBEDDINGS)


def test_a_pulled_image_outlives_its_lease(producer: Half, consumer: Half) -> None:
    payload = put(producer)
    consumer.step(Pull("image", payload, 5))
    release(producer, payload)
    assert torch.equal(consumer.encoder_cache["image"], EMBEDDINGS)


def test_a_lease_ends_with_a_release_for_all_and_not_with_a_read(producer: Half, consumer: Half) -> None:
    payload = put(producer)
    for _ in range(2):
        assert consumer.step(Pull("image", payload, 5)).pulled
        assert num_leases(producer) == 1
    release(producer, payload)
    assert consumer.step(Pull("image", payload, 5)).lost


def test_an_image_that_is_cached_is_put_at_once(producer: Half) -> None:
    producer.encoder_cache["image"] = EMBEDDINGS
    assert list(producer.step(PUT).put) == [PUT]


def test_an_image_is_put_for_each_request_that_wants_it(producer: Half) -> None:
    other = Put("other", "image")
    assert not producer.step(PUT, other).put
    report = producer.step(encoded={"image": EMBEDDINGS})
    assert set(report.put) == {PUT, other} and report.put[PUT] != report.put[other]
    assert num_leases(producer) == 2


def test_an_image_that_no_request_wants_is_not_put(producer: Half) -> None:
    assert not producer.step(encoded={"image": EMBEDDINGS})


def test_a_pulled_image_is_put_for_requests_that_want_it(producer: Half, consumer: Half) -> None:
    report = consumer.step(PUT, Pull("image", put(producer), 5))
    assert report.pulled == {"image": 1} and set(report.put) == {PUT}


def test_only_the_first_rank_puts(producer: Half) -> None:
    config = make_config(Engine(ec_role="ec_producer"))
    config.parallel_config = SimpleNamespace(rank=1, tensor_parallel_size=2)  # type: ignore[assignment]
    connector = RelayECConnector(config, ECConnectorRole.WORKER)
    producer.connector._puts = connector._puts
    assert not producer.step(PUT, encoded={"image": EMBEDDINGS})


# -- what is lost -----------------------------------------------------------------------------------------------------


def test_a_released_image_is_lost(producer: Half, consumer: Half) -> None:
    payload = put(producer)
    release(producer, payload)
    report = consumer.step(Pull("image", payload, 5))
    assert set(report.lost) == {"image"} and not report.pulled and not consumer.encoder_cache


def test_images_of_a_dead_producer_are_lost(producer: Half, consumer: Half) -> None:
    payload = put(producer)
    producer.connector.hub.close()
    assert set(consumer.step(Pull("image", payload, 5)).lost) == {"image"}


@pytest.mark.parametrize(
    ("payload", "num_embeds"),
    [
        (encode(Payload({EMBEDS: InlineRelay().put_nowait("", EMBEDDINGS)})), 4),
        (encode(Payload({EMBEDS: InlineRelay().put_nowait("", EMBEDDINGS[:, :5].contiguous())})), 5),
        (encode(Payload({EMBEDS: InlineRelay().put_nowait("", EMBEDDINGS[0])})), 5),
        (encode(Payload({"pages": InlineRelay().put_nowait("", EMBEDDINGS)})), 5),
        (b"no payload", 5),
    ],
    ids=["another length", "another width", "another rank", "another tensor", "no payload"],
)
def test_embeddings_of_another_shape_are_lost(consumer: Half, payload: bytes, num_embeds: int) -> None:
    report = consumer.step(Pull("image", payload, num_embeds))
    assert set(report.lost) == {"image"} and not consumer.encoder_cache


# -- no room ----------------------------------------------------------------------------------------------------------


def test_a_put_into_a_full_relay_is_rejected_and_never_inline() -> None:
    hub = RelayHub(RelayOptions("shm", 8192, inline_bytes=0))
    half = Half("ec_producer", hub)
    page = torch.zeros(2048, dtype=torch.float32).view(-1, WIDTH)
    payload = put(half, page)
    half.encoder_cache["other"] = page
    other = Put("request", "other")
    rejected = half.step(other).rejected
    assert set(rejected) == {other} and not rejected[other].is_final
    release(half, payload)
    assert set(half.step(other).put) == {other}
    half.encoder_cache["large"] = torch.zeros(4096, WIDTH)
    assert half.step(Put("request", "large")).rejected[Put("request", "large")].is_final
    hub.close()


# -- the scheduler's half ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("status", [RequestStatus.FINISHED_STOPPED, RequestStatus.FINISHED_ABORTED])
def test_an_aborted_request_has_its_images_released(producer: Half, status: RequestStatus) -> None:
    request = make_request(PlannedRequest("request", (9, 9), (Image("image", 0, 2),), 1), Engine())
    producer.connector.add_image("request", "image", payload := put(producer))
    producer.connector.count_encode("request")
    request.status = status
    has_ended = status is RequestStatus.FINISHED_STOPPED
    result = {"num_encoded": 1} | ({"images": {"image": payload}} if has_ended else {})
    assert producer.connector.request_finished(request) == (False, result)
    assert until(lambda: num_leases(producer) == has_ended)


def test_a_request_aborted_after_its_end_has_its_images_released(producer: Half) -> None:
    request = make_request(PlannedRequest("request", (9, 9), (Image("image", 0, 2),), 1), Engine())
    producer.connector.add_image("request", "image", put(producer))
    request.status = RequestStatus.FINISHED_STOPPED
    producer.connector.request_finished(request)
    producer.connector.abort_announced(["another"])
    assert num_leases(producer) == 1
    for _ in range(2):
        producer.connector.abort_announced(["request"])
    assert until(lambda: not num_leases(producer))


def test_an_image_that_is_put_twice_keeps_one_lease(producer: Half) -> None:
    first, second = put(producer), put(producer)
    producer.connector.add_image("request", "image", first)
    producer.connector.add_image("request", "image", second)
    assert until(lambda: num_leases(producer) == 1)
    assert producer.step(Pull("first", first, 5), Pull("second", second, 5)).lost.keys() == {"second"}


def test_reports_of_ranks_become_one() -> None:
    left = RelayECReport({PUT: b"payload"})
    left.pulled["image"] += 1
    right = RelayECReport(rejected={Put("other", "image"): PutRejection("full", False)}, lost={"gone": "why"})
    right.pulled["image"] += 1
    report = left.aggregate(right)
    assert report.pulled == {"image": 2} and report.lost == {"gone": "why"}
    assert set(report.put) == {PUT} and len(report.rejected) == 1
    assert not RelayECReport()


def test_upstreams_scheduler_is_rejected() -> None:
    config = make_config(Engine(ec_role="ec_both"))
    config.scheduler_config.scheduler_cls = None
    with pytest.raises(ConfigError, match="EPDScheduler"):
        RelayECConnector(config, ECConnectorRole.SCHEDULER)


def test_payloads_are_bytes_that_hold_no_tensor(producer: Half) -> None:
    payload = put(producer)
    assert len(payload) < 400
    assert decode(payload).tensors[EMBEDS].shape == (5, WIDTH)
