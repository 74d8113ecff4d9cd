"""First audio of Qwen2.5-Omni with the talker started early against late, on the same workload.

    python -m benchmarks.first_audio [--runs 5] [--concurrency 4]

Baseline: the same server with ``stream: false`` on the edge from the thinker to the talker: the rows of a reply reach
the talker when the reply is complete. Early, each row is sent as soon as it is computed, through a ring in shared
memory that the talker's scheduler reads.

Workload: that of ``benchmarks/qwen_omni.py``: 842 prompt tokens with a video, 150 tokens of text, 545 codes, float32,
greedy; every request has a video of its own. Both servers run all the time and alternate, first with one request
alone, then with several at once; the other idles. Regime: alone, a step is bound by reading the weights, and thinker
and talker share the cores while both work. Codes of both sides are compared.

``gated`` is the cost of vLLM's engine core stepping each millisecond while it has only waiting requests: CPU time of a
talker whose only request waits for a thinker that sends nothing, as a share of one core.
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
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")  # read at import; stdout is for the table

import psutil
import torch
from vllm.inputs import tokens_input

from benchmarks.qwen_omni import ENGINE_ARGS, MODALITIES, NUM_CODES, SHAPE, Job, run_jobs
from vllm_omni.entrypoints.async_omni import AsyncOmni
from vllm_omni.messages.payload import Payload, encode
from vllm_omni.model_executor.pipeline import RequestContext, StageRequest
from vllm_omni.relay import InlineRelay
from vllm_omni.relay.shm import ShmRelay
from vllm_omni.testing.qwen2_5_omni import build

GOAL = 0.6
GATED_S = 5.0
SIDES = {"early": True, "late": False}


def start(path: Path, is_early: bool) -> AsyncOmni:
    return AsyncOmni(path, overrides={"edges": {"thinker->talker": {"stream": is_early}}}, **ENGINE_ARGS)


def summarize(jobs: Sequence[Job]) -> dict[str, float]:
    return {
        "first_audio_s": statistics.mean(job.first_audio - job.started for job in jobs),
        "text_s": statistics.mean(job.token_times[-1] - job.started for job in jobs),
        "completion_s": statistics.mean(job.done - job.started for job in jobs),
    }


async def measure(sides: dict[str, AsyncOmni], options: argparse.Namespace) -> dict[str, Any]:
    """Medians by concurrency and side."""
    result: dict[str, Any] = {}
    for concurrency in (1, options.concurrency):
        times: dict[str, list[dict[str, float]]] = {name: [] for name in sides}
        for run in range(-1, options.runs):  # the first warms up
            tokens = {}
            for name in list(sides) if run % 2 else list(sides)[::-1]:
                jobs = await run_jobs(sides[name], range(max(run, 0), max(run, 0) + concurrency), 842, MODALITIES)
                assert all(len(job.code_times) == NUM_CODES for job in jobs)
                tokens[name] = [job.token_ids for job in jobs]
                if run >= 0:
                    times[name].append(summarize(jobs))
            assert tokens["early"] == tokens["late"], "the two sides do not answer alike"
        result[str(concurrency)] = {
            name: {key: statistics.median(one[key] for one in runs) for key in runs[0]} for name, runs in times.items()
        }
    return result


async def measure_gated(omni: AsyncOmni) -> float:
    """CPU seconds per second of a talker whose only request waits for a row."""
    engine = omni.orchestrator.engines["talker"]
    relay = ShmRelay(1 << 20)
    width = engine.vllm_config.model_config.hf_config.embedding_size
    writer = relay.open_stream("gated", (width,), torch.float32, credits=8)
    inline = InlineRelay()
    tensors = {
        "rows": inline.put_nowait("gated", torch.zeros(4, width)),
        "positions": inline.put_nowait("gated", torch.arange(4, dtype=torch.int32).expand(3, -1)),
    }
    values = {"rows": None, "positions": None, "first_row": 0, "num_rows": 4}
    args = {"payloads": [encode(Payload(tensors, values, {"rows": writer.ref}))]}
    request = StageRequest(tokens_input([0] * 6), {**args, "num_own_tokens": 1, "speaker_index": 0})
    context = RequestContext("gated", omni.params.resolve(None), {})
    outputs = engine.generate(request, context, frozenset({"codes"}))
    waiting = asyncio.ensure_future(anext(outputs))
    await asyncio.sleep(1)
    (core,) = engine.pids()
    process = psutil.Process(core)
    before, started = sum(process.cpu_times()[:2]), time.perf_counter()
    await asyncio.sleep(GATED_S)
    share = (sum(process.cpu_times()[:2]) - before) / (time.perf_counter() - started)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    relay.close()
    return share


def report(result: dict[str, Any], gated: float) -> list[tuple[str, float, float, bool]]:
    print(f"\n{os.cpu_count()} cores, torch {torch.__version__}, {platform.machine()}; float32, greedy, medians\n")
    print("| requests at once | | late | early | ratio |\n|---|---|---|---|---|")
    for concurrency, sides in result.items():
        for key, late in sides["late"].items():
            early = sides["early"][key]
            print(f"| {concurrency} | {key} | {late:.3f} | {early:.3f} | {early / late:.2f} |")
    print(f"\na request that waits costs {100 * gated:.1f} % of a core (vLLM's engine core steps each millisecond)")
    alone = result["1"]
    ratio = alone["early"]["first_audio_s"] / alone["late"]["first_audio_s"]
    goals = [("first audio early, of late", GOAL, ratio, ratio <= GOAL)]
    print("\n| goal | at most | measured | |\n|---|---|---|---|")
    for what, goal, got, reached in goals:
        print(f"| {what} | {goal:.2f} | {got:.2f} | {'reached' if reached else 'MISSED'} |")
    return goals


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--concurrency", type=int, default=4)
    parser.add_argument("--checkpoint", type=Path, help="made beforehand; a new one by default")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        path = options.checkpoint or build(Path(directory), shape=SHAPE)
        sides = {name: start(path, is_early) for name, is_early in SIDES.items()}

        async def run() -> tuple[dict[str, Any], float]:
            try:
                return await measure(sides, options), await measure_gated(sides["early"])
            finally:
                for omni in sides.values():
                    await omni.aclose()

        result, gated = asyncio.run(run())
    goals = report(result, gated)
    print(json.dumps({"result": result, "gated_share_of_a_core": gated, "goals": goals}))


if __name__ == "__main__":
    main()
