import threading
import time
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from vllm_omni.worker.encoders import SlicedEncoder, ThreadedEncoder

NUM_LAYERS = 6


class Tower(nn.Module):
    """Writes down what it does."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(NUM_LAYERS))
        self.log: list[str] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.log.append("begin")
        for number, layer in enumerate(self.layers):
            x = layer(x).tanh()
            self.log.append(str(number))
        self.log.append("end")
        return x


@pytest.fixture
def tower() -> Tower:
    return Tower()


@pytest.fixture
def encoder(tower: Tower) -> Iterator[SlicedEncoder]:
    encoder = SlicedEncoder([tower])
    yield encoder
    encoder.close()


def begin(encoder: SlicedEncoder, tower: Tower, x: torch.Tensor) -> list[torch.Tensor]:
    results: list[torch.Tensor] = []
    encoder.start(lambda: results.append(tower(x)))
    return results


@pytest.mark.parametrize("num_layers", [1, 2, 4, 5, 6, 7, None])
def test_slices_compute_what_one_forward_computes(encoder: SlicedEncoder, tower: Tower, num_layers: int | None) -> None:
    x = torch.randn(3, 8)
    whole = tower(x)
    results = begin(encoder, tower, x)
    slices = [encoder.resume(num_layers)]
    while not slices[-1].has_ended:
        slices.append(encoder.resume(num_layers))
    assert torch.equal(results[0], whole)
    assert [one.num_layers for one in slices[:-1]] == [num_layers] * (len(slices) - 1)
    assert sum(one.num_layers for one in slices) == NUM_LAYERS
    assert not encoder.is_running


@pytest.mark.parametrize(
    ("until", "num_layers"), [(0.0, 1), (1.0, 1), (2.0, 2), (2.9, 2), (4.0, 4), (100.0, 6)], ids=str
)
def test_by_the_clock_no_layer_starts_that_would_end_too_late(tower: Tower, until: float, num_layers: int) -> None:
    """Each of the tower's layers takes a second."""
    encoder = SlicedEncoder([tower], clock=lambda: float(sum(line.isdigit() for line in tower.log)))
    begin(encoder, tower, torch.randn(1, 8))
    assert encoder.resume(None, until).num_layers == num_layers
    encoder.close()


def test_what_a_layer_takes_is_known_from_the_slices_before(tower: Tower) -> None:
    encoder = SlicedEncoder([tower], clock=lambda: float(sum(line.isdigit() for line in tower.log)))
    begin(encoder, tower, torch.randn(1, 8))
    encoder.resume(None, until=2.0)
    assert encoder.resume(None, until=3.5).num_layers == 1
    assert encoder.resume(None, until=5.0).num_layers == 2
    encoder.close()


class Block(nn.Module):
    """A norm, which is no part of its own, and two matrices, of which the second takes three times as long."""

    def __init__(self, log: list[str]) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.log = log

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        up = self.up(self.norm(x))
        self.log.append("tick")
        down = self.down(up)
        self.log += ["tick"] * 3
        return x + down


@pytest.fixture
def blocks(tower: Tower) -> Iterator[tuple[SlicedEncoder, Tower]]:
    tower.layers = nn.ModuleList(Block(tower.log) for _ in range(NUM_LAYERS))
    encoder = SlicedEncoder([tower], clock=lambda: float(tower.log.count("tick")))
    yield encoder, tower
    encoder.close()


def test_by_the_clock_a_slice_ends_within_a_layer_if_no_more_of_it_fits(blocks: tuple[SlicedEncoder, Tower]) -> None:
    encoder, tower = blocks
    x = torch.randn(2, 8)
    whole = tower(x)
    tower.log.clear()
    results = begin(encoder, tower, x)
    assert encoder.resume(None, until=4.0).seconds == 4.0  # a layer
    assert (
        encoder.resume(None, until=7.5).seconds == 1.0
    )  # of the next one what takes a second; three would be too many
    assert encoder.resume(None, until=8.5).seconds == 3.0  # at least a part
    slices = []
    while encoder.is_running:
        slices.append(encoder.resume(None, until=0.0))
    assert [one.seconds for one in slices] == [1.0, 3.0] * (NUM_LAYERS - 2)
    assert torch.equal(results[0], whole)


def test_reported_parts_of_layers_sum_to_the_layers(blocks: tuple[SlicedEncoder, Tower]) -> None:
    encoder, tower = blocks
    for until in (0.0, 5.0):
        begin(encoder, tower, torch.randn(2, 8))
        tower.log.clear()
        reported = []
        while encoder.is_running:
            reported.append(encoder.resume(None, until).num_layers)
        assert sum(reported) == pytest.approx(NUM_LAYERS) and min(reported) > 0


def test_a_slice_by_layers_ends_between_layers(blocks: tuple[SlicedEncoder, Tower]) -> None:
    encoder, tower = blocks
    begin(encoder, tower, torch.randn(2, 8))
    assert [encoder.resume(2).seconds for _ in range(3)] == [8.0] * 3


