import pytest
import torch

from vllm_omni.errors import RelayBroken
from vllm_omni.relay import InlineRelay, Payload, pack, unpack
from vllm_omni.relay.codec import decode, encode


def make_payload() -> Payload:
    relay = InlineRelay()
    tensors = {"rows": relay.put("request", torch.arange(6.0).reshape(2, 3))}
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
