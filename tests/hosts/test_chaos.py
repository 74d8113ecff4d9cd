"""Chaos by seed: engines and hosts are killed, cut off, drained and scaled under load. Every request is answered as it
is alone, or fails with the name of a stage, and nothing is left afterwards.

``FUZZ`` scales the number of events, ``FUZZ_SEED`` runs one seed (``tests/fuzz.py``). The events of a seed are the same
in each run; when they hit the requests is not.
"""

import asyncio
import os
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests import machine, zygote
from tests.fuzz import ONLY_SEED, num_cases
from tests.hosts import deployments
from tests.hosts.chaos import (
    IDLE_S,
    LOCAL,
    MAX_LOCAL,
    NUM_CLIENTS,
    ON_HOSTS,
    ORPHAN_S,
    POLL_S,
    RESTARTS,
    STAGES,
    WITH_CONTROLLERS,
    WITH_REPLICAS,
    Chaos,
    Event,
    Load,
    Question,
    Reply,
    answer_alone,
    held,
    make_events,
)
from tests.hosts.deployments import Deployment, deploy, wait_for
from vllm_omni.process.proc import SHM
from vllm_omni.testing import qwen2_5_omni as tiny

NUM_SEEDS = 3
NUM_EVENTS = 30  # of each on each deployment, at FUZZ=1: 60 of a seed
EVENT_TIMEOUT_S = 20.0  # 3 s, on a machine that is busy with other tests

pytestmark = [
    pytest.mark.fuzz,
    pytest.mark.long,
    pytest.mark.timeout(300 + EVENT_TIMEOUT_S * NUM_SEEDS * num_cases(NUM_EVENTS)),
]
MOST = 60  # events of one seed; further ones are those of further seeds
HOSTS = ("box-c", "box-a", "box-b")


def test_a_shorter_schedule_is_the_start_of_a_longer_one() -> None:
    assert list(make_events(7, 60))[:8] == list(make_events(7, 8))


@pytest.fixture(scope="module", params=["replicas", "controllers"])
def deployment(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    """Each engine on a host of its own and its controller with it; with replicas, but for those of the vocoder, which
    run beside the front end."""
    machine.require("networks")
    zygote.ensure_running()
    before = _processes()
    if has_replicas := request.param == "replicas":
        overrides = [f"thinker.host={HOSTS[0]}", "talker.replicas=2", f"talker.host=[{', '.join(HOSTS[1:])}]"]
        overrides += [f"{LOCAL}.max_replicas={MAX_LOCAL}"]
    else:
        overrides = [f"{stage}.host={host}" for stage, host in zip(STAGES, HOSTS, strict=True)]
    checkpoint = tiny.build(tmp_path_factory.mktemp("checkpoint"))
    places = tmp_path_factory.mktemp("logs"), tmp_path_factory.mktemp("h")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(deployments, "ORPHAN_S", ORPHAN_S)
        for name, value in RESTARTS.items():
            patch.setenv(name, value)
        stages = dict(zip(ON_HOSTS if has_replicas else STAGES, HOSTS, strict=True))
        with deploy(checkpoint, places[0], stages, *overrides, hosts_dir=places[1]) as made:
            name = Path(made.omni.engine.orchestrator.running.server_id).name
            yield made
    wait_for("the end of all processes", lambda: _processes() <= before, IDLE_S)
    assert [path.name for path in SHM.iterdir() if path.name.startswith(name)] == []  # semaphores: the tracker's


def _processes() -> set[int]:
    """Children of this process; Python's fork server and resource tracker serve it until its end."""
    found = set()
    for one in psutil.Process().children(recursive=True):
        try:
            line = " ".join(one.cmdline())
            is_helper = any(name in line for name in ("resource_tracker", "forkserver", "ForkServer"))
            if not is_helper and one.status() != psutil.STATUS_ZOMBIE:
                found.add(one.pid)
        except psutil.NoSuchProcess:
            continue
    return found


@pytest.fixture(scope="module")
def alone(deployment: Deployment) -> dict[Question, Reply]:
    return deployment.omni.run(answer_alone(deployment))


def _seeds() -> Iterator[tuple[int, int]]:
    """Seeds, and the number of events of each."""
    number = min(num_cases(NUM_EVENTS), MOST)
    if ONLY_SEED is not None:
        yield ONLY_SEED, number
        return
    first = int(os.environ.get("FUZZ_FIRST_SEED", "1"))
    for seed in range(first, first + max(NUM_SEEDS, NUM_SEEDS * num_cases(NUM_EVENTS) // MOST)):
        yield seed, number


def test_requests_under_chaos_are_answered_as_alone_or_fail_by_name_and_leave_nothing(
    deployment: Deployment, alone: dict[Question, Reply], capsys: pytest.CaptureFixture[str]
) -> None:
    faults = WITH_REPLICAS if "talker/0" in deployment.hosts else WITH_CONTROLLERS
    for seed, number in _seeds():
        started, chaos = time.monotonic(), Chaos(deployment)
        try:
            counts = deployment.omni.run(_run(deployment, alone, chaos, seed, make_events(seed, number, faults)))
        except Exception as exc:
            events = "\n".join(f"  {event}" for event in chaos.past)
            raise AssertionError(f"FUZZ_SEED={seed}: {exc}\nafter the events:\n{events}") from exc
        with capsys.disabled():
            print(f"\nchaos: seed {seed}, {number} events in {time.monotonic() - started:.0f} s, {dict(counts)}")
        assert counts["answered"]


async def _run(
    deployment: Deployment, alone: dict[Question, Reply], chaos: Chaos, seed: int, events: Iterator[Event]
) -> Counter[str]:
    load = Load(deployment, seed, alone)
    async with asyncio.TaskGroup() as tasks:
        for client in range(NUM_CLIENTS):
            tasks.create_task(load.client(client))
        await chaos.run(events)
        load.stop()
    for question, reply in (await answer_alone(deployment)).items():
        reply.check(alone[question])
    try:
        async with asyncio.timeout(IDLE_S):
            while await held(deployment):  # noqa: ASYNC110 - nothing notifies of it
                await asyncio.sleep(POLL_S)
    except TimeoutError:
        raise AssertionError(f"left behind: {await held(deployment)}") from None
    return load.counts
