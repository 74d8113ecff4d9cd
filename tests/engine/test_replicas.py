"""Replicas of a stage, with engines that answer from a script."""

import asyncio
import gc
from collections.abc import AsyncGenerator, Coroutine
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.sampling_params import SamplingParams

from vllm_omni.config import StageConfig, load_config
from vllm_omni.config.epd import Balance, Instance
from vllm_omni.engine.engine_args import config_of_instance
from vllm_omni.engine.group import balance_of
from vllm_omni.engine.replicas import ReplicaGroup, make_replicas
from vllm_omni.engine.stage import StageEngine
from vllm_omni.engine.streamed_reply import StreamedReplies
from vllm_omni.entrypoints.admin import StageAdmin
from vllm_omni.epd.router import MAX_TERMINATIONS
from vllm_omni.errors import ConfigError, GraphError, StageFailed, StageUnavailable
from vllm_omni.flow import Field, Graph, GraphParser, Role, Scheduling, interface
from vllm_omni.messages.outputs import OmniRequestOutput
from vllm_omni.messages.payload import Payload, TensorRef, encode
from vllm_omni.messages.report import Reporter
from vllm_omni.messages.token_names import TokenNames, encode_names
from vllm_omni.model_executor.pipeline import RequestContext, StageRequest, StageSpec
from vllm_omni.process.status import StageState, StageStatus
from vllm_omni.testing import qwen2_5_omni

NUM_OUTPUTS = 3


@dataclass
class Replica:
    """Answers a request with ``NUM_OUTPUTS`` outputs, unless it dies or rejects."""

    instance: Instance
    spec: StageSpec = field(default_factory=lambda: StageSpec("talker", "", "text"))
    dies_after: int | None = None  # outputs of each request
    rejects: bool = False
    is_open: asyncio.Event = field(default_factory=asyncio.Event)  # outputs wait for it
    has_died: bool = False
    host: str | None = None
    num_leases: int = 0  # of tensors that other stages read
    got: list[str] = field(default_factory=list)  # ids of requests
    params: Any = None  # of the last one

    # The real ones, of a real status.
    current_status = StageEngine.current_status
    set_drained = StageEngine.set_drained
    set_status = StageEngine.set_status

    def __post_init__(self) -> None:
        self.name = self.instance.name
        self.config = SimpleNamespace(name=self.instance.stage, host_of=lambda: self.host, part_hosts=[self.host])
        self._status, self.is_drained, self.num_requests = StageStatus(), False, 0
        self.is_open.set()

    def on_status(self) -> None: ...

    async def relay_statistics(self, timeout_s: float) -> list[dict[str, dict[str, int]]]:
        if self.has_died:
            raise StageFailed(self.name, self.termination_reason())
        return [{"tcp": {"num_leases": self.num_leases}, "inline": {"num_leases": 0}}]

    def termination_reason(self) -> str:
        return "its engine has died: killed"

    async def prepare(self, request: StageRequest, *_: Any) -> tuple[Any, SamplingParams]:
        prompt = {"prompt_token_ids": request.prompt}
        return prompt, SamplingParams(max_tokens=10, extra_args=dict(request.args))

    async def run(self, prompt: Any, params: Any, request_id: str, *_: Any) -> AsyncGenerator[OmniRequestOutput, None]:
        self.got.append(request_id)
        self.params = params
        if self.rejects:
            raise StageFailed(self.name, "failed the request: no")
        self.num_requests += 1
        try:
            for number in range(NUM_OUTPUTS):
                await self.is_open.wait()
                if self.dies_after is not None and number >= self.dies_after:
                    self.has_died = True
                if self.has_died:
                    raise StageFailed(self.name, self.termination_reason())
                completion = CompletionOutput(0, str(number), [number], None, None)
                is_last = number == NUM_OUTPUTS - 1
                yield OmniRequestOutput.of(RequestOutput(request_id, None, [1], None, [completion], is_last))
        finally:
            self.num_requests -= 1


def make_group(num_replicas: int = 2, balance: Balance = "least_work") -> tuple[Any, list[Any]]:
    config = StageConfig(stage_id=1, name="talker", model="model", replicas=num_replicas)
    replicas = [Replica(one) for one in make_replicas(config)]
    return ReplicaGroup(config, replicas, balance), replicas  # type: ignore[arg-type]


