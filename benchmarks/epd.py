"""Token latency and goodput under image load: stage-level batching and an encode instance, against stock vLLM.

    python -m benchmarks.epd [--quick | --short] [--workloads TextCaps,MME] [--modes stock,ours] [--requests 200]
        [--repeats 5]

Baseline: stock vLLM (``AsyncLLM`` with its own scheduler and worker) on the same checkpoint, cores and arrivals, in the
same run. All engines are started first; while one mode is measured, the engines of the others are suspended, because
an idle engine wakes up often enough to lengthen another engine's token gaps. Two engines are balanced by the least
number of outstanding requests.

* ``stock``, ``ours``: one engine. The only difference of ``ours`` is this project's worker and scheduler, and an SLO
  on each request.
* ``2 stock``, ``2 EPD``, ``E+PD``: two engines; the paper's ablation (section 5.6) in reverse: without stage-level
  batching, without hybrid disaggregation, complete. ``E+PD`` is ``AsyncOmni`` with ``epd="E:1,PD:1"``.

The model is a random LLaVA-1.5 whose vision tower has 24 layers, like the real one, and whose encode takes as long as
10 to 15 decode steps. Its language model does not fit into a processor's cache: one that does decodes twice as fast
alone as beside others, so that three times its unloaded gap would be no SLO. Every engine computes with one thread
(``OMP_NUM_THREADS=1``) and has ``max_num_batched_tokens=256``, so that stock encodes at most one image a step, which
is better for it than its default. Images and words differ between requests and cells, so that no cache helps.

Workloads are named after the paper's datasets. **Their parameters are assumptions**: the text does not give Fig. 9's
numbers. Every request has an image of 196 tokens, and a prompt and an answer as long as ``WORKLOADS`` says. Arrivals
are Poisson, open loop; the clock of a request starts at its scheduled arrival.

Idle time of a mode is cut to ``REST_S`` and later arrivals are moved forward by as much. This changes nothing for a
request and shortens cells of low rates several times.

Modes alternate every ``TURN`` requests, so that a slow phase of a shared machine affects all of them.

SLOs are those of the unloaded stock engine: TTFT 5 times and gap 3 times its medians, over all unloaded requests of a
workload so far; a few are measured before each turn. By the *paper's* rule a request meets its SLO with its TTFT and
90% of its gaps, by the *strict* rule with its TTFT and the 99th percentile of its gaps (``tpot_share``). Goodput is
the rate at which 90% of the requests meet it: searched for on a grid of rates (shares of stock's capacity), and
interpolated between two points of the grid. The search uses one seed (``TUNING_SEED``), the result other seeds.

* gap p99, TTFT, stalls: at one rate for all modes, half of stock's capacity, with strict requests. A stall is a gap
  longer than half of an unloaded encode.
* all at once: requests per second when all arrive at the start and none has an SLO.

Each cell reports how many cores other programs used meanwhile (``others``); ratios of cells in which this differs mean
nothing. ``--quick`` only shows that the benchmark works.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import math
import os
import platform
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")  # read at import, as what follows; stdout is for the table
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("VLLM_USE_V2_MODEL_RUNNER", "0")

import numpy as np
import psutil
from PIL import Image
from vllm import SamplingParams
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM

from vllm_omni.config.budgets import EPD_CONFIG
from vllm_omni.entrypoints.async_omni import AsyncOmni
from vllm_omni.messages.slo import SHARE_OF_GAPS, SLO_ARGS, STRICT_SHARE_OF_GAPS, Slo, SloState
from vllm_omni.testing import llava
from vllm_omni.worker.platforms import find_platform

SHAPE = llava.Shape(
    vocab_size=1024,
    image_size=224,
    patch_size=16,
    tower_hidden_size=256,
    num_tower_layers=25,
    num_tower_heads=4,
    hidden_size=512,
    num_layers=6,
    num_heads=8,
)

TTFT_FACTOR, GAP_FACTOR = 5, 3
ATTAINMENT = 0.9
PAPER, STRICT = "paper", "strict"
RULES = {PAPER: SHARE_OF_GAPS, STRICT: STRICT_SHARE_OF_GAPS}
REST_S = 0.1  # enough for an engine to finish its work after an answer
NOTHING_TO_PROTECT = Slo(ttft_ms=1e9, tpot_ms=1e9)
TUNING_SEED, FIRST_SEED = 1000, 1
TURN = 50  # requests of a mode before the next mode's
WARM_RATE, WARM_SLO = 4.0, Slo(ttft_ms=500.0, tpot_ms=15.0)
SHARES = tuple(0.05 * 1.25**k for k in range(16))  # of stock's capacity: 0.05 to 1.42
EQUAL_SHARE = 0.5
MAX_EXTENSIONS = 4  # of the rates around a goodput, where the search on the tuning seed was off


@dataclass(frozen=True)
class Workload:
    """Assumed lengths, in tokens; each request's are uniform between the two."""

    name: str
    text: tuple[int, int]
    answer: tuple[int, int]
    is_encode_heavy: bool  # answers long enough to meet the encodes of others


