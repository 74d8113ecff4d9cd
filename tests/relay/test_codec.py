import msgspec
import pytest
import torch

from vllm_omni.errors import RelayBroken
from vllm_omni.relay.codec import extract, restore


def test_a_tree_without_containers_travels() -> None:
    values, tensors = extract(torch.ones(2))
    assert (values, list(tensors)) == (None, [""])
    assert torch.equal(restore(values, tensors), torch.ones(2))


def test_what_cannot_travel_is_named_by_its_path() -> None:
    for tree, message in (
        ({"a": {1: 2}}, "a: the key 1 is not a str"),
        ({"a": [0, {1}]}, "a/1: set cannot travel"),
        ({"a": object()}, "a: object cannot travel"),
    ):
        with pytest.raises(TypeError, match=message):
            extract(tree)


def test_containers_nested_too_deeply_cannot_travel() -> None:
    tree: list[object] = []
    tree.append(tree)
    with pytest.raises(TypeError, match="deep"):
        extract(tree)
    with pytest.raises(RelayBroken):
        restore(msgspec.msgpack.decode(b"\x91" * 100 + b"\xc0"), {})


def test_a_path_that_leads_elsewhere_is_rejected() -> None:
    for path in ("b", "a/1", "a/x", "a/-1", "n", "", "a/0/0", "a/99999999999999999999", "a//0"):
        try:
            restore({"a": [None], "n": 3}, {path: torch.ones(1)})
        except RelayBroken:
            continue
        pytest.fail(f"a tensor was put at {path!r}")
