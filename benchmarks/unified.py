"""Pictures and texts by one engine, beside two engines with a copy of the weights each, and beside the plain model.

    python -m benchmarks.unified [--runs 5] [--images 1 8] [--chats 4] [--steps 8] [--tpot-ms 40] [--short]

Baseline: ``two``, a deployment for texts and one for pictures, each with a copy of the weights, half of the KV cache
and one thread, as where a language model and a diffusion transformer are stages of their own; and ``plain``, which is
``tests/reference/bagel.py``, one picture after the other in this process, equal to the original code, with the number
of threads that is fastest, found at the start.

* ``one``: BAGEL as it is deployed: one language model, two threads.
* ``target``: likewise, with a latency target of texts (``tpot_ms``).
* ``apart``: one deployment with ``unified: false``: two language models, one thread each; contexts are handed over.

Runs alternate; the latents of the first picture are compared.

Model: ``vllm_omni.testing.bagel``, variant "wide": 50 million random parameters of the language model, float32.
Workload: pictures of 128 by 128 pixels (66 tokens of a canvas) with guidance by the text in each step; texts of 48
tokens, greedy.

* images/s: pictures at once, no texts.
* gap: between two tokens of a text, 99th percentile of all texts; alone, and while as many pictures are made.
* memory: unique set size of the processes of language models, after all runs.
* shared: tokens of the contexts of edits (an image and a text) that a branch of the guidance did not compute again.
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
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")  # read at import; stdout is for the table
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")

import numpy as np
import psutil
import torch
from prometheus_client import REGISTRY
from torch import set_num_threads  # before vLLM's CPU worker replaces it

from tests.reference.bagel import Guidance, Reference, latent_of
from tests.reference.media import make_image
from vllm_omni.entrypoints.async_omni import AsyncOmni
from vllm_omni.messages.outputs import collect
from vllm_omni.testing.bagel import build

SIDE, SEED = 128, 7
GUIDANCE = Guidance(4.0, 1.0, (0.0, 1.0))
KV_BYTES = 64 << 20
TEXT_TOKENS = 48
TOLERANCE = 1e-4  # of the latents' maximum

Options = argparse.Namespace


def text_of(index: int) -> str:
    return f"<|im_start|>a small boat on a lake, number {index}<|im_end|>"


def image_params(options: Options, index: int, **more: Any) -> dict[str, Any]:
    image = {"width": SIDE, "height": SIDE, "num_inference_steps": options.steps, "seed": SEED + index}
    guidance = {"guidance_scale": GUIDANCE.text_scale, "guidance_interval": list(GUIDANCE.interval)}
    guidance["image_guidance_scale"] = GUIDANCE.image_scale
    return {"language_model": {"extra_args": {"image": {**image, **guidance, **more}}}}


@dataclass
class Deployment:
    """The engines that make pictures and texts: one, or one each."""

    name: str
    pictures: AsyncOmni
    texts: AsyncOmni

    async def draw(self, options: Options, count: int, **more: Any) -> list[Any]:
        return await asyncio.gather(
            *(
                collect(self.pictures.generate(text_of(i), image_params(options, i, **more), modalities=["image"]))
                for i in range(count)
            )
        )

    async def write(self, index: int) -> list[float]:
        """The times of a text's tokens."""
        times: list[float] = []
        params = {"language_model": {"temperature": 0.0, "max_tokens": TEXT_TOKENS, "ignore_eos": True}}
        prompt = text_of(index) + "<|im_start|>"
        async for output in self.texts.generate(prompt, params, modalities=["text"]):
            if output.outputs and output.outputs[0].token_ids:
                times.append(time.perf_counter())
        return times

    async def images_per_s(self, options: Options, count: int) -> float:
        started_at = time.perf_counter()
        await self.draw(options, count)
        return count / (time.perf_counter() - started_at)

    async def beside(self, options: Options, num_images: int) -> tuple[float, float]:
        """Texts while pictures are made: the 99th percentile of the gaps of all texts, ms; and pictures per second."""
        started_at = time.perf_counter()
        drawing = asyncio.ensure_future(self.draw(options, num_images))
        texts = await asyncio.gather(*(self.write(index) for index in range(options.chats)))
        gaps = [after - now for times in texts for now, after in pairwise(times)]
        await drawing
        return float(np.percentile(gaps, 99)) * 1e3, num_images / (time.perf_counter() - started_at)