WORKLOADS = {
    one.name: one
    for one in (
        Workload("TextCaps", (8, 16), (24, 48), True),  # a caption
        Workload("POPE", (8, 16), (4, 8), False),  # yes or no, in a sentence
        Workload("MME", (16, 32), (2, 4), False),  # yes or no
        Workload("TextVQA", (32, 64), (12, 24), True),  # a question with what was read in the image
        Workload("VizWiz", (8, 24), (16, 64), True),  # a question as it is spoken
    )
}


@dataclass
class Asked:
    """One request."""

    at_s: float  # after the start of the cell
    prompt: str
    image: Image.Image | None
    num_tokens: int


@dataclass
class Answered:
    """Arrival of its tokens, in seconds after its own scheduled arrival."""

    token_s: list[float] = field(default_factory=list)

    @property
    def gaps(self) -> list[float]:
        return [later - earlier for earlier, later in itertools.pairwise(self.token_s)]


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that this share of them does not exceed; 0 if there are none."""
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)] if values else 0.0


def goodput(shares: Mapping[float, float]) -> float:
    """The rate at which the attainment falls below 90%, interpolated between the last rate above and the next one.

    Args:
        shares: rate -> share of requests that met their SLO.
    """
    last, last_share = 0.0, 1.0
    for rate, share in sorted(shares.items()):
        if share < ATTAINMENT:
            return last + (rate - last) * (last_share - ATTAINMENT) / (last_share - share)
        last, last_share = rate, share
    return last


def make_requests(
    workload: Workload, shape: llava.Shape, seed: Sequence[int], number: int, rate: float | None
) -> list[Asked]:
    """Poisson arrivals at ``rate`` per second; None: all at once. Images and words depend on the seed."""
    rng = np.random.default_rng([*seed, sum(workload.name.encode())])
    gaps = rng.exponential(1.0, number)
    at = np.cumsum(gaps) / rate if rate else np.zeros(number)
    asked = []
    for at_s in at:
        words = rng.integers(0, shape.vocab_size - 5, rng.integers(workload.text[0], workload.text[1] + 1))
        text = " ".join(f"w{word}" for word in words)
        pixels = rng.integers(0, 255, (shape.image_size, shape.image_size, 3), dtype=np.uint8)
        num_tokens = int(rng.integers(workload.answer[0], workload.answer[1] + 1))
        asked.append(Asked(float(at_s), f"<s> <image> {text}", Image.fromarray(pixels), num_tokens))
    return asked


# -- engines -----------------------------------------------------------------------------------------------------------


class Engine(Protocol):
    def generate(self, prompt: Any, sampling_params: Any, request_id: str) -> AsyncIterator[Any]: ...

    def shutdown(self) -> None: ...


class Started(NamedTuple):
    engine: Engine
    processes: list[psutil.Process]


UNIPROC = "vllm.v1.executor.uniproc_executor.UniProcExecutor"  # no mode has a worker process, with its two hops a step
EPD: dict[str, Any] = {"tpot_ms": 50.0}  # a default: each request has its own


def engine_args(path: Path, shape: llava.Shape) -> dict[str, Any]:
    return {
        "model": str(path),
        "dtype": "float32",
        "enforce_eager": True,
        "max_model_len": min(512, shape.max_position_embeddings),
        "max_num_seqs": 32,
        "max_num_batched_tokens": 256,
        "limit_mm_per_prompt": {"image": 1},
    }


def start_stock(path: Path, shape: llava.Shape) -> Engine:
    args = engine_args(path, shape)
    return AsyncLLM.from_engine_args(
        AsyncEngineArgs(**args, disable_log_stats=True, distributed_executor_backend=UNIPROC)
    )


def start_ours(path: Path, shape: llava.Shape) -> Engine:
    args = AsyncEngineArgs(
        **engine_args(path, shape),
        disable_log_stats=True,
        distributed_executor_backend=UNIPROC,
        worker_cls=find_platform("cpu").ar_worker,
        scheduler_cls="vllm_omni.core.sched.epd.EPDScheduler",
        additional_config={EPD_CONFIG: EPD},
    )
    return AsyncLLM.from_engine_args(args)


def start_split(path: Path, shape: llava.Shape) -> Engine:
    return AsyncOmni(**engine_args(path, shape), epd={"instances": "E:1,PD:1", **EPD})


MODES: dict[str, tuple[Callable[[Path, llava.Shape], Engine], int]] = {
    "stock": (start_stock, 1),
    "ours": (start_ours, 1),
    "2 stock": (start_stock, 2),
    "2 EPD": (start_ours, 2),
    "E+PD": (start_split, 1),
}
BASELINES = {"stock": "stock", "ours": "stock", "2 stock": "2 stock", "2 EPD": "2 stock", "E+PD": "2 stock"}


def start(names: Sequence[str], path: Path, shape: llava.Shape) -> dict[str, Mode]:
    """Modes share equal engines."""
    engines: dict[Any, list[Started]] = {}
    modes = {}
    for name in names:
        make, number = MODES[name]
        alike = engines.setdefault(make, [])
        while len(alike) < number:
            there = _engine_processes()
            engine = make(path, shape)
            alike.append(Started(engine, [one for one in _engine_processes() if one not in there]))
        modes[name] = Mode(name, alike[:number], tells_slo=make is not start_stock)
    return modes


def _engine_processes() -> list[psutil.Process]:
    children = psutil.Process().children(recursive=True)
    return [one for one in children if "".join(one.cmdline()).startswith("VLLM::")]


@contextlib.contextmanager
def only(mode: Mode, modes: Iterable[Mode]) -> Iterator[None]:
    """Suspend the engines of all other modes."""
    others = {process for one in modes for process in one.processes} - set(mode.processes)
    try:
        for process in others:
            process.suspend()
        yield
    finally:
        for process in others:
            process.resume()


class Mode:
    """Engines; a request goes to the one with the fewest outstanding."""

    def __init__(self, name: str, started: Sequence[Started], tells_slo: bool) -> None:
        self.name = name
        self.engines = [engine for engine, _ in started]
        self.processes = [process for _, processes in started for process in processes]
        self._tells_slo = tells_slo
        self._outstanding = [0] * len(started)
        self._ids = itertools.count()

    async def answer(self, asked: Asked, due: float, slo: Slo | None) -> Answered:
        """``due``: its scheduled arrival, by ``time.perf_counter``. ``slo`` None: no SLO."""
        index = min(range(len(self.engines)), key=self._outstanding.__getitem__)
        target = asdict(slo or NOTHING_TO_PROTECT)
        params = SamplingParams(
            temperature=0,
            max_tokens=asked.num_tokens,
            ignore_eos=True,
            output_kind=RequestOutputKind.DELTA,
            extra_args={SLO_ARGS: target} if self._tells_slo else None,
        )
        prompt: dict[str, Any] = {"prompt": asked.prompt}
        if asked.image is not None:
            prompt["multi_modal_data"] = {"image": asked.image}
        answered = Answered()
        self._outstanding[index] += 1
        try:
            stream = self.engines[index].generate(prompt, params, f"{self.name}-{next(self._ids)}")
            async for output in stream:
                now = time.perf_counter()
                answered.token_s += [now - due] * len(output.outputs[0].token_ids)
        finally:
            self._outstanding[index] -= 1
        assert len(answered.token_s) == asked.num_tokens
        return answered


@dataclass
class Cell:
    """The measurements of a mode."""

    answers: list[Answered]
    slo: Slo
    seconds: float  # without the idle time that was cut
    others: float  # cores that other programs used meanwhile

    @property
    def gaps(self) -> list[float]:
        return [gap for answer in self.answers for gap in answer.gaps]

    @property
    def ttfts(self) -> list[float]:
        return [answer.token_s[0] for answer in self.answers]

    @property
    def are_met(self) -> list[bool]:
        return [meets(answer.token_s, self.slo) for answer in self.answers]


def meets(token_s: Sequence[float], slo: Slo) -> bool:
    """Whether a request with these token times met its SLO."""
    state = SloState(slo, arrived_at=0.0)
    for at in token_s:
        state.add_tokens(1, at)
    return state.report().is_met


async def run_cell(mode: Mode, asked: Sequence[Asked], slo: Slo | None) -> Cell:
    """Requests in the order of their arrival; ``slo`` None: only the total time is measured."""
    load = Load()
    began = origin = time.perf_counter()
    answers: list[asyncio.Task[Answered]] = []
    for one in asked:
        while (left := origin + one.at_s - time.perf_counter()) > 0:
            outstanding = [answer for answer in answers if not answer.done()]
            if outstanding:
                await asyncio.wait(outstanding, timeout=left, return_when=asyncio.FIRST_COMPLETED)
            else:
                origin -= max(0.0, left - REST_S)
                await asyncio.sleep(min(left, REST_S))
        answers.append(asyncio.create_task(mode.answer(one, origin + one.at_s, slo)))
    got = await asyncio.gather(*answers)
    return Cell(list(got), slo or NOTHING_TO_PROTECT, time.perf_counter() - began, load.others())


class Load:
    """Cores used by other programs than this process and its children, since construction."""

    def __init__(self) -> None:
        self._began = time.perf_counter()
        self._all, self._own = _busy_s(), _own_s()

    def others(self) -> float:
        passed = time.perf_counter() - self._began
        return max(0.0, (_busy_s() - self._all) - (_own_s() - self._own)) / passed


def _busy_s() -> float:
    times = psutil.cpu_times()
    return times.user + times.system + getattr(times, "nice", 0.0) + getattr(times, "steal", 0.0)


def _own_s() -> float:
    seconds = 0.0
    process = psutil.Process()
    for one in (process, *process.children(recursive=True)):
        with contextlib.suppress(psutil.NoSuchProcess):
            times = one.cpu_times()
            seconds += times.user + times.system
    return seconds


# -- the measurement ---------------------------------------------------------------------------------------------------


class Where(NamedTuple):
    rule: str
    share: float  # of the baseline's capacity

    @property
    def seed(self) -> tuple[int, int]:
        return list(RULES).index(self.rule), round(1000 * self.share)


Point = list[Cell]  # all turns of a mode at one rate


def attained(point: Point) -> float:
    are_met = [is_met for cell in point for is_met in cell.are_met]
    return sum(are_met) / len(are_met)


class Bench:
    """One workload on all modes.

    Args:
        say: receives lines about the progress.
    """

    def __init__(
        self, workload: Workload, modes: dict[str, Mode], options: Options, say: Callable[[str], None]
    ) -> None:
        self.workload = workload
        self.modes = modes
        self.options = options
        self._unloaded_s: dict[str, list[float]] = {"with image": [], "without": [], "gaps": []}
        self._num_unloaded = itertools.count()
        self.capacity: dict[str, float] = {}  # of each baseline, all at once
        self._say = say

    async def run(self) -> dict[str, Any]:
        # Kernels are compiled for each size of a batch, on all sides.
        for number, name in enumerate(self.modes):
            requests = self._requests([TUNING_SEED + 2, number], self.options.num_warm, WARM_RATE)
            async with self._only(name) as mode:
                await run_cell(mode, requests, WARM_SLO)
        modes = list(self.modes)
        at_once: dict[str, list[float]] = {name: [] for name in modes}
        for repeat in range(self.options.repeats):
            await self._unloaded()
            for name in _rotated(modes, repeat):
                cell = await self._cell(name, FIRST_SEED + repeat, None, self.options.num_at_once)
                at_once[name].append(len(cell.answers) / cell.seconds)
        for name in modes:
            self.capacity[name] = statistics.median(at_once[name])
        equal_at = Where(STRICT, EQUAL_SHARE)
        equal = await self._points({name: {equal_at} for name in modes})
        points: dict[str, dict[Where, Point]] = {name: {} for name in modes}
        wanted = {name: await self._search(name) for name in modes}
        for _ in range(MAX_EXTENSIONS):
            for name, found in (await self._points(wanted)).items():
                points[name] |= found
            wanted = {
                name: set().union(*(self._missing(points[name], rule) for rule in self.options.rules)) for name in modes
            }
            if not any(wanted.values()):
                break
        return {
            "slo": asdict(self.slo()),
            "encode_ms": self.encode_s * 1e3,
            "all_at_once": at_once,
            "modes": {name: self._row(name, equal[name][equal_at], points[name], at_once[name]) for name in modes},
        }

    async def _unloaded(self) -> None:
        """Requests to stock, or to the mode that replaces it as the baseline, one by one."""
        name = next(iter(self.modes))
        seed = [TUNING_SEED, next(self._num_unloaded)]
        requests = self._requests(seed, self.options.num_unloaded, None)
        texts = []
        for one in requests:  # its own words, repeated to the length of the prompt; no image
            words = itertools.cycle(one.prompt.split()[2:])
            text = " ".join(itertools.islice(words, self.options.shape.num_image_tokens))
            texts.append(replace(one, prompt=one.prompt.replace("<image>", text), image=None))
        measured = self._unloaded_s
        async with self._only(name) as mode:
            for one, text in zip(requests, texts, strict=True):
                answer = (await run_cell(mode, [one], None)).answers[0]
                measured["with image"].append(answer.token_s[0])
                measured["gaps"] += answer.gaps
                measured["without"].append((await run_cell(mode, [text], None)).answers[0].token_s[0])

    def _median(self, what: str) -> float:
        return statistics.median(self._unloaded_s[what])

    def slo(self, rule: str = STRICT) -> Slo:
        ttft_ms, gap_ms = self._median("with image") * 1e3, self._median("gaps") * 1e3
        return Slo(TTFT_FACTOR * ttft_ms, GAP_FACTOR * gap_ms, RULES[rule])

    @property
    def encode_s(self) -> float:
        return self._median("with image") - self._median("without")

    def _requests(self, seed: Sequence[int], number: int, rate: float | None) -> list[Asked]:
        return make_requests(self.workload, self.options.shape, seed, number, rate)

    async def _cell(self, name: str, seed: int, where: Where | None, number: int) -> Cell:
        """``where`` None: all at once.

        Modes that are compared have equal requests; no other cell has them, as engines may be shared.
        """
        rate = self._rate(name, where.share) if where is not None else None
        of_cell = [seed, list(MODES).index(BASELINES[name]), *(where.seed if where is not None else ())]
        requests = self._requests(of_cell, number, rate)
        async with self._only(name) as mode:
            cell = await run_cell(mode, requests, self.slo(where.rule) if where is not None else None)
        what = f"{rate:.2f}/s, {where.rule}" if where is not None else "all at once"
        self._say(
            f"{self.workload.name}, {name}, {what}: {number} in {cell.seconds:.1f} s; others {cell.others:.2f} cores; "
            f"SLO ({cell.slo.ttft_ms:.0f} and {cell.slo.tpot_ms:.1f} ms) met {attained([cell]):.2f}; gap p99 "
            f"{percentile(cell.gaps, 0.99) * 1e3:.1f} ms, TTFT p50 {percentile(cell.ttfts, 0.5) * 1e3:.0f} ms"
        )
        return cell

    @contextlib.asynccontextmanager
    async def _only(self, name: str) -> AsyncIterator[Mode]:
        with only(self.modes[name], self.modes.values()):
            yield self.modes[name]
            await asyncio.sleep(REST_S)

    def _rate(self, name: str, share: float) -> float:
        """Of the capacity of the mode's baseline, or of the mode itself if there is none."""
        baseline = BASELINES[name]
        return share * self.capacity[baseline if baseline in self.capacity else name]

    async def _search(self, name: str) -> set[Where]:
        """The shares around the goodput by each rule, on the tuning seed: the last good one and the next."""
        wanted: set[Where] = set()
        for rule in self.options.rules:
            low, high = -1, len(self.options.shares)  # the last good one, the first bad one
            while high - low > 1:
                middle = (low + high) // 2
                where = Where(rule, self.options.shares[middle])
                await self._unloaded()
                cell = await self._cell(name, TUNING_SEED + 1, where, min(TURN, self.options.num_requests))
                if attained([cell]) >= ATTAINMENT:
                    low = middle
                else:
                    high = middle
            shares = self.options.shares
            wanted |= {Where(rule, shares[one]) for one in (low, high) if 0 <= one < len(shares)}
        return wanted

    async def _points(self, wanted: Mapping[str, set[Where]]) -> dict[str, dict[Where, Point]]:
        points: dict[str, dict[Where, Point]] = {name: {} for name in wanted}
        for turn in range(math.ceil(self.options.repeats * self.options.num_requests / TURN)):
            await self._unloaded()
            for name in _rotated(list(wanted), turn):
                for where in sorted(wanted[name]):
                    cell = await self._cell(name, FIRST_SEED + turn, where, min(TURN, self.options.num_requests))
                    points[name].setdefault(where, []).append(cell)
        return points

    def _missing(self, points: Mapping[Where, Point], rule: str) -> set[Where]:
        """The next share below or above, where the reported seeds do not agree with the search."""
        shares = self.options.shares
        of_rule = {at.share: point for at, point in points.items() if at.rule == rule}
        are_good = {shares.index(share): attained(point) >= ATTAINMENT for share, point in of_rule.items()}
        if not any(are_good.values()) and min(are_good) > 0:
            return {Where(rule, shares[min(are_good) - 1])}
        if all(are_good.values()) and max(are_good) + 1 < len(shares):
            return {Where(rule, shares[max(are_good) + 1])}
        return set()

    def _row(self, name: str, equal: Point, points: Mapping[Where, Point], at_once: Sequence[float]) -> dict[str, Any]:
        gaps = [gap for cell in equal for gap in cell.gaps]
        ttfts = [ttft for cell in equal for ttft in cell.ttfts]
        attainment: dict[str, dict[float, float]] = {rule: {} for rule in self.options.rules}
        for where, point in points.items():
            attainment[where.rule][self._rate(name, where.share)] = attained(point)
        return {
            "rate": self._rate(name, EQUAL_SHARE),
            "gap_p50_ms": percentile(gaps, 0.5) * 1e3,
            "gap_p99_ms": percentile(gaps, 0.99) * 1e3,
            "ttft_p50_ms": percentile(ttfts, 0.5) * 1e3,
            "ttft_p99_ms": percentile(ttfts, 0.99) * 1e3,
            "stalls_per_1000": 1e3 * sum(gap > self.encode_s / 2 for gap in gaps) / max(1, len(gaps)),
            "all_at_once_s": statistics.median(at_once),
            "goodput_s": {rule: goodput(shares) for rule, shares in attainment.items()},
            "attainment": {
                rule: {f"{rate:.2f}": share for rate, share in sorted(shares.items())}
                for rule, shares in attainment.items()
            },
            "others": max(cell.others for cell in equal),
        }