async def ask(group: Any, request_id: str, num_tokens: int = 4, session: str | None = None, **args: Any) -> list[str]:
    more = {} if session is None else {"session_id": session}
    context = RequestContext(request_id, {}, {}, engine_kwargs=more)
    request = StageRequest(list(range(num_tokens)), args)
    return [one.outputs[0].text async for one in group.generate(request, context, frozenset())]


async def hold(group: Any, replicas: list[Any], request_id: str, **more: Any) -> "asyncio.Task[list[str]]":
    """Start a request, which then waits in its replica."""
    num_got = sum(len(one.got) for one in replicas)
    task = asyncio.create_task(ask(group, request_id, **more))
    while sum(len(one.got) for one in replicas) == num_got:  # noqa: ASYNC110  # one or two steps of the loop
        await asyncio.sleep(0)
    return task


# -- replicas that come and go -----------------------------------------------------------------------------------------


async def test_a_replica_that_is_added_gets_its_share_and_one_that_is_removed_gets_nothing() -> None:
    group, replicas = make_group(2, "round_robin")
    late = Replica(Instance("talker", None, 2, {}, is_front=False))
    group.add(late)
    for number in range(3):
        await ask(group, str(number))
    assert [len(one.got) for one in (*replicas, late)] == [1, 1, 1]
    group.remove("talker/2")
    for number in range(4):
        await ask(group, str(number))
    assert [len(one.got) for one in (*replicas, late)] == [3, 3, 1]
    assert group.router.num_open("talker/2") == 0


async def test_the_session_of_a_replica_that_is_removed_continues_on_another() -> None:
    group, replicas = make_group(2, "session")
    await ask(group, "1", session="s")
    (home,) = (one for one in replicas if one.got)
    group.remove(home.name)
    await ask(group, "2", session="s")
    assert [len(one.got) for one in replicas] == [1, 1]


async def test_a_replica_with_an_assignment_is_not_idle_before_its_engine_has_it() -> None:
    group, replicas = make_group()
    for one in replicas:
        one.is_open.clear()
    task = await hold(group, replicas, "a")
    (busy,) = (one.name for one in replicas if one.got)
    assert group.router.num_open(busy) == 1
    for one in replicas:
        one.is_open.set()
    await task
    assert group.router.num_open(busy) == 0


def test_devices_are_divided_among_all_replicas_that_there_may_be() -> None:
    config = StageConfig(
        stage_id=1, name="talker", model="model", max_replicas=3, engine_args={"device_ids": [1, 2, 5]}
    )
    assert [one.engine_args["device_ids"] for one in make_replicas(config)] == [[1], [2], [5]]
    with pytest.raises(ConfigError, match="max_replicas = 2: cannot share 3 device_ids evenly"):
        StageConfig(stage_id=1, name="talker", model="model", max_replicas=2, engine_args={"device_ids": [1, 2, 5]})
    with pytest.raises(ConfigError, match="max_replicas = 2: there are more at the start: replicas = 3"):
        StageConfig(stage_id=1, name="talker", model="model", replicas=3, max_replicas=2)


# -- policies ----------------------------------------------------------------------------------------------------------


async def test_the_replica_with_the_fewest_outstanding_tokens_gets_the_next_request() -> None:
    group, replicas = make_group()
    for one in replicas:
        one.is_open.clear()
    tasks = [await hold(group, replicas, name, num_tokens=n) for name, n in (("a", 90), ("b", 10), ("c", 10), ("d", 9))]
    assert [one.got for one in replicas] == [["a-talker"], ["b-talker", "c-talker", "d-talker"]]
    for one in replicas:
        one.is_open.set()
    assert await asyncio.gather(*tasks) == [["0", "1", "2"]] * 4
    assert not any(group.router.statistics().work.values())


async def test_round_robin_ignores_the_length_of_requests() -> None:
    group, replicas = make_group(balance="round_robin")
    for number in range(6):
        await ask(group, str(number), num_tokens=50 * (number % 2))
    assert [len(one.got) for one in replicas] == [3, 3]


