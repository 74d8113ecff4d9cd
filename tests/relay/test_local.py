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


def test_what_nobody_releases_expires() -> None:
    relay, now = LocalRelay(), [0.0]
    relay.clock = lambda: now[0]
    first, second = relay.put_nowait("request", torch.ones(4)), relay.put_nowait("request", torch.ones(4))
    taken = relay.get_nowait(second)
    now[0] = relay.lease_s - 1
    assert relay.renew(first)
    now[0] = relay.lease_s
    assert relay.statistics()[3:] == (1, first.num_rows * 4, 1)
    with pytest.raises(RelayBroken, match="not in this process"):
        relay.get_nowait(second)
    assert torch.equal(taken, torch.ones(4)) and not relay.renew(second)
    now[0] += relay.lease_s
    third = relay.put_nowait("request", torch.ones(4))
    assert list(relay.held) == [third.lease]
