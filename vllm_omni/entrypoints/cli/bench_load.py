"""``vllm-omni bench load``: open-loop load at several rates, or of a trace, on one server or two."""

from __future__ import annotations

import asyncio
import json
import math
import os
import sys
from argparse import ArgumentTypeError, Namespace
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from vllm_omni.entrypoints.bench.load import Endpoint, Point, describe_rate, measure, open_session, warm_up
from vllm_omni.entrypoints.bench.report import TARGETS, parse_targets
from vllm_omni.entrypoints.bench.requests import BACKENDS
from vllm_omni.entrypoints.bench.workload import (
    SECONDS,
    TEXTS,
    Workload,
    at_rate,
    make_arrivals,
    rate_of,
    read_prompts,
    read_trace,
)
from vllm_omni.entrypoints.cli.parser import RejectingParser, reason
from vllm_omni.entrypoints.cli.server import URL, ask_server
from vllm_omni.entrypoints.cli.table import table_lines
from vllm_omni.errors import ConfigError, OmniError

NAMES = ("A", "B")
LATE_MS = 50.0
CHAT = "omni-chat"
DESCRIPTION = """Send requests at their times, whatever became of those before them: Poisson arrivals at each rate, or
those of a trace. Two servers are measured in the order A, B, A, and each figure is printed with the ratio of B to A,
beside the A/A band: the ratios that comparing A with itself would give, by how A's own runs differ."""


def bench_load(args: Sequence[str]) -> None:
    """Measure, print, and write what was asked for.

    Raises:
        ConfigError: a wrong argument; nothing was sent.
        OmniError: a server cannot be reached, or fails the first request; or a file cannot be written.
    """
    options = _parser().parse_args(args)
    bounds = parse_targets(options.goodput, "--goodput")
    workloads = make_workloads(options)
    _check_files(options, bounds, workloads)
    body, urls = _read_body(options.extra_body), _read_urls(options.base_url or [URL])
    endpoints = [_endpoint(options, body, name, url) for name, url in zip(NAMES, urls, strict=False)]
    num_repeats = options.repeats or (3 if len(endpoints) > 1 else 1)
    points = asyncio.run(_measure(endpoints, workloads, num_repeats, bounds))
    report = {
        "backend": options.backend,
        "servers": {endpoint.name: {"url": endpoint.url, "model": endpoint.model} for endpoint in endpoints},
        "goodput": bounds,
        "trace": options.trace,
        "points": [_as_json(point) for point in points],
    }
    try:
        if options.result:
            Path(options.result).write_text(json.dumps(report, allow_nan=False) + "\n")
        if options.plot:
            draw_points(points, endpoints, bounds, Path(options.plot))
    except OSError as exc:
        raise OmniError(f"{exc.filename}: {reason(exc)}") from exc


async def _measure(
    endpoints: Sequence[Endpoint], workloads: Sequence[Workload], num_repeats: int, bounds: Mapping[str, float]
) -> list[Point]:
    points = []
    async with open_session() as session:
        for endpoint in endpoints:
            await warm_up(endpoint, workloads[0].arrivals[0], session)
        for workload in workloads:
            point = await measure(endpoints, workload, num_repeats, bounds, session, _tell)
            print("\n".join([*describe_point(point, endpoints), ""]), flush=True)
            points.append(point)
    return points


# -- arguments ---------------------------------------------------------------------------------------------------------


