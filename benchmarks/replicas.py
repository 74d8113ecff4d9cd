"""Two replicas of a talker against one, on the same cores: Qwen2.5-Omni in text and codes.

    python -m benchmarks.replicas [--runs 5] [--jobs 1 4 16] [--short]

Baseline: the same deployment with one talker, in a server of its own; both servers stay alive, and one waits while the
other works. Runs alternate, and the codes of both sides are compared.

Workload: 16 tokens of text, then 200 codes, which is where the time goes; no sound. The model has 34 and 33 million
random parameters, float32, greedy (``benchmarks.qwen_omni``). Regime: on a CPU a talker's step is bound by reading its
weights and keys. One engine reads the weights once for its whole batch and uses all cores; two engines read them twice
and share the cores, but neither waits for the other's scheduler. What replicas are for, devices of their own and
talkers that may die, is not in these numbers: they say what a second engine costs or saves where it has no device of
its own. Codes per second; medians.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import statistics
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")  # read at import; stdout is for the table

import torch

from benchmarks.qwen_omni import SHAPE
from vllm_omni import OmniLLM
from vllm_omni.messages.outputs import collect
from vllm_omni.testing.qwen2_5_omni import build

ENGINE_ARGS: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": 1024,
    "max_num_seqs": 16,
    "enforce_eager": True,
    "skip_mm_profiling": True,
}
NUM_TEXT_TOKENS = 16
PROMPT = "<|im_start|>user\nTell me story number {}.<|im_end|>\n<|im_start|>assistant\n"


async def run(omni: OmniLLM, num_jobs: int, num_codes: int) -> tuple[float, list[list[int]]]:
    params = {
        "thinker": {"temperature": 0.0, "max_tokens": NUM_TEXT_TOKENS, "ignore_eos": True},
        "talker": {"temperature": 0.0, "max_tokens": num_codes, "ignore_eos": True},
    }
    started = time.perf_counter()
    answers = await asyncio.gather(
        *(
            collect(omni.engine.generate(PROMPT.format(number), params, modalities=["codec_ids"]))
            for number in range(num_jobs)
        )
    )
    return time.perf_counter() - started, [list(answer.multimodal_output["codec_ids"]) for answer in answers]


def measure(one: OmniLLM, two: OmniLLM, options: argparse.Namespace) -> list[dict[str, Any]]:
    rows = []
    for num_jobs in options.jobs:
        times: dict[str, list[float]] = {"one": [], "two": []}
        for number in range(-1, options.runs):  # the first warms up
            codes = {}
            for name, omni in list({"one": one, "two": two}.items())[:: 1 if number % 2 else -1]:
                seconds, codes[name] = omni.run(run(omni, num_jobs, options.codes))
                if number >= 0:
                    times[name].append(seconds)
            assert codes["one"] == codes["two"], "the two sides do not answer alike"
        num_codes = num_jobs * options.codes
        rates = {name: num_codes / statistics.median(seconds) for name, seconds in times.items()}
        rows.append({"jobs": num_jobs, **rates, "ratio": rates["two"] / rates["one"]})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--jobs", type=int, nargs="+", default=[1, 4, 16], help="at once")
    parser.add_argument("--codes", type=int, default=200, help="of each job")
    parser.add_argument("--short", action="store_true", help="one run of a few codes, to see that it works")
    options = parser.parse_args()
    if options.short:
        options.runs, options.jobs, options.codes = 1, [1, 4], 20
    with tempfile.TemporaryDirectory() as directory, ExitStack() as stack:
        model = build(Path(directory), shape=SHAPE)
        one = stack.enter_context(OmniLLM(model, **ENGINE_ARGS))
        two = stack.enter_context(OmniLLM(model, **ENGINE_ARGS, stage_overrides=["talker.replicas=2"]))
        rows = measure(one, two, options)
    print(
        f"\n{os.cpu_count()} cores, torch {torch.__version__}, {platform.machine()}; medians of {options.runs} runs\n"
    )
    print("| jobs at once | one talker, codes/s | two, codes/s | ratio |\n|---|---|---|---|")
    for row in rows:
        print(f"| {row['jobs']} | {row['one']:.0f} | {row['two']:.0f} | {row['ratio']:.2f} |")
    print(json.dumps({"benchmark": "replicas", "rows": rows}))


if __name__ == "__main__":
    main()
