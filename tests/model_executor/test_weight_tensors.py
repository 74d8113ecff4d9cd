"""Tensors of a model that engines share, in a file of the host and in a block of a device: what is published, and who
may have it.

The block lies in a memory file, which processes share by its descriptor as they share a GPU's memory.
"""

import mmap
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.cases import rejected
from vllm_omni.errors import ConfigError
from vllm_omni.model_executor.device_block import BlockMemory, CudaMemory
from vllm_omni.model_executor.device_weights import DEVICE_ALIGNMENT, DeviceWeights
from vllm_omni.model_executor.host_weights import HostWeights
from vllm_omni.model_executor.weight_tensors import SharedModel, published_bytes, tensors_of
from vllm_omni.process.run_directory import RunDirectory

CPU = torch.device("cpu")
GPU = pytest.param(
    "gpu",
    marks=[
        pytest.mark.gpu,
        pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device"),
    ],
)


class FileMemory:
    """Blocks in memory files."""

    device = CPU

    def create(self, num_bytes: int) -> int:
        descriptor = os.memfd_create("block")
        os.ftruncate(descriptor, num_bytes)
        return descriptor

    def map(self, descriptor: int, num_bytes: int) -> torch.Tensor:
        return torch.frombuffer(mmap.mmap(descriptor, num_bytes), dtype=torch.uint8)


class Model(nn.Module):
    """Tied embeddings, a buffer that no checkpoint has, an integer, an empty parameter, a tensor that is neither."""

    def __init__(self, seed: int, *, has_more: bool = False) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.embed = nn.Embedding(32, 8, _weight=torch.randn(32, 8, generator=generator))
        self.head = nn.Linear(8, 32, bias=False)
        self.head.weight = self.embed.weight
        self.scale = nn.Parameter(torch.randn(3, generator=generator, dtype=torch.bfloat16), requires_grad=False)
        self.empty = nn.Parameter(torch.empty(0))
        self.register_buffer("table", torch.randn(5, 7, generator=generator), persistent=False)
        self.register_buffer("count", torch.tensor(seed))
        self.plain = torch.arange(3)
        if has_more:
            self.more = nn.Parameter(torch.zeros(2))


def values(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().cpu().clone() for name, tensor in tensors_of(model).items()}


def are_equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.fixture
def directory() -> Iterator[RunDirectory]:
    directory = RunDirectory()
    directory.hold_blocks()
    yield directory
    directory.remove()


Make = Callable[[], SharedModel]
"""Makes the weights as another process sees them."""


@pytest.fixture(params=["host", "block", GPU])
def make(request: pytest.FixtureRequest, directory: RunDirectory) -> Make:
    def made() -> SharedModel:
        if request.param == "host":
            return HostWeights(directory.path, "0123")
        return device_weights(directory, CudaMemory() if request.param == "gpu" else FileMemory())

    return made


@pytest.fixture(params=["block", GPU])
def make_block(request: pytest.FixtureRequest, directory: RunDirectory) -> Make:
    return lambda: device_weights(directory, CudaMemory() if request.param == "gpu" else FileMemory())


def device_weights(directory: RunDirectory, memory: BlockMemory) -> DeviceWeights:
    return DeviceWeights(directory.path, "0123", memory)


def publish(model: nn.Module, weights: SharedModel) -> None:
    with weights.claim() as must_load:
        assert must_load
        weights.prepare(model)
        weights.publish(model)


def share(make: Make) -> tuple[Model, Model]:
    """A model that has published, and one that has adopted what that one published."""
    one, other = Model(1), Model(2)
    publish(one, make())
    weights = make()
    with weights.claim() as must_load:
        assert not must_load
        weights.adopt(other)
    return one, other


def test_another_model_has_the_values_of_the_one_that_published(make: Make) -> None:
    expected = values(Model(1))
    one, other = share(make)
    assert are_equal(values(one), expected) and are_equal(values(other), expected)


def test_what_is_loaded_after_the_room_was_made_is_published(make: Make) -> None:
    one, other, weights = Model(1), Model(2), make()
    with weights.claim(), torch.no_grad():
        weights.prepare(one)
        one.embed.weight.fill_(7)
        one.count.fill_(8)
        weights.publish(one)
    make().adopt(other)
    assert other.embed.weight.eq(7).all() and other.count.item() == 8


def test_parameters_stay_the_same_objects(make: Make) -> None:
    one, other = Model(1), Model(2)
    kept = [id(tensor) for model in (one, other) for tensor in tensors_of(model).values()]
    publish(one, make())
    make().adopt(other)
    assert [id(tensor) for model in (one, other) for tensor in tensors_of(model).values()] == kept
    assert other.head.weight is other.embed.weight


