"""Products of prepared layers are those of the layers, with vLLM's operators (which this file loads) and without."""

import gc

import pytest
import torch
from torch import Tensor, nn
from vllm import _custom_ops  # noqa: F401

from vllm_omni.speech.few_rows import FewRowsLinear, JoinedLinears, Product, prepare

X = torch.randn(3, 2, 8, generator=torch.Generator().manual_seed(0))
SHAPES = [(8,), (1, 8), (1, 1, 8), (5, 8), (3, 2, 8), (70, 8), (0, 8)]


@pytest.fixture(params=[True, False], ids=["packed", "by column"])
def is_packed(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    if not request.param:
        monkeypatch.setattr(torch.Tensor, "is_cpu", property(lambda tensor: False))
    return bool(request.param)


def make_layers(*, bias: bool) -> list[FewRowsLinear]:
    torch.manual_seed(1)
    return [FewRowsLinear(8, size, bias=bias) for size in (6, 2, 4)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [False, True])
@torch.inference_mode()
def test_products_are_those_of_the_layer(is_packed: bool, bias: bool, dtype: torch.dtype) -> None:
    layer = make_layers(bias=bias)[0].to(dtype)
    for shape in SHAPES:
        x = torch.randn(shape, generator=torch.Generator().manual_seed(2)).to(dtype)
        layer._product = None
        expected = layer(x)
        layer.prepare()
        assert layer._product is not None
        if dtype == torch.float32:  # others are not packed by every processor's oneDNN
            assert (layer._product._packed is not None) == is_packed
        torch.testing.assert_close(layer(x), expected)


@pytest.mark.parametrize("bias", [False, True])
@torch.inference_mode()
def test_joined_products_are_those_of_the_layers(is_packed: bool, bias: bool) -> None:
    layers = make_layers(bias=bias)
    expected = [layer(X) for layer in layers]
    joined = JoinedLinears(*layers)
    for got, own, one in zip(joined(X), (layer(X) for layer in layers), expected, strict=True):
        torch.testing.assert_close(got, one)
        torch.testing.assert_close(own, one)


@torch.inference_mode()
def test_a_compiled_product_is_that_of_the_layer() -> None:
    layer = make_layers(bias=True)[0]
    expected = layer(X.sum(0)), layer(X[:1, 0])

    @torch.compile(fullgraph=True)
    def multiply(x: Tensor) -> Tensor:
        return layer(2 * x) - layer(x)

    layer.prepare()
    torch.testing.assert_close(multiply(X.sum(0)) + layer.bias, expected[0])
    torch.testing.assert_close(multiply(X[:1, 0]) + layer.bias, expected[1])


@torch.inference_mode()
def test_a_prepared_layer_has_the_same_parameter_with_the_same_values_by_column() -> None:
    (layer, *_), other = make_layers(bias=False), nn.Identity()
    parameter, values = layer.weight, layer.weight.clone()
    prepare(layer, other)
    assert layer.weight is parameter and torch.equal(layer.weight, values)
    assert layer.weight.t().is_contiguous()


def test_a_packed_weight_goes_with_its_product(monkeypatch: pytest.MonkeyPatch) -> None:
    released = []
    monkeypatch.setattr(torch.ops._C, "release_dnnl_matmul_handler", released.append)
    product = Product(torch.randn(4, 8), None)
    assert product._packed is not None
    address = product._packed.item()
    del product
    gc.collect()
    assert released == [address]


def test_layers_of_which_only_some_have_a_bias_cannot_be_joined() -> None:
    with pytest.raises(AssertionError, match="some of the layers have a bias"):
        JoinedLinears(nn.Linear(2, 2), nn.Linear(2, 2, bias=False))
