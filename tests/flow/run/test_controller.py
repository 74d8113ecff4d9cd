"""One controller at a time: frames go in, and its messages are checked."""

import asyncio
import contextlib

import pytest

from tests.flow.builders import FunctionNode, hang, spin
from vllm_omni.flow import ENTRY, Emission, EndReason, Field, Frame, Graph, GraphParser, NodeController, Role, interface
from vllm_omni.flow.run.activity import ActivityTracker
from vllm_omni.flow.run.scope import CallScope


class Worker(Role):
    run = interface(
        inputs_or=[["a"]],
        outputs={"stream": Field("text", streamed=True), "whole": Field("text"), "unasked": Field("text")},
    )


class RecordingLink:
    def __init__(self):
        self.frames = []

    def bind(self, target, receive):
        raise AssertionError("not needed here")

    def send(self, message):
        if isinstance(message, Frame):  # credit is not looked at here
            self.frames.append(message)

    def sent(self):
        return [(frame.field, frame.seq, frame.payload, frame.last, frame.reason) for frame in self.frames]


class World:
    """A controller of `worker.run`, whose input `a` comes from the entry, in one open call."""

    def __init__(self, forward):
        graph = Graph("g")
        reply = graph.role(Worker, "worker").run(a=graph.placeholder("a"))
        graph.output(stream=reply.stream, whole=reply.whole, unasked=reply.unasked)
        plan = GraphParser(graph).parse()
        self.link = RecordingLink()
        self.node = FunctionNode(forward)
        self.ended = False
        self.tracker = ActivityTracker(self._on_idle)
        self.controller = NodeController("worker.run", self.node, self.link)
        self.controller.open(CallScope("call", plan.route({"stream", "whole"}), self.tracker, "context"))

    def _on_idle(self):
        self.ended = True

    def arrive(self, field, seq, payload=None, *, last=False, reason=EndReason.NONE, call_id="call", activation_id=7):
        self.controller.receive(
            Frame(call_id, ENTRY, "worker.run", 0, field, activation_id, seq, last, payload, reason)
        )


async def copy_a(activation):
    async for chunk in activation.inputs["a"]:
        yield Emission("stream", chunk.payload, chunk.last)


async def test_node_fires_with_the_first_payload_and_not_before():
    world = World(copy_a)
    await spin()
    assert world.controller.num_running == 0
    world.arrive("a", 0, "x")
    assert world.controller.num_running == 1
    world.controller.cancel("call")
    await spin()


async def test_later_frames_feed_the_same_activation():
    world = World(copy_a)
    for seq in range(3):
        world.arrive("a", seq, seq, last=seq == 2)
        await spin()
    assert len(world.node.activations) == 1
    assert world.link.sent()[:3] == [("stream", seq, seq, seq == 2, EndReason.NONE) for seq in range(3)]


async def test_activation_has_its_call_node_and_id():
    world = World(copy_a)
    world.arrive("a", 0, "x", last=True)
    await spin()
    (activation,) = world.node.activations
    assert (activation.call_id, activation.node, activation.interface) == ("call", "worker.run", "run")
    assert (activation.activation_id, activation.context) == (7, "context")
    assert activation.wanted == {"stream", "whole"}
    assert set(activation.inputs) == {"a"}
    assert (activation.path, activation.iteration) == ((), 0)


async def test_field_left_open_is_closed_as_empty():
    world = World(copy_a)
    world.arrive("a", 0, "x")
    world.arrive("a", 1, None, last=True, reason=EndReason.EMPTY)
    await spin()
    assert world.link.sent()[0] == ("stream", 0, "x", False, EndReason.NONE)
    assert set(world.link.sent()[1:]) == {
        ("stream", 1, None, True, EndReason.EMPTY),
        ("whole", 0, None, True, EndReason.EMPTY),
    }


async def test_node_whose_input_ends_empty_is_unreachable():
    world = World(copy_a)
    world.arrive("a", 0, last=True, reason=EndReason.EMPTY)
    await spin()
    assert world.node.activations == []
    assert sorted(world.link.sent(), key=str) == [
        ("stream", 0, None, True, EndReason.UNREACHABLE),
        ("whole", 0, None, True, EndReason.UNREACHABLE),
    ]


async def test_field_that_is_not_streamed_is_last_without_the_flag():
    async def once(activation):
        yield Emission("whole", "all")

    world = World(once)
    world.arrive("a", 0, "x", last=True)
    await spin()
    assert world.link.sent()[0] == ("whole", 0, "all", True, EndReason.NONE)


async def test_unwanted_field_is_not_sent():
    async def emit_unasked(activation):
        yield Emission("unasked", "x")
        yield Emission("unasked", "y")

    world = World(emit_unasked)
    world.arrive("a", 0, "x", last=True)
    await spin()
    assert {frame.field for frame in world.link.frames} == {"stream", "whole"}