def start(model: Path, num_threads: int, kv_bytes: int, **more: Any) -> AsyncOmni:
    os.environ["OMP_NUM_THREADS"] = str(num_threads)
    settings = {"dtype": "float32", "max_model_len": 1024, "max_num_batched_tokens": 1024, "block_size": 32}
    settings |= {"kv_cache_memory_bytes": kv_bytes, **more}
    overrides = [f"language_model.{name}={value}" for name, value in settings.items()]
    return AsyncOmni(model, stage_overrides=overrides, log_stats=True)


def language_models() -> set[int]:
    """The processes of this program's language models."""
    files = Path(tempfile.gettempdir()).glob("vllm-omni-*/language_model*.process")
    running = {int(file.name.split(".")[-2]) for file in files}
    return running & {child.pid for child in psutil.Process().children(recursive=True)}


def unique_mb(processes: set[int]) -> float:
    return sum(psutil.Process(pid).memory_full_info().uss for pid in processes) / 1e6


def plain_latents(reference: Reference, options: Options, index: int) -> torch.Tensor:
    empty = reference.new_context()
    text = text_of(index).removeprefix("<|im_start|>").removesuffix("<|im_end|>")
    side = SIDE // 16
    noise = torch.randn(side * side, 64, generator=torch.Generator().manual_seed(SEED + index))
    context = reference.read_text(empty, text)
    canvas = reference.denoise(
        noise,
        (side, side),
        (context, empty, context),
        num_timesteps=options.steps + 1,
        shift=3.0,
        guidance=GUIDANCE,
    )
    return canvas.latents[-1]


