"""Two replicas of a language model that map one copy of its weights, against two that load their own.

    python -m benchmarks.shared_weights [--runs 5] [--tokens 32] [--prompt-tokens 400] [--short]

Baseline: vLLM's default loader, which packs linear weights for oneDNN. Both loaders run in this run, on the same cores
and the same checkpoint, and the tokens of both are compared (in bfloat16 they may differ by rounding, which is
printed).

Workload: LLaVA with 129 million random parameters, bfloat16. (1) Two processes that are alive at
the same time load it one after the other, as two replicas do, read each weight once and run one forward: seconds of
``load_model``, which do not contain imports, and bytes that belong to weights: memory of the process that has grown by
loading, and its part of shared memory (``Pss``; a page of two processes counts half for each). (2) A server for each
loader; both stay alive, and one waits while the other works: runs alternate, of one request with a long prompt and one
token, and of one with a short prompt and many. Regime: on a CPU, prefill is bound by arithmetic and decode by reading
the weights, which packing makes faster. Medians, milliseconds.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import statistics
import tempfile
import time
from contextlib import ExitStack
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")  # read at import; stdout is for the table
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

from vllm_omni import OmniLLM
from vllm_omni.config import load_config
from vllm_omni.engine.orchestrator import Orchestrator
from vllm_omni.messages.outputs import collect
from vllm_omni.process.fork_server import StageContext
from vllm_omni.process.proc import anonymous_rss
from vllm_omni.process.run_directory import RunDirectory
from vllm_omni.process.shared_weights import SHARED_WEIGHTS
from vllm_omni.process.tether import ServerTether
from vllm_omni.testing import llava

MAX_MODEL_LEN = 1024
SHORT_SHAPE = llava.Shape(max_position_embeddings=MAX_MODEL_LEN)
SHAPE = llava.Shape(
    vocab_size=1024,
    num_tower_layers=2,
    hidden_size=1024,
    num_layers=12,
    num_heads=16,
    max_position_embeddings=MAX_MODEL_LEN,
)
FLAGS: dict[str, Any] = {
    "dtype": "bfloat16",
    "max_model_len": MAX_MODEL_LEN,
    "max_num_seqs": 4,
    "enforce_eager": True,
}
LOADERS: dict[str, dict[str, Any]] = {"default": {}, "omni_shared": {"load_format": "omni_shared"}}


# -- loading -----------------------------------------------------------------------------------------------------------


def load(model: Path, flags: dict[str, Any], tether: ServerTether, port: Connection) -> None:
    """Load the model in this process when asked to, report, and stay until the connection is closed."""
    from vllm.config import set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel
    from vllm.model_executor.model_loader import get_model, get_model_cls

    import vllm_omni.worker.cpu_worker  # noqa: F401  # it gives torch an accelerator, the CPU, which loaders ask
    from vllm_omni.plugin import register

    orchestrator = Orchestrator(load_config(model, **FLAGS, **flags))
    (engine,), _ = orchestrator.maker.make_node(orchestrator.config.stages[0])
    config = engine.vllm_config
    tether.update(config.additional_config)
    config.additional_config = tether
    register()
    with tempfile.NamedTemporaryFile() as rendezvous, set_current_vllm_config(config), torch.inference_mode():
        init_distributed_environment(1, 0, f"file://{rendezvous.name}-group", 0, "gloo")
        initialize_model_parallel(1, 1)
        get_model_cls(config.model_config)  # imports it
        port.send("ready")
        port.recv()
        before, started = anonymous_rss(), time.perf_counter()
        loaded = get_model(vllm_config=config)
        seconds = time.perf_counter() - started
        private = anonymous_rss() - before
        for tensor in loaded.parameters():
            tensor.view(-1)[:: 2048 // tensor.element_size()].sum()  # each page
        port.send((seconds, private))
        port.recv()
        port.send(mapped_bytes())
        port.recv()


def mapped_bytes() -> int:
    """This process's part of the shared weights that it has mapped."""
    total, is_weights = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            is_weights = "-weights-" in line
        elif is_weights and (found := re.match(r"Pss: +(\d+) kB", line)):
            total += int(found[1]) * 1024
    return total


