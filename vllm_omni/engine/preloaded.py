"""What the fork server imports for all stages (``process/fork_server.py``): vLLM's engine, and ours in it."""

import atexit
import contextlib
import gc
import os
from multiprocessing import forkserver
from pathlib import Path

import vllm.model_executor.layers.quantization.online.base
import vllm.v1.engine.core
import vllm.v1.worker.cpu_worker  # noqa: F401
from vllm.platforms import current_platform
from vllm.utils.system_utils import set_process_title

import vllm_omni.core.sched.diffusion
import vllm_omni.core.sched.epd
import vllm_omni.core.sched.generation
import vllm_omni.model_executor.diffusers_executor
import vllm_omni.model_executor.generation_executor
import vllm_omni.worker.cpu_worker  # noqa: F401
from vllm_omni.process.fork_server import FORK_SERVER, worker_context
from vllm_omni.vllm_patches import (
    configure_logging_at_once,
    end_without_collecting,
    register_kernels_once,
    start_workers_in,
    wait_without_spinning,
)


def _remove_socket(parent: int) -> None:
    """Python leaves this to the parent, which may have been killed."""
    if os.getppid() == parent:
        return
    address = forkserver._forkserver._forkserver_address  # type: ignore[attr-defined]
    with contextlib.suppress(OSError):
        os.unlink(address)
        Path(address).parent.rmdir()


atexit.register(_remove_socket, os.getppid())
FORK_SERVER.serve_descendants()
start_workers_in(worker_context)
register_kernels_once()
configure_logging_at_once()
if current_platform.is_cpu():
    wait_without_spinning()
end_without_collecting()
set_process_title("ForkServer")  # its children can set theirs then, although their environments change before
gc.freeze()  # a collection would write to, and thereby copy, pages that all children share
