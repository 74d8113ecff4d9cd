"""``listen_at``: where the sockets of vLLM and torch listen in the processes of an engine that spans hosts."""

from __future__ import annotations

import ipaddress
import os
import socket

import psutil

from vllm_omni.errors import ConfigError

NODE_ADDRESS = "node_address"
"""Key in a stage's ``additional_config``: the address of this host for the others that the engine spans."""


def listen_at(address: str) -> None:
    """Let this process open sockets for its ranks at one address of this host; what the environment names stays.

    torch's store is elsewhere (``hosts/rank_store.py``); by default, rank 0 would open one at all interfaces.

    Raises:
        ConfigError: no interface has this address.
    """
    interface = _interface_of(address)
    os.environ.setdefault("VLLM_HOST_IP", address)  # vLLM's message queues
    os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={interface}")  # with "=", the name and not a prefix
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = str(True)


def numeric(host: str) -> str:
    """The address of a host's name. Raises ``OSError``: it is unknown."""
    *_, address = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0]
    return str(address[0])


def _interface_of(address: str) -> str:
    # All of 127.0.0.0/8 is this host, although the loopback interface names one address.
    given = ipaddress.ip_address(address)
    looked_for = "127.0.0.1" if given in ipaddress.ip_network("127.0.0.0/8") else str(given)
    for name, found in psutil.net_if_addrs().items():
        if any(one.address.partition("%")[0] == looked_for for one in found):
            return name
    raise ConfigError(f"VLLM_OMNI_RELAY_HOST: no interface of this host has the address {address}")
