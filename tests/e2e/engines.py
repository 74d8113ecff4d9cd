"""What tests of language engines share: settings for a small machine, and engines in this process or in their own."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from PIL import Image
from vllm import LLM, SamplingParams, envs
from vllm.outputs import RequestOutput

from tests.relay.io import await_io_thread
from vllm_omni.process.fork_server import forked_stages
from vllm_omni.relay import hub as relay_hub
from vllm_omni.testing import llava as llava

MARKS = [
    # vLLM's own, of a worker in this process.
    pytest.mark.filterwarnings("ignore:`torch.distributed.reduce_op` is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:max_rollback_tokens is deprecated:DeprecationWarning"),
]

UPSTREAM: dict[str, Any] = {
    "dtype": "float32",
    "enforce_eager": True,
    "max_model_len": 256,
    "max_num_seqs": 8,
    "block_size": 32,
    "num_gpu_blocks_override": 512,  # 16 MB rather than the 1 GiB of VLLM_CPU_KVCACHE_SPACE, which would be zeroed
    "limit_mm_per_prompt": {"image": 2},
}
"""Arguments of an upstream engine."""

PATIENT: dict[str, Any] = {"admission_timeout_s": 300}
"""Options of ``epd``: no request moves to another instance because the machine is slow."""

OMNI: dict[str, Any] = {
    **UPSTREAM,
    "async_scheduling": False,
    "worker_cls": "vllm_omni.worker.cpu_worker.CPUARWorker",
    "scheduler_cls": "vllm_omni.core.sched.epd.EPDScheduler",
}
"""Arguments of an engine with our worker and scheduler, outside a server."""

NUM_TOKENS = 8

Prompt = dict[str, Any]


def make_image(seed: int) -> Image.Image:
    """An image of random pixels, of the size that the tiny LLaVA reads."""
    shape = (llava.IMAGE_SIZE, llava.IMAGE_SIZE, 3)
    return Image.fromarray(np.random.default_rng(seed).integers(0, 255, shape, dtype=np.uint8))


def greedy(**more: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0, "max_tokens": NUM_TOKENS, "ignore_eos": True, **more})


def tokens_of(outputs: Sequence[RequestOutput]) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in outputs]


@contextmanager
def engine_here(checkpoint: Path, **engine: Any) -> Iterator[LLM]:
    """An engine in this process: it starts in two seconds, and its steps can be looked at.

    vLLM has one connector of each kind for a process: stop an upstream engine before starting one that has them.
    """
    with torch.compiler.set_stance("force_eager"):  # vLLM compiles how it ranks logprobs, which takes seconds and g++
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
            patch.setattr(relay_hub, "_process_hub", None)
            llm = LLM(str(checkpoint), **UPSTREAM | engine)
        envs.disable_envs_cache()  # an engine core turns it on: the next engine would be in this process, too
        try:
            yield llm
        finally:
            llm.llm_engine.engine_core.shutdown()


@contextmanager
def engine_apart(checkpoint: Path, **engine: Any) -> Iterator[LLM]:
    """An engine in a process of its own, which may be killed; with several ranks, in several."""
    is_one_process = engine.get("tensor_parallel_size", 1) == 1
    if is_one_process:
        engine["distributed_executor_backend"] = "vllm.v1.executor.uniproc_executor.UniProcExecutor"
    with forked_stages("cpu"):  # else it, and each rank, would take ten seconds to import vLLM
        llm = LLM(str(checkpoint), **UPSTREAM | engine)
    try:
        yield llm
    finally:
        if all(psutil.pid_exists(process.pid) for process in processes_of(llm)):
            llm.llm_engine.engine_core.shutdown(timeout=1 if is_one_process else 20)  # it ends its workers


def processes_of(llm: LLM) -> list[psutil.Process]:
    """The engine cores of an engine apart."""
    processes: list[psutil.Process] = llm.llm_engine.engine_core.resources.engine_manager.processes
    return processes


def kill(llm: LLM) -> None:
    """Kill an engine of one rank. This process's relay has noticed it: what it had mapped could be read until then."""
    for process in processes_of(llm):
        process.kill()
        process.join(20)
    await_io_thread()


def upstream_answers(
    checkpoint: Path, prompts: Sequence[Any], params: Any = None, **engine: Any
) -> list[RequestOutput]:
    """Replies of an upstream engine; greedy unless the parameters say otherwise."""
    with engine_here(checkpoint, **engine) as llm:
        outputs: list[RequestOutput] = llm.generate(prompts, params or greedy(), use_tqdm=False)
    return outputs
