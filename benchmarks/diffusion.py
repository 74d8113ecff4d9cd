"""Stepping the pipelines of several requests together: cost and gain against diffusers, in one run.

    python -m benchmarks.diffusion [--rounds 3] [--threads 2] [--size 256] [--steps 4] [--layers 6] [--quick]

Baseline: diffusers' own ``QwenImagePipeline``, the same object, weights, threads and seeds: *one by one*, a call for
each request, and *as a list*, one call with all prompts, which must all be there before it starts.

The denoiser is a random ``QwenImageTransformer2DModel`` of middle size behind the tiny text encoder of ``vllm-omni
tiny``; no guidance, and latents as output, so that nearly all of the time is the denoiser's. Ways of one width follow
each other in each round, and rounds repeat; times are medians, ratios the median of each round's ratio. Hooks on the
denoiser time its forwards, for all ways alike; on a GPU they synchronize first.

* throughput: 1, 2, 4, 8 requests at once, each with its own prompt and seed; requests per second.
* a short request that arrives when a long one has done its first step: seconds until its result. Without steps
  together, it waits for the long one.
* time outside of forwards, for one request and for eight: everything but the denoiser, the text encoder included on
  both sides. The limit is diffusers' own for the same requests one by one, plus 0.6 ms for each of our steps and 0.3 ms
  for each row of them.
* the row-wise first-block cache: time, and the relative error of the latents (norm of the difference to those without
  it, by their norm). diffusers' own first-block cache beside it, for one request. The weights are random, except that
  the influence of the step's number is made a tenth of theirs; how much real weights lose at which threshold was not
  measured.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from diffusers import DiffusionPipeline, FirstBlockCacheConfig, QwenImageTransformer2DModel
from torch import Tensor

from vllm_omni.config.diffusion_params import DiffusionParams
from vllm_omni.diffusion.first_block_cache import FirstBlockCache
from vllm_omni.diffusion.request import DiffusionRequest
from vllm_omni.diffusion.stepper import PipelineStepper
from vllm_omni.testing import diffusion as tiny

WIDTHS = (1, 2, 4, 8)
ONE_BY_ONE, LIST, OURS = "one by one", "as a list", "stepped together"
THRESHOLDS = (0.2, 0.4)
TIME_GAIN = 0.1  # with it d, of the cache, is 0.2 between two of 16 steps
MS_PER_STEP, MS_PER_ROW = 0.6, 0.3
PROMPTS = (
    "a red bicycle before a wall of brick",
    "two owls",
    "the harbour of a small town at night, seen from the sea, in rain",
    "an old map",
    "a bowl of cherries on a blue table",
    "a lighthouse",
    "snow in a street with a single lantern",
    "a paper boat in a puddle",
)
PAPER_SPEEDUP = 1.26  # over all of Qwen-Image and Wan 2.2, by vLLM's operators and attention (vLLM-Omni's paper, 4)


@dataclass(frozen=True)
class Workload:
    """The workload and its device."""

    device: torch.device
    dtype: torch.dtype
    size: int  # pixels, of a square
    num_steps: int
    rounds: int
    cache_steps: int  # of the requests that measure the cache
    long_steps: int  # of the long request before a short one (num_steps)

    def request(self, index: int, num_steps: int | None = None) -> DiffusionRequest:
        params = DiffusionParams(
            height=self.size,
            width=self.size,
            num_inference_steps=num_steps or self.num_steps,
            true_cfg_scale=1.0,
            seed=index,
            output_type="latents",
        )
        return DiffusionRequest(PROMPTS[index % len(PROMPTS)], [], params)

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    @contextmanager
    def timed(self, seconds: list[float]) -> Iterator[None]:
        gc.collect()
        self.synchronize()
        start = time.perf_counter()
        yield
        self.synchronize()
        seconds.append(time.perf_counter() - start)


class ForwardClock:
    """Seconds in a module's forward and the number of calls, by hooks."""

    def __init__(self, module: torch.nn.Module, workload: Workload):
        self.seconds = 0.0
        self.num_forwards = 0
        self._workload = workload
        self._start = 0.0
        module.register_forward_pre_hook(self._before)
        module.register_forward_hook(self._after)

    def reset(self) -> None:
        self.seconds, self.num_forwards = 0.0, 0

    def _before(self, *_: Any) -> None:
        self._workload.synchronize()
        self._start = time.perf_counter()

    def _after(self, *_: Any) -> None:
        self._workload.synchronize()
        self.seconds += time.perf_counter() - self._start
        self.num_forwards += 1


