"""Open-loop load on one server or two: each request is sent at its time, whatever became of those before it."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any

import aiohttp
import numpy as np
from vllm.benchmarks.lib.endpoint_request_func import RequestFuncInput

from vllm_omni.entrypoints.bench.compare import Comparison, compare, shared_figures
from vllm_omni.entrypoints.bench.report import summarize
from vllm_omni.entrypoints.bench.requests import BACKENDS, MediaOutput, measured
from vllm_omni.entrypoints.bench.workload import Arrival, Workload
from vllm_omni.errors import OmniError


@dataclass(frozen=True)
class Endpoint:
    """A route of a server, and how it is asked.

    Attributes:
        name: A or B.
        headers: of every request.
        body: fields of every request; those of an arrival come over them.
    """

    name: str
    url: str
    model: str
    backend: str
    body: Mapping[str, Any]
    headers: Mapping[str, str]
    timeout_s: float

    def request(self, arrival: Arrival) -> RequestFuncInput:
        return RequestFuncInput(
            prompt=arrival.prompt,
            api_url=self.url + BACKENDS[self.backend][0],
            prompt_len=0,
            output_len=arrival.output_length or 0,
            ignore_eos=arrival.output_length is not None,
            model=self.model,
            extra_headers=dict(self.headers),
            extra_body={**self.body, **arrival.body},
        )


@dataclass(frozen=True)
class Run:
    """The requests of one rate, sent to one server once.

    Attributes:
        late_ms: by how much requests were sent after their time, the 99th percentile.
        errors: what servers said of failed requests -> how often.
    """

    server: str
    figures: Mapping[str, float]
    late_ms: float
    errors: Mapping[str, int]


@dataclass(frozen=True)
class Point:
    """All runs at one rate."""

    rate: float  # requests per second; infinite: all at once
    num_requests: int
    runs: list[Run] = field(default_factory=list)

    def figures_of(self, server: str) -> list[Mapping[str, float]]:
        return [run.figures for run in self.runs if run.server == server]

    def values(self, server: str, name: str) -> list[float]:
        return [figures[name] for figures in self.figures_of(server)]

    def medians(self, server: str) -> dict[str, float]:
        return {name: median(self.values(server, name)) for name in shared_figures(self.figures_of(server))}

    def comparisons(self) -> list[Comparison]:
        """Of A and B, by the figures that all runs have."""
        names = shared_figures([run.figures for run in self.runs])
        return [compare(name, self.values("A", name), self.values("B", name)) for name in names]


def open_session() -> aiohttp.ClientSession:
    """A session without limits of its own: any number of requests may be open."""
    return aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=None))


async def warm_up(endpoint: Endpoint, arrival: Arrival, session: aiohttp.ClientSession) -> None:
    """Send one request.

    Raises:
        OmniError: it fails.
    """
    (output,) = await replay(endpoint, [replace(arrival, at_s=0.0)], session)
    if not output.success:
        raise OmniError(f"{endpoint.request(arrival).api_url}: the first request failed: {output.error}")


async def measure(
    endpoints: Sequence[Endpoint],
    workload: Workload,
    num_repeats: int,
    bounds: Mapping[str, float],
    session: aiohttp.ClientSession,
    tell: Callable[[str], object],
) -> Point:
    """Send a workload to each server several times: A, A, ..., or A, B, A, A, B, A, ...

    Around each run of B are two of A, so what changes steadily on the machines meanwhile is no difference of the two.

    Args:
        endpoints: A, or A and B.
        bounds: what a good request meets (``parse_targets``).
        tell: receives which run is next.
    """
    order = [endpoints[0], endpoints[1], endpoints[0]] if len(endpoints) > 1 else [endpoints[0]]
    point = Point(workload.rate, len(workload.arrivals))
    for number, endpoint in enumerate(order * num_repeats, 1):
        tell(f"{describe_rate(workload.rate)}, run {number} of {len(order) * num_repeats}: {endpoint.name}")
        point.runs.append(await _run(endpoint, workload.arrivals, bounds, session))
    return point


def describe_rate(rate: float) -> str:
    return "all at once" if rate == float("inf") else f"{rate:.3g} requests/s"


async def _run(
    endpoint: Endpoint, arrivals: Sequence[Arrival], bounds: Mapping[str, float], session: aiohttp.ClientSession
) -> Run:
    started = time.perf_counter()
    outputs = await replay(endpoint, arrivals, session)
    late = [one.start_time - started - arrival.at_s for one, arrival in zip(outputs, arrivals, strict=True)]
    errors = Counter(one.error for one in outputs if not one.success)
    return Run(endpoint.name, summarize(outputs, bounds), 1000 * float(np.percentile(late, 99)), dict(errors))


async def replay(endpoint: Endpoint, arrivals: Sequence[Arrival], session: aiohttp.ClientSession) -> list[MediaOutput]:
    """Send requests at their times, and wait for all answers; the outputs are in the order of the arrivals."""
    outputs: list[MediaOutput] = []
    send = measured(BACKENDS[endpoint.backend][1], outputs, endpoint.timeout_s)
    started = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for arrival in arrivals:
            await asyncio.sleep(max(started + arrival.at_s - time.perf_counter(), 0.0))
            group.create_task(send(endpoint.request(arrival), session))
    return outputs
