"""Where the sockets of ranks listen."""

import os

import psutil
import pytest

from vllm_omni.errors import ConfigError
from vllm_omni.process.node_address import listen_at, numeric

NAMES = ("VLLM_HOST_IP", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TORCHELASTIC_USE_AGENT_STORE")


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in NAMES:
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


@pytest.mark.parametrize("address", ["127.0.0.1", "127.0.1.7"])
def test_sockets_are_opened_at_the_interface_of_an_address(address: str) -> None:
    listen_at(address)
    assert [os.environ[name] for name in NAMES] == [address, "lo", "=lo", "True"]


def test_each_interface_is_found_by_its_addresses() -> None:
    for name, found in psutil.net_if_addrs().items():
        for one in found:
            if one.family.name == "AF_INET":
                os.environ.pop("GLOO_SOCKET_IFNAME", None)
                listen_at(one.address)
                assert os.environ["GLOO_SOCKET_IFNAME"] == name


def test_what_the_environment_names_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "ib")
    listen_at("127.0.0.1")
    assert os.environ["NCCL_SOCKET_IFNAME"] == "ib"


def test_an_address_of_no_interface_is_rejected() -> None:
    with pytest.raises(ConfigError, match=r"no interface of this host has the address 192\.0\.2\.1"):
        listen_at("192.0.2.1")


def test_a_name_becomes_an_address() -> None:
    assert numeric("127.0.0.1") == "127.0.0.1"
    assert numeric("localhost") in ("127.0.0.1", "::1")
