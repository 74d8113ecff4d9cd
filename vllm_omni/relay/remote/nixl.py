"""NIXL: the consumer's agent reads the producer's registered memory, by RDMA where there is any.

UCX chooses among RDMA, another process's memory on the same host (CMA), or TCP. Measured between two processes of one
host, a read of 1 MB takes about 90 us by CMA and 1500 us by TCP; ``UCX_TLS`` and ``UCX_NET_DEVICES`` narrow the choice.

From: SGLang-Omni (communication, ``nixl``).
"""

from __future__ import annotations

import asyncio
import secrets
import threading
from typing import Any

import torch

from vllm_omni.errors import MissingDependency, RelayBroken, RelayError, how_to_install
from vllm_omni.relay.remote.one_sided import OneSidedRelay

NUM_EAGER_POLLS = 20  # a small tensor has arrived by then
MAX_POLL_S = 0.001
NUM_EAGER_HELPS = 100
HELP_S = 0.0002


class NixlRelay(OneSidedRelay[str]):
    """An agent of this process, and the names of the agents that it reads from.

    The agent is not thread-safe: it is called under a lock.
    """

    backend = "nixl"

    def _start(self, host: str) -> None:
        try:
            from nixl._api import nixl_agent, nixl_agent_config
        except ImportError as exc:
            raise MissingDependency(f"the nixl relay needs nixl; {how_to_install('nixl')} ({exc})") from exc
        self._agent_lock = threading.Lock()
        # NIXL's progress thread would keep a core busy for as long as the process lives.
        config = nixl_agent_config(backends=["UCX"], enable_prog_thread=False)
        try:
            self._agent = nixl_agent(secrets.token_hex(16), config)
        except Exception as exc:
            raise RelayError(f"NIXL cannot start with UCX here: {exc}") from exc
        self._helping: asyncio.Task[None] | None = None

    def _stop(self) -> None:
        with self._agent_lock:
            del self._agent

    def _register(self, memory: torch.Tensor) -> Any:
        with self._agent_lock:
            return self._agent.register_memory([(memory.data_ptr(), memory.numel(), 0, "")], "DRAM")

    def _unregister(self, registration: Any) -> None:
        with self._agent_lock:
            self._agent.deregister_memory(registration)

    def _peer(self) -> bytes:
        with self._agent_lock:
            metadata: bytes = self._agent.get_agent_metadata()
        return metadata

    def _open(self, peer: bytes) -> str:
        with self._agent_lock:
            name: str | bytes = self._agent.add_remote_agent(peer)
        return name.decode() if isinstance(name, bytes) else name

    def _forget_remote(self, remote: str) -> None:
        with self._agent_lock:
            self._agent.remove_remote_agent(remote)

    def on_fetching(self) -> None:
        if self._helping is None or self._helping.done():
            self._helping = asyncio.ensure_future(self._help())

    async def _help(self) -> None:
        """Let UCX make progress on other processes' reads: while it connects, and over TCP all the time."""
        num_polls = 0
        while not self.is_closed and self._consumers is not None and self._consumers.fetching:
            with self._agent_lock:
                self._agent.get_new_notifs()
            num_polls += 1
            await asyncio.sleep(0 if num_polls < NUM_EAGER_HELPS else HELP_S)

    async def _read(self, remote: str, address: int, memory: torch.Tensor) -> None:
        agent = self._agent
        with self._agent_lock:
            here = agent.get_xfer_descs([(memory.data_ptr(), memory.numel(), 0)], "DRAM")
            there = agent.get_xfer_descs([(address, memory.numel(), 0)], "DRAM")
            transfer = agent.initialize_xfer("READ", here, there, remote)
        try:
            with self._agent_lock:
                state = agent.transfer(transfer)
            num_polls, delay_s = 0, 0.0
            while state == "PROC":
                await asyncio.sleep(delay_s)
                num_polls += 1
                if num_polls > NUM_EAGER_POLLS:
                    delay_s = min(max(2 * delay_s, 1e-5), MAX_POLL_S)
                with self._agent_lock:
                    state = agent.check_xfer_state(transfer)
            if state != "DONE":
                raise RelayBroken(f"the transfer ended as {state}")
        finally:
            with self._agent_lock:
                agent.release_xfer_handle(transfer)
