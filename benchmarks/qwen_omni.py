"""Qwen2.5-Omni in text and speech: this project against transformers, on one checkpoint and the same cores.

    python -m benchmarks.qwen_omni [--runs 5] [--concurrency 16] [--prompt-tokens 842]

Baseline: transformers' ``Qwen2_5OmniForConditionalGeneration.generate`` in a process of its own, one request after the
other (it supports no more with audio), with the number of threads that is fastest, found at the start. Ours is
``AsyncOmni`` with the bundled deployment and ``ENGINE_ARGS``. Both processes stay alive; one waits while the other
works. Runs alternate: transformers, ours alone, ours at the given concurrency, and the latter once more for codes
without sound, because transformers' rates are those of a stage that has the machine to itself.

Workload: the video case of the vLLM-Omni paper (section 4): 842 prompt tokens with a video (777 here, as frames come in
pairs), 150 tokens of text, 545 codes. Thinker and talker have 34 and 33 million random parameters, float32, greedy; the
vocoder is sized to take 10 to 20 % of transformers' time. Regime: on a CPU a step of one request is bound by reading
the weights, a step of sixteen by reading the keys and values of their rows; ``floor`` is the time of a step's linear
layers alone, as matmuls of their shapes, and of reading those keys and values.

Every request has a video of its own, so that no cache helps. Text and sound of both sides are compared.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")  # read at import; stdout is for the table

import psutil
import torch

from tests.reference.media import Case, format_prompt, make_video
from vllm_omni.config import load_config
from vllm_omni.engine.orchestrator import Orchestrator
from vllm_omni.engine.stage import StageEngine
from vllm_omni.entrypoints.async_omni import AsyncOmni
from vllm_omni.process.run_directory import RunDirectory
from vllm_omni.process.tether import ServerTether
from vllm_omni.relay.hub import RelayHub, RelayOptions
from vllm_omni.testing.qwen2_5_omni import TinyShape, build

SHAPE = TinyShape(
    head_dim=64,
    mrope_section=(16, 8, 8),
    thinker_layers=12,
    thinker_heads=8,
    thinker_kv_heads=2,
    thinker_intermediate_size=1408,
    talker_layers=12,
    talker_hidden_size=480,
    talker_heads=8,
    talker_kv_heads=2,
    talker_intermediate_size=1408,
    num_codes=1024,
    dit_layers=2,
    dit_look_ahead_layers=(1,),
    dit_look_backward_layers=(0,),
    resblock_kernel_sizes=(3, 7, 11),
    loudness=0.06,
)
NUM_TEXT_TOKENS, NUM_CODES = 150, 545
AUDIO_S = NUM_CODES / 50
ENGINE_ARGS = {"dtype": "float32", "max_model_len": 2048, "max_num_seqs": 16, "skip_mm_profiling": True}
PARAMS = {
    "thinker": {"temperature": 0.0, "max_tokens": NUM_TEXT_TOKENS, "ignore_eos": True},
    "talker": {"temperature": 0.0, "max_tokens": NUM_CODES, "ignore_eos": True},
    "token2wav": {"seed": 0},
}
REFERENCE_KWARGS = {
    "thinker_max_new_tokens": NUM_TEXT_TOKENS,
    "talker_max_new_tokens": NUM_CODES,
    "talker_repetition_penalty": 1.05,
}


PLACEHOLDER = "<|vision_bos|><|VIDEO|><|vision_eos|>"


def make_case(index: int, num_prompt_tokens: int) -> Case:
    """A question about a video; the processor makes 144 tokens of a pair of its frames, and the text is 57."""
    video = make_video(2 * max(1, round((num_prompt_tokens - 57) / 144)), 280, 280, seed=index)
    return Case(f"video {index}", format_prompt(f"{PLACEHOLDER}What happens?"), videos=(video,))


# -- transformers, in a process of its own ---------------------------------------------------------------------------


def serve_reference(path: Path) -> None:
    """Answer a line of JSON (index, prompt tokens, threads, file for the waveform) with one of times in seconds."""
    from tests.reference.qwen2_5_omni import Reference

    reference = Reference(path)
    model = reference.model
    times: dict[str, float] = {}
    for name, owner, method in (
        ("thinker", model.thinker, "generate"),
        ("thinker_step", model.thinker, "forward"),
        ("talker", model.talker, "generate"),
        ("talker_step", model.talker, "forward"),
        ("token2wav", model.token2wav, "forward"),
    ):
        setattr(owner, method, _timed(times, name, getattr(owner, method)))
    print("ready", flush=True)
    for line in sys.stdin:
        index, num_prompt_tokens, num_threads, waveform_path = json.loads(line)
        torch.set_num_threads(num_threads)
        times.clear()
        started = time.perf_counter()
        inputs = reference.process(make_case(index, num_prompt_tokens))
        torch.manual_seed(0)
        with torch.inference_mode():
            token_ids, waveform = model.generate(**reference.generate_kwargs(inputs), **REFERENCE_KWARGS)
        times["total"] = time.perf_counter() - started
        torch.save(waveform.clone(), waveform_path)
        num_prompt = inputs["input_ids"].shape[1]
        print(json.dumps([times, num_prompt, token_ids[0, num_prompt:].tolist()]), flush=True)


def _timed(times: dict[str, float], name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Only the first call of a name counts: that of a model's forward is the prompt's."""

    @functools.wraps(function)  # transformers looks at the signature
    def call(*args: Any, **kwargs: Any) -> Any:
        started = time.perf_counter()
        result = function(*args, **kwargs)
        times.setdefault(name, time.perf_counter() - started)
        return result

    return call


