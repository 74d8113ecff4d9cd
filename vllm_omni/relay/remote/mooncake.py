"""Mooncake: its transfer engine reads the producer's registered memory, by RDMA where there is any, else by TCP.

The engines find each other without a metadata server (``P2PHANDSHAKE``). An engine listens on all addresses of its
host, at random ports, and lets every client that connects read what was registered: let only the deployment's hosts
reach them.

From: SGLang-Omni (communication, ``mooncake``).
"""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import torch

from vllm_omni.errors import MissingDependency, RelayBroken, RelayError, how_to_install
from vllm_omni.relay.remote.one_sided import OneSidedRelay

PROTOCOL = "tcp"
MAX_SESSION = 64  # characters

_engines: dict[str, Any] = {}  # by host; destroying one takes a second
_lock = threading.Lock()


def _engine(host: str) -> Any:
    try:
        from mooncake.engine import TransferEngine
    except ImportError as exc:  # also raised where libibverbs, librdmacm or CUDA is missing
        raise MissingDependency(
            f"the mooncake relay needs a transfer engine that can be loaded; {how_to_install('mooncake')}, or, where "
            f"there is no CUDA: pip install mooncake-transfer-engine-non-cuda ({exc})"
        ) from exc
    with _lock:
        engine = _engines.get(host)
        if engine is None:
            engine = TransferEngine()
            if engine.initialize(host, "P2PHANDSHAKE", PROTOCOL, ""):
                raise RelayError(f"Mooncake's engine cannot use {PROTOCOL} at {host}")
            _engines[host] = engine
        return engine


class MooncakeRelay(OneSidedRelay[str]):
    """This process's transfer engine, and the sessions of the processes that it reads from."""

    backend = "mooncake"

    def _start(self, host: str) -> None:
        self._registered: set[int] = set()  # addresses
        self._engine = _engine(host)
        self._session = f"{host}:{self._engine.get_rpc_port()}"

    def _stop(self) -> None:
        for address in list(self._registered):
            self._unregister(address)

    def _register(self, memory: torch.Tensor) -> int:
        address: int = memory.data_ptr()
        if self._engine.register_memory(address, memory.numel()):
            raise RelayError(f"Mooncake's engine cannot register {memory.numel()} bytes")
        self._registered.add(address)
        return address

    def _unregister(self, registration: Any) -> None:
        self._registered.discard(registration)
        self._engine.unregister_memory(registration)

    def _peer(self) -> bytes:
        return self._session.encode()

    def _open(self, peer: bytes) -> str:
        if len(peer) > MAX_SESSION:
            raise ValueError(f"a session's name of {len(peer)} bytes")
        return peer.decode()

    async def _read(self, remote: str, address: int, memory: torch.Tensor) -> None:
        status = await asyncio.to_thread(
            self._engine.transfer_sync_read, remote, memory.data_ptr(), address, memory.numel()
        )
        if status:
            raise RelayBroken(f"the transfer ended with status {status}")