def _rotated(names: Sequence[str], by: int) -> list[str]:
    by %= len(names)
    return [*names[by:], *names[:by]]


# -- the report --------------------------------------------------------------------------------------------------------


class Goal(NamedTuple):
    what: str
    at_least: float
    got: float


def goals(results: Mapping[str, Any]) -> Iterator[Goal]:
    for name, result in results.items():
        rows, is_heavy = result["modes"], WORKLOADS[name].is_encode_heavy
        for better, baseline, ratio in (("ours", "stock", 1.3), ("E+PD", "2 stock", 1.5)):
            if better not in rows or baseline not in rows:
                continue
            ours, stock = rows[better], rows[baseline]
            if is_heavy:
                yield Goal(f"{name}: gap p99, {baseline} over {better}", 3.0, stock["gap_p99_ms"] / ours["gap_p99_ms"])
            if STRICT in ours["goodput_s"]:
                got = ours["goodput_s"][STRICT] / max(stock["goodput_s"][STRICT], 1e-9)
                yield Goal(f"{name}: goodput, strict, {better} over {baseline}", ratio if is_heavy else 0.95, got)
            if better == "ours":
                got = ours["all_at_once_s"] / stock["all_at_once_s"]
                yield Goal(f"{name}: all at once, {better} over {baseline}", 0.9, got)
        if {"E+PD", "2 EPD", "2 stock"} <= rows.keys() and is_heavy and STRICT in rows["E+PD"]["goodput_s"]:
            full, mixed, stock = (rows[one]["goodput_s"][STRICT] for one in ("E+PD", "2 EPD", "2 stock"))
            yield Goal(f"{name}: goodput, full over no hybrid", 1.0, full / max(mixed, 1e-9))
            yield Goal(f"{name}: goodput, no hybrid over no stage-level batching", 1.0, mixed / max(stock, 1e-9))


