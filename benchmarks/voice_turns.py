"""First audio of the turns of a spoken conversation, whose prompts grow: with prefixes from caches, and without.

    python -m benchmarks.voice_turns [--runs 3] [--turns 10] [--tokens 430] [--short]

Baseline: the same server, where the thinker keeps no rows of cached prefixes (``row_cache: false``) and the talker has
no prefix cache, so that both compute the whole prompt of a request with speech. A third server has a pool of pages, and
forgets its prefix caches before each turn: what a server finds after a restart, or another replica. All servers run all
the time and take turns; the others idle.

Workload: a conversation of its own for each run. Every turn adds ``--tokens`` tokens to the prompt: the last reply and
a question. The tenth has 4,300 tokens, 3,870 of them history. Answers have 24 tokens of text and 40 codes, greedy,
float32; thinker and talker have 34 and 33 million random parameters. Regime: a prompt is bound by arithmetic, a step of
one request by reading the weights. ``text`` is the first token, ``code`` the talker's first, ``audio`` the first sound.
The last turn is also measured against the first, which has no history. Text and codes of all sides are compared.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import re
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")  # read at import; stdout is for the table

import torch

from benchmarks.qwen_omni import SHAPE
from vllm_omni.entrypoints.async_omni import AsyncOmni
from vllm_omni.testing.qwen2_5_omni import build

GOAL = 1.2  # first audio of the last turn, times that of the first
SIDES: dict[str, tuple[str, ...]] = {
    "kept": (),
    "computed": ("thinker.row_cache=false", "talker.enable_prefix_caching=false"),
    "pool": (),
}
POOL = {"memory_bytes": 1 << 30, "staging_bytes": 256 << 20}
NUM_TEXT_TOKENS, NUM_CODES = 24, 40
PARAMS = {
    "thinker": {"temperature": 0.0, "max_tokens": NUM_TEXT_TOKENS, "ignore_eos": True},
    "talker": {"temperature": 0.0, "max_tokens": NUM_CODES, "ignore_eos": True},
    "token2wav": {"seed": 0},
}
MODALITIES = ("text", "audio", "codec_ids")


class Turn(NamedTuple):
    """Seconds from the request on, and what was answered."""

    text_s: float
    code_s: float
    audio_s: float
    num_prompt: int
    num_cached: int
    token_ids: list[int]
    codes: list[int]


def start(path: Path, side: str, max_model_len: int, *, is_eager: bool) -> AsyncOmni:
    return AsyncOmni(
        path,
        stage_overrides=SIDES[side],
        kv_pool={**POOL, "directory": str(path / "slabs")} if side == "pool" else None,
        dtype="float32",
        max_model_len=max_model_len,
        max_num_seqs=4,
        skip_mm_profiling=True,
        enforce_eager=is_eager,
    )


def make_turns(conversation: int, num_turns: int, num_tokens: int) -> list[str]:
    """Prompts of a byte to a token, each of which begins with the one before."""
    prompts, prompt = [], ""
    for turn in range(num_turns):
        start = f"<|im_end|>\n<|im_start|>user\nTurn {turn} of conversation {conversation}. "
        end = "<|im_end|>\n<|im_start|>assistant\n"
        said = "".join(chr(97 + (7 * turn + 5 * conversation + i * i) % 26) for i in range(num_tokens))
        num_own = sum(1 if part.startswith("<|") else len(part) for part in re.split(r"(<\|\w+\|>)", start + end))
        prompt += start + said[: num_tokens - num_own] + end
        prompts.append(prompt)
    return prompts


async def ask(omni: AsyncOmni, prompt: str) -> Turn:
    started = time.perf_counter()
    times: dict[str, float] = {}
    token_ids: list[int] = []
    codes: list[int] = []
    num_prompt = num_cached = 0
    async for output in omni.generate(prompt, PARAMS, modalities=MODALITIES):
        now, media = time.perf_counter() - started, output.multimodal_output
        if output.outputs and output.outputs[0].token_ids:
            times.setdefault("text", now)
            token_ids += output.outputs[0].token_ids
            num_prompt = len(output.prompt_token_ids or ()) or num_prompt
            num_cached = max(num_cached, output.num_cached_tokens or 0)
        if media.get("codec_ids"):
            times.setdefault("code", now)
            codes += media["codec_ids"]
        if "audio" in media and len(media["audio"]):
            times.setdefault("audio", now)
    return Turn(times["text"], times["code"], times["audio"], num_prompt, num_cached, token_ids, codes)


async def measure(sides: dict[str, AsyncOmni], options: argparse.Namespace) -> list[dict[str, list[Turn]]]:
    """For each run, the turns of each side; two turns before them warm up."""
    runs = []
    for run in range(-1, options.runs):
        turns: dict[str, list[Turn]] = {name: [] for name in sides}
        for number, prompt in enumerate(make_turns(run + 1, 2 if run < 0 else options.turns, options.tokens)):
            for name in list(sides) if number % 2 else list(sides)[::-1]:
                if name == "pool":
                    assert await sides[name].reset_prefix_cache()
                turns[name].append(await ask(sides[name], prompt))
            kept, *others = ((turns[name][-1].token_ids, turns[name][-1].codes) for name in SIDES)
            assert all(other == kept for other in others), "the sides answer differently"
        if run >= 0:
            runs.append(turns)
    return runs


def summarize(runs: Sequence[dict[str, list[Turn]]]) -> dict[str, list[dict[str, float]]]:
    """Medians by side and turn."""
    summary: dict[str, list[dict[str, float]]] = {}
    for name in SIDES:
        turns = zip(*(run[name] for run in runs), strict=True)
        summary[name] = [
            {key: statistics.median(getattr(one, key) for one in same) for key in Turn._fields[:5]} for same in turns
        ]
    return summary


def goals(summary: dict[str, list[dict[str, float]]]) -> list[tuple[str, float, float, bool]]:
    kept, computed, pool = (summary[name] for name in SIDES)
    ratio = kept[-1]["audio_s"] / kept[0]["audio_s"]
    share = kept[-1]["audio_s"] / computed[-1]["audio_s"]
    first = kept[0]["audio_s"] / computed[0]["audio_s"]
    pooled = pool[-1]["audio_s"] / computed[-1]["audio_s"]
    return [
        ("first audio of the last turn, times that of the first", GOAL, ratio, ratio <= GOAL),
        ("first audio of the last turn, share of the baseline's", 1.0, share, share <= 1.0),
        ("first audio of the first turn, times the baseline's", 1.03, first, first <= 1.03),
        ("first audio of the last turn from the pool, share of the baseline's", 1.0, pooled, pooled <= 1.0),
    ]


def report(summary: dict[str, list[dict[str, float]]], reached: Sequence[tuple[str, float, float, bool]]) -> None:
    print(f"\n{os.cpu_count()} cores, torch {torch.__version__}, {platform.machine()}; float32, greedy, medians\n")
    heads = [f"{what}, {side}" for what in ("text", "code", "audio") for side in SIDES]
    print(f"| turn | prompt | cached | in the pool | {' | '.join(heads)} |")
    print("|" + "---|" * (4 + len(heads)))
    for number, turn in enumerate(zip(*(summary[name] for name in SIDES), strict=True), 1):
        times = " | ".join(f"{one[key]:.3f}" for key in Turn._fields[:3] for one in turn)
        kept, pool = turn[0], turn[-1]
        print(
            f"| {number} | {kept['num_prompt']:.0f} | {kept['num_cached']:.0f} | {pool['num_cached']:.0f} | {times} |"
        )
    print("\n| goal | at most | measured | |\n|---|---|---|---|")
    for what, goal, got, is_reached in reached:
        print(f"| {what} | {goal:.2f} | {got:.2f} | {'reached' if is_reached else 'MISSED'} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--tokens", type=int, default=430, help="of each turn")
    parser.add_argument("--short", action="store_true", help="one run of two turns of a tiny model")
    parser.add_argument("--eager", action="store_true", help="without torch.compile")
    options = parser.parse_args()
    if options.short:
        options.runs, options.turns, options.tokens, options.eager = 1, 2, 200, True
    max_model_len = options.turns * options.tokens + NUM_CODES + 64
    with tempfile.TemporaryDirectory() as directory:
        path = build(Path(directory), **({} if options.short else {"shape": SHAPE}))
        sides = {name: start(path, name, max_model_len, is_eager=options.eager) for name in SIDES}

        async def run() -> list[dict[str, list[Turn]]]:
            try:
                return await measure(sides, options)
            finally:
                for omni in sides.values():
                    await omni.aclose()

        summary = summarize(asyncio.run(run()))
    reached = goals(summary)
    report(summary, reached)
    result: dict[str, Any] = {"summary": summary, "goals": reached}
    print(json.dumps(result))


if __name__ == "__main__":
    main()