class ReferenceJob(NamedTuple):
    times: dict[str, float]
    num_prompt_tokens: int
    token_ids: list[int]
    waveform: torch.Tensor


class ReferenceProcess:
    """The other side of ``serve_reference``."""

    def __init__(self, path: Path) -> None:
        env = os.environ | {"OMP_NUM_THREADS": str(os.cpu_count())}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.qwen_omni", "--serve-reference", str(path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=env,
        )
        self._waveform = path / "waveform.pt"
        self._read("ready")

    def answer(self, index: int, num_prompt_tokens: int, num_threads: int) -> ReferenceJob:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps([index, num_prompt_tokens, num_threads, str(self._waveform)]) + "\n")
        self.process.stdin.flush()
        times, num_prompt, token_ids = json.loads(self._read("["))
        return ReferenceJob(times, num_prompt, token_ids, torch.load(self._waveform))

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(30)

    def _read(self, start: str) -> str:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith(start):
                return line
        raise RuntimeError(f"transformers ended with {self.process.wait()}")


# -- ours --------------------------------------------------------------------------------------------------------------


@dataclass
class Job:
    """Seconds since the start of its run."""

    started: float
    first_audio: float = 0.0
    done: float = 0.0
    token_ids: list[int] = field(default_factory=list)
    token_times: list[float] = field(default_factory=list)  # one for each token
    code_times: list[float] = field(default_factory=list)
    audio: list[torch.Tensor] = field(default_factory=list)


MODALITIES = ("text", "audio", "codec_ids")


async def run_jobs(
    omni: AsyncOmni, indices: Sequence[int], num_prompt_tokens: int, modalities: Sequence[str] = MODALITIES
) -> list[Job]:
    """All at once."""
    cases = [make_case(index, num_prompt_tokens) for index in indices]
    origin = time.perf_counter()

    def now() -> float:
        return time.perf_counter() - origin

    async def run(case: Case) -> Job:
        job = Job(now())
        async for output in omni.generate(case.vllm_prompt, PARAMS, modalities=modalities):
            media = output.multimodal_output
            if output.outputs and output.outputs[0].token_ids:
                job.token_ids += output.outputs[0].token_ids
                job.token_times += [now()] * len(output.outputs[0].token_ids)
            if media.get("codec_ids"):
                job.code_times += [now()] * len(media["codec_ids"])
            if "audio" in media and len(media["audio"]):
                job.first_audio = job.first_audio or now()
                job.audio.append(media["audio"])
        job.done = now()
        return job

    return list(await asyncio.gather(*(run(case) for case in cases)))


def summarize(jobs: Sequence[Job]) -> dict[str, float]:
    """A stage's rate is over the time from its first job's start to its last one's end, prompts included."""
    tokens, codes = [job.token_times for job in jobs], [job.code_times for job in jobs]
    last_token, last_code = max(times[-1] for times in tokens), max(times[-1] for times in codes)
    return {
        "completion_s": statistics.mean(job.done - job.started for job in jobs),
        "first_audio_s": statistics.mean(job.first_audio - job.started for job in jobs),
        "thinker_tokens_s": sum(map(len, tokens)) / last_token,
        "thinker_decode_tokens_s": decode_rate(tokens),
        "talker_tokens_s": sum(map(len, codes)) / (last_code - min(times[-1] for times in tokens)),
        "talker_decode_tokens_s": decode_rate(codes),
        "jobs_s": len(jobs) / max(job.done for job in jobs),
    }


