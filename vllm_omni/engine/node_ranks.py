"""The part of an engine that spans hosts on one of them: its ranks, and on the first host its engine core."""

from __future__ import annotations

import logging
import sys
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnContext

from vllm.config import VllmConfig
from vllm.platforms import current_platform
from vllm.plugins import load_general_plugins
from vllm.utils.system_utils import decorate_logs, set_process_title
from vllm.v1.executor.multiproc_executor import MultiprocExecutor

from vllm_omni.hosts.messages import Node
from vllm_omni.process.fork_server import stage_context
from vllm_omni.process.node_address import NODE_ADDRESS, numeric

logger = logging.getLogger(__name__)

END_TIMEOUT_S = 5.0


def set_node(config: VllmConfig, node: Node, address: str) -> None:
    """Complete the configuration of a part before it starts.

    Args:
        address: of this host, for the others.
    """
    parallel = config.parallel_config
    parallel.node_rank = node.rank
    parallel.master_addr, parallel.master_port = node.store_host, node.store_port
    if parallel.assigned_physical_gpu_ids is None:  # vLLM takes their number for that of the ranks on a host
        ranks = range(parallel.local_world_size)
        physical = current_platform.device_id_to_physical_device_id
        parallel.assigned_physical_gpu_ids = [*ranks] if current_platform.is_cpu() else [physical(one) for one in ranks]
    config.additional_config[NODE_ADDRESS] = numeric(address)


class NodeRanks:
    """The process that starts the ranks of a further host, in the place of vLLM's ``CoreEngineProcManager``.

    Args:
        config: completed by ``set_node``.
    """

    def __init__(self, config: VllmConfig) -> None:
        context = stage_context() or SpawnContext()
        self._ready, ready = context.Pipe(duplex=False)
        # Known by this name to ``RunDirectory.kill_starting``.
        self._process = context.Process(target=run_ranks, args=(config, ready), name="EngineCore")
        self._process.start()
        ready.close()

    def wait_until_loaded(self) -> None:
        """Wait until the ranks have loaded the model; the engine core then measures them.

        Raises:
            EOFError: they did not start.
        """
        self._ready.recv()

    def finished_procs(self) -> dict[str, int]:
        code = self._process.exitcode
        return {} if code is None else {self._process.name: code}

    def shutdown(self, timeout: float) -> None:
        """Kill the process; the ranks end with it."""
        self._process.kill()
        self._process.join(timeout or END_TIMEOUT_S)


def run_ranks(config: VllmConfig, ready: Connection) -> None:
    """Run the ranks of this host until one of them ends. The main function of ``NodeRanks``' process."""
    load_general_plugins()
    set_process_title("Ranks")
    decorate_logs("Ranks")
    try:
        executor = MultiprocExecutor(config, monitor_workers=False)
        ready.send(None)
        executor.start_worker_monitor(inline=True)
    except Exception:
        logger.exception("the ranks did not start")
    sys.exit(1)
