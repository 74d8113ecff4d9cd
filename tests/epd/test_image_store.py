"""Embeddings kept between requests."""

import pytest

from vllm_omni.epd.image_store import TTL_S, ImageStore
from vllm_omni.messages.payload import Payload, TensorRef

NUM_BYTES = 64


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def released() -> list[Payload]:
    return []


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def store(released: list[Payload], clock: Clock) -> ImageStore:
    return ImageStore(2 * NUM_BYTES, released.append, clock=clock)


def make_payload(number: int = 0) -> Payload:
    return Payload({"embeds": TensorRef("shm", (4, 4), "float32", b"", number + 1)})


def keep(store: ImageStore, name: str, source: str = "E0") -> Payload:
    payload = make_payload(hash(name) % 1000)
    store.give_back(store.put(name, source, b"", payload))
    return payload


def test_the_least_recently_used_image_is_dropped(store: ImageStore, released: list[Payload]) -> None:
    first, _ = keep(store, "a"), keep(store, "b")
    found = store.take("a")
    assert found is not None and found.payload == first
    store.give_back(found)
    keep(store, "c")  # b was used longest ago
    assert store.take("b") is None and store.take("a") is not None
    assert len(released) == 1
    assert store.statistics() == (2, 2 * NUM_BYTES, 3, 2)


def test_each_source_has_its_own_limit(store: ImageStore, released: list[Payload]) -> None:
    for name in ("a", "b"):
        keep(store, name, "E0")
        keep(store, name.upper(), "E1")
    assert released == []
    assert store.statistics().num_images == 4


def test_a_lease_lasts_while_a_request_reads(store: ImageStore, released: list[Payload]) -> None:
    image = store.put("a", "E0", b"", make_payload())
    store.clear()
    assert released == [] and store.take("a") is None
    store.give_back(image)
    assert released == [image.payload]


def test_an_image_above_the_limit_is_not_kept(store: ImageStore, released: list[Payload]) -> None:
    small = ImageStore(NUM_BYTES - 1, released.append)
    image = small.put("a", "E0", b"", make_payload())
    assert small.take("a") is None
    small.give_back(image)
    assert released == [image.payload]


def test_an_image_that_is_encoded_twice_at_once_is_kept_once(store: ImageStore, released: list[Payload]) -> None:
    first, second = store.put("a", "E0", b"", make_payload(1)), store.put("a", "E1", b"", make_payload(2))
    store.give_back(first)
    store.give_back(second)
    assert released == [second.payload]
    assert store.take("a") is first


def test_an_image_is_dropped_before_its_lease_expires(store: ImageStore, released: list[Payload], clock: Clock) -> None:
    payload = keep(store, "a")
    clock.now = TTL_S + 1
    assert store.take("a") is None
    assert released == [payload]


def test_images_of_a_terminated_source_are_dropped(store: ImageStore) -> None:
    keep(store, "a", "E0")
    keep(store, "b", "E1")
    store.forget_source("E0")
    assert store.take("a") is None and store.take("b") is not None