def decode_rate(times: Sequence[Sequence[float]]) -> float:
    """Tokens per second while all jobs decode: from the last job's first token to the first job's last."""
    start, end = max(one[0] for one in times), min(one[-1] for one in times)
    return sum(start < time <= end for one in times for time in one) / (end - start)


def pss_mib(pid: int) -> float:
    """Memory of a process and its children; shared pages count once."""
    process = psutil.Process(pid)
    return sum(one.memory_full_info().pss for one in (process, *process.children(recursive=True))) / 2**20


# -- start-up and floor ------------------------------------------------------------------------------------------------


def start_stage(path: Path, stage: str) -> None:
    """Start one stage alone, or all ("all"); prints the seconds."""
    config = load_config(path, **ENGINE_ARGS)
    orchestrator = Orchestrator(config)
    started = time.perf_counter()
    if stage == "all":
        orchestrator.start()
        elapsed_s = time.perf_counter() - started
        orchestrator.shutdown()
    else:
        spec = next(one for one in orchestrator.pipeline.stages if one.name == stage)
        engine, run_directory = StageEngine(config.stage(stage), spec), RunDirectory()
        with run_directory.inherited():
            hub = RelayHub(RelayOptions())
            engine.start(ServerTether(run_directory.path, stage), hub)
        elapsed_s = time.perf_counter() - started
        engine.shutdown()
        hub.close()
        run_directory.remove()
    print(f"started {elapsed_s}", flush=True)


def measure_start(path: Path, stage: str) -> float:
    """Measured in a new process, from reading the configuration: importing vLLM costs all the same."""
    command = [sys.executable, "-m", "benchmarks.qwen_omni", "--checkpoint", str(path), "--start", stage]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    (line,) = (line for line in output.splitlines() if line.startswith("started "))
    return float(line.split()[1])


class Floor(NamedTuple):
    """The least work of a decode step, on all cores: a bound for every implementation."""

    linear_ms: float  # the linear layers, as oneDNN's matmuls of their shapes with packed weights
    gigabytes_s: float  # of their weights
    gigaflops: float
    kv_cache_ms: float  # reading the keys and values of the mean context, at the rate of a sum over as many bytes
    step_ms: float  # both


def measure_floor(
    hidden_size: int, heads: int, kv_heads: int, mlp_size: int, num_layers: int, batch: int, context: int
) -> Floor:
    head_dim = SHAPE.head_dim
    shapes = [
        (hidden_size, (heads + 2 * kv_heads) * head_dim),
        (heads * head_dim, hidden_size),
        (hidden_size, 2 * mlp_size),
        (mlp_size, hidden_size),
    ]
    pack, linear = torch.ops.mkldnn._reorder_linear_weight, torch.ops.mkldnn._linear_pointwise
    layers = [[pack(torch.randn(columns, rows), batch) for rows, columns in shapes] for _ in range(num_layers)]
    inputs = [torch.randn(batch, rows) for rows, _ in shapes]

    def run_linear() -> None:
        for layer in layers:
            for weight, x in zip(layer, inputs, strict=True):
                linear(x, weight, None, "none", [], "")

    kv_cache = torch.randn(batch * context * num_layers * 2 * kv_heads * head_dim)
    linear_s, kv_cache_s = _median_s(run_linear), _median_s(kv_cache.sum)
    num_weights = num_layers * sum(rows * columns for rows, columns in shapes)
    return Floor(
        linear_s * 1e3,
        4 * num_weights / linear_s / 1e9,
        2 * num_weights * batch / linear_s / 1e9,
        kv_cache_s * 1e3,
        (linear_s + kv_cache_s) * 1e3,
    )


def _median_s(run: Callable[[], object]) -> float:
    times = []
    for _ in range(30):
        started = time.perf_counter()
        run()
        times.append(time.perf_counter() - started)
    return statistics.median(times)


