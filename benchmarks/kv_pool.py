"""The first token of a prompt whose KV pages another engine, or an earlier one, has left in the pool.

    python -m benchmarks.kv_pool [--runs 6] [--tokens 1000 1500 2000] [--pause-s 1] [--redis URL] [--short]

Baseline: ``plain``, an engine without a pool, which computes the prompt; and its own prefix cache (``local``), which
has the pages already: no pool can be faster. All engines live at the same time and take turns, each prompt is new.

* ``miss``: the first engine with a pool, to which the prompt is new, too.
* ``other``: the second one, on the same host, ``--pause-s`` later: pages come from the first one's slab.
* ``miss redis``: the third one, to which the prompt is new, and which asks a directory in Redis for it (``--redis``).
* ``remote``: the fourth one, which shares Redis alone with the third: pages come from its slab over TCP on loopback.
* ``disk``: an engine that starts when the others have ended and their shared memory is gone.

Model: a Llama with 107 million random parameters, float32; blocks of 128 tokens, greedy. Times are those of requests
for one token, so they include the front end; medians, ms. All answers (8 tokens) are compared.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import shutil
import statistics
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")  # read at import; stdout is for the table
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from vllm_omni import OmniLLM

VOCABULARY = 8192
SIZES = {"hidden_size": 768, "intermediate_size": 2304, "num_hidden_layers": 12, "num_attention_heads": 12}
BLOCK = 128
NUM_COMPARED = 8
KINDS = ("plain", "local", "miss", "other", "disk")
KINDS_OF_REDIS = ("miss redis", "remote")
STAGING_BYTES, DISK_BYTES = 256 << 20, 2 << 30


def build_model(path: Path, *, is_short: bool) -> Path:
    sizes = SIZES | ({"num_hidden_layers": 2} if is_short else {})
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=VOCABULARY, max_position_embeddings=4096, **sizes)
    LlamaForCausalLM(config).save_pretrained(path)
    return path


def start(model: Path, pool: dict[str, Any] | None) -> OmniLLM:
    settings = {"dtype": "float32", "max_model_len": 4096, "block_size": BLOCK, "kv_cache_memory_bytes": 1 << 29}
    return OmniLLM(model, skip_tokenizer_init=True, enforce_eager=True, kv_pool=pool, **settings)


def ask(engine: OmniLLM, ids: list[int], num_tokens: int = 1) -> tuple[float, list[int], int]:
    """Seconds, tokens, and how many of the prompt's tokens were cached."""
    params = {"temperature": 0.0, "max_tokens": num_tokens, "ignore_eos": True, "detokenize": False}
    started_at = time.perf_counter()
    (output,) = engine.generate({"prompt_token_ids": ids}, params, use_tqdm=False)
    took_s = time.perf_counter() - started_at
    return took_s, list(output.outputs[0].token_ids), output.num_cached_tokens or 0


class Times:
    """Milliseconds by kind and length, and whether the answers agree."""

    def __init__(self) -> None:
        self.values: dict[str, list[float]] = {}
        self.cached: dict[str, int] = {}
        self._answers: dict[tuple[int, ...], list[int]] = {}

    def take(self, kind: str, engine: OmniLLM, ids: list[int]) -> None:
        took_s, _, cached = ask(engine, ids)
        self.values.setdefault(f"{kind} {len(ids)}", []).append(took_s * 1e3)
        self.cached[f"{kind} {len(ids)}"] = cached

    def compare(self, engine: OmniLLM, ids: list[int]) -> None:
        _, answer, _ = ask(engine, ids, NUM_COMPARED)
        assert self._answers.setdefault(tuple(ids), answer) == answer, "the pool changed an answer"


def measure(model: Path, directory: Path, options: argparse.Namespace) -> Times:
    memory = {"memory_bytes": options.pool_bytes, "staging_bytes": STAGING_BYTES}
    disk = {"disk": str(directory / "disk"), "disk_bytes": DISK_BYTES}
    pool = {**memory, **disk, "directory": str(directory / "slabs")}
    times, rng = Times(), random.Random(0)
    prompts = [
        [rng.randrange(VOCABULARY) for _ in range(length)] for _ in range(options.runs) for length in options.tokens
    ]
    warm = [[rng.randrange(VOCABULARY) for _ in range(max(options.tokens))] for _ in range(2)]
    with ExitStack() as stack:
        plain, first, second = (stack.enter_context(start(model, one)) for one in (None, pool, pool))
        hosts = [
            stack.enter_context(start(model, {**memory, "directory": str(directory / name), "redis": options.redis}))
            for name in (("third", "fourth") if options.redis else ())
        ]
        for ids in warm:
            for engine in (plain, first, second, *hosts):
                ask(engine, ids)
                time.sleep(options.pause_s)
        for number, ids in enumerate(prompts):
            for kind, engine in (
                (("plain", plain), ("miss", first)) if number % 2 else (("miss", first), ("plain", plain))
            ):
                times.take(kind, engine, ids)
            for engine in hosts[:1]:
                times.take("miss redis", engine, ids)
            time.sleep(options.pause_s)  # as between the turns of a chat: pages are written in the background
            for kind, engine in (("other", second), ("local", plain), *(("remote", engine) for engine in hosts[1:])):
                times.take(kind, engine, ids)
            for engine in (plain, first, second, *hosts):
                times.compare(engine, ids)
    shutil.rmtree(directory / "slabs")
    with start(model, pool) as third:
        ask(third, [rng.randrange(VOCABULARY) for _ in range(max(options.tokens))])
        for ids in prompts:
            times.take("disk", third, ids)
            times.compare(third, ids)
    return times


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=6, help="prompts of each length")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1000, 1500, 2000], help="of prompts")
    parser.add_argument("--pause-s", type=float, default=1.0, help="between a prompt and the same one elsewhere")
    parser.add_argument("--redis", help="URL of an empty Redis on this host: with the kinds that need it")
    parser.add_argument("--pool-bytes", type=int, default=1 << 30, help="shared memory of each engine with a pool")
    parser.add_argument("--short", action="store_true", help="one short run, to see that it works")
    options = parser.parse_args(arguments)
    if options.short:
        options.runs, options.tokens = 1, [300]
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        times = measure(build_model(directory / "model", is_short=options.short), directory, options)
    medians = {key: round(statistics.median(values), 1) for key, values in times.values.items()}
    machine = f"{os.cpu_count()} cores, torch {torch.__version__}, {platform.machine()}"
    print(f"\n{machine}; medians of {options.runs} prompts\n")
    kinds = [*KINDS, *(KINDS_OF_REDIS if options.redis else ())]
    print("| first token, ms | " + " | ".join(kinds) + " | plain / other | other - local | miss / plain |")
    print("|---|" + "---|" * (len(kinds) + 3))
    for length in options.tokens:
        of_length = {kind: medians[f"{kind} {length}"] for kind in kinds}
        plain, local, miss, other = (of_length[kind] for kind in KINDS[:4])
        cells = [*of_length.values(), f"{plain / other:.1f}", round(other - local, 1), f"{miss / plain:.2f}"]
        print(f"| {length} tokens | " + " | ".join(map(str, cells)) + " |")
    print(f"\nTokens from a cache: {times.cached}")
    print(json.dumps({"benchmark": "kv_pool", "ms": medians, "cached": times.cached}))


if __name__ == "__main__":
    main()
