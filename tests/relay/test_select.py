"""The choice of an edge's backend."""

import logging

import pytest

from vllm_omni.errors import ConfigError
from vllm_omni.relay import select
from vllm_omni.relay.select import BACKENDS, Placement, choose_backend, make_relay

EDGE = "thinker->talker"


@pytest.fixture
def works(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Replace the probes: names of the backends that work."""
    names: set[str] = set(BACKENDS)

    def probe(backend: str) -> None:
        if backend not in names:
            raise OSError("no such thing")

    monkeypatch.setattr(select, "_probe", probe)
    return names


@pytest.mark.parametrize(
    ("placement", "backend"),
    [
        (Placement(same_process=True), "local"),
        (Placement(devices=("cuda", "cuda"), same_gpu=True), "cuda_ipc"),
        (Placement(devices=("cuda", "cuda")), "shm"),
        (Placement(devices=("cuda", "cpu")), "shm"),
        (Placement(), "shm"),
        (Placement(same_host=False), "nixl"),
    ],
)
def test_auto_takes_the_fastest_that_can_work(works: set[str], placement: Placement, backend: str) -> None:
    assert choose_backend("auto", placement, EDGE) == backend


def test_auto_skips_what_does_not_work_and_says_why(works: set[str], caplog: pytest.LogCaptureFixture) -> None:
    works -= {"nixl", "mooncake"}
    logging.getLogger("vllm_omni").addHandler(caplog.handler)
    with caplog.at_level(logging.INFO, logger="vllm_omni"):
        assert choose_backend("auto", Placement(same_host=False), EDGE) == "tcp"
    logging.getLogger("vllm_omni").removeHandler(caplog.handler)
    assert "edge thinker->talker: tensors travel by tcp" in caplog.text
    assert "not nixl: OSError: no such thing" in caplog.text


@pytest.mark.parametrize(
    ("transport", "placement", "reason"),
    [
        ("local", Placement(), "different processes"),
        ("shm", Placement(same_host=False), "different hosts"),
        ("cuda_ipc", Placement(), "devices are cpu and cpu"),
        ("cuda_ipc", Placement(devices=("cuda", "cuda")), "not on the same GPU"),
    ],
)
def test_a_named_transport_that_cannot_work_says_why(
    works: set[str], transport: str, placement: Placement, reason: str
) -> None:
    with pytest.raises(ConfigError, match=f"edge thinker->talker: transport = '{transport}' cannot work.*{reason}"):
        choose_backend(transport, placement, EDGE)


def test_a_named_transport_whose_probe_fails_says_why(works: set[str]) -> None:
    works.remove("tcp")
    with pytest.raises(ConfigError, match="no such thing"):
        choose_backend("tcp", Placement(), EDGE)


def test_the_real_probe_carries_a_tensor_through_shared_memory() -> None:
    assert choose_backend("auto", Placement(), EDGE) == "shm"


@pytest.mark.parametrize("backend", ["local", "inline", "shm", "tcp"])
def test_a_relay_is_made_by_its_name(backend: str) -> None:
    relay = make_relay(backend, 1 << 20)
    assert relay.backend == backend
    relay.close()


def test_a_relay_between_hosts_listens_at_the_given_host() -> None:
    relay = make_relay("tcp", 1 << 20, host="127.0.0.2")
    assert "127.0.0.2" in relay.address
    relay.close()