async def test_a_session_and_a_call_without_one_stay_at_their_replica() -> None:
    group, replicas = make_group(3, "session")
    for number in range(9):
        await ask(group, str(number), session="abc"[number % 3])
    await ask(group, "loop")
    await ask(group, "loop")
    homes = [{int(id.partition("-")[0]) % 3 for id in one.got if id[0] != "l"} for one in replicas]
    assert sorted(homes, key=min) == [{0}, {1}, {2}]
    assert sorted(sum(id[0] == "l" for id in one.got) for one in replicas) == [0, 0, 2]


async def test_with_affinity_a_prefix_goes_to_the_replica_that_had_it() -> None:
    group, replicas = make_group(2, "affinity")
    for number in range(4):
        await ask(group, str(number), num_tokens=200)
    assert sorted(len(one.got) for one in replicas) == [0, 4]
    assert group.router.statistics().num_chosen == {"load": 1, "pages": 3}


async def test_a_replica_that_was_restarted_holds_no_pages() -> None:
    group, replicas = make_group(2, "affinity")
    await ask(group, "a", num_tokens=200)
    (home,) = (one for one in replicas if one.got)
    home.set_status(StageStatus(num_restarts=1))
    await ask(group, "b", num_tokens=200)
    assert group.router.statistics().num_chosen == {"load": 2}


async def test_prompts_of_rows_are_told_apart_by_their_names() -> None:
    """Their ids are fillers."""
    group, _ = make_group(2, "affinity")
    for number, first in enumerate((1, 2, 1, 2, None, None)):
        names = None if first is None else encode_names(TokenNames([first, *range(199)]))
        more = {} if names is None else {"row_names": names}
        await ask(group, str(number), num_tokens=200, payloads=[], **more)
    assert group.router.statistics().num_chosen == {"load": 4, "pages": 2}


# -- a replica that dies -----------------------------------------------------------------------------------------------


async def test_a_request_without_output_moves_to_another_replica() -> None:
    group, (first, second) = make_group()
    first.dies_after = 0
    assert await ask(group, "a") == ["0", "1", "2"]
    assert (first.got, second.got) == (["a-talker"], ["a-talker-t2"])
    assert group.current_status() == StageStatus()
    assert group.router.statistics().num_redone == 1
    await ask(group, "b")  # the dead one gets nothing more
    assert first.got == ["a-talker"]


async def test_after_its_first_output_a_request_fails_with_the_replica_that_died() -> None:
    group, (first, second) = make_group()
    first.dies_after = 1
    with pytest.raises(StageFailed, match="'talker/0': its engine has died: killed; after the request's first output"):
        await ask(group, "a")
    assert not second.got and not any(group.router.statistics().work.values())


STREAM = TensorRef("shm", (8, 2), "float32", b"", 1)


@dataclass
class Reply:
    """One whose rows are streamed, and can be computed again."""

    failure: Exception | None = None
    num_repeats: int = 0

    async def compute_rows_again(self, stream: TensorRef, report: Reporter) -> list[Payload]:
        assert stream == STREAM
        if self.failure is not None:
            raise self.failure
        self.num_repeats += 1
        return [Payload(values=self.num_repeats)]


def replies_of(reply: Reply | None) -> StreamedReplies:
    replies = StreamedReplies()
    if reply is not None:
        replies.add("a", STREAM, reply)  # type: ignore[arg-type]
    return replies


async def test_rows_that_were_read_while_they_were_made_are_computed_again_for_each_other_replica() -> None:
    group, (first, third, second) = make_group(3)  # in the order in which they get it
    first.dies_after = second.dies_after = 0
    whole, streamed = encode(Payload(values="whole")), encode(Payload({}, {}, {"rows": STREAM}))
    group.streamed_replies = replies_of(Reply())
    assert await ask(group, "a", payloads=[whole, streamed], index=3) == ["0", "1", "2"]
    assert first.params.extra_args == {"payloads": [whole, streamed], "index": 3}
    assert second.params.extra_args == {"payloads": [whole, encode(Payload(values=1))], "index": 3}
    assert third.params.extra_args == {"payloads": [whole, encode(Payload(values=2))], "index": 3}
    assert not any(group.router.statistics().work.values())