def measure_floors(batch: int, num_prompt_tokens: int) -> dict[str, Floor]:
    thinker = (SHAPE.hidden_size, SHAPE.thinker_heads, SHAPE.thinker_kv_heads, SHAPE.thinker_intermediate_size)
    talker = (SHAPE.talker_hidden_size, SHAPE.talker_heads, SHAPE.talker_kv_heads, SHAPE.talker_intermediate_size)
    return {
        "thinker": measure_floor(*thinker, SHAPE.thinker_layers, batch, num_prompt_tokens + NUM_TEXT_TOKENS // 2),
        "talker": measure_floor(*talker, SHAPE.talker_layers, batch, num_prompt_tokens + NUM_CODES // 2),
    }


# -- the whole ---------------------------------------------------------------------------------------------------------


def compare(job: Job, reference: ReferenceJob) -> float:
    """Distance of the sound from transformers' in dB, after asserting that the text is the same."""
    assert job.token_ids == reference.token_ids, "the text is not transformers'"
    audio = torch.cat(job.audio)
    assert audio.shape == reference.waveform.shape, "the speech is not as long as transformers'"
    error = (audio - reference.waveform).pow(2).mean()
    return 10 * torch.log10(reference.waveform.pow(2).mean() / error).item()


async def measure(omni: AsyncOmni, reference: ReferenceProcess, options: argparse.Namespace) -> dict[str, Any]:
    """``options.runs`` rounds of transformers, ours alone, ours at the concurrency; after one warm-up round."""
    times: dict[int, ReferenceJob] = {}
    for num_threads in sorted({1, os.cpu_count() or 1}):
        reference.answer(0, options.prompt_tokens, num_threads)
        times[num_threads] = reference.answer(0, options.prompt_tokens, num_threads)
    num_threads = min(times, key=lambda n: times[n].times["total"])
    await run_jobs(omni, [0], options.prompt_tokens)
    await run_jobs(omni, range(options.concurrency), options.prompt_tokens)
    theirs: list[ReferenceJob] = []
    alone: list[dict[str, float]] = []
    together: list[dict[str, float]] = []
    without_vocoder: list[dict[str, float]] = []
    snr_db = []
    for run in range(options.runs):
        theirs.append(await asyncio.to_thread(reference.answer, run, options.prompt_tokens, num_threads))
        jobs = await run_jobs(omni, [run], options.prompt_tokens)
        snr_db.append(compare(jobs[0], theirs[-1]))
        alone.append(summarize(jobs))
        jobs = await run_jobs(omni, range(run, run + options.concurrency), options.prompt_tokens)
        compare(jobs[0], theirs[-1])
        together.append(summarize(jobs))
        jobs = await run_jobs(omni, range(run, run + options.concurrency), options.prompt_tokens, ["text", "codec_ids"])
        without_vocoder.append(summarize(jobs))
        print(f"run {run + 1}: {theirs[-1].times}, {alone[-1]}, {together[-1]}, {without_vocoder[-1]}", file=sys.stderr)
    baseline = {
        "completion_s": [job.times["total"] for job in theirs],
        "first_audio_s": [job.times["total"] for job in theirs],
        "thinker_tokens_s": [NUM_TEXT_TOKENS / job.times["thinker"] for job in theirs],
        "thinker_decode_tokens_s": [
            (NUM_TEXT_TOKENS - 1) / (job.times["thinker"] - job.times["thinker_step"]) for job in theirs
        ],
        "talker_tokens_s": [NUM_CODES / job.times["talker"] for job in theirs],
        "talker_decode_tokens_s": [
            (NUM_CODES - 1) / (job.times["talker"] - job.times["talker_step"]) for job in theirs
        ],
        "jobs_s": [1 / job.times["total"] for job in theirs],
    }
    median = statistics.median
    their_mib = pss_mib(reference.process.pid)  # a child of this process
    return {
        "num_prompt_tokens": theirs[0].num_prompt_tokens,
        "reference_threads": num_threads,
        "vocoder_share": median(job.times["token2wav"] / job.times["total"] for job in theirs),
        "snr_db": min(snr_db),
        "transformers": {name: median(values) for name, values in baseline.items()},
        "alone": {name: median(one[name] for one in alone) for name in baseline},
        "together": {name: median(one[name] for one in together) for name in baseline},
        "without_vocoder": {name: median(one[name] for one in without_vocoder) for name in baseline},
        "memory_mib": {"transformers": their_mib, "ours": pss_mib(os.getpid()) - their_mib},
    }


def goals(result: dict[str, Any], starts: dict[str, float]) -> list[tuple[str, float, float, bool]]:
    """(subject, goal, measured, whether it is reached); a goal on a share is an upper bound."""
    theirs, alone, together = result["transformers"], result["alone"], result["together"]
    share = result["vocoder_share"]
    rows = []
    for name in ("thinker_decode_tokens_s", "talker_decode_tokens_s"):
        rows.append((f"{name}, times transformers'", 8.0, together[name] / theirs[name], True))
    without_vocoder = result["without_vocoder"][name] / theirs[name]
    rows.append(("the same where no vocoder works beside it", 8.0, without_vocoder, True))
    rows.append(("jobs/s, times", 0.7 / (share + (1 - share) / 8), together["jobs_s"] / theirs["jobs_s"], True))
    rows.append(("completion alone, times sooner", 1.25, theirs["completion_s"] / alone["completion_s"], True))
    rows.append(("first audio alone, share of the job", 1 / 3, alone["first_audio_s"] / alone["completion_s"], False))
    slowest = max(seconds for name, seconds in starts.items() if name != "all")
    rows.append(("start of all stages, times the slowest's", 2.0, starts["all"] / slowest, False))
    return [(what, goal, got, got >= goal if is_least else got <= goal) for what, goal, got, is_least in rows]


def report(result: dict[str, Any], starts: dict[str, float], floors: dict[int, dict[str, Floor]], n: int) -> None:
    print(f"\n{os.cpu_count()} cores, torch {torch.__version__}, {platform.machine()}; float32, greedy")
    print(
        f"{result['num_prompt_tokens']} prompt tokens, {NUM_TEXT_TOKENS} of text, {NUM_CODES} codes "
        f"({AUDIO_S:.1f} s of sound); transformers on {result['reference_threads']} thread(s); "
        f"v = {result['vocoder_share']:.2f}; same text, sound within {result['snr_db']:.0f} dB\n"
    )
    print(f"| median | transformers, 1 | ours, 1 | ratio | ours, {n} | ratio | ours, {n}, codes only | ratio |")
    print("|---|---|---|---|---|---|---|---|")
    theirs, *ours = (result[name] for name in ("transformers", "alone", "together", "without_vocoder"))
    for column in (theirs, *ours):
        column["rtf"] = column["completion_s"] / AUDIO_S
    for name in theirs:
        # Codes only: there is no audio to wait for.
        cells = " | ".join(
            f"{one[name]:.3g} | {one[name] / theirs[name]:.2f}" if one[name] > 0 else "|" for one in ours
        )
        print(f"| {name} | {theirs[name]:.3g} | {cells} |")
    memory = result["memory_mib"]
    print(f"| memory, MiB | {memory['transformers']:.0f} | {memory['ours']:.0f} | | | | | |")
    print("\n| floor of a step | linear, ms | GB/s | GFLOP/s | KV cache, ms | tokens/s |\n|---|---|---|---|---|---|")
    for batch, stages in floors.items():
        for name, floor in stages.items():
            cells = f"{floor.linear_ms:.1f} | {floor.gigabytes_s:.1f} | {floor.gigaflops:.1f} | {floor.kv_cache_ms:.1f}"
            print(f"| {name}, {batch} | {cells} | {batch / floor.step_ms * 1e3:.0f} |")
    print("\n| start | s |\n|---|---|")
    for name, seconds in starts.items():
        print(f"| {name} | {seconds:.1f} |")
    print("\n| goal | at least / at most | measured | |\n|---|---|---|---|")
    for what, goal, got, reached in goals(result, starts):
        print(f"| {what} | {goal:.2f} | {got:.2f} | {'reached' if reached else 'MISSED'} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--concurrency", type=int, default=16)
    parser.add_argument("--prompt-tokens", type=int, default=842)
    parser.add_argument("--checkpoint", type=Path, help="made beforehand; a new one by default")
    parser.add_argument("--serve-reference", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--start", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve_reference:
        return serve_reference(options.serve_reference)
    if options.start:
        return start_stage(options.checkpoint, options.start)
    with tempfile.TemporaryDirectory() as directory:
        path = options.checkpoint or build(Path(directory), shape=SHAPE)
        floors = {batch: measure_floors(batch, options.prompt_tokens) for batch in (1, options.concurrency)}
        starts = {name: measure_start(path, name) for name in ("thinker", "talker", "token2wav", "all")}
        reference = ReferenceProcess(path)
        omni = AsyncOmni(path, **ENGINE_ARGS)

        async def run() -> dict[str, Any]:
            try:
                return await measure(omni, reference, options)
            finally:
                await omni.aclose()

        try:
            result = asyncio.run(run())
        finally:
            reference.close()
    report(result, starts, floors, options.concurrency)
    floors_json = {batch: {name: floor._asdict() for name, floor in stages.items()} for batch, stages in floors.items()}
    print(json.dumps({**result, "start_s": starts, "floor": floors_json, "goals": goals(result, starts)}))


if __name__ == "__main__":
    main()
