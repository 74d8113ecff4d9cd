"""What the front end is spared where the controllers of replicas run beside them: a part of ``benchmarks/hosts.py``.

Baseline: the same deployment with the controllers in the front end.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import psutil

from benchmarks.host_deployments import TALKERS, Answer, Deployment, ask_at_once, speech_of

BESIDE, FRONT_END = "controllers beside the talkers", "controllers in the front end"
FLAGS = {BESIDE: "--stage=talker.balance=round_robin", FRONT_END: "--stage=talker.balance=affinity"}
"""A replica that is chosen by its prompt is chosen by the front end, which then has the controllers."""

RATE, CPU_MS = "requests/s", "CPU of the front end, ms a request"


def cpu_s(process: psutil.Process) -> float:
    """By the clock of ``clock_getcpuclockid``: /proc counts in steps of 10 ms."""
    return time.clock_gettime(~process.pid << 3 | 2)


@contextmanager
def deployments(model: Path, directory: Path) -> Iterator[dict[str, Deployment]]:
    """Two talkers, each on a host, with their controllers here and there."""
    with ExitStack() as stack:
        made = {}
        for name, flag in FLAGS.items():
            place = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="vo", dir=directory)))
            made[name] = Deployment(stack, model, place, TALKERS, [flag])
        yield made


def measure_replicas(
    model: Path, directory: Path, num_runs: int, num_at_once: int, num_tokens: int, num_codes: int
) -> dict[str, dict[str, list[float]]]:
    """Requests per second of many at once, and what each costs the front end; both sides are alive, and take turns."""
    with deployments(model, directory) as sides:
        found: dict[str, dict[str, list[float]]] = {what: {name: [] for name in sides} for what in (RATE, CPU_MS)}
        for run in range(-1, num_runs):  # the first warms up
            bodies = [speech_of(100 * run + number, num_tokens, num_codes) for number in range(num_at_once)]
            answers: dict[str, Sequence[Answer]] = {}
            for name, side in list(sides.items())[:: 1 if run % 2 else -1]:
                before, started_at = cpu_s(side.server.process), time.perf_counter()
                answers[name] = ask_at_once(side.server, bodies)
                if run >= 0:
                    found[RATE][name].append(num_at_once / (time.perf_counter() - started_at))
                    found[CPU_MS][name].append(1e3 * (cpu_s(side.server.process) - before) / num_at_once)
            one, other = ([_said(answer) for answer in answers[name]] for name in sides)
            assert one == other, "the two sides do not answer alike"
    return found


def _said(answer: Answer) -> tuple[Any, ...]:
    return answer.text, answer.num_bytes