COLUMNS = "gap_p50_ms gap_p99_ms ttft_p50_ms ttft_p99_ms stalls_per_1000 all_at_once_s".split()


def report(machine: dict[str, Any], results: Mapping[str, Any], rules: Sequence[str]) -> str:
    titles = ["workload", "mode", "rate", *COLUMNS, *(f"goodput, {rule}" for rule in rules), "others"]
    lines = ["| " + " | ".join(titles) + " |", "|---" * len(titles) + "|"]
    for workload, result in results.items():
        for mode, row in result["modes"].items():
            values = [row["rate"], *(row[name] for name in COLUMNS), *row["goodput_s"].values(), row["others"]]
            lines.append("| " + " | ".join([workload, mode, *(f"{value:.3g}" for value in values)]) + " |")
    lines += ["", "| goal | at least | measured | |", "|---|---|---|---|"]
    for goal in goals(results):
        verdict = "reached" if goal.got >= goal.at_least else "MISSED"
        lines.append(f"| {goal.what} | {goal.at_least:.3g} | {goal.got:.3g} | {verdict} |")
    return "\n".join([*lines, json.dumps({"machine": machine, "workloads": results})])


async def measure(names: Sequence[str], workloads: Sequence[Workload], options: Options, path: Path) -> dict[str, Any]:
    def say(line: str) -> None:
        print(f"{time.perf_counter() - began:6.0f} s  {line}", file=sys.stderr, flush=True)

    began = time.perf_counter()
    modes = await asyncio.to_thread(start, names, path, options.shape)
    try:
        say("all engines are there")
        first = make_requests(workloads[0], options.shape, [TUNING_SEED + 3], 2, None)
        for mode in modes.values():
            await run_cell(mode, first, None)  # after the profile
        return {one.name: await Bench(one, modes, options, say).run() for one in workloads}
    finally:
        for engine in {id(engine): engine for mode in modes.values() for engine in mode.engines}.values():
            engine.shutdown()


