"""What ``vllm-omni bench load`` sends, and when: Poisson arrivals, or those of a trace."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from vllm_omni.errors import ConfigError
from vllm_omni.names import suggest

TEXTS = (
    "The harbour was quiet before the first boats came back with the tide.",
    "Please read the next three stations, and say which of them has a lift.",
    "A small cat sleeps on a warm stone wall in the afternoon sun.",
    "Tell me how bread is made, in two short sentences.",
    "The train to the coast leaves at nine, and returns at six in the evening.",
    "What would you pack for a week in the mountains in early spring?",
    "Snow fell all night, and in the morning the whole street was white.",
    "Describe a lighthouse on a cliff above a stormy sea.",
)
"""The prompts where none are given."""

WORDS = "the of and to in is was for on that with as at by it from are this be or".split()
"""A prompt of ``input_length`` tokens is so many of these, each of which is one token in usual vocabularies."""

TRACE_KEYS = ("timestamp", "prompt", "input_length", "output_length", "body")
SECONDS = {"s": 1.0, "ms": 0.001}


@dataclass(frozen=True)
class Arrival:
    """A request that is sent at a time, whatever became of those before it."""

    at_s: float  # since the first one
    prompt: str
    output_length: int | None = None  # tokens of a chat's reply, which does not end before; None: it ends by itself
    body: Mapping[str, Any] = field(default_factory=dict)  # further fields of the request


class Workload(NamedTuple):
    """The requests of a run."""

    rate: float  # requests per second; infinite: all at once
    arrivals: Sequence[Arrival]


def make_arrivals(num_requests: int, prompts: Sequence[str], rng: np.random.Generator) -> list[Arrival]:
    """Poisson arrivals at one request per second: ``at_rate`` gives the same pattern at another rate.

    As in vLLM's client, the gaps are scaled to have exactly that mean, so that a run of few requests has its rate.
    """
    times = np.concatenate([[0.0], np.cumsum(rng.exponential(size=num_requests - 1))])
    if num_requests > 1:
        times *= (num_requests - 1) / times[-1]
    return [Arrival(float(at), prompts[index % len(prompts)]) for index, at in enumerate(times)]


def rate_of(arrivals: Sequence[Arrival]) -> float:
    """Requests per second; infinite if all arrive at once."""
    last = arrivals[-1].at_s
    return (len(arrivals) - 1) / last if last else math.inf


def at_rate(arrivals: Sequence[Arrival], rate: float) -> list[Arrival]:
    """The same requests with their times scaled.

    Raises:
        ConfigError: they all arrive at once, at any rate.
    """
    before = rate_of(arrivals)
    if math.isinf(before) and len(arrivals) > 1:
        raise ConfigError("--rates: all requests of the trace arrive at the same time, which has no rate to scale")
    return [replace(one, at_s=one.at_s * before / rate if one.at_s else 0.0) for one in arrivals]


def read_prompts(path: Path) -> list[str]:
    """The lines of a file that are not empty.

    Raises:
        ConfigError: it cannot be read, or has none.
    """
    prompts = [line.strip() for line in _read(path, "--prompts").splitlines() if line.strip()]
    if not prompts:
        raise ConfigError(f"--prompts {path}: has no prompt; one line is one prompt")
    return prompts


def read_trace(path: Path, unit: str, has_lengths: bool) -> list[Arrival]:
    """The requests of a trace in the order of their times, of which the first is 0.

    Args:
        path: JSON lines with ``TRACE_KEYS``; ``timestamp`` is needed, and ``prompt`` or ``input_length``.
        unit: of timestamps, a key of ``SECONDS``.
        has_lengths: whether the route answers in tokens, so that ``output_length`` has a meaning.

    Raises:
        ConfigError: the file cannot be read, or a line is wrong.
    """
    arrivals = []
    for number, line in enumerate(_read(path, "--trace").splitlines(), 1):
        if line.strip():
            try:
                arrivals.append(_parse(line, SECONDS[unit], has_lengths))
            except ConfigError as exc:
                raise ConfigError(f"{path}:{number}: {exc}") from None
    if not arrivals:
        raise ConfigError(f'--trace {path}: has no request; a line is one, as in {{"timestamp": 0.5, "prompt": "Hi."}}')
    arrivals.sort(key=lambda one: one.at_s)
    first = arrivals[0].at_s
    return [replace(one, at_s=one.at_s - first) for one in arrivals]


def _parse(line: str, unit_s: float, has_lengths: bool) -> Arrival:
    try:
        record = json.loads(line)
    except ValueError:
        record = None
    if not isinstance(record, dict):
        raise ConfigError('is no JSON object, as {"timestamp": 0.5, "prompt": "Hi."} is')
    for key in record:
        if key not in TRACE_KEYS:
            raise ConfigError(f"{key}: {suggest(key, TRACE_KEYS)}")
    prompt, body = record.get("prompt"), record.get("body", {})
    if (prompt is None) == ("input_length" not in record):
        raise ConfigError("needs either prompt or input_length")
    if prompt is None:
        length = _count(record, "input_length")
        prompt = " ".join(WORDS[index % len(WORDS)] for index in range(length))
    if not isinstance(prompt, str) or not prompt:
        raise ConfigError(f"prompt = {prompt!r}: must be a text")
    if not isinstance(body, dict):
        raise ConfigError(f"body = {body!r}: must be an object with fields of the request")
    output_length = None
    if "output_length" in record:
        if not has_lengths:
            raise ConfigError("output_length: only omni-chat answers in tokens; give sizes of other answers in body")
        output_length = _count(record, "output_length")
    return Arrival(unit_s * _time(record), prompt, output_length, body)


def _time(record: Mapping[str, Any]) -> float:
    value = record.get("timestamp")
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ConfigError(f"timestamp = {value!r}: must be a number")
    return float(value)


def _count(record: Mapping[str, Any], key: str) -> int:
    value = record[key]
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"{key} = {value!r}: must be an integer above 0")
    return value


def _read(path: Path, flag: str) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as exc:
        said = exc.strerror if isinstance(exc, OSError) else "is not UTF-8"
        raise ConfigError(f"{flag} {path}: {said}") from exc
