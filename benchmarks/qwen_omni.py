"""Qwen2.5-Omni in text and speech: this project beside transformers, on one checkpoint and the same cores.

    python -m benchmarks.qwen_omni [--runs 5] [--concurrency 16] [--prompt-tokens 842]

Baseline: transformers' ``Qwen2_5OmniForConditionalGeneration.generate``, one request after the other, which is all that
it can do with audio, in a process of its own, with the number of threads that suits it best (tried at the start). Ours
is ``AsyncOmni`` with the bundled deployment and ``STAGES``. Both sides keep their process; while one works, the other
waits. Runs alternate: transformers, ours alone, ours at the given concurrency.

Workload: the video case of the vLLM-Omni paper (section 4): 842 prompt tokens with a video, 150 tokens of text, 545
codes. Thinker and talker have 34 and 33 million random parameters, float32, greedy; the vocoder is sized to take 10 to
20 % of transformers' time. Regime: on a CPU a step of one request is bound by reading the weights, one of sixteen by
arithmetic; ``floor`` is the time of the linear layers of a step alone, as matmuls of their shapes.

Each request has a video of its own, so that no cache answers. The codes of both sides are compared.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch

from tests.reference.media import Case, format_prompt, make_video
from vllm_omni.entrypoints.async_omni import AsyncOmni
from vllm_omni.model_executor.models.qwen2_5_omni.tiny import TinyShape

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
    """A question about a video; a pair of its 280 x 280 frames makes 100 tokens, the text about 100."""
    video = make_video(2 * max(1, (num_prompt_tokens - 50) // 100), 280, 280, seed=index)
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
    """Only the first call of a name counts: of a model's forward, that is the prompt's."""

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
    first_token: float = 0.0
    last_token: float = 0.0
    first_code: float = 0.0
    last_code: float = 0.0
    first_audio: float = 0.0
    done: float = 0.0
    token_ids: list[int] = field(default_factory=list)
    num_codes: int = 0
    audio: list[torch.Tensor] = field(default_factory=list)


async def run_jobs(omni: AsyncOmni, indices: Sequence[int], num_prompt_tokens: int) -> list[Job]:
    """All at once."""
    cases = [make_case(index, num_prompt_tokens) for index in indices]
    origin = time.perf_counter()

    def now() -> float:
        return time.perf_counter() - origin

    async def run(case: Case) -> Job:
        job = Job(now())
        async for output in omni.generate(case.vllm_prompt, PARAMS, modalities=["text", "audio", "codec_ids"]):
            media = output.multimodal_output
            if output.outputs and output.outputs[0].token_ids:
                job.first_token, job.last_token = job.first_token or now(), now()
                job.token_ids += output.outputs[0].token_ids
            if media.get("codec_ids"):
                job.first_code, job.last_code = job.first_code or now(), now()
                job.num_codes += len(media["codec_ids"])
            if "audio" in media and len(media["audio"]):
                job.first_audio = job.first_audio or now()
                job.audio.append(media["audio"])
        job.done = now()
        return job

    return list(await asyncio.gather(*(run(case) for case in cases)))


def summarize(jobs: Sequence[Job]) -> dict[str, float]:
    """Rates are over the time from the first job's start in a stage to the last one's end in it."""
    talker_s = max(job.last_code for job in jobs) - min(job.last_token for job in jobs)
    num_codes = sum(job.num_codes for job in jobs)
    num_tokens = sum(len(job.token_ids) for job in jobs)
    return {
        "completion_s": statistics.mean(job.done - job.started for job in jobs),
        "first_audio_s": statistics.mean(job.first_audio - job.started for job in jobs),
        "thinker_tokens_s": num_tokens / max(job.last_token for job in jobs),
        "thinker_decode_tokens_s": num_tokens
        / (max(job.last_token for job in jobs) - min(job.first_token for job in jobs)),
        "talker_tokens_s": num_codes / talker_s,
        "jobs_s": len(jobs) / max(job.done for job in jobs),
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--serve-reference", type=Path)
    parser.add_argument("--checkpoint", type=Path)
    parser.add_argument("--prompt-tokens", type=int, default=842)
    options = parser.parse_args()
    if options.serve_reference:
        serve_reference(options.serve_reference)
        return
    path = options.checkpoint
    ref = ReferenceProcess(path)
    for threads in (1, 2, 1, 2):
        job = ref.answer(0, options.prompt_tokens, threads)
        print(threads, job.times, job.num_prompt_tokens, flush=True)
    omni = AsyncOmni(path, **ENGINE_ARGS)

    async def run():
        for n in (1, 1, 1, 16, 16):
            jobs = await run_jobs(omni, range(n), options.prompt_tokens)
            print(n, summarize(jobs), flush=True)
            if n == 1:
                a = torch.cat(jobs[0].audio)
                e = a - job.waveform
                print(
                    jobs[0].token_ids == job.token_ids,
                    "snr",
                    10 * torch.log10(job.waveform.pow(2).mean() / e.pow(2).mean()),
                    jobs[0],
                ) if 0 else print(
                    jobs[0].token_ids == job.token_ids,
                    "snr",
                    10 * torch.log10(job.waveform.pow(2).mean() / e.pow(2).mean()),
                )
        await omni.aclose()

    asyncio.run(run())
    ref.close()


if __name__ == "__main__":
    main()
