"""A tiny LLaVA whose encode, prefill and decode instances are on three hosts, which die, return and are drained."""

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest

from tests import machine
from tests.e2e.engines import MARKS, PATIENT, UPSTREAM, greedy, tokens_of, upstream_answers
from tests.e2e.test_epd_instances import count_leases, make_prompts
from tests.e2e.test_epd_transports import SHAPE, all_leases_end
from tests.hosts.deployments import TIMEOUT_S, Deployment, deploy, wait_for
from vllm_omni.engine.instances import InstanceGroup
from vllm_omni.errors import StageFailed
from vllm_omni.messages.outputs import collect
from vllm_omni.process.status import StageState
from vllm_omni.testing import llava as llava

pytestmark = [*MARKS, pytest.mark.timeout(600), pytest.mark.long]

HOSTS = {"language/E0": "box-e", "language/P0": "box-p", "language/D0": "box-d"}
PROMPTS = make_prompts()[1:6]  # a text, and four with an image each
LONG = 240
NUM_TOKENS = 100  # of a reply: hosts die while it is made
NUM_IMAGES = 4
NUM_CLIENTS = 3  # that ask without a pause while a host leaves and returns
PARAMS = greedy(max_tokens=NUM_TOKENS)
EPD = {"instances": "E:1,P:1,D:1", "relay_bytes": 64 << 20, **PATIENT}
ENGINE: dict[str, Any] = {**UPSTREAM, "skip_mm_profiling": True, "epd": EPD}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return llava.build(tmp_path_factory.mktemp("checkpoint"), SHAPE)


@pytest.fixture(scope="module")
def expected(checkpoint: Path) -> list[list[int]]:
    """Replies of one engine on one machine."""
    return tokens_of(upstream_answers(checkpoint, PROMPTS, PARAMS))


@pytest.fixture(scope="module")
def deployment(
    checkpoint: Path, expected: list[list[int]], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Deployment]:
    places = tmp_path_factory.mktemp("logs"), tmp_path_factory.mktemp("h")
    hosts = f"language.host=[{', '.join(HOSTS.values())}]"
    with deploy(checkpoint, places[0], HOSTS, hosts, hosts_dir=places[1], engine=ENGINE) as made:
        yield made


@pytest.fixture
def group(deployment: Deployment) -> Iterator[InstanceGroup]:
    """The stage; after each test nothing is left of its requests."""
    group = deployment.omni.engine.orchestrator.nodes["language"]
    assert isinstance(group, InstanceGroup)
    yield group
    assert not any(group.statistics().work.values())
    deployment.omni.run(deployment.omni.engine.reset_mm_cache())
    assert deployment.omni.run(all_leases_end(group)), deployment.omni.run(count_leases(group))


async def ask(deployment: Deployment, number: int, **params: Any) -> list[int]:
    output = await collect(deployment.omni.engine.generate(PROMPTS[number], greedy(max_tokens=NUM_TOKENS, **params)))
    return list(output.outputs[0].token_ids)


def ask_all(deployment: Deployment) -> list[list[int]]:
    async def all_of_them() -> list[list[int]]:
        return await asyncio.gather(*(ask(deployment, number) for number in range(len(PROMPTS))))

    return deployment.omni.run(all_of_them())


def under_load(
    deployment: Deployment, expected: list[list[int]], change: Callable[[], Coroutine[Any, Any, None]]
) -> None:
    """Run ``change`` while clients ask without a pause; all answers are as expected."""
    is_over = False

    async def client(number: int) -> None:
        while not is_over:
            deployment.omni.engine.orchestrator.forget_images()  # so that the encoder has work as well
            assert await ask(deployment, number % len(PROMPTS)) == expected[number % len(PROMPTS)]
            number += 1

    async def run() -> None:
        nonlocal is_over
        clients = [asyncio.create_task(client(number)) for number in range(NUM_CLIENTS)]
        try:
            await change()
        finally:
            is_over = True
            await asyncio.wait_for(asyncio.gather(*clients), TIMEOUT_S)

    deployment.omni.run(run())


async def until(what: str, is_true: Callable[[], object]) -> None:
    await asyncio.to_thread(wait_for, what, is_true)


async def works(group: InstanceGroup, *names: str) -> None:
    """Wait until each of these instances has been given another task."""
    before = group.statistics().num_tasks
    await until("work", lambda: all(group.statistics().num_tasks[one] > before.get(one, 0) for one in names))