@dataclass(frozen=True)
class Options:
    shape: llava.Shape = SHAPE
    num_requests: int = 200  # of a repeat
    repeats: int = 5
    num_at_once: int = 60
    num_warm: int = 40
    num_unloaded: int = 4  # before each turn
    rules: tuple[str, ...] = (STRICT, PAPER)
    shares: tuple[float, ...] = SHARES  # rates of the goodput search, as shares of the baseline's capacity


def some_of(known: Iterable[str]) -> Callable[[str], list[str]]:
    def names(value: str) -> list[str]:
        if unknown := [one for one in value.split(",") if one not in known]:
            raise argparse.ArgumentTypeError(f"unknown {', '.join(unknown)}; known are {', '.join(known)}")
        return value.split(",")

    return names


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workloads", type=some_of(WORKLOADS), default=list(WORKLOADS))
    parser.add_argument("--modes", type=some_of(MODES), default=list(MODES))
    parser.add_argument("--requests", type=int, help="of a mode at one rate, in each repeat; 200, --short: 100")
    parser.add_argument("--repeats", type=int, help="5, --short: 1")
    parser.add_argument("--rules", type=some_of(RULES), help="whose goodput is searched for; both, --short: strict")
    parser.add_argument("--short", action="store_true", help="a first look")
    parser.add_argument("--quick", action="store_true", help="a tiny model, one workload: to see that it runs")
    given = parser.parse_args()
    names = given.modes
    workloads = [WORKLOADS[name] for name in given.workloads]
    options = Options(num_requests=100, repeats=1, rules=(STRICT,)) if given.short else Options()
    options = replace(
        options,
        num_requests=given.requests or options.num_requests,
        repeats=given.repeats or options.repeats,
        rules=tuple(given.rules or options.rules),
    )
    if given.quick:
        options = Options(
            llava.TINY, 6, 1, num_at_once=4, num_warm=4, num_unloaded=3, rules=(STRICT,), shares=SHARES[8:]
        )
        workloads = workloads[:1]
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # otherwise vLLM's engines would outlive this process
    with tempfile.TemporaryDirectory() as directory:
        path = llava.build(Path(directory), options.shape)
        results = asyncio.run(measure(names, workloads, options, path))
    machine = {
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "threads": os.environ["OMP_NUM_THREADS"],
        "requests": options.num_requests,
        "repeats": options.repeats,
    }
    print(report(machine, results, options.rules))


if __name__ == "__main__":
    main()
