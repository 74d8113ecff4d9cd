"""How the stages on one device share its memory: weights and activations first, then the caches.

A stage's cache is between a *minimum*, one request of ``max_model_len``, and a *maximum*, ``max_num_seqs`` of them.
What weights and activations leave is divided in proportion to the maxima; no cache is below its minimum or above its
maximum. A cache that the configuration sizes is taken off first.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain

from msgspec import Struct
from msgspec.structs import replace

from vllm_omni.errors import ConfigError

DEVICE_SHARE = 0.92
"""Of a device's memory, for its stages together: vLLM's default. The rest is for CUDA graphs and fragments."""
HOST_SHARE = 0.5
"""Of the memory that is left on a host, for caches: the front end and other programs use the rest."""
UNPROFILED_DIVISOR = 4
"""A stage without a profile run, a vocoder or a pipeline of diffusers, is estimated to need weights / 4 for a step."""
LENGTH_STEP = 256  # of a suggested max_model_len
_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30}


class StageMemory(Struct, frozen=True, kw_only=True):
    """The needs of one rank of a stage, in bytes."""

    stage: str  # or instance, with its rank if it has several: see ``name_rank``
    weights: int
    activations: int  # largest allocation of a step, beside what stays allocated
    cache_min: int = 0
    cache_max: int = 0
    cache: int | None = None  # as the configuration sizes it
    max_model_len: int = 0
    max_num_seqs: int = 0
    activations_per_seq: int = 0  # of the activations, if it is known
    dtype: str | None = None  # of the weights, if the configuration can change it

    @property
    def least_cache(self) -> int:
        return self.cache_min if self.cache is None else self.cache


class Device(Struct, frozen=True, kw_only=True):
    """A device, or a host without one, at some moment."""

    name: str  # "cpu", "cuda:0"
    total: int  # bytes
    free: int  # of them, now
    is_host: bool = False

    def room(self, stages: Iterable[StageMemory], *, are_loaded: bool) -> int:
        """Bytes for the caches of the stages; negative if there is too little memory without any."""
        return self.room_beside(sum(stage.activations + (0 if are_loaded else stage.weights) for stage in stages))

    def room_beside(self, num_bytes: int) -> int:
        """Bytes for caches beside weights and activations of that size; negative if these have too little memory."""
        left = self.free - num_bytes
        if self.is_host:
            return int(left * HOST_SHARE) if left > 0 else left
        return left - int(self.total * (1 - DEVICE_SHARE))


class DevicePlan(Struct, frozen=True, kw_only=True):
    """The memory of a device, divided."""

    stages: list[StageMemory]
    caches: dict[str, int]  # stage -> bytes; none for a stage without cache

    @property
    def planned(self) -> int:
        """Bytes for everything."""
        return sum(stage.weights + stage.activations for stage in self.stages) + sum(self.caches.values())

    def summary(self) -> str:
        """For the log: "thinker 16.6 GiB of weights, 20.0 GiB of cache; ..."."""
        return "; ".join(
            f"{stage.stage} {format_bytes(stage.weights)} of weights"
            + (f", {format_bytes(self.caches[stage.stage])} of cache" if stage.stage in self.caches else "")
            for stage in self.stages
        )


class DoesNotFit(ConfigError):
    """The stages of a device need more memory than it has; the message has the numbers and the nearest change."""


def name_rank(stage: str, rank: int, num_ranks: int) -> str:
    return stage if num_ranks == 1 else f"{stage} rank {rank}"


def divide(device: Device, stages: Sequence[StageMemory], *, are_loaded: bool) -> DevicePlan:
    """Divide what weights and activations leave between the caches; the order of the stages has no effect.

    Args:
        are_loaded: the device's free memory is what the weights have left.

    Raises:
        DoesNotFit: a cache cannot have its minimum.
    """
    stages = sorted(stages, key=lambda stage: stage.stage)
    room = device.room(stages, are_loaded=are_loaded)
    if _missing(room, stages):
        raise DoesNotFit(_describe(device, room, stages, are_loaded=are_loaded))
    caches = {stage.stage: stage.cache for stage in stages if stage.cache is not None}
    others = [stage for stage in stages if stage.cache is None and stage.cache_max]
    return DevicePlan(stages=stages, caches=caches | _in_proportion(room - sum(caches.values()), others))


def _missing(room: int, stages: Iterable[StageMemory]) -> int:
    """Bytes by which the least caches exceed the room, or a configured cache is below its minimum; 0: they fit."""
    too_small = (stage.cache_min - stage.cache for stage in stages if stage.cache is not None)
    return max(0, sum(stage.least_cache for stage in stages) - room, *too_small)


def _in_proportion(room: int, stages: Sequence[StageMemory]) -> dict[str, int]:
    """Proportional to the maxima, except that stages whose part would be below their minimum get that."""
    caches: dict[str, int] = {}
    while stages:
        whole = sum(stage.cache_max for stage in stages)
        if whole <= room:
            return caches | {stage.stage: stage.cache_max for stage in stages}
        pinned = [stage for stage in stages if stage.cache_min * whole > room * stage.cache_max]
        if not pinned:
            return caches | {stage.stage: room * stage.cache_max // whole for stage in stages}
        caches |= {stage.stage: stage.cache_min for stage in pinned}
        room -= sum(stage.cache_min for stage in pinned)
        stages = [stage for stage in stages if stage.stage not in caches]
    return caches


# -- what does not fit -------------------------------------------------------------------------------------------------


def _describe(device: Device, room: int, stages: Sequence[StageMemory], *, are_loaded: bool) -> str:
    missing = _missing(room, stages)
    elsewhere = (
        (f"give {stage.stage} another device (device_ids)", [one for one in stages if one is not stage])
        for stage in stages
    )
    fitting = (
        change
        for change, changed in chain(changes(missing, stages), elsewhere)
        if not _missing(device.room(changed, are_loaded=are_loaded), changed)
    )
    change = next(fitting, "give some stages another device (device_ids), or use a larger one")
    return f"{describe_shortage(device.name, device, missing, stages)}: {change}"


def describe_shortage(place: str, device: Device, missing: int, stages: Iterable[StageMemory]) -> str:
    """For an error message, which continues with a change that helps."""
    return (
        f"device {place}: {format_bytes(missing)} of memory are missing for its stages: "
        f"{'; '.join(map(_needs, stages))}; it has {format_bytes(device.free)} free of {format_bytes(device.total)}"
    )


def _needs(stage: StageMemory) -> str:
    needs = [f"weights {format_bytes(stage.weights)}", f"activations {format_bytes(stage.activations)}"]
    if stage.cache_min:
        needs.append(f"cache {format_bytes(stage.cache_min)} at least")
    if stage.cache is not None:
        needs.append(f"{format_bytes(stage.cache)} by its configuration")
    return f"{stage.stage}: {', '.join(needs)}"


def changes(missing: int, stages: Sequence[StageMemory]) -> Iterator[tuple[str, list[StageMemory]]]:
    """Changes of settings that may save so many bytes, the nearest first, with the stages as they would be then."""
    by_size = sorted(stages, key=lambda stage: -stage.cache_min)
    for make in (_larger_cache, _smaller_cache, _shorter, _fewer):
        yield from _changes_of_one(make, missing, by_size)
    yield from _all_shorter(missing, stages)
    yield from _changes_of_one(_smaller_weights, missing, by_size)


_Change = tuple[str, StageMemory]


def _changes_of_one(
    make: Callable[[StageMemory, int], Iterator[_Change]], missing: int, stages: Sequence[StageMemory]
) -> Iterator[tuple[str, list[StageMemory]]]:
    for stage in stages:
        for change, changed in make(stage, missing):
            yield change, [changed if one is stage else one for one in stages]


def _larger_cache(stage: StageMemory, missing: int) -> Iterator[_Change]:
    if stage.cache is not None and stage.cache < stage.cache_min:
        yield (
            f"give {stage.stage} {format_bytes(stage.cache_min - stage.cache)} more (gpu_memory_utilization, "
            "kv_cache_memory_bytes)",
            replace(stage, cache=stage.cache_min),
        )


def _smaller_cache(stage: StageMemory, missing: int) -> Iterator[_Change]:
    if stage.cache is not None and stage.cache > missing:
        yield (
            f"give {stage.stage} {format_bytes(missing)} less (kv_cache_memory_bytes)",
            replace(stage, cache=stage.cache - missing),
        )


def _shorter(stage: StageMemory, missing: int) -> Iterator[_Change]:
    if stage.cache_min > missing:
        length = _round(stage.max_model_len * (stage.cache_min - missing) // stage.cache_min)
        if length:
            yield f"give {stage.stage}.max_model_len={length}", _with_length(stage, length)


def _all_shorter(missing: int, stages: Sequence[StageMemory]) -> Iterator[tuple[str, list[StageMemory]]]:
    whole = sum(stage.cache_min for stage in stages)
    if whole > missing:
        length = _round(max(stage.max_model_len for stage in stages) * (whole - missing) // whole)
        if length:
            yield f"give all stages --max-model-len={length}", [_with_length(stage, length) for stage in stages]


def _round(length: int) -> int:
    return length // LENGTH_STEP * LENGTH_STEP


def _with_length(stage: StageMemory, length: int) -> StageMemory:
    if stage.max_model_len <= length:
        return stage
    return replace(stage, cache_min=stage.cache_min * length // stage.max_model_len, max_model_len=length)


def _fewer(stage: StageMemory, missing: int) -> Iterator[_Change]:
    if stage.activations_per_seq:
        saved = -(-missing // stage.activations_per_seq)
        if saved < stage.max_num_seqs:
            fewer = replace(stage, activations=stage.activations - saved * stage.activations_per_seq)
            yield f"give {stage.stage}.max_num_seqs={stage.max_num_seqs - saved}", fewer


def _smaller_weights(stage: StageMemory, missing: int) -> Iterator[_Change]:
    halved = replace(stage, weights=stage.weights // 2)
    if stage.dtype == "float32":
        yield f"give {stage.stage}.dtype=bfloat16", halved
    elif stage.dtype is not None and stage.cache_max:
        yield f"give {stage.stage}.quantization=fp8", halved


def format_bytes(num_bytes: int) -> str:
    """With the largest unit of which there is at least one: "1.5 GiB"."""
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if abs(num_bytes) >= size:
            return f"{num_bytes / size:.1f} {unit}"
    return f"{num_bytes} B"


def parse_bytes(text: str) -> int:
    """Read "24GiB", "80GB" or a number of bytes; raises ``ValueError``."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?) ?([KMG]i?B|)", text, re.IGNORECASE)
    if found is None or not (size := int(float(found[1]) * _UNITS[found[2].upper()])):
        raise ValueError(f"{text!r} is not a size: give for example 24GiB, 80GB or 512MiB")
    return size
