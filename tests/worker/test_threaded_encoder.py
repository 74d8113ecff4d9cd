import threading
import time
from collections.abc import Iterator

import pytest
import torch

from vllm_omni.worker.threaded_encoder import ThreadedEncoder


@pytest.fixture
def encoder() -> Iterator[ThreadedEncoder]:
    encoder = ThreadedEncoder()
    yield encoder
    encoder.close()


def wait_for(encoder: ThreadedEncoder) -> None:
    deadline = time.monotonic() + 10
    while not encoder.poll().has_ended:
        assert time.monotonic() < deadline


def test_a_forward_ends_by_itself_and_needs_no_gradients(encoder: ThreadedEncoder) -> None:
    results: list[torch.Tensor] = []
    for number in range(2):
        encoder.start(lambda: results.append(torch.ones(2)))
        wait_for(encoder)
        assert not encoder.is_running and len(results) == number + 1
    assert results[0].is_inference()


def test_the_caller_continues_while_it_runs(encoder: ThreadedEncoder) -> None:
    goes_on = threading.Event()
    encoder.start(lambda: goes_on.wait(10) and None)
    assert not encoder.poll().has_ended
    goes_on.set()
    wait_for(encoder)


def test_what_a_forward_raises_comes_out_where_its_end_is_asked_for(encoder: ThreadedEncoder) -> None:
    encoder.start(lambda: torch.zeros(2) @ torch.zeros(3) and None)
    with pytest.raises(RuntimeError, match="inconsistent tensor size"):
        wait_for(encoder)
    assert not encoder.is_running


def test_given_up_it_is_waited_for_and_forgotten(encoder: ThreadedEncoder) -> None:
    ended: list[bool] = []
    encoder.start(lambda: ended.append(True))
    encoder.cancel()
    assert ended and not encoder.is_running


def test_closed_it_leaves_no_thread() -> None:
    encoder = ThreadedEncoder()
    threads: list[threading.Thread] = []
    encoder.start(lambda: threads.append(threading.current_thread()))
    wait_for(encoder)
    encoder.close()
    assert not threads[0].is_alive()