def test_instances_on_three_hosts_answer_as_one_machine(
    deployment: Deployment, group: InstanceGroup, expected: list[list[int]]
) -> None:
    assert ask_all(deployment) == expected
    statistics = group.statistics()
    assert statistics.num_tasks == {"language/E0": 4, "language/P0": 5, "language/D0": 5}
    assert (statistics.num_encoded, statistics.num_migrations, statistics.num_redone) == (4, 5, 0)
    relays = {name: deployment.omni.run(engine.relay_statistics())[0]["tcp"] for name, engine in group.engines.items()}
    counts = {name: (one["num_puts"], one["num_gets"]) for name, one in relays.items()}
    assert counts == {"language/E0": (4, 0), "language/P0": (5, 4), "language/D0": (0, 5)}
    assert ask_all(deployment) == expected  # images and prefixes are cached


def test_a_host_that_is_drained_gives_its_tasks_to_the_others(
    deployment: Deployment, group: InstanceGroup, expected: list[list[int]]
) -> None:
    drain, undrain = deployment.omni.engine.drain, deployment.omni.engine.undrain

    async def change() -> None:
        await works(group, *HOSTS)
        (engine,) = await drain("box-p", TIMEOUT_S)
        assert (engine.engine, engine.is_idle) == ("language/P0", True)
        before = group.statistics().num_tasks["language/P0"]
        await works(group, "language/D0")
        assert group.statistics().num_tasks["language/P0"] == before
        undrain("box-p")
        await works(group, *HOSTS)

    under_load(deployment, expected, change)


def test_requests_of_a_host_that_dies_continue_on_the_others_or_fail_with_the_instances_name(
    deployment: Deployment, group: InstanceGroup, expected: list[list[int]]
) -> None:
    """What prefills can decode. With penalties a reply could differ behind the tokens that the client has."""

    async def change() -> None:
        await works(group, *HOSTS)
        params = greedy(max_tokens=LONG, presence_penalty=1.0)
        async with aclosing(deployment.omni.engine.generate(PROMPTS[0], params)) as outputs:
            await anext(outputs)
            await asyncio.to_thread(deployment.hosts["language/D0"].kill)
            with pytest.raises(StageFailed, match=r"of the reply, which with these .* cannot be resumed") as raised:
                async for _ in outputs:
                    pass
        assert raised.value.stage == "language/D0"
        await works(group, "language/P0")

    under_load(deployment, expected, change)
    deployment.join("language/D0")
    deployment.recovered()
    before = group.statistics().num_tasks
    assert ask_all(deployment) == expected
    assert all(group.statistics().num_tasks[one] > before[one] for one in HOSTS)


@pytest.mark.parametrize("name", HOSTS)
def test_a_host_that_is_cut_off_continues_without_its_requests_and_their_caches(
    deployment: Deployment, group: InstanceGroup, expected: list[list[int]], name: str
) -> None:
    machine.require("networks")
    host, engine = deployment.hosts[name], group.engines[name]
    wait_for("the host reports its processes", engine.pids)
    pids = engine.pids()

    async def change() -> None:
        await works(group, *HOSTS)
        host.cut()
        await until("the loss", lambda: deployment.status(name) is StageState.RESTARTING)
        await works(group, *(one for one in ("language/P0", "language/D0") if one != name))
        host.mend()
        await until("the return", lambda: deployment.status(name) is StageState.RUNNING)
        await works(group, *HOSTS)

    under_load(deployment, expected, change)
    wait_for("the host reports its processes", engine.pids)
    assert engine.pids() == pids  # it has not loaded its weights again


def test_hosts_that_do_not_reach_each_other_compute_what_they_cannot_pull(
    deployment: Deployment, group: InstanceGroup, expected: list[list[int]]
) -> None:
    """The front end reaches all of them, and no request fails."""
    machine.require("networks")
    encodes, prefills, decodes = (deployment.hosts[name] for name in HOSTS)
    for reset in (deployment.omni.engine.reset_encoder_cache, deployment.omni.engine.reset_prefix_cache):
        deployment.omni.run(reset())
    before = group.statistics().num_encoded
    for host in (encodes, decodes):
        prefills.part(host)
    try:
        assert ask_all(deployment) == expected
    finally:
        for host in (encodes, decodes):
            prefills.meet(host)
    assert group.statistics().num_encoded == before + 2 * NUM_IMAGES  # by what encodes, and by what prefills
