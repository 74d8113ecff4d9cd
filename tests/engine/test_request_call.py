"""A request runs once more where a replica is lost before the user has anything; on hosts that die:
tests/hosts/test_placed_replicas.py."""

from collections.abc import AsyncIterator, Collection, Mapping
from types import SimpleNamespace
from typing import Any

import pytest

from tests.flow.builders import FunctionNode, make_speech_nodes, make_speech_plan, read
from vllm_omni.engine import request_call
from vllm_omni.engine.admission import AdmissionGate
from vllm_omni.engine.request_call import RequestCall
from vllm_omni.errors import EngineLost, InvalidRequest, SourceLost, StageFailed, StageUnavailable
from vllm_omni.flow import Activation, Emission, FlowStatistics, GraphCall, GraphRuntime, StaticPlan
from vllm_omni.messages.request import RequestContext
from vllm_omni.process.status import StageState, StageStatus


class Places:
    """In the place of ``RemoteControllers``: has another talker, or not."""

    def __init__(self, *, has_another: bool) -> None:
        self.has_another = has_another
        self.entered: list[tuple[str, float | None]] = []
        self.left: list[str] = []
        self.lost: list[str] = []

    async def enter(
        self,
        context: RequestContext,
        inputs: Mapping[str, Any],
        plan: StaticPlan,
        stages: Collection[str],
        gate: AdmissionGate,
    ) -> tuple[RequestContext, Mapping[str, Any], float | None]:
        self.entered.append((context.request_id, context.deadline_s))
        await gate.enter(context.request_id)
        return context, inputs, context.deadline_s

    def move(self, context: RequestContext, error: StageFailed, request_id: str) -> bool:
        self.lost.append(error.stage)
        return self.has_another

    def leave(self, request_id: str) -> None:
        self.left.append(request_id)


class Losing:
    """A talker that is lost in its first calls."""

    def __init__(self, *errors: StageFailed) -> None:
        self.errors = [*errors]

    async def talk(self, activation: Activation) -> AsyncIterator[Emission]:
        async for chunk in activation.inputs["rows"]:
            if self.errors:
                raise self.errors.pop(0)
            yield Emission("codes", chunk.payload * 10, last=chunk.last)


LOST = EngineLost("talker/0", "its host is gone")
UNREAD = SourceLost("talker", "RelayBroken: the producer p cannot be reached")


class World:
    def __init__(self, *errors: StageFailed, has_another: bool = True, outputs: frozenset[str] | None = None) -> None:
        plan = make_speech_plan()
        nodes = make_speech_nodes(talker=FunctionNode(Losing(*errors).talk))
        self.runtime = GraphRuntime(plan, nodes)
        self.gate, self.places = AdmissionGate(), Places(has_another=has_another)
        wanted = outputs or frozenset({"audio"})
        places: Any = self.places
        self.statuses = {name: StageStatus() for name in ("thinker/0", "thinker/1", "painter", "talker")}
        engines: Any = {name: self._engine(name) for name in self.statuses}
        stages = ["thinker", "talker"]
        self.call = RequestCall(
            self.runtime, self.gate, places, plan, wanted, stages, None, lambda report: None, engines
        )

    def _engine(self, name: str) -> SimpleNamespace:
        config = SimpleNamespace(name=name.partition("/")[0])
        return SimpleNamespace(config=config, current_status=lambda: self.statuses[name])

    def lose(self, name: str) -> None:
        self.statuses[name] = StageStatus(StageState.RESTARTING, "killed by SIGKILL")

    async def open(self, deadline_s: float | None = None) -> None:
        await self.call.open(RequestContext("a", {}, {}, deadline_s=deadline_s), {"prompt": "hi"})

    async def end(self) -> None:
        await self.call.aclose()
        assert self.runtime.statistics() == FlowStatistics(0, 0, 0, 0)
        assert not self.gate.admitted
        assert set(self.places.left) == {name for name, _ in self.places.entered}