@pytest.mark.parametrize(
    ("emissions", "complaint"),
    [
        (
            [Emission("whole", 1), Emission("whole", 2)],
            "'worker.run' emitted field 'whole' twice; declare Field.streamed",
        ),
        (
            [Emission("stream", 1, True), Emission("stream", 2)],
            "'worker.run' emitted field 'stream' after its last frame",
        ),
        ([Emission("strean", 1)], "'worker.run' emitted field 'strean', .*did you mean 'stream'"),
    ],
)
async def test_wrong_emission_is_reported_to_the_entry(emissions, complaint):
    async def emit(activation):
        for emission in emissions:
            yield emission

    world = World(emit)
    world.arrive("a", 0, "x", last=True)
    await spin()
    report = world.link.frames[-1]
    assert (report.target, report.field, report.reason) == (ENTRY, "", EndReason.ERROR)
    with pytest.raises(ValueError, match=complaint):
        raise report.payload
    assert world.ended
    assert world.node.events == ["start", "clean"]


async def test_cancelled_activation_acknowledges_after_its_clean_up():
    world = World(hang)
    world.arrive("a", 0, "x")
    await asyncio.sleep(0)
    world.controller.cancel("call")
    assert not world.ended
    await spin()
    assert world.ended
    assert world.node.events == ["start", "cancelled", "clean"]
    assert world.link.sent() == []


async def test_activation_cancelled_before_its_first_step_acknowledges_too():
    world = World(hang)
    world.arrive("a", 0, "x")
    world.controller.cancel("call")
    await spin()
    assert world.ended
    assert world.node.events == []


async def test_node_that_swallows_its_cancellation_is_closed_at_its_next_emission():
    async def stubborn(activation):
        try:
            await asyncio.get_running_loop().create_future()
        except asyncio.CancelledError:
            yield Emission("stream", "one more")
            raise AssertionError("must not be resumed") from None

    world = World(stubborn)
    world.arrive("a", 0, "x")
    await spin()
    world.controller.cancel("call")
    await spin()
    assert world.ended
    assert world.link.sent() == []


async def test_node_that_answers_its_cancellation_by_returning_sends_nothing():
    async def give_in(activation):
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.get_running_loop().create_future()
        return
        yield

    world = World(give_in)
    world.arrive("a", 0, "x")
    await spin()
    world.controller.cancel("call")
    await spin()
    assert world.ended
    assert world.link.sent() == []


async def test_cancellation_from_outside_is_reported_to_the_entry():
    async def stumble(activation):
        asyncio.current_task().cancel()
        await asyncio.sleep(0)
        yield Emission("stream", "never")

    world = World(stumble)
    world.arrive("a", 0, "x")
    await spin()
    assert [(frame.target, frame.field, frame.reason) for frame in world.link.frames] == [(ENTRY, "", EndReason.CANCEL)]


async def test_activation_that_has_ended_its_outputs_is_spared_and_sees_its_input_end():
    async def tidy(activation):
        yield Emission("stream", "done", last=True)
        yield Emission("whole", "done")
        async for _ in activation.inputs["a"]:
            pass

    world = World(tidy)
    world.arrive("a", 0, "x")
    await spin()
    world.controller.cancel("call", unfinished_only=True)
    await spin()
    assert not world.ended
    world.arrive("a", 1, last=True, reason=EndReason.CANCEL)
    await spin()
    assert world.node.events == ["start", "clean"]


async def test_activation_without_readers_is_cancelled_and_ends_its_fields():
    world = World(hang)
    world.arrive("a", 0, "x")
    await spin()
    world.controller.cancel("call", unfinished_only=True)
    await spin()
    assert {(field, reason) for field, _, _, _, reason in world.link.sent()} == {
        ("stream", EndReason.CANCEL),
        ("whole", EndReason.CANCEL),
    }


async def test_frames_behind_the_end_of_an_activation_are_dropped():
    async def leave(activation):
        yield Emission("whole", "enough")

    world = World(leave)
    world.arrive("a", 0, "x")
    await spin()
    world.arrive("a", 1, "y")
    await spin()
    assert len(world.node.activations) == 1
    assert world.controller.num_buffered == 0


async def test_frames_of_a_call_that_is_not_open_are_dropped():
    world = World(copy_a)
    world.arrive("a", 0, "x", call_id="other")
    await spin()
    assert world.node.activations == []


async def test_buffered_frames_are_counted_early_ones_too():
    world = World(hang)
    world.arrive("a", 0, "x")
    world.arrive("a", 2, "early")
    assert world.controller.num_buffered == 2
    world.controller.cancel("call")
    await spin()
    assert world.controller.num_buffered == 0
