import msgspec
import pytest
import torch

from vllm_omni.errors import RelayBroken
from vllm_omni.relay import InlineRelay, Payload, codec, pack, unpack
from vllm_omni.relay.codec import decode, encode, extract, restore


def make_payload() -> Payload:
    relay = InlineRelay()
    tensors = {"rows": relay.put_nowait("request", torch.arange(6.0).reshape(2, 3))}
    return Payload(tensors, {"first_row": 4, "name": "rows", "ids": [1, 2, 3], "blob": b"\x00\xff"})


def test_a_payload_survives_the_one_tensor_that_vllm_carries() -> None:
    payload = make_payload()
    packed = pack(payload)
    assert packed.dtype == torch.uint8
    assert packed.dim() == 1
    assert unpack(packed) == payload


def test_a_packed_payload_that_is_a_slice_is_read() -> None:
    packed = pack(make_payload())
    padded = torch.cat([packed, torch.zeros(3, dtype=torch.uint8)])
    assert unpack(padded[: len(packed)]) == make_payload()


def test_lengths_are_known_without_opening_a_tensor() -> None:
    assert make_payload().tensors["rows"].num_rows == 2


@pytest.mark.parametrize("data", [b"", b"\xc1", b"hello", encode(make_payload())[:-1], b"\x93\x01\x02\x03"], ids=repr)
def test_bytes_that_are_no_payload_are_refused(data: bytes) -> None:
    with pytest.raises(RelayBroken):
        decode(data)


def test_a_pickle_is_refused() -> None:
    import pickle

    with pytest.raises(RelayBroken):
        decode(pickle.dumps({"tensors": {}}))


@pytest.mark.parametrize("tensor", [torch.zeros(4), torch.zeros(2, 2, dtype=torch.uint8)], ids=["float", "matrix"])
def test_a_tensor_of_another_kind_is_refused(tensor: torch.Tensor) -> None:
    with pytest.raises(RelayBroken):
        unpack(tensor)


def test_a_payload_too_large_is_refused_before_it_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codec, "MAX_PAYLOAD_BYTES", 10)
    with pytest.raises(RelayBroken, match="at most 10"):
        decode(encode(make_payload()))


def test_bytes_that_are_nested_too_deeply_are_refused() -> None:
    deep = b"\x81\xa6values" + b"\x91" * 100_000 + b"\xc0"
    with pytest.raises(RelayBroken):
        decode(deep)
    with pytest.raises(RelayBroken):
        restore(msgspec.msgpack.decode(b"\x91" * 100 + b"\xc0"), {})


def test_a_tree_without_containers_travels() -> None:
    values, tensors = extract(torch.ones(2))
    assert (values, list(tensors)) == (None, [""])
    assert torch.equal(restore(values, tensors), torch.ones(2))


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ({"a": {1: 2}}, "a: the key 1 is no str"),
        ({"a": [0, {1}]}, "a/1: set cannot travel"),
        ({"a": object()}, "a: object cannot travel"),
    ],
)
def test_what_cannot_travel_is_named_by_its_path(tree: object, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        extract(tree)


def test_containers_nested_too_deeply_cannot_travel() -> None:
    tree: list[object] = []
    tree.append(tree)
    with pytest.raises(TypeError, match="deep"):
        extract(tree)


@pytest.mark.parametrize("path", ["b", "a/1", "a/x", "a/-1", "n", "", "a/0/0", "a/99999999999999999999", "a//0"])
def test_a_path_that_leads_elsewhere_is_refused(path: str) -> None:
    with pytest.raises(RelayBroken):
        restore({"a": [None], "n": 3}, {path: torch.ones(1)})
