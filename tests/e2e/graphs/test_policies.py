"""Policies that a graph or a deployment declares, on engines: seven language models, each with two replicas."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

import pytest
from transformers import PreTrainedConfig

from tests.e2e.engines import MARKS
from tests.e2e.test_replicas import until
from tests.engine_threads import engine_threads, held_steps
from tests.reference import llama
from vllm_omni.engine.replicas import ReplicaGroup
from vllm_omni.entrypoints.async_omni import AsyncOmni
from vllm_omni.entrypoints.cli.serve import parse_serve_args
from vllm_omni.flow import Field, Graph, Role, Scheduling, interface
from vllm_omni.messages.outputs import collect
from vllm_omni.model_executor.pipeline import Pipeline, StageSpec
from vllm_omni.process.status import StageState

pytestmark = [*MARKS, pytest.mark.timeout(400), pytest.mark.long]  # units: tests/engine/test_replicas.py

TEXT = {"text": Field("text", streamed=True)}
PARAMS = {"temperature": 0.0, "max_tokens": 4, "ignore_eos": True, "detokenize": False}
SMALL: dict[str, Any] = {
    "dtype": "float32",
    "enforce_eager": True,
    "max_model_len": 256,
    "num_gpu_blocks_override": 32,
    "skip_tokenizer_init": True,
}


class Rotating(Role):
    write = interface([["prompt"]], TEXT, scheduling=Scheduling.ROUND_ROBIN)


class Remembering(Role):
    write = interface([["prompt"]], TEXT, scheduling=Scheduling.SESSION)


class Balanced(Role):
    write = interface([["prompt"]], TEXT, scheduling=Scheduling.LEAST_OUTSTANDING)


DECLARED = {"rotating": Rotating, "remembering": Remembering, "balanced": Balanced}
# A deployment gives these another policy than their graph does.
DEPLOYED = {"round_robin": Remembering, "session": Rotating, "least_work": Rotating, "affinity": Rotating}
ROLES = DECLARED | DEPLOYED
DEPLOYMENT = """
stages:
  session: {balance: session}
  affinity: {balance: affinity}
"""
FLAGS = ["--stage", "round_robin.balance=round_robin", "--stage", "least_work.balance=least_work"]


class PoliciesPipeline(Pipeline):
    """A graph of one node for each stage."""

    modalities = {"text": "text"}
    stages = [StageSpec(name, "", "text") for name in ROLES]
    deployment = {"stages": {name: {"engine_type": "ar", "replicas": 2, "engine_args": SMALL} for name in ROLES}}

    def __init__(self, model: str, hf_config: PreTrainedConfig, revision: str | None = None) -> None:
        graphs = []
        for name, role in ROLES.items():
            graph = Graph(name)
            graph.output(text=graph.role(role, name).write(prompt=graph.placeholder("prompt")).text)
            graphs.append(graph)
        self.graph, *self.further_graphs = graphs

    def validate(self, options: Mapping[str, Any]) -> dict[str, Any]:
        return {}


@pytest.fixture(scope="module")
async def omni(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[AsyncOmni]:
    """As ``vllm serve --omni`` starts it."""
    directory = tmp_path_factory.mktemp("policies")
    deployment = directory / "deployment.yaml"
    deployment.write_text(DEPLOYMENT)
    pipeline = f"{__name__}:{PoliciesPipeline.__name__}"
    flags = ["--pipeline", pipeline, "--deploy-config", str(deployment), *FLAGS]
    with engine_threads():
        omni = AsyncOmni(config=parse_serve_args([str(llama.build(directory / "model")), *flags]).load_config())
        try:
            yield omni
        finally:
            omni.shutdown()


def group_of(omni: AsyncOmni, stage: str) -> ReplicaGroup:
    group = omni.orchestrator.nodes[stage]
    assert isinstance(group, ReplicaGroup)
    return group


class Counted:
    """Requests that each replica of a stage gets from now on."""

    def __init__(self, omni: AsyncOmni, stage: str) -> None:
        self._omni, self._stage = omni, stage
        self._group = group_of(omni, stage)
        self._before = Counter(self._group.router.statistics().num_tasks)

    async def ask(self, num_tokens: int = 4, first: int = 1, **more: Any) -> None:
        """Send a prompt of so many tokens; those with another first token have no common prefix."""
        prompt = {"prompt_token_ids": [first, *(2 + number % 50 for number in range(num_tokens - 1))]}
        answer = await collect(self._omni.generate(prompt, {self._stage: PARAMS}, graph=self._stage, **more))
        assert len(answer.outputs[0].token_ids) == PARAMS["max_tokens"]

    async def hold(self, num_tokens: int) -> "asyncio.Task[None]":
        """Send a request to engines that do not run."""
        sent = self.total()
        task = asyncio.create_task(self.ask(num_tokens))
        await until(lambda: self.total() > sent)
        return task

    def total(self) -> int:
        return sum(self.by_replica())

    def by_replica(self) -> Sequence[int]:
        now = Counter(self._group.router.statistics().num_tasks) - self._before
        return [now[name] for name in sorted(self._group.engines)]


@pytest.mark.parametrize("stage", ["rotating", "round_robin"])
async def test_round_robin_alternates_whatever_the_length(omni: AsyncOmni, stage: str) -> None:
    counted = Counted(omni, stage)
    for number in range(4):
        await counted.ask(4 + 90 * (number % 2), session_id="s")
    assert counted.by_replica() == [2, 2]


@pytest.mark.parametrize("stage", ["remembering", "session"])
async def test_a_session_stays_at_its_engine(omni: AsyncOmni, stage: str) -> None:
    engines = set()
    for session in ("a", "b", "c"):
        counted = Counted(omni, stage)
        for num_tokens in (4, 90, 20):
            await counted.ask(num_tokens, session_id=session)
        assert sorted(counted.by_replica()) == [0, 3]
        engines.add(tuple(counted.by_replica()))
    assert len(engines) == 2  # sessions are divided


@pytest.mark.parametrize("stage", ["balanced", "least_work"])
async def test_the_engine_with_the_fewest_outstanding_tokens_gets_the_next_request(omni: AsyncOmni, stage: str) -> None:
    counted = Counted(omni, stage)
    with held_steps():
        tasks = [await counted.hold(num_tokens) for num_tokens in (120, 10, 10, 10)]
        assert sorted(counted.by_replica()) == [1, 3]
    await asyncio.gather(*tasks)


async def test_with_affinity_a_prefix_goes_to_the_engine_that_had_it(omni: AsyncOmni) -> None:
    counted = Counted(omni, "affinity")
    for number in range(8):
        await counted.ask(200, first=3 + number % 2)
    assert counted.by_replica() == [4, 4]  # a prefix each, whatever came between
    counted = Counted(omni, "affinity")
    for _ in range(3):
        await counted.ask(200, first=3)
    assert sorted(counted.by_replica()) == [0, 3]


async def test_each_replica_of_each_policy_runs(omni: AsyncOmni) -> None:
    report = omni.stage_report()
    assert set(report) == {f"{name}/{number}" for name in ROLES for number in range(2)}
    assert {status.state for status in report.values()} == {StageState.RUNNING}
