"""Joined products are those of the layers, whose parameters they read."""

import pytest
import torch
from torch import nn

from vllm_omni.speech.joined_linears import JoinedLinears, store_by_column

X = torch.randn(3, 2, 8, generator=torch.Generator().manual_seed(0))


def make_layers(*, bias: bool) -> list[nn.Linear]:
    torch.manual_seed(1)
    return [nn.Linear(8, size, bias=bias) for size in (6, 2, 4)]


@pytest.mark.parametrize("bias", [False, True])
@torch.inference_mode()
def test_joined_products_are_those_of_the_layers(bias: bool) -> None:
    layers = make_layers(bias=bias)
    expected = [layer(X) for layer in layers]
    joined = JoinedLinears(*layers)
    for got, own, one in zip(joined(X), (layer(X) for layer in layers), expected, strict=True):
        torch.testing.assert_close(got, one)
        torch.testing.assert_close(own, one)


@torch.inference_mode()
def test_new_weights_that_are_copied_into_a_layer_are_read() -> None:
    layers = make_layers(bias=True)
    joined = JoinedLinears(*layers)
    before = joined(X)
    layers[1].load_state_dict({"weight": torch.ones(2, 8), "bias": torch.tensor([1.0, 2.0])})
    after = joined(X)
    torch.testing.assert_close(after[1], X.sum(-1, keepdim=True) + torch.tensor([1.0, 2.0]))
    assert torch.equal(after[0], before[0]) and torch.equal(after[2], before[2])


@torch.inference_mode()
def test_weights_stored_by_column_are_the_same_parameters_with_the_same_values() -> None:
    (layer, *_), other = make_layers(bias=False), nn.Identity()
    parameter, values = layer.weight, layer.weight.clone()
    store_by_column(layer, other)
    assert layer.weight is parameter and torch.equal(layer.weight, values)
    assert layer.weight.t().is_contiguous()


def test_layers_of_which_only_some_have_a_bias_cannot_be_joined() -> None:
    with pytest.raises(AssertionError, match="some of the layers have a bias"):
        JoinedLinears(nn.Linear(2, 2), nn.Linear(2, 2, bias=False))
