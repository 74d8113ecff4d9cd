"""A program whose function computes in a process of its own until it is ended; run by ``test_function_process.py``.

python -m tests.engine.function_program DIRECTORY
"""

import asyncio
import signal
import sys
from collections.abc import AsyncIterator

from tests.engine.functions import CODEC
from vllm_omni.engine.function_process import FunctionProcess
from vllm_omni.flow import Activation, Chunk
from vllm_omni.process.run_directory import RunDirectory
from vllm_omni.process.supervisor import in_thread
from vllm_omni.process.tether import ServerTether


async def calls(directory: str) -> AsyncIterator[Chunk]:
    yield Chunk({"do": "block", "in": directory}, last=True)


async def compute(process: FunctionProcess, directory: str) -> None:
    inputs = {"call": calls(directory)}
    async for _ in process.run(Activation("c", "tool.use", "use", 1, inputs, frozenset({"result"}), None)):
        pass


def main(directory: str) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # one started in a shell's background ignores it
    process, run_directory = FunctionProcess("tool", "tests.engine.functions:act", CODEC), RunDirectory()
    with run_directory.inherited():
        in_thread(process.start, ServerTether(run_directory.path, "tool", is_of_engine=False)).result()
    print(*process.pids(), flush=True)
    try:
        asyncio.run(compute(process, directory))
    finally:
        run_directory.announce_end()
        process.shutdown()
        run_directory.remove()


if __name__ == "__main__":
    main(sys.argv[1])
