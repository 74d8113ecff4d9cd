"""A thousand simulated replicas on one core: placement, choice of a replica, registry and autoscaling.

    python -m benchmarks.scale [--replicas 1000] [--hosts 125] [--requests 100000] [--seconds 86400] [--short]

Baseline: for the choice of a replica, what ignores or samples its load: a random one, one after the other, and the less
loaded of two random ones, on the same arrivals in the same run, by cost and by the waits that follow. For the others
there is no other implementation: their cost is to be compared with the second in which they are asked once.

The classes are the server's: ``plan`` and ``PlacementPlan``, ``ReplicaGroup`` with its ``Router``, ``HeldPages``, the
registry's ``Replica`` in its encoding, ``Autoscaler``. Simulated are the clock, the arrivals and the engines, each a
queue served one request at a time, with the real ``StageEngine.current_status`` of a status that never changes.
``RedisRegistry`` needs a Redis server, and ``Scaling`` needs engines that start: neither is here.

Regime: all is bound by the interpreter, on one core. Times are CPU time of this process, of one call the median; a
choice is an ``assign`` and its ``release``. Waits are in units of the mean time of a request, at 80 % of the capacity;
a request's time is its tokens, lognormal, and the router is given the prompt and at most 256 tokens of the reply.
Memory is what Python allocates (tracemalloc), in a part that is not timed.
"""

from __future__ import annotations

import argparse
import gc
import heapq
import itertools
import json
import math
import os
import platform
import random
import statistics
import time
import tracemalloc
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar, cast, get_args

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")  # read at import; stdout is for the table

import msgspec

from vllm_omni.config import StageConfig
from vllm_omni.config.epd import MAX_INSTANCES, Balance, Instance, Tasks
from vllm_omni.deploy.autoscale import FULL, Autoscaler, Bounds, Load
from vllm_omni.deploy.placement import PlacementPlan, plan
from vllm_omni.deploy.resources import Host, Stage
from vllm_omni.deploy.shortage import NoPlace
from vllm_omni.engine.replicas import ReplicaGroup, make_replicas
from vllm_omni.engine.stage import StageEngine
from vllm_omni.epd.assignment import NUM_TOKENS_UNKNOWN, RequestSize
from vllm_omni.epd.held_pages import MAX_PAGES, PAGE_TOKENS, HeldPages, content_of
from vllm_omni.epd.router import RequestState
from vllm_omni.flow.remote.registry import HEARTBEAT_S, Replica
from vllm_omni.messages.token_names import TokenNames
from vllm_omni.process.memory import Device, StageMemory
from vllm_omni.process.status import StageStatus

T = TypeVar("T")
SEED = 0
GIB = 1 << 30
DEVICES_PER_HOST = 8
UTILIZATION = 0.8
PROMPT_TOKENS = 1024  # of a prompt whose pages are compared
BALANCES: tuple[Balance, ...] = get_args(Balance)


# -- placement ---------------------------------------------------------------------------------------------------------


class PlacementRun(NamedTuple):
    """Milliseconds, and what a change of the inventory or of a stage has moved."""

    replicas: int
    devices_in_use: int
    first_ms: float
    add_ms: float
    remove_ms: float  # with ``release``
    lose_host_ms: float
    no_place_ms: float
    moved_by_add: int
    lost_with_host: int  # replicas of the host
    moved_with_host: int  # replicas that are elsewhere afterwards
    bytes_per_replica: float


def make_hosts(number: int) -> list[Host]:
    devices = tuple(Device(name=f"cuda:{index}", total=80 * GIB, free=80 * GIB) for index in range(DEVICES_PER_HOST))
    return [Host(f"host{index}", devices) for index in range(number)]


