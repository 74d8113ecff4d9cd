"""Cost of copying scattered pages: the library of csrc beside torch, in one run.

    make native && python -m benchmarks.block_copy [--rounds 15] [--threads 1 2] [--quick]

Baseline: the torch twins of ``vllm_omni/ops/block_copy.py`` (``index_select`` and ``index_copy_``, in units of 16 bytes
where they fit), called through the same functions with ``path="torch"``; both times include the checks of the
arguments. Floor: *memcpy*, one contiguous copy of as many bytes.

Regimes: pages of a slab, where the cost of a call, of many small copies, or of memory is the largest in turn. The slab
has four times as many pages as are copied, at random, the same on every side.

Times are medians of interleaved samples with the 10th and 90th percentile, each the mean of as many calls as take some
milliseconds; GB/s count each byte once. The library uses one thread, torch ``--threads``.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from vllm_omni.errors import MissingDependency
from vllm_omni.ops.block_copy import CopyPath, gather_pages, scatter_pages

Copy = Callable[[CopyPath], None]


class Case(NamedTuple):
    name: str
    num_bytes: int
    copy: Copy


PAGES = [(16, 4096), (16, 65536), (256, 65536), (1000, 2048), (1000, 2050)]


def random_bytes(*shape: int) -> torch.Tensor:
    return torch.randint(0, 255, shape, dtype=torch.uint8)


def page_cases(count: int, page_bytes: int) -> list[Case]:
    slab = random_bytes(4 * count, page_bytes)
    flat = random_bytes(count, page_bytes)
    pages = torch.randperm(4 * count)[:count].clone()
    size = f"{count} pages of {page_bytes:,} B"
    return [
        Case(f"gather {size}", flat.nbytes, lambda path: gather_pages(slab, pages, flat, path=path)),
        Case(f"scatter {size}", flat.nbytes, lambda path: scatter_pages(flat, pages, slab, path=path)),
    ]


def time_calls(call: Callable[[], None], count: int) -> float:
    """Microseconds per call."""
    started = time.perf_counter()
    for _ in range(count):
        call()
    return (time.perf_counter() - started) / count * 1e6


def measure(case: Case, options: argparse.Namespace) -> dict[str, Any]:
    whole = random_bytes(case.num_bytes)
    into = torch.empty_like(whole)
    sides: dict[str, tuple[int, Callable[[], None]]] = {
        "memcpy": (1, lambda: into.copy_(whole)),
        "native": (1, lambda: case.copy("native")),
        **{f"torch, {threads}": (threads, lambda: case.copy("torch")) for threads in options.threads},
    }
    samples: dict[str, list[float]] = {name: [] for name in sides}
    count = max(1, int(options.sample_s * 1e6 / max(1.0, time_calls(sides["native"][1], 3))))
    for round_ in range(options.rounds + 1):
        for name, (threads, call) in sides.items():
            torch.set_num_threads(threads)
            one = time_calls(call, count)
            if round_:  # the first warms up
                samples[name].append(one)
    return {"num_bytes": case.num_bytes, **{name: summarize(times) for name, times in samples.items()}}


def summarize(times: list[float]) -> dict[str, float]:
    low, *_, high = statistics.quantiles(times, n=10, method="inclusive") if len(times) > 1 else times * 2
    return {"us": statistics.median(times), "p10": low, "p90": high}


def report(machine: dict[str, Any], table: dict[str, dict[str, Any]], threads: list[int]) -> None:
    print(", ".join(f"{name} {value}" for name, value in machine.items()))
    twins = [f"torch, {count}" for count in threads]
    sides = ["memcpy", "native", *twins]
    print("\n| µs, median (p10-p90) | " + " | ".join(sides), end=" | ")
    print("native, GB/s | " + " | ".join(f"{twin} / native" for twin in twins) + " |")
    print("|---" * (2 + len(sides) + len(twins)) + "|")
    for name, row in table.items():
        cells = ["{us:.3g} ({p10:.3g}-{p90:.3g})".format(**row[side]) for side in sides]
        cells.append(f"{row['num_bytes'] / row['native']['us'] / 1e3:.1f}")
        cells += [f"{row[twin]['us'] / row['native']['us']:.2f}" for twin in twins]
        print(f"| {name} | " + " | ".join(cells) + " |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2], help="of torch")
    parser.add_argument("--sample-s", type=float, default=0.02)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="small and short: only shows that it runs")
    options = parser.parse_args()
    pages = PAGES
    if options.quick:
        options.rounds, options.sample_s = 2, 0.0
        pages = PAGES[:1]
    torch.manual_seed(options.seed)
    table = {}
    try:
        for size in pages:
            for case in page_cases(*size):
                table[case.name] = measure(case, options)
    except MissingDependency as exc:
        raise SystemExit(str(exc)) from exc
    machine = {"device": platform.machine(), "torch": torch.__version__, "rounds": options.rounds, "seed": options.seed}
    report(machine, table, options.threads)
    print(json.dumps({"machine": machine, "us": table}))


if __name__ == "__main__":
    main()
