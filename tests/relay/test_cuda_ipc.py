import pytest
import torch

from tests.relay.peer import Peer, peers
from vllm_omni.errors import MissingDependency
from vllm_omni.relay.cuda_ipc import CudaIpcRelay


@pytest.mark.skipif(torch.cuda.is_available(), reason="torch sees a CUDA device")
def test_without_a_gpu_the_error_says_so() -> None:
    with pytest.raises(MissingDependency, match="torch sees no CUDA device"):
        CudaIpcRelay(4096)


def deliver(producer: Peer, consumer: Peer, num_bytes: int, seed: int) -> None:
    ref = producer.do("put", "request", num_bytes, seed)
    assert consumer.do("get", ref, seed)
    consumer.do("release", ref)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device")
def test_tensors_on_a_gpu_go_from_one_process_to_another() -> None:
    with peers("cuda_ipc", "cuda_ipc") as (producer, consumer):
        for seed, num_bytes in enumerate([1, 4097, 3_000_001]):
            deliver(producer, consumer, num_bytes, seed)
        assert producer.do("await_leases", 0) == 0
        producer.do("check_integrity")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device")
def test_a_consumer_that_dies_holds_nothing_on_the_gpu() -> None:
    with peers("cuda_ipc", "cuda_ipc") as (producer, consumer):
        assert consumer.do("get", producer.do("put", "request", 100_000, 1), 1)
        assert producer.do("await_leases", 1) == 1
        consumer.kill()
        assert producer.do("await_leases", 0) == 0
        producer.do("check_integrity")