def make_stages(num_replicas: int) -> list[Stage]:
    """A speech pipeline: a thinker on two devices, a talker on one, and for each two vocoders on devices of others."""

    def needs(stage: str, weights: int) -> StageMemory:
        return StageMemory(stage=stage, weights=weights * GIB, activations=2 * GIB, cache_min=GIB, cache_max=8 * GIB)

    quarter = max(1, num_replicas // 4)
    return [
        Stage(name="thinker", replicas=quarter, ranks=2, memory=needs("thinker", 30)),
        Stage(name="talker", replicas=quarter, memory=needs("talker", 10), near=frozenset({"thinker"})),
        Stage(
            name="vocoder",
            replicas=num_replicas - 2 * quarter,
            layer=1,
            memory=needs("vocoder", 2),
            near=frozenset({"talker"}),
        ),
    ]


def measure_placement(num_replicas: int, num_hosts: int) -> PlacementRun:
    stages, hosts = make_stages(num_replicas), make_hosts(num_hosts)
    first, first_ms = timed_ms(lambda: plan(stages, hosts))
    removed, remove_ms = timed_ms(lambda: _without(first, first.of_stage("vocoder")[-1].name))
    added, add_ms = timed_ms(lambda: removed.add("vocoder"))
    lost, lose_host_ms = timed_ms(lambda: plan(stages, hosts[1:], added))
    _, no_place_ms = timed_ms(lambda: _too_many(added, num_hosts * DEVICES_PER_HOST))
    before = {one.name: one.places for one in added.replicas}
    gone = {one.name for one in added.replicas if hosts[0].name in one.hosts}
    return PlacementRun(
        len(first.replicas),
        len({place for one in first.replicas for place in one.places}),
        first_ms,
        add_ms,
        remove_ms,
        lose_host_ms,
        no_place_ms,
        sum(before[one.name] != one.places for one in removed.replicas),
        len(gone),
        sum(before[one.name] != one.places for one in lost.replicas),
        allocated(lambda: plan(stages, hosts)) / num_replicas,
    )


def _without(running: PlacementPlan, name: str) -> PlacementPlan:
    return running.remove(name).release(name)


def _too_many(running: PlacementPlan, count: int) -> None:
    """Ask for more replicas than there are devices; the error names what would fit."""
    try:
        running.add("thinker", count)
    except NoPlace:
        return
    raise AssertionError("there is room for what there cannot be room for")


# -- the choice of a replica -------------------------------------------------------------------------------------------


class SimulatedEngine:
    """What a group asks of an engine, with the status of a real one."""

    current_status = StageEngine.current_status
    spec = None
    has_died = is_drained = False

    def __init__(self, instance: Instance) -> None:
        self.instance, self.name, self._status = instance, instance.name, StageStatus()


def make_group(num_replicas: int, balance: Balance) -> ReplicaGroup:
    """A group of a stage. One that is served has at most ``MAX_INSTANCES``; those above are added afterwards."""
    config = StageConfig(stage_id=0, name="talker", model="simulated", replicas=min(num_replicas, MAX_INSTANCES))
    engines = cast("Any", [SimulatedEngine(one) for one in make_replicas(config)])
    group = ReplicaGroup(config, engines, balance)
    for number in range(MAX_INSTANCES, num_replicas):
        group.add(cast("Any", SimulatedEngine(Instance(config.name, None, number, {}, is_front=False))))
    return group


class Arrival(NamedTuple):
    at: float
    num_prompt_tokens: int
    num_reply_tokens: int
    session: str

    @property
    def service(self) -> float:
        """The time that it takes, in tokens of the reply; a prompt's tokens are computed 50 times as fast."""
        return self.num_prompt_tokens / 50 + self.num_reply_tokens

    def state(self) -> RequestState:
        size = RequestSize(0, self.num_prompt_tokens, min(self.num_reply_tokens, NUM_TOKENS_UNKNOWN))
        return RequestState(size, session=self.session)


def make_arrivals(number: int, num_replicas: int) -> list[Arrival]:
    """Requests at random times, at ``UTILIZATION`` of what the replicas can serve."""
    rng, now, found = random.Random(SEED), 0.0, []
    for _ in range(number):
        prompt, reply = (max(1, round(rng.lognormvariate(math.log(median), 1.0))) for median in (500, 100))
        found.append(Arrival(0.0, prompt, reply, f"session {rng.randrange(20 * num_replicas)}"))
    gap = statistics.fmean(one.service for one in found) / (UTILIZATION * num_replicas)
    for index, one in enumerate(found):
        now += rng.expovariate(1 / gap)
        found[index] = one._replace(at=now)
    return found


Choose = Callable[[Arrival], tuple[int, Callable[[], None]]]
"""Returns the number of a replica, and what to call when the request has ended there."""


def by_group(group: ReplicaGroup) -> Choose:
    numbers = {name: number for number, name in enumerate(group.engines)}

    def choose(arrival: Arrival) -> tuple[int, Callable[[], None]]:
        assignment = group.assign(arrival.state())
        assert assignment is not None, "all replicas run"
        return numbers[assignment.instance], lambda: group.router.release(assignment)

    return choose


def at_random(num_replicas: int) -> Choose:
    rng = random.Random(SEED + 1)
    return lambda arrival: (rng.randrange(num_replicas), lambda: None)


def in_order(num_replicas: int) -> Choose:
    numbers = itertools.cycle(range(num_replicas))
    return lambda arrival: (next(numbers), lambda: None)


def of_two(num_replicas: int) -> Choose:
    """The less loaded of two random replicas; load as the router measures it."""
    rng, work = random.Random(SEED + 1), [0] * num_replicas

    def choose(arrival: Arrival) -> tuple[int, Callable[[], None]]:
        number = min(rng.randrange(num_replicas), rng.randrange(num_replicas), key=work.__getitem__)
        size = arrival.num_prompt_tokens + min(arrival.num_reply_tokens, NUM_TOKENS_UNKNOWN)
        work[number] += size

        def release() -> None:
            work[number] -= size

        return number, release

    return choose


def choosers(num_replicas: int) -> dict[str, Choose]:
    groups = {balance: by_group(make_group(num_replicas, balance)) for balance in BALANCES if balance != "affinity"}
    return {
        **groups,
        "baseline: random": at_random(num_replicas),
        "baseline: in order": in_order(num_replicas),
        "baseline: less of two": of_two(num_replicas),
    }


class Waits(NamedTuple):
    """In units of the mean time of a request."""

    mean: float
    p99: float
    longest_queue: int  # requests that a replica had at once


def simulate(arrivals: Sequence[Arrival], num_replicas: int, choose: Choose) -> Waits:
    """Serve the requests, each replica one at a time in the order of arrival."""
    free_at, queued, longest = [0.0] * num_replicas, [0] * num_replicas, 0
    running: list[tuple[float, int, int, Callable[[], None]]] = []  # end, sequence number, replica, release
    waits = []
    for sequence, one in enumerate(arrivals):
        while running and running[0][0] <= one.at:
            _, _, ended, release = heapq.heappop(running)
            queued[ended] -= 1
            release()
        number, release = choose(one)
        start = max(one.at, free_at[number])
        free_at[number] = start + one.service
        waits.append(start - one.at)
        queued[number] += 1
        longest = max(longest, queued[number])
        heapq.heappush(running, (free_at[number], sequence, number, release))
    for *_, release in running:
        release()
    mean = statistics.fmean(one.service for one in arrivals)
    return Waits(statistics.fmean(waits) / mean, statistics.quantiles(waits, n=100)[98] / mean, longest)


def cost_us(choose: Choose, arrivals: Sequence[Arrival]) -> float:
    """Median microseconds of one choice and its release."""

    def one_choice(arrival: Arrival) -> None:
        choose(arrival)[1]()

    return 1000 * statistics.median(timed_ms(lambda one=one: one_choice(one))[1] for one in arrivals)


def affinity_cost_us(num_replicas: int, number: int) -> float:
    """The same by the pages that replicas hold, with prompts of ``PROMPT_TOKENS`` that two requests each share."""
    group, times = make_group(num_replicas, "affinity"), []
    for index in range(number):
        names = TokenNames([index // 2] * PROMPT_TOKENS)
        state = RequestState(RequestSize(0, PROMPT_TOKENS, 100), names, session=str(index))
        assignment, milliseconds = timed_ms(lambda state=state: group.assign(state))
        assert assignment is not None, "all replicas run"
        group.router.note_found(state, assignment, 0)
        group.router.release(assignment)
        times.append(milliseconds)
    return 1000 * statistics.median(times)


# -- memory ------------------------------------------------------------------------------------------------------------


def held_bytes(num_pages: int) -> float:
    """What the front end remembers of a replica that holds so many pages."""
    pages = HeldPages()

    def fill() -> HeldPages:
        for first in range(0, num_pages, PROMPT_TOKENS // PAGE_TOKENS):
            content = content_of(TokenNames([first] * PROMPT_TOKENS), Tasks.EPD)
            pages.note_computed("talker/0", content)
        return pages

    return allocated(fill)


def growth_bytes(num_replicas: int, arrivals: Sequence[Arrival]) -> float:
    """Bytes that the second half of the requests leaves behind, for each of them; all sessions are known before."""
    group = make_group(num_replicas, "session")
    choose, half = by_group(group), len(arrivals) // 2
    sessions = {one.session: one for one in arrivals}
    tracemalloc.start()
    for one in (*sessions.values(), *arrivals[:half]):
        choose(one)[1]()
    gc.collect()
    before = tracemalloc.get_traced_memory()[0]
    for one in arrivals[half:]:
        choose(one)[1]()
    gc.collect()
    after = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert not any(group.router.statistics().work.values()), "work is left after the last request"
    return (after - before) / (len(arrivals) - half)


# -- the registry ------------------------------------------------------------------------------------------------------


class RegistryRun(NamedTuple):
    bytes_per_replica: float  # as it is stored
    publish_us: float  # to encode a server's replicas, once a second
    list_us: float  # to decode those of all servers


def measure_registry(num_replicas: int) -> RegistryRun:
    servers = [
        tuple(
            Replica(f"server{first}", f"talker/{number}", f"http://host{first}:8000", "model", "running")
            for number in range(min(MAX_INSTANCES, num_replicas - first))
        )
        for first in range(0, num_replicas, MAX_INSTANCES)
    ]
    data = [msgspec.json.encode(one) for one in servers]
    decoder = msgspec.json.Decoder(tuple[Replica, ...])
    _, encode_ms = timed_ms(lambda: [msgspec.json.encode(servers[0]) for _ in range(100)])
    _, decode_ms = timed_ms(lambda: [[decoder.decode(one) for one in data] for _ in range(10)])
    return RegistryRun(sum(map(len, data)) / num_replicas, encode_ms * 10, decode_ms * 100)


# -- autoscaling -------------------------------------------------------------------------------------------------------


class AutoscaleRun(NamedTuple):
    look_ms: float  # at all stages, which it does once a second
    changes: int  # of the target of one stage in the simulated time
    fewest: int
    most: int
    full_share: float  # of the seconds, with more requests than slots
    used_share: float  # of the slots, by requests


def measure_autoscaling(num_stages: int, seconds: int, most: int = MAX_INSTANCES) -> AutoscaleRun:
    """Look at many stages; and follow one through days whose load rises from a tenth to 75 % of the most and falls."""
    now = 0.0
    names = [f"stage{number}" for number in range(num_stages)]
    many = Autoscaler(dict.fromkeys(names, Bounds(1, most)), lambda: now)
    rng, times = random.Random(SEED), []
    for _ in range(20):
        now += 1.0
        loads = [Load(4, 4, 16, rng.randrange(100), rng.randrange(3)) for _ in names]
        times.append(timed_ms(lambda loads=loads: [many.propose(*one) for one in zip(names, loads, strict=True)])[1])

    scaler, slots, start_s = Autoscaler({"talker": Bounds(1, most)}, lambda: now), 16, 60.0
    replicas = target = 1
    ready_at, changes, full, used, had = 0.0, 0, 0, 0.0, [1]
    for second in range(seconds):
        now += 1.0
        level = 0.1 + 0.65 * (0.5 - 0.5 * math.cos(2 * math.pi * second / 86400))
        requests = max(0, round(rng.gauss(level * slots * most, math.sqrt(level * slots * most))))
        if target > replicas and now >= ready_at:  # one after the other, as ``Scaling`` starts them
            replicas, ready_at = replicas + 1, now + start_s
        replicas = min(replicas, target)
        capacity = replicas * slots
        full += requests > capacity
        used += min(requests, capacity) / capacity
        load = Load(replicas, target, slots, requests, max(0, requests - capacity), start_s)
        if (proposal := scaler.propose("talker", load)) is not None:
            ready_at = now + start_s
            target, changes = proposal.replicas, changes + 1
        had.append(replicas)
    return AutoscaleRun(
        statistics.median(times), changes, min(had[-seconds // 2 :]), max(had), full / seconds, used / seconds
    )


# -- all ---------------------------------------------------------------------------------------------------------------


def timed_ms(work: Callable[[], T]) -> tuple[T, float]:
    started = time.process_time_ns()
    result = work()
    return result, (time.process_time_ns() - started) / 1e6


def allocated(make: Callable[[], object]) -> float:
    """Bytes of what a call returns, and whatever it leaves elsewhere."""
    gc.collect()
    tracemalloc.start()
    made = make()
    gc.collect()
    size = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    del made
    return float(size)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    sizes = sorted({min(8, options.replicas), min(MAX_INSTANCES, options.replicas), options.replicas})
    served = min(MAX_INSTANCES, options.replicas)
    arrivals = make_arrivals(options.requests // 5, served)
    costs = {
        size: {
            **{name: cost_us(choose, arrivals[: options.choices]) for name, choose in choosers(size).items()},
            "affinity": affinity_cost_us(size, max(2, options.choices // 10)),
        }
        for size in sizes
    }
    return {
        "placement": measure_placement(options.replicas, options.hosts)._asdict(),
        "choice_us": {str(size): row for size, row in costs.items()},
        "waits": {name: simulate(arrivals, served, one)._asdict() for name, one in choosers(served).items()},
        "bytes": {
            "router_per_replica": router_bytes(options.replicas),
            "pages_per_replica": held_bytes(options.pages),
            "growth_per_request": growth_bytes(served, make_arrivals(options.requests, served)),
        },
        "registry": measure_registry(options.replicas)._asdict(),
        "autoscaling": measure_autoscaling(options.replicas, options.seconds)._asdict(),
    }


def router_bytes(num_replicas: int) -> float:
    """Of a group with its router, after each replica has had a request; engines are not counted."""
    engines = [SimulatedEngine(Instance("talker", None, number, {})) for number in range(num_replicas)]
    group = make_group(1, "session")

    def use() -> None:
        for engine in engines[1:]:
            group.add(cast("Any", engine))
        choose = by_group(group)
        held = [choose(Arrival(0.0, 100, 100, str(number)))[1] for number in range(num_replicas)]
        for release in held:
            release()

    return allocated(use) / num_replicas


def show(result: Mapping[str, Any], options: argparse.Namespace) -> None:
    print(
        f"\n{os.cpu_count()} cores, Python {platform.python_version()}, {platform.machine()}; CPU time, seed {SEED}\n"
    )
    print(f"| placement of {options.replicas} replicas on {options.hosts} hosts | |\n|---|---|")
    for name, value in result["placement"].items():
        print(f"| {name} | {value:.4g} |")
    sizes = list(result["choice_us"])
    print(f"\n| a choice, µs, among | {' | '.join(sizes)} |\n|---|{'---|' * len(sizes)}")
    for name in result["choice_us"][sizes[0]]:
        row = [f"{result['choice_us'][size][name]:.3g}" for size in sizes]
        print(f"| {name} | {' | '.join(row)} |")
    print("\n| waits, in requests | mean | p99 | longest queue |\n|---|---|---|---|")
    for name, row in result["waits"].items():
        print(f"| {name} | {row['mean']:.3f} | {row['p99']:.2f} | {row['longest_queue']} |")
    for part in ("bytes", "registry", "autoscaling"):
        print(f"\n| {part} | |\n|---|---|")
        for name, value in result[part].items():
            print(f"| {name} | {value:.4g} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", type=int, default=1000)
    parser.add_argument("--hosts", type=int, default=125, help=f"of {DEVICES_PER_HOST} devices")
    parser.add_argument("--requests", type=int, default=100_000, help="whose memory is followed; a fifth for the waits")
    parser.add_argument("--seconds", type=int, default=86400, help="that the autoscaler is followed")
    parser.add_argument("--choices", type=int, default=500, help="that are timed, of each policy")
    parser.add_argument("--pages", type=int, default=MAX_PAGES, help="that a replica holds, for the memory of them")
    parser.add_argument("--short", action="store_true", help="few of everything, to see that it works")
    options = parser.parse_args()
    if options.short:
        options.replicas, options.hosts, options.requests, options.seconds = 80, 12, 2000, 2000
        options.choices, options.pages = 20, 256
    result = measure(options)
    show(result, options)
    heading = {"benchmark": "scale", "replicas": options.replicas, "hosts": options.hosts, "seed": SEED}
    print(json.dumps({**heading, "heartbeat_s": HEARTBEAT_S, "full": FULL, **result}))


if __name__ == "__main__":
    main()
