"""What a run has measured of media, beside what vLLM reports of texts."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from vllm_omni.entrypoints.bench.playback import Playback
from vllm_omni.entrypoints.bench.requests import MediaOutput
from vllm_omni.errors import ConfigError
from vllm_omni.names import suggest

PERCENTILES = (50, 95, 99)
CONTINUITY_MS = (50, 100)
TARGETS = ("ttft", "ttfa", "gap", "rtf", "e2el")
"""What a target may bound: milliseconds, but for ``rtf``, seconds of work for a second of sound."""


def parse_targets(given: Sequence[str], flag: str) -> dict[str, float]:
    """Parse ``ttfa:500``.

    Raises:
        ConfigError: an unknown target, or no number above 0.
    """
    targets = {}
    for one in given:
        name, _, value = one.partition(":")
        if name not in TARGETS:
            raise ConfigError(f"{flag} {one}: {suggest(name, TARGETS)}")
        try:
            targets[name] = float(value)
        except ValueError:
            targets[name] = 0.0
        if not targets[name] > 0.0:
            raise ConfigError(f"{flag} {one}: must be a number above 0, as in {name}:500")
    return targets


def values_of(output: MediaOutput) -> dict[str, float]:
    """What targets bound, of one request that has succeeded."""
    values = {"ttft": 1000 * output.ttft, "e2el": 1000 * output.latency}
    playback = output.playback
    if playback.first_at is not None:
        values["ttfa"] = 1000 * (playback.first_at - output.start_time)
        values["gap"] = 1000 * max(playback.gaps, default=0.0)
        values["rtf"] = output.latency / playback.seconds
    return values


def summarize(outputs: Sequence[MediaOutput], targets: Mapping[str, float]) -> dict[str, float]:
    """The figures of a run.

    Args:
        outputs: of all its requests; those that failed meet no target.
    """
    done = [one for one in outputs if one.success]
    seconds = max(one.start_time + one.latency for one in outputs) - min(one.start_time for one in outputs)
    report: dict[str, float] = {"media_completed": len(done), "media_failed": len(outputs) - len(done)}
    if targets:
        num_met = sum(_meets(one, targets) for one in done)
        report |= {"media_goodput": num_met / seconds, "media_goodput_share": num_met / len(outputs)}
    for name, found in _measured(done).items():
        unit = name if name == "rtf" else f"{name}_ms"
        report |= {f"p{percent}_{unit}": float(np.percentile(found, percent)) for percent in PERCENTILES if found}
    report |= _summarize_sound([one.playback for one in done if one.playback.first_at is not None], seconds)
    for name in ("images", "videos"):
        if number := sum(getattr(one, f"num_{name}") for one in done):
            report[f"{name}_per_second"] = number / seconds
    return report


def _meets(output: MediaOutput, targets: Mapping[str, float]) -> bool:
    """Whether it is within all targets; a value that it lacks is a target that it misses: a speech without sound."""
    values = values_of(output)
    return all(values.get(name, math.inf) <= bound for name, bound in targets.items())


def _measured(done: Sequence[MediaOutput]) -> dict[str, list[float]]:
    """Name of what percentiles are taken of -> its values, of the requests that have one."""
    values = [values_of(one) for one in done]
    measured = {name: [one[name] for one in values if name in one] for name in TARGETS}
    measured["ttft"] = [1000 * one.ttft for one in done if one.generated_text]
    measured["pauses"] = [1000 * one.playback.paused_s for one in done if one.playback.first_at is not None]
    return measured


def _summarize_sound(spoken: Sequence[Playback], seconds: float) -> dict[str, float]:
    """The figures of the sound of a run of this many seconds."""
    if not spoken:
        return {}
    report = {"audio_seconds_per_second": sum(one.seconds for one in spoken) / seconds}
    for longest in CONTINUITY_MS:
        report[f"c{longest}"] = sum(one.is_continuous(longest / 1000) for one in spoken) / len(spoken)
    return report
