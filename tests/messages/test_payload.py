import pickle

import pytest
import torch
from msgspec import structs

from vllm_omni.errors import RelayBroken
from vllm_omni.messages import payload as payload_module
from vllm_omni.messages.payload import Payload, TensorRef, decode, encode, pack, unpack


def make_payload() -> Payload:
    tensors = {"rows": TensorRef("inline", (2, 3), "float32", bytes(24))}
    return Payload(tensors, {"first_row": 4, "name": "rows", "ids": [1, 2, 3], "blob": b"\x00\xff"})


def test_a_payload_survives_the_one_tensor_that_vllm_carries() -> None:
    payload = make_payload()
    packed = pack(payload)
    assert (packed.dtype, packed.dim()) == (torch.uint8, 1)
    assert unpack(packed) == payload


def test_a_slice_of_a_tensor_is_unpacked() -> None:
    packed = pack(make_payload())
    padded = torch.cat([packed, torch.zeros(3, dtype=torch.uint8)])
    assert unpack(padded[: len(packed)]) == make_payload()


def test_a_reference_tells_the_number_of_rows() -> None:
    assert make_payload().tensors["rows"].num_rows == 2


def test_each_reader_gets_its_own_references_and_its_own_stream() -> None:
    ref = TensorRef("shm", (2, 3), "float32", b"here", 1)
    other = structs.replace(ref, location=b"there")
    streams = {name: structs.replace(ref, lease=number) for number, name in enumerate(("a.read", "b.read"), 2)}
    payload = decode(encode(Payload({"rows": ref}, {"rows": None}, streams, {"b.read": {"rows": other}, "c.read": {}})))
    assert payload.of("a.read") == Payload({"rows": ref}, {"rows": None}, {"rows": streams["a.read"]})
    assert payload.of("b.read") == Payload({"rows": other}, {"rows": None}, {"rows": streams["b.read"]})
    assert payload.of("c.read") == Payload({}, {"rows": None})
    assert payload.of("d.read") == Payload({"rows": ref}, {"rows": None})
    assert payload.refs() == [ref, *streams.values(), other]
    assert payload.of("a.read").of("a.read") == payload.of("a.read")


def test_malformed_bytes_are_rejected() -> None:
    deep = b"\x81\xa6values" + b"\x91" * 100_000 + b"\xc0"
    pickled = pickle.dumps({"tensors": {}})
    for data in (b"", b"\xc1", b"hello", encode(make_payload())[:-1], b"\x93\x01\x02\x03", deep, pickled):
        try:
            decode(data)
        except RelayBroken:
            continue
        pytest.fail(f"{data[:20]!r} was decoded")


def test_a_tensor_that_is_not_bytes_is_rejected() -> None:
    for tensor in (torch.zeros(4), torch.zeros(2, 2, dtype=torch.uint8)):
        with pytest.raises(RelayBroken, match=r"a packed payload is uint8 \[n\]"):
            unpack(tensor)


def test_a_payload_too_large_is_rejected_before_it_is_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(payload_module, "MAX_PAYLOAD_BYTES", 10)
    with pytest.raises(RelayBroken, match="at most 10"):
        decode(encode(make_payload()))