def load_twice(model: Path, flags: dict[str, Any]) -> dict[str, Any]:
    directory = RunDirectory()
    context = StageContext()  # as the processes of stages
    processes, ports = [], []
    for number in range(2):
        here, there = context.Pipe()
        tether = ServerTether(directory.path, f"language/{number}")
        tether[SHARED_WEIGHTS] = bool(flags)
        processes.append(context.Process(target=load, args=(model, flags, tether, there), daemon=True))
        processes[-1].start()
        ports.append(here)
        assert here.recv() == "ready"
    loads = []
    for port in ports:
        port.send("load")
        loads.append(port.recv())
    mapped = []
    for port in ports:
        port.send("measure")
        mapped.append(port.recv())
    for port, process in zip(ports, processes, strict=True):
        port.send("end")
        process.join(10)
    directory.remove()
    return {"load_s": [one[0] for one in loads], "private": [one[1] for one in loads], "mapped": mapped}


# -- serving -----------------------------------------------------------------------------------------------------------


async def ask(omni: OmniLLM, number: int, num_prompt_tokens: int, num_tokens: int) -> tuple[float, list[int]]:
    prompt = {"prompt_token_ids": [10 + (number * 31 + position) % 100 for position in range(num_prompt_tokens)]}
    params = {"language": {"temperature": 0.0, "max_tokens": num_tokens, "ignore_eos": True}}
    started = time.perf_counter()
    answer = await collect(omni.engine.generate(prompt, params))
    return 1e3 * (time.perf_counter() - started), list(answer.outputs[0].token_ids)


def serve(servers: dict[str, OmniLLM], options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    cases = {"prefill": (options.prompt_tokens, 1), "decode": (16, options.tokens)}
    times: dict[str, dict[str, list[float]]] = {name: {case: [] for case in cases} for name in servers}
    num_equal, num_compared = 0, 0
    for run in range(-1, options.runs):  # the first warms up
        for case, sizes in cases.items():
            tokens = {}
            for name, omni in list(servers.items())[:: 1 if run % 2 else -1]:
                milliseconds, tokens[name] = omni.run(ask(omni, run + 1 + len(case), *sizes))
                if run >= 0:
                    times[name][case].append(milliseconds)
            num_compared += 1
            num_equal += len({tuple(one) for one in tokens.values()}) == 1
    medians = {name: {case: statistics.median(one) for case, one in own.items()} for name, own in times.items()}
    return {**medians, "equal": {"answers": num_equal, "of": num_compared}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=32, help="of a decode")
    parser.add_argument("--prompt-tokens", type=int, default=400, help="of a prefill")
    parser.add_argument("--dtype", default=FLAGS["dtype"])
    parser.add_argument("--short", action="store_true", help="one run of a tiny model, to see that it works")
    options = parser.parse_args()
    FLAGS["dtype"] = options.dtype
    if options.short:
        options.runs, options.tokens, options.prompt_tokens = 1, 4, 32
    with tempfile.TemporaryDirectory() as directory, ExitStack() as stack:
        model = llava.build(Path(directory), SHORT_SHAPE if options.short else SHAPE)
        rows: dict[str, dict[str, Any]] = {name: load_twice(model, flags) for name, flags in LOADERS.items()}
        servers = {name: stack.enter_context(OmniLLM(model, **FLAGS, **flags)) for name, flags in LOADERS.items()}
        served = serve(servers, options)
    equal = served.pop("equal")
    mib = 1 << 20
    print(
        f"\n{os.cpu_count()} cores, torch {torch.__version__}, {platform.machine()}; medians of {options.runs} runs\n"
    )
    print(
        "| loader | first load, s | second | private, MiB | shared, MiB | weights of two | prefill, ms | decode, ms |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for name, row in rows.items():
        row |= served[name] | {"weight_bytes": sum(row["private"]) + sum(row["mapped"])}
        private, mapped = (" + ".join(f"{one / mib:.0f}" for one in row[kind]) for kind in ("private", "mapped"))
        print(
            f"| {name} | {row['load_s'][0]:.2f} | {row['load_s'][1]:.2f} | {private} | {mapped} | "
            f"{row['weight_bytes'] / mib:.0f} | {row['prefill']:.0f} | {row['decode']:.0f} |"
        )
    print(f"\nequal answers: {equal['answers']} of {equal['of']}")
    print(json.dumps({"benchmark": "shared_weights", "loaders": rows, "equal": equal}))


if __name__ == "__main__":
    main()
