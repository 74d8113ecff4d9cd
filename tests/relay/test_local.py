"""``LocalRelay``: by reference, within a process."""

import pytest
import torch

from vllm_omni.errors import RelayBroken
from vllm_omni.relay.local import LocalRelay


def test_nothing_is_copied() -> None:
    relay, tensor = LocalRelay(), torch.ones(4)
    assert relay.get_nowait(relay.put_nowait("request", tensor)).data_ptr() == tensor.data_ptr()


def test_a_change_between_put_and_release_is_detected() -> None:
    relay, tensor = LocalRelay(check_versions=True), torch.ones(4)
    ref = relay.put_nowait("request", tensor)
    tensor.add_(1)
    with pytest.raises(RelayBroken, match="request: a tensor was changed"):
        relay.release(ref)
    assert relay.statistics().num_leases == 0


def test_an_unchanged_tensor_is_released_without_an_error() -> None:
    relay = LocalRelay(check_versions=True)
    relay.release(relay.put_nowait("request", torch.ones(4)))


def test_an_inference_tensor_counts_no_changes() -> None:
    relay = LocalRelay(check_versions=True)
    with torch.inference_mode():
        tensor = torch.ones(4)
        ref = relay.put_nowait("request", tensor)
        tensor.add_(1)
    relay.release(ref)


def test_a_relay_that_is_gone_has_no_tensors() -> None:
    relay = LocalRelay()
    ref = relay.put_nowait("request", torch.ones(4))
    relay.close()
    with pytest.raises(RelayBroken, match="not in this process"):
        LocalRelay().get_nowait(ref)