def make_pipeline(workload: Workload, *, num_layers: int, num_heads: int, head_dim: int) -> Any:
    """Qwen-Image with a random denoiser of the given size; the rest is tiny."""
    with tempfile.TemporaryDirectory() as directory:
        pipeline = DiffusionPipeline.from_pretrained(tiny.build(Path(directory), "qwen-image"))
        pipeline.text_encoder.to(workload.dtype)  # read before the directory is removed
    config = dict(pipeline.transformer.config)
    rope = (head_dim // 8, head_dim * 7 // 16, head_dim * 7 // 16)
    denoiser = QwenImageTransformer2DModel.from_config(
        config
        | {
            "num_layers": num_layers,
            "num_attention_heads": num_heads,
            "attention_head_dim": head_dim,
            "axes_dims_rope": rope,
        }
    )
    with torch.no_grad():
        tiny.randomize(denoiser, torch.Generator().manual_seed(0))
        # With random weights, neighbouring steps differ as much as any two; trained ones change slowly with time.
        denoiser.time_text_embed.timestep_embedder.linear_2.weight.mul_(TIME_GAIN)
    pipeline.transformer = denoiser
    pipeline.to(workload.device, workload.dtype)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


# -- the ways ----------------------------------------------------------------------------------------------------------


def call(pipeline: Any, requests: Sequence[DiffusionRequest]) -> Tensor:
    """diffusers' own call, with lists for several requests, all with the first one's number of steps. [N, ...]"""
    params = requests[0].params
    return pipeline(
        prompt=[request.prompt for request in requests],
        generator=[torch.Generator().manual_seed(request.params.seed or 0) for request in requests],
        height=params.height,
        width=params.width,
        num_inference_steps=params.num_inference_steps,
        true_cfg_scale=1.0,
        output_type="latent",
    ).images


def one_by_one(pipeline: Any, requests: Sequence[DiffusionRequest]) -> Tensor:
    return torch.cat([call(pipeline, [request]) for request in requests])


def step_all(stepper: PipelineStepper, requests: Sequence[DiffusionRequest]) -> Tensor:
    names = [str(index) for index in range(len(requests))]
    for name, request in zip(names, requests, strict=True):
        stepper.add(name, request)
    results: dict[str, Tensor] = {}
    while running := [name for name in names if name not in results]:
        for name, outcome in stepper.step(running).items():
            if outcome.error is not None:
                raise outcome.error
            if outcome.output is not None:
                results[name] = outcome.output["latents"]
    return torch.cat([results[name].reshape(1, *results[name].shape[-2:]) for name in names])


# -- what is measured --------------------------------------------------------------------------------------------------


def measure_throughput(pipeline: Any, stepper: PipelineStepper, clock: ForwardClock, workload: Workload) -> list[Any]:
    ways: dict[str, Callable[[Sequence[DiffusionRequest]], Tensor]] = {
        ONE_BY_ONE: lambda requests: one_by_one(pipeline, requests),
        LIST: lambda requests: call(pipeline, requests),
        OURS: lambda requests: step_all(stepper, requests),
    }
    rows = []
    for width in WIDTHS:
        requests = [workload.request(index) for index in range(width)]
        seconds: dict[str, list[float]] = {name: [] for name in ways}
        outside: dict[str, list[float]] = {name: [] for name in ways}
        error = 0.0
        for round_index in range(workload.rounds + 1):
            latents = {}
            for name, run in ways.items():
                clock.reset()
                with workload.timed(times := []):
                    latents[name] = run(requests)
                if round_index:  # the first warms up
                    seconds[name] += times
                    outside[name].append(times[0] - clock.seconds)
            error = max(error, difference(latents[OURS], latents[ONE_BY_ONE]))
        num_steps = workload.num_steps
        limit_s = (MS_PER_STEP * num_steps + MS_PER_ROW * num_steps * width) / 1000
        rows.append(
            {
                "width": width,
                "seconds": {name: statistics.median(times) for name, times in seconds.items()},
                "times_one_by_one": median_ratio(seconds[ONE_BY_ONE], seconds[OURS]),
                "times_list": median_ratio(seconds[LIST], seconds[OURS]),
                "outside_ms": {name: 1000 * statistics.median(times) for name, times in outside.items()},
                "outside_limit_ms": 1000 * (statistics.median(outside[ONE_BY_ONE]) + limit_s),
                "error": error,
            }
        )
    return rows


def measure_short_behind_long(pipeline: Any, stepper: PipelineStepper, workload: Workload) -> dict[str, float]:
    long, short = workload.request(0, workload.long_steps), workload.request(1)
    waits: dict[str, list[float]] = {"first come first served": [], OURS: []}
    for round_index in range(workload.rounds + 1):
        arrived_at = 0.0

        def note_arrival(_: Any, step: int, __: Any, values: dict[str, Any]) -> dict[str, Any]:
            nonlocal arrived_at
            if step == 0:
                workload.synchronize()
                arrived_at = time.perf_counter()
            return values

        pipeline(
            prompt=long.prompt,
            generator=torch.Generator().manual_seed(0),
            height=workload.size,
            width=workload.size,
            num_inference_steps=workload.long_steps,
            true_cfg_scale=1.0,
            output_type="latent",
            callback_on_step_end=note_arrival,
        )
        call(pipeline, [short])
        workload.synchronize()
        served_s = time.perf_counter() - arrived_at

        stepper.add("long", long)
        stepper.step(["long"])
        workload.synchronize()
        arrived_at = time.perf_counter()
        stepper.add("short", short)
        outcome = None
        while outcome is None or not outcome.has_ended:
            outcome = stepper.step(["long", "short"])["short"]
        assert outcome.error is None, outcome.error
        workload.synchronize()
        stepped_s = time.perf_counter() - arrived_at
        stepper.abort("long")
        if round_index:
            waits["first come first served"].append(served_s)
            waits[OURS].append(stepped_s)
    ratio = median_ratio(waits["first come first served"], waits[OURS])
    return {name: statistics.median(times) for name, times in waits.items()} | {"ratio": ratio}


def measure_cache(pipeline: Any, workload: Workload) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for width in (4,):
        requests = [workload.request(index, workload.cache_steps) for index in range(width)]
        plain = PipelineStepper(pipeline, max_rows=8)
        cached = {threshold: FirstBlockCache(threshold) for threshold in THRESHOLDS}
        steppers = {name: PipelineStepper(pipeline, max_rows=8, cache=cache) for name, cache in cached.items()}
        seconds: dict[Any, list[float]] = {name: [] for name in (None, *THRESHOLDS, "diffusers")}
        errors: dict[Any, float] = {}
        for round_index in range(workload.rounds + 1):
            expected = None
            for threshold in (None, *THRESHOLDS):
                if threshold is not None:
                    for index in range(width):
                        cached[threshold].grant(str(index), 1 << 40)
                with workload.timed(times := []):
                    latents = step_all(plain if threshold is None else steppers[threshold], requests)
                expected = latents if expected is None else expected
                errors[threshold] = difference(latents, expected)
                if round_index:
                    seconds[threshold] += times
        for threshold, cache in cached.items():
            statistics_ = cache.statistics()
            num_rows = statistics_.num_rows_reused + statistics_.num_rows_computed
            rows.append(
                {
                    "width": width,
                    "threshold": threshold,
                    "speedup": median_ratio(seconds[None], seconds[threshold]),
                    "reused": statistics_.num_rows_reused / max(num_rows, 1),
                    "error": errors[threshold],
                }
            )
    request = workload.request(0, workload.cache_steps)
    plain_s: list[float] = []
    for threshold in THRESHOLDS:
        cached_s: list[float] = []
        for round_index in range(workload.rounds + 1):
            with workload.timed(times := []):
                expected = call(pipeline, [request])
            pipeline.transformer.enable_cache(FirstBlockCacheConfig(threshold=threshold))
            with workload.timed(cached_times := []):
                latents = call(pipeline, [request])
            pipeline.transformer.disable_cache()
            if round_index:
                plain_s += times
                cached_s += cached_times
        speedup = median_ratio(plain_s[-workload.rounds :], cached_s)
        error = difference(latents, expected)
        rows.append({"width": "diffusers'", "threshold": threshold, "speedup": speedup, "reused": None, "error": error})
    return rows


def difference(latents: Tensor, expected: Tensor) -> float:
    """Norm of the difference, relative to that of the expected."""
    latents, expected = latents.float().cpu(), expected.float().cpu()
    return ((latents - expected).norm() / expected.norm()).item()


def median_ratio(above: Sequence[float], below: Sequence[float]) -> float:
    return statistics.median(a / b for a, b in zip(above, below, strict=True))


# -- the report --------------------------------------------------------------------------------------------------------


def run(pipeline: Any, workload: Workload) -> dict[str, Any]:
    stepper = PipelineStepper(pipeline, max_rows=max(WIDTHS))
    clock = ForwardClock(pipeline.transformer, workload)
    print("throughput", file=sys.stderr)
    results: dict[str, Any] = {"throughput": measure_throughput(pipeline, stepper, clock, workload)}
    print("a short request behind a long one", file=sys.stderr)
    results["short"] = measure_short_behind_long(pipeline, stepper, workload)
    print("the cache", file=sys.stderr)
    results["cache"] = measure_cache(pipeline, workload)
    return results | {"paper_speedup": PAPER_SPEEDUP}


def report(machine: dict[str, Any], results: dict[str, Any]) -> str:
    """Tables, goals, and one line of JSON."""
    lines = [", ".join(f"{name} {value}" for name, value in machine.items()), ""]
    names = (ONE_BY_ONE, LIST, OURS)
    lines.append("| requests | " + " | ".join(f"{name}, requests/s" for name in names))
    lines[-1] += " | times one by one | times a list | relative error |"
    lines.append("|---" * 7 + "|")
    for row in results["throughput"]:
        rates = [f"{row['width'] / row['seconds'][name]:.3g}" for name in names]
        ratios = [f"{row['times_one_by_one']:.2f}", f"{row['times_list']:.2f}", f"{row['error']:.0e}"]
        lines.append("| " + " | ".join([str(row["width"]), *rates, *ratios]) + " |")
    lines += ["", "| requests | " + " | ".join(f"{name}, ms outside of forwards" for name in names) + " | limit |"]
    lines.append("|---" * 5 + "|")
    for row in results["throughput"]:
        cells = [f"{row['outside_ms'][name]:.1f}" for name in names] + [f"{row['outside_limit_ms']:.1f}"]
        lines.append("| " + " | ".join([str(row["width"]), *cells]) + " |")
    short = results["short"]
    lines += ["", "| a short request behind a long one | seconds |", "|---|---|"]
    lines += [f"| {name} | {seconds:.3f} |" for name, seconds in short.items() if name != "ratio"]
    lines += ["", "| cache: requests | threshold | times without | rows reused | relative error |"]
    lines.append("|---" * 5 + "|")
    for row in results["cache"]:
        reused = "" if row["reused"] is None else f"{row['reused']:.0%}"
        cells = [row["width"], row["threshold"], f"{row['speedup']:.2f}", reused, f"{row['error']:.1e}"]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    lines += ["", "| goal | limit | measured | |", "|---|---|---|---|"]
    for what, limit, got, is_least in goals(results):
        verdict = "reached" if (got >= limit if is_least else got <= limit) else "MISSED"
        lines.append(f"| {what} | at {'least' if is_least else 'most'} {limit:.3g} | {got:.3g} | {verdict} |")
    lines += ["", f"The paper's speed-up over diffusers, on a GPU, by operators and attention: {PAPER_SPEEDUP}."]
    return "\n".join([*lines, json.dumps({"machine": machine} | results)])


def goals(results: dict[str, Any]) -> Iterator[tuple[str, float, float, bool]]:
    """(subject, limit, measured, whether the limit is a lower bound)."""
    by_width = {row["width"]: row for row in results["throughput"]}
    yield "1 request, times diffusers", 0.97, by_width[1]["times_one_by_one"], True
    for width in (4, 8):
        yield f"{width} requests, times diffusers' list", 0.95, by_width[width]["times_list"], True
    yield "a short request behind a long one, times sooner", 3.0, results["short"]["ratio"], True
    for width, row in by_width.items():
        yield f"{width} requests, ms outside of forwards", row["outside_limit_ms"], row["outside_ms"][OURS], False
    best = max((row for row in results["cache"] if row["width"] == 4), key=lambda row: row["speedup"])
    yield f"cache, 4 requests, error {best['error']:.1e}", 1.5, best["speedup"], True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--size", type=int, default=256, help="pixels of a side")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--quick", action="store_true", help="a tiny denoiser, one round: to see that it runs")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    workload = Workload(
        device=torch.device("cpu"),
        dtype=torch.float32,
        size=64 if options.quick else options.size,
        num_steps=options.steps,
        rounds=1 if options.quick else options.rounds,
        cache_steps=6 if options.quick else 16,
        long_steps=8 if options.quick else 24,
    )
    shape = {"num_layers": 2, "num_heads": 2, "head_dim": 32} if options.quick else {}
    shape = {"num_layers": options.layers, "num_heads": 8, "head_dim": 64} | shape
    pipeline = make_pipeline(workload, **shape)
    num_parameters = sum(parameter.numel() for parameter in pipeline.transformer.parameters())
    machine = {
        "machine": platform.machine(),
        "threads": options.threads,
        "torch": torch.__version__,
        "parameters": f"{num_parameters / 1e6:.1f} M",
        "pixels": workload.size,
        "steps": workload.num_steps,
    }
    print(report(machine, run(pipeline, workload)))


if __name__ == "__main__":
    main()