async def test_a_request_whose_rows_cannot_be_computed_again_fails_with_the_stage_that_cannot() -> None:
    stream = encode(Payload({}, {}, {"rows": STREAM}))
    for reply, message in (
        (None, "'talker/0': its engine has died: killed; it had the rows .* and no stage can repeat them"),
        (Reply(StageFailed("thinker", "its engine has died")), "'thinker': its engine has died"),
        (Reply(StageUnavailable("thinker", "restarting: killed")), "'thinker': restarting: killed"),
    ):
        group, (first, second) = make_group()
        group.streamed_replies = replies_of(reply)
        first.dies_after = 0
        with pytest.raises((StageFailed, StageUnavailable), match=message):
            await ask(group, "a", payloads=[stream])
        assert not second.got and not any(group.router.statistics().work.values())


async def test_a_request_that_the_model_fails_on_is_not_repeated() -> None:
    group, (first, second) = make_group()
    first.rejects = True
    with pytest.raises(StageFailed, match="'talker/0': failed the request: no"):
        await ask(group, "a")
    assert not second.got


async def test_where_the_second_replica_fails_the_request_the_first_death_is_the_reason() -> None:
    group, (first, second) = make_group()
    first.dies_after, second.rejects = 0, True
    with pytest.raises(StageFailed, match="'talker/0': its engine has died") as raised:
        await ask(group, "a")
    assert "no" in str(raised.value.__cause__)


async def test_a_request_that_ends_several_replicas_fails() -> None:
    group, replicas = make_group(MAX_TERMINATIONS + 2)
    for one in replicas:
        one.dies_after = 0
    with pytest.raises(StageFailed, match="so did 2 others that had the request"):
        await ask(group, "a")
    assert [len(one.got) for one in replicas] == [1] * (MAX_TERMINATIONS + 1) + [0]


async def test_without_a_replica_requests_are_rejected_until_one_is_restarted() -> None:
    group, replicas = make_group()
    for one in replicas:
        one.set_status(StageStatus(StageState.RESTARTING, "killed", 1))
    with pytest.raises(StageUnavailable, match="stage 'talker': restarting: talker/0: killed; talker/1: killed"):
        await ask(group, "a")
    replicas[1].set_status(StageStatus(StageState.FAILED, "given up", 1))
    assert group.current_status().state is StageState.RESTARTING
    replicas[0].set_status(StageStatus(StageState.RUNNING, None, 2))
    assert group.current_status() == StageStatus(StageState.RUNNING, None, 3)
    await ask(group, "b")
    assert [one.got for one in replicas] == [["b-talker"], []]


# -- administration ----------------------------------------------------------------------------------------------------


class Admin(StageAdmin):
    """The administration of one group alone."""

    def __init__(self, group: Any) -> None:
        self.orchestrator: Any = SimpleNamespace(engines=group.engines, nodes={group.name: group})


Admin.__abstractmethods__ = frozenset()


async def test_a_call_of_all_engines_that_is_cancelled_at_once_leaves_no_coroutine_behind() -> None:
    """A coroutine that was made and is never awaited warns when it is collected."""
    group, replicas = make_group()

    async def resume_generation() -> None: ...

    async def ask(call: Coroutine[Any, Any, None]) -> None:
        await call

    for one in replicas:
        one.llm = SimpleNamespace(resume_generation=resume_generation)  # type: ignore[attr-defined]
        one.ask = ask  # type: ignore[attr-defined]
    admin = Admin(group)  # type: ignore[abstract]
    admin.orchestrator.resume = lambda: None
    resuming = asyncio.create_task(admin.resume_generation())
    await asyncio.sleep(0)  # the tasks of the engines are made, and have not begun
    resuming.cancel()
    with pytest.raises(asyncio.CancelledError):
        await resuming
    gc.collect()