def test_nothing_runs_between_two_grants(encoder: SlicedEncoder, tower: Tower) -> None:
    begin(encoder, tower, torch.randn(1, 8))
    assert tower.log == []
    encoder.resume(2)
    assert tower.log == ["begin", "0", "1"]
    tower(torch.randn(1, 8))  # by the caller: not sliced
    tower.log.clear()
    encoder.resume(3)
    assert tower.log == ["2", "3", "4"]
    assert encoder.resume(1).has_ended


def test_the_forward_needs_no_gradients(encoder: SlicedEncoder, tower: Tower) -> None:
    results = begin(encoder, tower, torch.randn(1, 8))
    encoder.resume(1)
    encoder.resume(None)
    assert results[0].is_inference()
    assert not torch.is_inference_mode_enabled()


def test_what_the_forward_raises_comes_out_where_it_is_run(encoder: SlicedEncoder, tower: Tower) -> None:
    begin(encoder, tower, torch.randn(1, 7))
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        encoder.resume(1)
    assert not encoder.is_running
    results = begin(encoder, tower, torch.randn(1, 8))
    assert encoder.resume(None).has_ended and len(results) == 1


@pytest.mark.parametrize("num_layers", [0, 3])
def test_a_forward_can_be_given_up(encoder: SlicedEncoder, tower: Tower, num_layers: int) -> None:
    results = begin(encoder, tower, torch.randn(1, 8))
    if num_layers:
        encoder.resume(num_layers)
    encoder.cancel()
    assert not encoder.is_running and not results and "end" not in tower.log
    results = begin(encoder, tower, torch.randn(1, 8))
    assert encoder.resume(None).num_layers == NUM_LAYERS and len(results) == 1


def test_a_batch_that_runs_the_tower_twice_has_twice_its_layers(encoder: SlicedEncoder, tower: Tower) -> None:
    assert encoder.num_layers_of_batch == NUM_LAYERS
    encoder.start(lambda: [tower(torch.randn(1, 8)) for _ in range(2)] and None)
    assert encoder.resume(None).num_layers == encoder.num_layers_of_batch == 2 * NUM_LAYERS


def test_closed_in_the_middle_it_leaves_no_boundary(tower: Tower) -> None:
    encoder = SlicedEncoder([tower])
    begin(encoder, tower, torch.randn(1, 8))
    encoder.resume(2)
    encoder.close()
    assert not encoder.is_running
    assert not any(module._forward_pre_hooks for module in tower.modules())


def test_within_an_autocast_it_does_not_stop(encoder: SlicedEncoder, tower: Tower) -> None:
    """What the caller computes meanwhile would be cast, too."""

    def forward() -> None:
        with torch.autocast("cpu"):
            tower(torch.randn(1, 8))

    encoder.start(forward)
    assert encoder.resume(2).has_ended


def test_what_a_forward_sets_for_its_tensors_does_not_hold_for_its_caller(encoder: SlicedEncoder, tower: Tower) -> None:
    @torch.no_grad()
    def forward() -> None:
        tower(torch.randn(1, 8))

    encoder.start(forward)
    while encoder.is_running:
        encoder.resume(2)
        assert torch.is_grad_enabled()


def test_the_forward_is_the_callers_thread(encoder: SlicedEncoder) -> None:
    threads: list[threading.Thread] = []
    encoder.start(lambda: threads.append(threading.current_thread()))
    encoder.resume(None)
    assert threads == [threading.current_thread()]


@pytest.fixture
def threaded() -> Iterator[ThreadedEncoder]:
    threaded = ThreadedEncoder()
    yield threaded
    threaded.close()


def wait_for(threaded: ThreadedEncoder) -> None:
    deadline = time.monotonic() + 60
    while not threaded.poll().has_ended:
        assert time.monotonic() < deadline


def test_a_forward_ends_by_itself_and_needs_no_gradients(threaded: ThreadedEncoder) -> None:
    results: list[torch.Tensor] = []
    for number in range(2):
        threaded.start(lambda: results.append(torch.ones(2)))
        wait_for(threaded)
        assert not threaded.is_running and len(results) == number + 1
    assert results[0].is_inference()


def test_the_caller_continues_while_it_runs(threaded: ThreadedEncoder) -> None:
    goes_on = threading.Event()
    threaded.start(lambda: goes_on.wait(10) and None)
    assert not threaded.poll().has_ended
    goes_on.set()
    wait_for(threaded)


def test_what_a_forward_raises_comes_out_where_its_end_is_asked_for(threaded: ThreadedEncoder) -> None:
    threaded.start(lambda: torch.zeros(2) @ torch.zeros(3) and None)
    with pytest.raises(RuntimeError, match="inconsistent tensor size"):
        wait_for(threaded)
    assert not threaded.is_running


def test_given_up_it_is_waited_for_and_forgotten(threaded: ThreadedEncoder) -> None:
    ended: list[bool] = []
    threaded.start(lambda: ended.append(True))
    threaded.cancel()
    assert ended and not threaded.is_running


def test_closed_it_leaves_no_thread() -> None:
    threaded = ThreadedEncoder()
    threads: list[threading.Thread] = []
    threaded.start(lambda: threads.append(threading.current_thread()))
    wait_for(threaded)
    threaded.close()
    assert not threads[0].is_alive()