@pytest.mark.parametrize("error", [LOST, StageUnavailable("talker/0", "restarting: killed")])
async def test_a_request_without_an_output_runs_once_more(error: StageFailed) -> None:
    world = World(error)
    await world.open(deadline_s=50.0)
    frames = await read(world.call)  # type: ignore[arg-type]
    assert [frame.payload for frame in frames["audio"] if frame.payload] == [[0, 10, 20]]
    assert world.places.lost == ["talker/0"]
    first, second = world.places.entered
    assert (first, second[0]) == (("a", 50.0), "a-again")
    assert second[1] is not None
    assert 0.0 < second[1] < 50.0, "the rest of the deadline"
    assert world.call.request_ids == ["a", "a-again"]
    await world.end()


async def test_it_runs_no_third_time() -> None:
    world = World(LOST, LOST)
    await world.open()
    with pytest.raises(StageFailed, match="its host is gone; so did another one that had the request") as raised:
        await read(world.call)  # type: ignore[arg-type]
    assert not isinstance(raised.value, EngineLost), "nothing repeats it"
    assert world.call.request_ids == ["a", "a-again"]
    await world.end()


async def test_it_fails_where_no_other_replica_is_left() -> None:
    world = World(LOST, has_another=False)
    await world.open()
    with pytest.raises(EngineLost):
        await read(world.call)  # type: ignore[arg-type]
    assert world.call.request_ids == ["a"]
    await world.end()


async def test_it_fails_where_the_user_has_something_of_it() -> None:
    world = World(LOST, outputs=frozenset({"text", "audio"}))
    await world.open()
    assert (await anext(world.call)).field == "text"
    with pytest.raises(EngineLost):
        await read(world.call)  # type: ignore[arg-type]
    assert world.places.lost == []
    await world.end()


async def test_a_model_that_fails_on_the_request_does_not_run_again() -> None:
    world = World(StageFailed("talker/0", "failed the request"))
    await world.open()
    with pytest.raises(StageFailed, match="failed the request"):
        await read(world.call)  # type: ignore[arg-type]
    assert world.places.lost == []
    await world.end()


class Closing:
    """In the place of ``GraphRuntime``: one engine was lost just now, and another one has yet to end its part."""

    has_call = False

    def is_open(self, call_id: str) -> bool:
        return self.has_call

    def open(self, call_id: str, *args: Any, **options: Any) -> GraphCall:
        self.has_call = True
        raise LOST


async def test_a_request_that_cannot_be_opened_holds_nothing_also_while_it_is_closed() -> None:
    world, runtime = World(), Closing()
    world.call._runtime = runtime  # type: ignore[assignment]
    with pytest.raises(EngineLost):
        await world.open()
    assert runtime.has_call
    assert not world.gate.admitted
    assert world.places.left == ["a"]


async def test_a_request_whose_id_is_in_use_leaves_the_other_where_it_is() -> None:
    world, again = World(), World()
    await world.open()
    again.call._runtime, again.call._gate = world.runtime, world.gate
    with pytest.raises(InvalidRequest, match="a call of this id is still open"):
        await again.open()
    assert world.gate.admitted == {"a"}
    assert again.places.left == []
    await world.end()


async def test_what_could_not_be_read_names_the_engine_that_had_it() -> None:
    world = World(UNREAD, has_another=False)
    for name in ("painter", "thinker/1"):  # the painter takes no part in the request
        world.lose(name)
    await world.open()
    with pytest.raises(EngineLost, match="stage 'thinker/1': killed by SIGKILL"):
        await read(world.call)  # type: ignore[arg-type]
    await world.end()


async def test_a_request_whose_source_is_lost_runs_once_more() -> None:
    world = World(UNREAD)
    world.lose("thinker/0")
    await world.open()
    frames = await read(world.call)  # type: ignore[arg-type]
    assert [frame.payload for frame in frames["audio"] if frame.payload] == [[0, 10, 20]]
    assert world.places.lost == ["thinker/0"]
    await world.end()


async def test_what_could_not_be_read_of_an_engine_that_runs_stays_the_readers_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(request_call, "NOTICED_S", 0.0)
    world = World(UNREAD)
    world.lose("painter")
    await world.open()
    with pytest.raises(SourceLost, match="stage 'talker': RelayBroken: the producer p cannot be reached"):
        await read(world.call)  # type: ignore[arg-type]
    assert world.places.lost == []
    await world.end()