async def test_a_drained_replica_that_dies_stays_drained_and_its_requests_move() -> None:
    group, replicas = make_group()
    replicas[0].is_open.clear()
    running = await hold(group, replicas, "a")
    replicas[0].set_drained(True)
    replicas[0].has_died = True
    assert replicas[0].current_status().state is StageState.RESTARTING
    replicas[0].is_open.set()
    assert await running == ["0", "1", "2"]
    replicas[0].has_died = False  # restarted
    assert replicas[0].current_status().state is StageState.DRAINED
    replicas[1].has_died = True  # a stage of which all are drained or restarting is not given up
    assert group.current_status().state is StageState.RESTARTING
    replicas[1]._status = StageStatus(StageState.FAILED, "given up")
    replicas[1].has_died = False
    with pytest.raises(StageUnavailable, match="'talker': drained: talker/0: it gets no new requests; talker/1: given"):
        await ask(group, "b")


# -- configuration -----------------------------------------------------------------------------------------------------


def test_devices_are_divided_among_replicas() -> None:
    args = {"device_ids": [0, 1, 2, 3], "tensor_parallel_size": 2}
    config = StageConfig(stage_id=0, name="writer", model="model", replicas=2, engine_args=args)
    replicas = make_replicas(config)
    assert [one.name for one in replicas] == ["writer/0", "writer/1"]
    own = [config_of_instance(config, one).engine_args for one in replicas]
    assert own == [args | {"device_ids": [0, 1]}, args | {"device_ids": [2, 3]}]
    config = StageConfig(stage_id=0, name="writer", model="model", replicas=2, engine_args={"device_ids": [1, 2]})
    own = [config_of_instance(config, one).engine_args for one in make_replicas(config)]
    assert own == [{"device_ids": [1]}, {"device_ids": [2]}]
    with pytest.raises(ConfigError, match="replicas = 3: cannot share 4 device_ids evenly"):
        StageConfig(stage_id=0, name="writer", model="model", replicas=3, engine_args=args)


@pytest.mark.parametrize(
    "override, message",
    [
        ("talker.replicas=0", r"--stage talker.replicas = 0: must be .*1"),
        ("talker.balance=session", r"stage 'talker': balance: has no effect on one engine: give replicas"),
        ("talker.balance=random", r"--stage talker.balance = 'random': valid: least_work, round_robin"),
    ],
)
def test_wrong_settings_are_rejected(override: str, message: str, tmp_path: Any) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(qwen2_5_omni.build(tmp_path), stage_overrides=[override])


def test_replicas_of_instances_are_rejected(tmp_path: Any) -> None:
    with pytest.raises(ConfigError, match=r"replicas: cannot be combined with epd.instances"):
        load_config(qwen2_5_omni.build(tmp_path), epd="E:1,PD:1", stage_overrides=["thinker.replicas=2"])


class Writer(Role):
    write = interface([["prompt"]], {"text": Field("text")}, scheduling=Scheduling.ROUND_ROBIN)
    remember = interface([["text"]], {"text": Field("text")}, scheduling=Scheduling.SESSION)


class Plain(Role):
    write = interface([["prompt"]], {"text": Field("text")})


def test_the_graph_chooses_the_policy_and_the_deployment_overrides_it() -> None:
    graph = Graph("g")
    plain = graph.role(Plain, "plain").write(prompt=graph.placeholder("prompt")).text
    writer = graph.role(Writer, "writer")
    once = writer.write(prompt=plain)
    graph.output(text=once.text)
    plans = [GraphParser(graph).parse()]

    def stage(name: str, **more: Any) -> StageConfig:
        return StageConfig(stage_id=0, name=name, model="model", replicas=2, **more)

    assert balance_of(stage("plain"), plans) == "least_work"
    assert balance_of(stage("writer"), plans) == "round_robin"
    assert balance_of(stage("writer", balance="affinity"), plans) == "affinity"
    split = StageConfig(stage_id=0, name="writer", model="model", epd={"instances": {"EPD": 2}})
    assert balance_of(split, plans) == "round_robin"
    graph.output(again=writer.remember(text=once.text).text)
    plans = [GraphParser(graph).parse()]
    with pytest.raises(
        GraphError, match=r"'writer': .* several \(.*ROUND_ROBIN.*SESSION\): .*--stage writer.balance=V"
    ):
        balance_of(stage("writer"), plans)
    assert balance_of(stage("writer", balance="session"), plans) == "session"
