"""Cost of a served graph above its engines: joins, functions and loops, on one engine, against the same calls by hand.

    python -m benchmarks.graph [--runs 5] [--concurrency 64] [--quick]

Baseline: plain asyncio over the same ``AsyncLLM``, in the same process and run: ``asyncio.gather`` where the graph
branches, one await after another where it does not. Both sides make the same requests of the engine, and their answers
are compared. By hand, each reply is asked for in one piece, as nothing reads it before its end; the graph finds this
out by itself.

* join: two replies at once, and a third one to both of them (three requests of the engine).
* function: a function makes the prompt, and one reply (one request).
* loop: three replies, each to the one before, with a function between them (three requests).

Regimes: alone, and many calls at once. Runs alternate. The model is a random LLaVA of a few million parameters,
float32, greedy: its decode step takes a few milliseconds, as that of a real model on a GPU does. ``us a node`` is the
difference of the two sides by the number of nodes that a call runs. Growth: the ratio of the two sides with 1,000 calls
of "function" open, whose requests of the engine have one token, by that with 50.
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
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")  # read at import; stdout is for the table

import torch
from transformers import PreTrainedConfig
from vllm.sampling_params import RequestOutputKind, SamplingParams

from vllm_omni.entrypoints.async_omni import AsyncOmni
from vllm_omni.flow import Activation, Chunk, Emission, Field, Graph, Role, interface
from vllm_omni.messages.outputs import collect
from vllm_omni.messages.stage_output import StageOutput
from vllm_omni.model_executor.pipeline import FunctionSpec, Pipeline, StageRequest, StageSpec
from vllm_omni.model_executor.routes import ByReply
from vllm_omni.testing import llava

GOAL, GROWTH_GOAL = 1.1, 1.2
NUM_ITERATIONS = 3
NUM_NODES = {"join": 3, "function": 2, "loop": 2 * NUM_ITERATIONS - 1}
SHAPE = replace(llava.TINY, hidden_size=256, num_heads=4, num_layers=6)
ENGINE_ARGS: dict[str, Any] = {"dtype": "float32", "max_model_len": 512, "enforce_eager": True, "max_num_seqs": 64}
PROMPT = [1, 10, 20, 30, 40, 50, 60, 70]

WHOLE = Field("text")


class Writer(Role):
    left = interface([["prompt"]], {"text": WHOLE})
    right = interface([["prompt"]], {"text": WHOLE})
    merge = interface([["left", "right"]], {"text": WHOLE})
    write = interface([["prompt"], ["draft"]], {"text": WHOLE, "draft": WHOLE})


class Editor(Role):
    edit = interface([["draft"]], {"prompt": WHOLE})


class BenchmarkPipeline(Pipeline):
    modalities = {"text": "text"}
    deployment = {"stages": {"writer": {"engine_type": "ar"}}}

    def __init__(self, model: str, hf_config: PreTrainedConfig, revision: str | None = None) -> None:
        self.graph, function, loop = Graph("join"), Graph("function"), Graph("loop")
        writer, prompt = self.graph.role(Writer, "writer"), self.graph.placeholder("prompt")
        left, right = writer.left(prompt=prompt), writer.right(prompt=prompt)
        self.graph.output(text=writer.merge(left=left.text, right=right.text).text)
        edited = function.role(Editor, "editor").edit(draft=function.placeholder("prompt"))
        function.output(text=function.role(Writer, "writer").left(prompt=edited.prompt).text)
        writer, editor = loop.role(Writer, "writer"), loop.role(Editor, "editor")
        written = writer.write(prompt=loop.placeholder("prompt"))
        writer.write(draft=editor.edit(draft=written.draft).prompt)
        loop.output(text=written.text)
        self.further_graphs = (function, loop)
        self.stages = (StageSpec("writer", "", "text", combine={"merge": merge}, route={"write": ByReply(field_of)}),)
        self.functions = (FunctionSpec("editor", edit),)

    def validate(self, options: Mapping[str, Any]) -> dict[str, Any]:
        return {}


def ids_of(payload: Any) -> list[int]:
    """Of a prompt, or of a reply."""
    if isinstance(payload, StageRequest):
        return list(payload.prompt["prompt_token_ids"])
    return list(payload.outputs[0].token_ids)


async def merge(activation: Activation) -> AsyncIterator[Chunk]:
    ids = [token for chunks in activation.inputs.values() async for chunk in chunks for token in ids_of(chunk.payload)]
    yield Chunk(StageRequest({"prompt_token_ids": ids}), last=True)


async def edit(activation: Activation) -> AsyncIterator[Emission]:
    async for chunk in activation.inputs["draft"]:
        yield Emission("prompt", StageRequest({"prompt_token_ids": ids_of(chunk.payload)[::-1]}))


def field_of(reply: StageOutput, activation: Activation) -> str:
    return "text" if activation.iteration == NUM_ITERATIONS - 1 else "draft"


class Sides:
    """The two ways to make a call; each returns the ids of its last reply."""

    def __init__(self, omni: AsyncOmni, num_tokens: int) -> None:
        self._omni = omni
        self._llm = omni.orchestrator.front("writer").llm
        self._num_calls = 0
        kind = RequestOutputKind.DELTA  # the graph finds out that nothing reads deltas
        self._params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True, output_kind=kind)
        self._whole = self._params.clone()
        self._whole.output_kind = RequestOutputKind.FINAL_ONLY

    async def served(self, graph: str) -> list[int]:
        answer = await collect(self._omni.generate({"prompt_token_ids": PROMPT}, self._params, graph=graph))
        return list(answer.outputs[0].token_ids)

    async def by_hand(self, graph: str) -> list[int]:
        if graph == "join":
            left, right = await asyncio.gather(self._ask(PROMPT), self._ask(PROMPT))
            return await self._ask([*left, *right])
        if graph == "function":
            return await self._ask(PROMPT[::-1])
        ids = await self._ask(PROMPT)
        for _ in range(NUM_ITERATIONS - 1):
            ids = await self._ask(ids[::-1])
        return ids

    async def _ask(self, ids: list[int]) -> list[int]:
        self._num_calls += 1
        (prompt,) = await self._llm.renderer.render_cmpl_async([{"prompt_token_ids": ids}])
        outputs = self._llm.generate(prompt, self._whole.clone(), f"by-hand-{self._num_calls}")
        reply: list[int] = []
        async with aclosing(outputs):
            async for output in outputs:
                reply += output.outputs[0].token_ids
        return reply


async def time_of(call: Callable[[str], Awaitable[list[int]]], graph: str, number: int) -> tuple[float, list[int]]:
    started = time.perf_counter()
    answers = await asyncio.gather(*(call(graph) for _ in range(number)))
    seconds = time.perf_counter() - started
    assert all(answer == answers[0] for answer in answers), "equal prompts were answered differently"
    return seconds, answers[0]


async def measure(omni: AsyncOmni, options: argparse.Namespace) -> list[dict[str, Any]]:
    sides, rows = Sides(omni, options.tokens), []
    for graph in NUM_NODES:
        for number in (1, options.concurrency):
            times: dict[str, list[float]] = {"served": [], "by hand": []}
            calls = {"served": sides.served, "by hand": sides.by_hand}
            for run in range(-1, options.runs):  # the first warms up
                answers = {}
                for name in list(calls) if run % 2 else list(calls)[::-1]:
                    seconds, answers[name] = await time_of(calls[name], graph, number)
                    if run >= 0:
                        times[name].append(seconds)
                assert answers["served"] == answers["by hand"], "the two sides do not answer alike"
            served, by_hand = (statistics.median(one) for one in times.values())
            cost_us = 1e6 * (served - by_hand) / number / NUM_NODES[graph]
            rows.append(
                {"graph": graph, "calls": number, "served_s": served, "by_hand_s": by_hand, "ratio": served / by_hand}
                | {"us_a_node": cost_us}
            )
    return rows


async def measure_growth(omni: AsyncOmni, options: argparse.Namespace) -> dict[str, float]:
    """The ratio of the two sides with few and with many calls open."""
    sides, ratios = Sides(omni, 1), {}
    for number in (50, options.growth):
        times: list[tuple[float, float]] = []
        for run in range(-1, options.runs):
            pair = [(await time_of(call, "function", number))[0] for call in (sides.served, sides.by_hand)]
            if run >= 0:
                times.append((pair[0], pair[1]))
        ratios[number] = statistics.median(served / by_hand for served, by_hand in times)
    few, many = ratios.values()
    return {"open": options.growth, "ratio_few": few, "ratio_many": many, "growth": many / few}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--concurrency", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=16, help="of each reply")
    parser.add_argument("--growth", type=int, default=1000, help="open calls")
    parser.add_argument("--quick", action="store_true", help="one run of a few calls, to see that it works")
    options = parser.parse_args()
    if options.quick:
        options.runs, options.concurrency, options.tokens, options.growth = 1, 4, 4, 60
    with tempfile.TemporaryDirectory() as directory:
        model = llava.build(Path(directory) / "model", SHAPE)
        omni = AsyncOmni(model, pipeline=BenchmarkPipeline, **ENGINE_ARGS)
        try:
            rows, growth = asyncio.run(run(omni, options))
        finally:
            omni.shutdown()
    print(
        f"\n{os.cpu_count()} cores, torch {torch.__version__}, {platform.machine()}; medians of {options.runs} runs\n"
    )
    print("| graph | calls at once | served, s | by hand, s | ratio | us a node |\n|---|---|---|---|---|---|")
    for row in rows:
        print(
            f"| {row['graph']} | {row['calls']} | {row['served_s']:.3f} | {row['by_hand_s']:.3f} "
            f"| {row['ratio']:.3f} | {row['us_a_node']:.0f} |"
        )
    worst = max(row["ratio"] for row in rows)
    print("\n| goal | at most | measured | |\n|---|---|---|---|")
    for name, goal, measured in (("ratio", GOAL, worst), ("growth", GROWTH_GOAL, growth["growth"])):
        print(f"| {name} | {goal} | {measured:.2f} | {'reached' if measured <= goal else 'MISSED'} |")
    print(json.dumps({"benchmark": "graph", "rows": rows, "growth": growth}))


async def run(omni: AsyncOmni, options: argparse.Namespace) -> tuple[list[dict[str, Any]], dict[str, float]]:
    rows = await measure(omni, options)
    growth = await measure_growth(omni, options)
    await omni.aclose()
    return rows, growth


if __name__ == "__main__":
    main()
