"""What every relay promises. A new backend is added to ``RELAYS`` and must pass unchanged."""

from collections.abc import Callable, Iterator

import msgspec
import pytest
import torch

from vllm_omni.errors import RelayBroken, RelayClosed
from vllm_omni.relay import InlineRelay, Relay, TensorRef

RELAYS: dict[str, Callable[[], Relay]] = {"inline": InlineRelay}
DTYPES = [
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float64,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.bool,
]


@pytest.fixture(params=RELAYS)
def relay(request: pytest.FixtureRequest) -> Iterator[Relay]:
    relay = RELAYS[request.param]()
    yield relay
    relay.close()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (1,), (3, 5), (0, 4), (2, 0), (2, 3, 4)], ids=str)
def test_a_tensor_arrives_as_it_was_put(relay: Relay, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = (torch.rand(shape) * 100).to(dtype)
    arrived = relay.get(relay.put("request", tensor))
    assert arrived.dtype == dtype
    assert arrived.shape == tensor.shape
    assert torch.equal(arrived, tensor)


def test_a_view_arrives_without_what_lies_around_it(relay: Relay) -> None:
    tensor = torch.arange(24.0).reshape(4, 6)
    ref = relay.put("request", tensor[1:3, ::2].T)
    assert torch.equal(relay.get(ref), tensor[1:3, ::2].T)


def test_the_producer_may_change_its_tensor_after_put(relay: Relay) -> None:
    tensor = torch.zeros(4)
    ref = relay.put("request", tensor)
    tensor.fill_(1.0)
    assert torch.equal(relay.get(ref), torch.zeros(4))


def test_the_consumer_may_change_what_it_got(relay: Relay) -> None:
    ref = relay.put("request", torch.zeros(4))
    relay.get(ref).fill_(1.0)
    assert torch.equal(relay.get(ref), torch.zeros(4))


def test_a_reference_survives_the_wire(relay: Relay) -> None:
    tensor = torch.randn(7, 3)
    wire = msgspec.msgpack.encode(relay.put("request", tensor))
    assert torch.equal(relay.get(msgspec.msgpack.decode(wire, type=TensorRef)), tensor)


def test_releasing_twice_does_nothing(relay: Relay) -> None:
    ref = relay.put("request", torch.zeros(4))
    relay.release(ref)
    relay.release(ref)
    assert relay.statistics().num_leases == 0


def test_aborting_a_request_leaves_no_lease(relay: Relay) -> None:
    for _ in range(3):
        relay.put("request", torch.zeros(4))
    relay.abort("request")
    relay.abort("unknown")
    assert relay.statistics().num_leases == 0


def test_statistics_count_puts_gets_and_bytes(relay: Relay) -> None:
    ref = relay.put("request", torch.zeros(4))
    relay.get(ref)
    statistics = relay.statistics()
    assert (statistics.num_puts, statistics.num_gets, statistics.num_bytes_put) == (1, 1, 16)


@pytest.mark.parametrize(
    "change",
    [
        {"backend": "another"},
        {"dtype": "float33"},
        {"dtype": "__class__"},
        {"dtype": "float64"},
        {"shape": (5,)},
        {"shape": (-4,)},
        {"shape": (-2, -2)},
        {"shape": (1 << 62, 1 << 62)},
        {"location": b""},
    ],
    ids=str,
)
def test_a_reference_that_does_not_add_up_is_refused(relay: Relay, change: dict[str, object]) -> None:
    ref = relay.put("request", torch.zeros(4))
    with pytest.raises(RelayBroken):
        relay.get(msgspec.structs.replace(ref, **change))


def test_a_closed_relay_says_that_it_was_closed(relay: Relay) -> None:
    ref = relay.put("request", torch.zeros(4))
    relay.close()
    with pytest.raises(RelayClosed):
        relay.put("request", torch.zeros(4))
    with pytest.raises(RelayClosed):
        relay.get(ref)


def test_a_dtype_that_cannot_travel_is_named(relay: Relay) -> None:
    with pytest.raises(TypeError, match="complex64"):
        relay.put("request", torch.zeros(4, dtype=torch.complex64))
