"""The first token of a prompt with an image that another engine, or an earlier one, has encoded.

    python -m benchmarks.media_pool [--runs 8] [--pause-s 1] [--short]

Baseline: ``plain``, an engine without a pool, which encodes each image. All engines live at the same time and take
turns; each prompt has a new image behind a new text, and each engine's own cache has room for one image.

* ``miss``: the first engine with a pool, to which the image is new, too.
* ``other``: the second one, on the same host, ``--pause-s`` later: from the first one's shared memory.
* ``disk``: an engine that starts when the others have ended and their shared memory is gone.

Model: a LLaVA-1.5 of random parameters, float32, 196 rows an image, whose image encoder is as large as its language
model. Times are those of requests for one token, so they include the front end; medians, ms. All answers are compared.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
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

import numpy as np
import torch
from PIL import Image

from vllm_omni import OmniLLM
from vllm_omni.testing import llava

SHAPE = llava.Shape(
    image_size=224,
    patch_size=16,
    tower_hidden_size=512,
    num_tower_layers=13,
    num_tower_heads=8,
    hidden_size=512,
    num_layers=4,
    num_heads=8,
    max_position_embeddings=512,
)
KINDS = ("plain", "miss", "other", "disk")
POOL = {"memory_bytes": 0, "media_bytes": 256 << 20, "disk_bytes": 0}


def start(model: Path, pool: dict[str, Any] | None) -> OmniLLM:
    settings = {"dtype": "float32", "max_model_len": 512, "max_num_batched_tokens": SHAPE.num_image_tokens}
    return OmniLLM(model, enforce_eager=True, kv_cache_memory_bytes=1 << 28, kv_pool=pool, **settings)


def make_prompt(number: int) -> dict[str, Any]:
    pixels = np.random.default_rng(number).integers(0, 255, (SHAPE.image_size, SHAPE.image_size, 3), dtype=np.uint8)
    return {"prompt": f"<s> w{number} <image> w3", "multi_modal_data": {"image": Image.fromarray(pixels)}}


class Times:
    """Milliseconds by kind, and whether the answers agree."""

    def __init__(self) -> None:
        self.values: dict[str, list[float]] = {}
        self._answers: dict[int, list[int]] = {}

    def take(self, kind: str, engine: OmniLLM, number: int) -> None:
        params = {"temperature": 0.0, "max_tokens": 1, "ignore_eos": True}
        started_at = time.perf_counter()
        (output,) = engine.generate(make_prompt(number), params, use_tqdm=False)
        self.values.setdefault(kind, []).append((time.perf_counter() - started_at) * 1e3)
        answer = list(output.outputs[0].token_ids)
        assert self._answers.setdefault(number, answer) == answer, "the pool changed an answer"


def measure(model: Path, directory: Path, options: argparse.Namespace) -> Times:
    pool = {**POOL, "disk": str(directory / "disk"), "directory": str(directory / "slabs")}
    times, warm = Times(), Times()
    with ExitStack() as stack:
        plain, first, second = (stack.enter_context(start(model, one)) for one in (None, pool, pool))
        for engine in (plain, first, second):
            for number in (100, 101):
                warm.take("", engine, number)
        for number in range(options.runs):
            in_turn = (("plain", plain), ("miss", first)) if number % 2 else (("miss", first), ("plain", plain))
            for kind, engine in in_turn:
                times.take(kind, engine, number)
            time.sleep(options.pause_s)  # what was encoded is stored in the background
            times.take("other", second, number)
    shutil.rmtree(directory / "slabs")
    with start(model, pool) as third:
        warm.take("", third, 102)
        for number in range(options.runs):
            times.take("disk", third, number)
    return times


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=8, help="images")
    parser.add_argument("--pause-s", type=float, default=1.0, help="between a prompt and the same one elsewhere")
    parser.add_argument("--short", action="store_true", help="one short run, to see that it works")
    options = parser.parse_args(arguments)
    if options.short:
        options.runs = 1
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        times = measure(llava.build(directory / "model", SHAPE), directory, options)
    medians = {kind: round(statistics.median(values), 1) for kind, values in times.values.items()}
    machine = f"{os.cpu_count()} cores, torch {torch.__version__}, {platform.machine()}"
    ratios = {"plain / other": medians["plain"] / medians["other"], "miss / plain": medians["miss"] / medians["plain"]}
    print(f"\n{machine}; medians of {options.runs} images\n")
    print("| | " + " | ".join([*KINDS, *ratios]) + " |")
    print("|---|" + "---|" * (len(KINDS) + len(ratios)))
    cells = [*(str(medians[kind]) for kind in KINDS), *(f"{ratio:.2f}" for ratio in ratios.values())]
    print("| first token, ms | " + " | ".join(cells) + " |")
    print(json.dumps({"benchmark": "media_pool", "machine": machine, "runs": options.runs, "median_ms": medians}))


if __name__ == "__main__":
    main()