def plain_images_per_s(reference: Reference, options: Options, count: int) -> float:
    started_at = time.perf_counter()
    with torch.no_grad():
        for index in range(count):
            reference.decode_latents(plain_latents(reference, options, index), SIDE // 16, SIDE // 16)
    return count / (time.perf_counter() - started_at)


def plain_rate_with(num_threads: int, reference: Reference, options: Options) -> float:
    set_num_threads(num_threads)
    return plain_images_per_s(reference, options, 1)


async def check(one: Deployment, reference: Reference, options: Options) -> None:
    (output,) = await one.draw(options, 1, output_type="latents")
    with torch.no_grad():
        expected = latent_of(plain_latents(reference, options, 0), SIDE // 16, SIDE // 16)
    difference = (output.multimodal_output["latents"][0] - expected).abs().max() / expected.abs().max()
    assert difference < TOLERANCE, f"latents differ by {difference:.1e}"


def hits() -> float:
    """Tokens that the prefix cache of an engine's contexts had, of all engines of this process."""
    return sum(
        sample.value
        for metric in REGISTRY.collect()
        for sample in metric.samples
        if sample.name == "vllm:prefix_cache_hits_total"
    )


async def count_shared(one: Deployment, options: Options) -> dict[str, Any]:
    """Tokens of the contexts of edits that were shared, of all of them."""
    before = hits()
    num_tokens = 0
    for index in range(4):
        params = image_params(options, index, image_guidance_scale=1.5)
        prompt = {
            "prompt": f"<|vision_start|><|vision_end|>{text_of(index)}",
            "multi_modal_data": {"image": [make_image(120, 100, seed=index)]},
            "mm_processor_kwargs": {"is_drawn": True},
        }
        output = await collect(one.pictures.generate(prompt, params, modalities=["image"]))
        num_tokens += len(output.prompt_token_ids)
    return {"contexts": num_tokens, "shared": hits() - before}


async def measure(deployments: Sequence[Deployment], reference: Reference, options: Options) -> dict[str, Any]:
    for deployment in deployments:
        await check(deployment, reference, options)
    set_num_threads(max((1, 2), key=lambda number: plain_rate_with(number, reference, options)))
    rates: dict[tuple[str, int | str], list[float]] = {}
    gaps: dict[tuple[str, str], list[float]] = {}
    for deployment in deployments:  # of each shape once, before anything is timed
        await deployment.beside(options, max(options.images))
    for run in range(options.runs):
        for deployment in deployments if run % 2 else reversed(deployments):
            for count in options.images:
                rates.setdefault((deployment.name, count), []).append(await deployment.images_per_s(options, count))
            for state, drawn in (("lone", 0), ("busy", max(options.images))):
                gap, rate = await deployment.beside(options, drawn)
                gaps.setdefault((deployment.name, state), []).append(gap)
                if drawn:
                    rates.setdefault((deployment.name, state), []).append(rate)
        for count in options.images:
            rates.setdefault(("plain", count), []).append(plain_images_per_s(reference, options, count))
    median = statistics.median
    return {
        "images_per_s": {f"{name} {count}": round(median(one), 3) for (name, count), one in rates.items()},
        "gap_p99_ms": {f"{name} {state}": round(median(each), 1) for (name, state), each in gaps.items()},
        **await count_shared(deployments[0], options),
    }


def print_row(said: str, values: list[float]) -> None:
    one, target, apart, two, *plain = values
    ratios = (f"{value / two:.2f}" for value in (one, target, apart))
    cells = [*map(str, (one, target, apart, two)), *(map(str, plain) if plain else [""]), *ratios]
    print(f"| {said} | {' | '.join(cells)} |")


def print_table(result: dict[str, Any], options: Options) -> None:
    rates, gaps, memory = result["images_per_s"], result["gap_p99_ms"], result["memory_mb"]
    names = ("one", "target", "apart", "two", "plain")
    print(f"\n| | {' | '.join(names)} | one / two | target / two | apart / two |\n|{'---|' * 9}")
    for count in options.images:
        print_row(f"images/s, {count} at once", [rates[f"{name} {count}"] for name in names])
    for state in ("lone", "busy"):
        said = "alone" if state == "lone" else f"beside {max(options.images)} pictures"
        print_row(f"gap p99 of {options.chats} texts {said}, ms", [gaps[f"{name} {state}"] for name in names[:-1]])
        if state == "busy":
            print_row("images/s beside them", [rates[f"{name} busy"] for name in names[:-1]])
    print_row("memory of language models, MB", [round(memory[name]) for name in names[:-1]])
    print(f"\nEdits: {result['shared']:.0f} tokens shared; the contexts have {result['contexts']}.")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--images", type=int, nargs="+", default=[1, 8], help="at once")
    parser.add_argument("--chats", type=int, default=4, help="texts at once")
    parser.add_argument("--steps", type=int, default=8, help="denoise steps of a picture")
    parser.add_argument("--tpot-ms", type=float, default=40.0, help="latency target of texts, of ``target``")
    parser.add_argument("--short", action="store_true", help="one short run, to see that it works")
    options = parser.parse_args(arguments)
    if options.short:
        options.runs, options.images, options.chats, options.steps = 1, [1, 2], 2, 2
    with tempfile.TemporaryDirectory() as directory:
        model = build(Path(directory), variant="base" if options.short else "wide")
        made: list[AsyncOmni] = []
        processes: dict[str, set[int]] = {}  # of a deployment's language models
        deployments: list[Deployment] = []

        def deploy(name: str, number: int, num_threads: int, kv_bytes: int, **more: Any) -> None:
            before = language_models()
            one = [start(model, num_threads, kv_bytes, **more) for _ in range(number)]
            made.extend(one)
            deployments.append(Deployment(name, one[0], one[-1]))
            processes[name] = language_models() - before

        try:
            deploy("one", 1, 2, KV_BYTES)
            deploy("target", 1, 2, KV_BYTES, **{"epd.tpot_ms": options.tpot_ms})
            deploy("apart", 1, 1, KV_BYTES // 2, unified=False)
            deploy("two", 2, 1, KV_BYTES // 2)
            result = asyncio.run(measure(deployments, Reference(model), options))
            result["memory_mb"] = {name: unique_mb(ids) for name, ids in processes.items()}
        finally:
            for omni in made:
                omni.shutdown()
    print(
        f"\n{os.cpu_count()} cores, torch {torch.__version__}, {platform.machine()}; medians of {options.runs} runs\n"
    )
    print_table(result, options)
    print(json.dumps({"benchmark": "unified", **result}))


if __name__ == "__main__":
    main()