def _parser() -> RejectingParser:
    parser = RejectingParser(prog="vllm-omni bench load", description=DESCRIPTION)
    add = parser.add_argument
    add("--base-url", action="append", metavar="URL", help=f"of a server (default: {URL}); twice: of A and of B")
    add("--backend", required=True, choices=list(BACKENDS), help=f"what is asked: {', '.join(BACKENDS)}")
    add("--model", help="a name of the server's models (default: its first)")
    add("--rates", nargs="+", type=_positive(float), metavar="R", help="requests per second, one run after another")
    add("--num-requests", type=_positive(int), metavar="N", help="at each rate (default: 40, or the whole trace)")
    add("--prompts", metavar="FILE", help="a prompt a line, for Poisson arrivals (default: eight of ours)")
    add("--seed", type=int, help="of Poisson arrivals, the same for each rate and server (default: 0)")
    add("--trace", metavar="FILE", help="arrivals as JSON lines; with --rates, its times are scaled to each of them")
    add("--trace-unit", choices=list(SECONDS), help="of the trace's timestamps (default: s)")
    add("--extra-body", metavar="JSON", help="further fields of every request")
    add("--api-key", metavar="KEY", default=os.environ.get("VLLM_API_KEY"), help="one of the servers'")
    add(
        "--goodput",
        nargs="+",
        default=[],
        metavar="NAME:VALUE",
        help=f"what a good request meets, in ms (rtf: a ratio): {', '.join(TARGETS)}. Example: ttfa:500 gap:50",
    )
    add(
        "--repeats",
        type=_positive(int),
        metavar="N",
        help="runs at each rate (default: 1; of two servers, 3 times A, B, A)",
    )
    add("--timeout-s", type=_positive(float), default=600.0, help="a request without an end by then has failed (600)")
    add("--result", metavar="FILE", help="write all figures of all runs there, as JSON")
    add("--plot", metavar="FILE.png", help="write a picture of rate against goodput there")
    return parser


def _positive(kind: type[int] | type[float]) -> Any:
    def parse(text: str) -> float:
        try:
            value = kind(text)
        except ValueError:
            value = kind(0)
        if not (value > 0 and math.isfinite(value)):
            raise ArgumentTypeError(f"{text!r}: must be {'an integer' if kind is int else 'a number'} above 0")
        return value

    return parse


def make_workloads(options: Namespace) -> list[Workload]:
    """The requests of each rate.

    Raises:
        ConfigError: arguments that contradict each other, or a wrong file.
    """
    if options.trace is None:
        if options.rates is None:
            raise ConfigError("--rates or --trace is needed: what is sent when")
        if options.trace_unit is not None:
            raise ConfigError("--trace-unit has no effect without --trace")
        prompts = TEXTS if options.prompts is None else read_prompts(Path(options.prompts))
        arrivals = make_arrivals(options.num_requests or 40, prompts, np.random.default_rng(options.seed or 0))
    else:
        for name in ("prompts", "seed"):
            if getattr(options, name) is not None:
                raise ConfigError(f"--{name} has no effect with --trace, which says what is sent when")
        arrivals = read_trace(Path(options.trace), options.trace_unit or "s", options.backend == CHAT)
        arrivals = arrivals[: options.num_requests]
    if options.rates is None:
        return [Workload(rate_of(arrivals), arrivals)]
    return [Workload(rate, at_rate(arrivals, rate)) for rate in options.rates]


def _check_files(options: Namespace, bounds: Mapping[str, float], workloads: Sequence[Workload]) -> None:
    for flag, file in (("--result", options.result), ("--plot", options.plot)):
        if file is not None and not Path(file).absolute().parent.is_dir():
            raise ConfigError(f"{flag} {file}: its directory does not exist")
    if options.plot is None:
        return
    if Path(options.plot).suffix.lower() != ".png":
        raise ConfigError(f"--plot {options.plot}: must end with .png")
    if not bounds:
        raise ConfigError("--plot needs --goodput, what a good request meets: for example --goodput e2el:2000")
    if any(math.isinf(workload.rate) for workload in workloads):
        raise ConfigError("--plot needs rates, and the requests of this run arrive at the same time")


def _read_urls(urls: Sequence[str]) -> list[str]:
    if len(urls) > len(NAMES):
        raise ConfigError(f"--base-url: {len(urls)} servers; two at most are compared")
    for url in urls:
        if not url.startswith(("http://", "https://")):
            raise ConfigError(f"--base-url {url}: must begin with http:// or https://")
    return [url.rstrip("/") for url in urls]


