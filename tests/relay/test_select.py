"""The choice of an edge's backend."""

import logging
from contextlib import closing

import pytest

from tests.contract.usable import USABLE
from vllm_omni.errors import ConfigError
from vllm_omni.relay import select
from vllm_omni.relay.select import BACKENDS, STREAMING, Placement, choose_backend, make_relay, suitable
from vllm_omni.relay.stream import Streams

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


REMOTE = ("nixl", "mooncake", "tcp")
ONE_GPU = {"devices": ("cuda", "cuda"), "same_gpu": True}


@pytest.mark.parametrize(
    ("placement", "tensors", "streams"),
    [
        (Placement(same_process=True), ["local", "shm", *REMOTE, "inline"], ["shm", *REMOTE]),
        (Placement(same_process=True, **ONE_GPU), ["local", "shm", *REMOTE, "inline"], ["shm", *REMOTE]),
        (Placement(**ONE_GPU), ["cuda_ipc", "shm", *REMOTE, "inline"], ["shm", *REMOTE]),
        (Placement(devices=("cuda", "cuda")), ["shm", *REMOTE, "inline"], ["shm", *REMOTE]),
        (Placement(devices=("cuda", "cpu")), ["shm", *REMOTE, "inline"], ["shm", *REMOTE]),
        (Placement(), ["shm", *REMOTE, "inline"], ["shm", *REMOTE]),
        (Placement(same_host=False), [*REMOTE, "inline"], [*REMOTE]),
        (Placement(same_host=False, **ONE_GPU), [*REMOTE, "inline"], [*REMOTE]),
    ],
    ids=["process", "process with GPU", "GPU", "two GPUs", "GPU to CPU", "host", "two hosts", "GPUs of two hosts"],
)
def test_where_the_ends_run_decides_which_backends_can_carry_an_edge(
    works: set[str], placement: Placement, tensors: list[str], streams: list[str]
) -> None:
    assert suitable(placement) == tensors
    assert suitable(placement, streams=True) == streams
    # Between hosts, the ports of two of them ask for no secret.
    chosen = (tensors[0], streams[0]) if placement.same_host else ("tcp", "tcp")
    assert (choose_backend("auto", placement, EDGE), choose_backend("auto", placement, EDGE, streams=True)) == chosen


@pytest.mark.parametrize("named", REMOTE)
def test_an_edge_between_hosts_takes_the_backend_that_it_names(works: set[str], named: str) -> None:
    assert choose_backend(named, Placement(same_host=False), EDGE) == named


def test_a_backend_on_the_gpu_is_not_probed_in_the_front_end(works: set[str]) -> None:
    works.remove("cuda_ipc")
    assert choose_backend("auto", Placement(**ONE_GPU), EDGE) == "cuda_ipc"


def test_auto_skips_what_does_not_work_and_says_why(works: set[str], caplog: pytest.LogCaptureFixture) -> None:
    works -= {"shm"}
    logging.getLogger("vllm_omni").addHandler(caplog.handler)
    with caplog.at_level(logging.INFO, logger="vllm_omni"):
        assert choose_backend("auto", Placement(), EDGE) == "nixl"
        assert choose_backend("auto", Placement(same_host=False), EDGE) == "tcp"
    logging.getLogger("vllm_omni").removeHandler(caplog.handler)
    assert "edge thinker->talker: tensors travel by nixl" in caplog.text
    assert "not shm: OSError: no such thing" in caplog.text
    assert "not nixl: its ports ask for no secret" in caplog.text


@pytest.mark.parametrize(
    ("transport", "placement", "reason"),
    [
        ("local", Placement(), "different processes"),
        ("shm", Placement(same_host=False), "different hosts"),
        ("cuda_ipc", Placement(), "devices are cpu and cpu"),
        ("cuda_ipc", Placement(devices=("cuda", "cuda")), "not on the same GPU"),
        ("cuda_ipc", Placement(same_process=True, **ONE_GPU), "one process"),
    ],
)
def test_a_named_transport_that_cannot_work_says_why(
    works: set[str], transport: str, placement: Placement, reason: str
) -> None:
    with pytest.raises(ConfigError, match=f"edge thinker->talker: transport = '{transport}' cannot work.*{reason}"):
        choose_backend(transport, placement, EDGE)


def test_a_named_transport_without_streams_carries_no_stream(works: set[str]) -> None:
    assert choose_backend("inline", Placement(), EDGE) == "inline"
    with pytest.raises(ConfigError, match="'inline' cannot work here: it has no streams"):
        choose_backend("inline", Placement(), EDGE, streams=True)


@pytest.mark.parametrize("backend", [name for name in USABLE if name != "cuda_ipc"])
def test_the_backends_with_streams_are_those_that_have_them(backend: str) -> None:
    with closing(make_relay(backend, 1 << 20)) as relay:
        assert isinstance(relay, Streams) == (backend in STREAMING)


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