def test_all_parameters_are_in_the_one_mapping(make: Make) -> None:
    for model in share(make):
        parameters = [one for one in model.parameters() if one.numel()]
        assert len({parameter.untyped_storage().data_ptr() for parameter in parameters}) == 1
        assert all(parameter.data_ptr() % 64 == 0 for parameter in parameters)


def test_a_tensor_with_two_names_is_published_once(make: Make) -> None:
    before, model = published_bytes(), Model(1)
    publish(model, make())
    assert published_bytes() - before < 2 * model.embed.weight.nbytes + 2 * DEVICE_ALIGNMENT


def test_a_model_that_makes_tensors_while_it_loads_is_rejected(make: Make) -> None:
    weights, model = make(), Model(1)
    with weights.claim():
        weights.prepare(model)
        model.encoder = nn.Linear(2, 2)
        with rejected(ConfigError, r"Model adds or removes tensors while it loads \(encoder.bias\)", "encoder"):
            weights.publish(model)
    assert not weights.path.exists()


def test_weights_of_another_model_are_rejected(make: Make) -> None:
    publish(Model(1), make())
    with rejected(ConfigError, "has weights of another model: more is in one of the two only", "more"):
        make().adopt(Model(2, has_more=True))


# -- a file of the host ------------------------------------------------------------------------------------------------


@pytest.fixture
def on_host(directory: RunDirectory) -> Make:
    return lambda: HostWeights(directory.path, "0123")


def test_new_weights_of_one_model_are_not_the_others(on_host: Make) -> None:
    one, other = share(on_host)
    expected = values(one)
    with torch.no_grad():
        other.embed.weight.zero_()
    assert are_equal(values(one), expected)


def test_room_is_checked_by_the_sizes_of_the_model_s_tensors(on_host: Make) -> None:
    on_host().prepare(Model(1))
    model = Model(1)
    model.huge = nn.Parameter(torch.empty(1 << 50, device="meta"))
    with rejected(ConfigError, "no room for 4194304.0 GiB", "huge"):
        on_host().prepare(model)


# -- a block of a device -----------------------------------------------------------------------------------------------


def test_what_a_model_writes_into_its_buffers_is_its_own(make_block: Make) -> None:
    one, other = share(make_block)
    expected = values(one)
    other.table.zero_()
    other.count.zero_()
    assert are_equal(values(one), expected)


def test_parameters_of_all_are_one_memory(make_block: Make) -> None:
    one, other = share(make_block)
    with torch.no_grad():
        one.embed.weight.fill_(5)
        if one.embed.weight.is_cuda:
            torch.cuda.synchronize()
    assert other.head.weight.eq(5).all()


def test_a_parameter_that_loading_replaced_is_put_into_its_place(make_block: Make) -> None:
    """Kernels for experts want them in another order."""
    one, other, weights = Model(1), Model(2), make_block()
    with weights.claim():
        weights.prepare(one)
        transposed = one.embed.weight.detach().t()
        expected = transposed.cpu().clone()
        one.embed.weight = nn.Parameter(transposed, requires_grad=False)
        one.head.weight = one.embed.weight
        weights.publish(one)
    make_block().adopt(other)
    for model in (one, other):
        assert torch.equal(model.embed.weight.cpu(), expected) and model.embed.weight.is_contiguous()


def test_a_parameter_that_has_grown_is_rejected(make_block: Make) -> None:
    weights, model = make_block(), Model(1)
    with weights.claim():
        weights.prepare(model)
        model.scale.data = model.scale.data.float()
        with rejected(ConfigError, "scale has 12 bytes when it is loaded, and 6 before", "scale"):
            weights.publish(model)


def test_the_block_of_one_that_fails_is_not_held(make_block: Make, directory: RunDirectory) -> None:
    with pytest.raises(ArithmeticError), make_block().claim():
        make_block().prepare(Model(1))
        raise ArithmeticError
    with make_block().claim() as must_load:
        assert must_load
    assert not list(Path(directory.path).glob("*.weights"))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device")
def test_all_tensors_are_on_the_gpu_and_an_adopting_model_adds_its_buffers_alone(directory: RunDirectory) -> None:
    models = [Model(1), Model(2)]
    publish(models[0], device_weights(directory, CudaMemory()))
    before = torch.cuda.memory_allocated()
    device_weights(directory, CudaMemory()).adopt(models[1])
    buffers = sum(-(-buffer.nbytes // 512) * 512 for buffer in (models[1].table, models[1].count, models[1].plain))
    assert torch.cuda.memory_allocated() - before == buffers
    for model in models:
        assert model.plain.is_cuda and all(tensor.is_cuda for tensor in tensors_of(model).values())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device")
def test_more_than_the_gpu_has_is_rejected(directory: RunDirectory) -> None:
    with rejected(ConfigError, r"the GPU has no room for 1048576.0 GiB of weights: .* are free", 1 << 50):
        CudaMemory().create(1 << 50)