def _read_body(text: str | None) -> dict[str, Any]:
    try:
        body = json.loads(text or "{}")
    except ValueError:
        body = None
    if not isinstance(body, dict):
        raise ConfigError(f"--extra-body {text}: must be a JSON object")
    return body


def _endpoint(options: Namespace, body: Mapping[str, Any], name: str, url: str) -> Endpoint:
    model = options.model
    if model is None:
        try:
            model = str(ask_server(Namespace(url=url, api_key=options.api_key), "/v1/models")["data"][0]["id"])
        except (KeyError, IndexError, TypeError) as exc:
            raise OmniError(f"{url}/v1/models: names no model; is this an OpenAI-compatible server?") from exc
    headers = {"Authorization": f"Bearer {options.api_key}"} if options.api_key else {}
    return Endpoint(name, url, model, options.backend, body, headers, options.timeout_s)


def _tell(what: str) -> None:
    print(what, file=sys.stderr, flush=True)


# -- results -----------------------------------------------------------------------------------------------------------


def describe_point(point: Point, endpoints: Sequence[Endpoint]) -> list[str]:
    """A table of the medians over the runs at a rate, with bands and ratios where there are several; what failed."""
    runs = "1 run" if len(point.runs) == 1 else f"{len(point.runs)} runs"
    lines = [f"{describe_rate(point.rate)}: {point.num_requests} requests, {runs}"]
    if len(endpoints) > 1:
        rows = [["FIGURE", "A", "B", "B/A", "A/A BAND", ""]]
        for one in point.comparisons():
            rows.append(
                [
                    one.name,
                    _short(one.a),
                    _short(one.b),
                    f"{one.ratio:.3f}",
                    f"{one.low:.3f} to {one.high:.3f}",
                    one.verdict,
                ]
            )
    else:
        rows = [["FIGURE", "MEDIAN", "LOWEST", "HIGHEST"]]
        for name, value in point.medians("A").items():
            values = point.values("A", name)
            rows.append([name, *map(_short, (value, min(values), max(values)))])
    lines += table_lines(rows)
    for endpoint in endpoints:
        errors = sum((Counter(run.errors) for run in point.runs if run.server == endpoint.name), Counter[str]())
        lines += [f"{endpoint.name}: {number} requests failed: {error}" for error, number in errors.most_common(3)]
    late_ms = max(run.late_ms for run in point.runs)
    if late_ms > LATE_MS:
        lines.append(f"requests were sent up to {late_ms:.0f} ms late: this client is too slow for the rate")
    return lines


def _short(value: float) -> str:
    """Four digits, and no exponent of large values."""
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _as_json(point: Point) -> dict[str, Any]:
    comparisons = point.comparisons() if any(run.server == "B" for run in point.runs) else []
    return {
        "rate": _finite(point.rate),
        "num_requests": point.num_requests,
        "runs": [asdict(run) for run in point.runs],
        "medians": {name: point.medians(name) for name in dict.fromkeys(run.server for run in point.runs)},
        "comparisons": [
            {name: _finite(value) for name, value in asdict(one).items()} | {"verdict": one.verdict}
            for one in comparisons
        ],
    }


def _finite(value: Any) -> Any:
    """JSON has no infinity."""
    return None if isinstance(value, float) and math.isinf(value) else value


def draw_points(
    points: Sequence[Point], endpoints: Sequence[Endpoint], bounds: Mapping[str, float], path: Path
) -> None:
    """Draw the goodput of each server by rate."""
    from vllm_omni.entrypoints.bench.plot import Measured, draw

    curves = {}
    for endpoint in endpoints:
        name = f"{endpoint.name}: {endpoint.url}" if len(endpoints) > 1 else endpoint.url
        of_points = [(point.rate, point.values(endpoint.name, "media_goodput")) for point in points]
        curves[name] = [
            Measured(rate, float(np.median(values)), min(values), max(values)) for rate, values in of_points
        ]
    said = ", ".join(f"{name} <= {bound:g}{'' if name == 'rtf' else ' ms'}" for name, bound in bounds.items())
    draw(f"{endpoints[0].backend}: goodput by offered rate", said, curves, path)
