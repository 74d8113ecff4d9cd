"""Whole calls through the speech pipeline: prompt -> thinker (text) -> talker (codec_ids) -> token2wav (audio)."""

import asyncio
import gc
import random
from contextlib import suppress

import pytest

from tests.flow.builders import (
    FunctionNode,
    ManualClock,
    ShufflingLink,
    hang,
    make_speech_graph,
    make_speech_nodes,
    make_speech_plan,
    read,
    read_payloads,
    spin,
    talk,
    think,
)
from vllm_omni.errors import CallAborted, DeadlineExceeded, GraphError, InvalidRequest, OmniError
from vllm_omni.flow import (
    Chunk,
    Emission,
    EndReason,
    Field,
    FlowStatistics,
    Graph,
    GraphParser,
    GraphRuntime,
    Role,
    interface,
)
from vllm_omni.flow.run.controller import CANCEL_TIMEOUT_S
from vllm_omni.flow.run.credit import WINDOW

ALL = {"text", "audio", "codec_ids"}
NOTHING_LEFT = FlowStatistics(0, 0, 0, 0)


def make_runtime(*, clock=None, link=None, to_talker=None, to_token2wav=None, **nodes):
    plan = make_speech_plan(to_talker, to_token2wav)
    return GraphRuntime(plan, make_speech_nodes(**nodes), clock=clock, link=link)


def open_call(runtime, outputs=ALL, call_id="call", prompt="w", **kwargs):
    return runtime.open(call_id, {"prompt": prompt}, outputs, **kwargs)


@pytest.fixture(autouse=True)
async def no_task_is_left():
    before = asyncio.all_tasks()
    yield
    assert asyncio.all_tasks() <= before | {asyncio.current_task()}


async def fail(activation):
    await asyncio.sleep(0)
    raise KeyError("weights")
    yield


# ---- outputs ----


async def test_every_wanted_output_arrives_in_order():
    runtime = make_runtime()
    assert await read_payloads(open_call(runtime)) == {
        "text": ["w0", "w1", "w2"],
        "codec_ids": [0, 10, 20],
        "audio": [[0, 10, 20]],
    }
    assert runtime.statistics() == NOTHING_LEFT


async def test_frames_are_numbered_and_the_last_one_says_so():
    frames = await read(open_call(make_runtime()))
    assert [(frame.seq, frame.last) for frame in frames["text"]] == [(0, False), (1, False), (2, True)]


async def test_text_only_call_never_starts_the_talker():
    nodes = make_speech_nodes()
    runtime = GraphRuntime(make_speech_plan(), nodes)
    assert await read_payloads(open_call(runtime, {"text"})) == {"text": ["w0", "w1", "w2"]}
    assert nodes["talker"].activations == nodes["token2wav"].activations == []
    assert nodes["thinker"].activations[0].wanted == {"text"}


async def test_unwanted_output_is_not_delivered():
    assert set(await read(open_call(make_runtime(), {"audio"}))) == {"audio"}


async def test_node_starts_while_its_producer_still_streams():
    gate = asyncio.Event()

    async def think_one_then_wait(activation):
        yield Emission("rows", 1)
        await gate.wait()
        yield Emission("rows", 2, last=True)

    call = open_call(make_runtime(thinker=FunctionNode(think_one_then_wait)), {"codec_ids"})
    assert (await anext(call)).payload == 10
    gate.set()
    assert [frame.payload async for frame in call] == [20]


async def test_a_report_arrives_before_what_is_yielded_next_and_while_the_call_stops():
    async def think_and_report(activation):
        try:
            activation.report("starts")
            yield Emission("text", "w")
            await asyncio.Event().wait()
        finally:
            activation.report("ends")

    reports = []
    runtime = make_runtime(thinker=FunctionNode(think_and_report))
    call = open_call(runtime, {"text"}, on_report=reports.append)
    assert (await anext(call)).payload == "w"
    assert reports == ["starts"]
    await call.aclose()
    assert reports == ["starts", "ends"]
    assert runtime.statistics() == NOTHING_LEFT


async def test_branch_that_hangs_does_not_hold_back_its_sibling():
    call = open_call(make_runtime(talker=FunctionNode(hang)), {"text", "audio"})
    assert [(await anext(call)).payload for _ in range(3)] == ["w0", "w1", "w2"]
    await call.aclose()


async def test_many_calls_do_not_mix():
    runtime = make_runtime()
    calls = [open_call(runtime, call_id=f"c{i}", prompt=f"p{i}-") for i in range(20)]
    for i, answer in enumerate(await asyncio.gather(*map(read_payloads, calls))):
        assert answer["text"] == [f"p{i}-0", f"p{i}-1", f"p{i}-2"]
    assert runtime.statistics() == NOTHING_LEFT


async def test_branch_without_data_ends_as_empty_and_then_unreachable():
    async def think_text_only(activation):
        yield Emission("text", "no speech", last=True)

    nodes = make_speech_nodes(thinker=FunctionNode(think_text_only))
    frames = await read(open_call(GraphRuntime(make_speech_plan(), nodes)))
    assert [(frame.payload, frame.last, frame.reason) for frame in frames["audio"]] == [
        (None, True, EndReason.UNREACHABLE)
    ]
    assert nodes["talker"].activations == []


async def test_output_left_open_by_its_node_ends_as_empty():
    async def think_without_end(activation):
        yield Emission("text", "word")

    frames = await read(open_call(make_runtime(thinker=FunctionNode(think_without_end)), {"text"}))
    assert [(frame.payload, frame.seq, frame.last, frame.reason) for frame in frames["text"]] == [
        ("word", 0, False, EndReason.NONE),
        (None, 1, True, EndReason.EMPTY),
    ]


async def test_producer_without_readers_is_cancelled():
    async def think_for_ever(activation):
        while True:
            await asyncio.sleep(0)
            yield Emission("rows", 1)

    async def talk_once(activation):
        yield Emission("codes", 5, last=True)

    thinker = FunctionNode(think_for_ever)
    runtime = make_runtime(thinker=thinker, talker=FunctionNode(talk_once))
    assert await read_payloads(open_call(runtime, {"codec_ids"})) == {"codec_ids": [5]}
    assert thinker.events == ["start", "cancelled", "clean"]
    assert runtime.statistics() == NOTHING_LEFT


async def test_consumer_draining_its_input_is_released_when_its_producer_is_cancelled():
    async def think_for_ever(activation):
        while True:
            await asyncio.sleep(0)
            yield Emission("rows", 1)

    async def talk_once_and_drain(activation):
        yield Emission("codes", 5, last=True)
        async for _ in activation.inputs["rows"]:
            pass

    talker = FunctionNode(talk_once_and_drain)
    runtime = make_runtime(thinker=FunctionNode(think_for_ever), talker=talker)
    assert await read_payloads(open_call(runtime, {"codec_ids"})) == {"codec_ids": [5]}
    assert talker.events == ["start", "clean"]


async def test_iteration_ends_after_the_clean_up_of_the_last_node():
    nodes = make_speech_nodes()
    await read(open_call(GraphRuntime(make_speech_plan(), nodes)))
    assert [node.events for node in nodes.values()] == [["start", "clean"]] * 3


@pytest.mark.parametrize("seed", range(20))
async def test_order_is_kept_over_a_link_that_shuffles_and_repeats(seed):
    runtime = make_runtime(link=ShufflingLink(random.Random(seed)))
    assert await read_payloads(open_call(runtime)) == {
        "text": ["w0", "w1", "w2"],
        "codec_ids": [0, 10, 20],
        "audio": [[0, 10, 20]],
    }
    await spin()
    assert runtime.statistics() == NOTHING_LEFT


async def test_iterating_a_finished_call_again_gives_nothing():
    call = open_call(make_runtime())
    await read(call)
    assert await read(call) == {}


async def test_call_that_ended_unread_is_forgotten_by_the_runtime_and_still_readable():
    runtime = make_runtime()
    call = open_call(runtime)
    await spin(50)
    assert runtime.statistics() == NOTHING_LEFT
    assert (await read_payloads(call))["text"] == ["w0", "w1", "w2"]


# ---- transfer functions ----


async def pair_up(chunks, call):
    """Sums of two; a remaining one is passed on alone."""
    held = []
    async for chunk in chunks:
        held.append(chunk.payload)
        if len(held) == 2:
            yield Chunk(sum(held))
            held = []
    if held:
        yield Chunk(sum(held), last=True)


async def test_transfer_function_may_change_the_number_of_chunks():
    assert await read_payloads(open_call(make_runtime(to_talker=pair_up), {"codec_ids"})) == {"codec_ids": [10, 20]}


async def test_chunks_of_a_transfer_function_are_numbered_for_it():
    seen = []

    async def note(activation):
        async for chunk in activation.inputs["rows"]:
            seen.append((chunk.seq, chunk.last))
        yield Emission("codes", None)

    await read(open_call(make_runtime(to_talker=pair_up, talker=FunctionNode(note)), {"codec_ids"}))
    assert seen == [(0, False), (1, True)]


async def test_transfer_function_receives_its_call():
    infos = []

    async def look(chunks, call):
        infos.append((call.call_id, call.context, call.source, call.target))
        async for chunk in chunks:
            yield chunk

    await read(open_call(make_runtime(to_talker=look), {"codec_ids"}, context={"voice": "Chelsie"}))
    assert infos == [("call", {"voice": "Chelsie"}, "thinker.generate", "talker.generate")]


async def test_transfer_function_is_over_with_the_chunk_it_marks_last():
    async def only_first(chunks, call):
        async for chunk in chunks:
            yield Chunk(chunk.payload, last=True)

    assert await read_payloads(open_call(make_runtime(to_talker=only_first), {"codec_ids"})) == {"codec_ids": [0]}


async def test_transfer_function_left_half_way_is_closed_with_its_activation():
    closed = []

    async def careful(chunks, call):
        try:
            async for chunk in chunks:
                yield chunk
        finally:
            await asyncio.sleep(0)
            closed.append(asyncio.current_task().get_name())

    async def read_one(activation):
        yield Emission("codes", (await anext(activation.inputs["rows"])).payload, last=True)

    await read(open_call(make_runtime(to_talker=careful, talker=FunctionNode(read_one)), {"codec_ids"}))
    assert closed == ["call/talker.generate"]  # by the activation's task, not by the garbage collector


async def test_failure_in_a_transfer_function_names_it_and_its_edge():
    async def broken(chunks, call):
        async for _ in chunks:
            raise ValueError("no such voice")
        yield Chunk(None)

    runtime = make_runtime(to_talker=broken)
    with pytest.raises(ValueError, match="no such voice") as failure:
        await read(open_call(runtime))
    notes = "\n".join(failure.value.__notes__)
    assert "broken" in notes
    assert "thinker.generate.rows -> talker.generate.rows" in notes
    assert "'talker.generate' of call 'call'" in notes
    assert runtime.statistics() == NOTHING_LEFT


# ---- failure ----


async def test_failure_in_a_node_is_raised_as_it_is_and_names_the_node():
    runtime = make_runtime(talker=FunctionNode(fail))
    with pytest.raises(KeyError, match="weights") as failure:
        await read(open_call(runtime))
    assert failure.value.__notes__ == ["in node 'talker.generate' of call 'call'"]
    assert runtime.statistics() == NOTHING_LEFT


async def test_failure_comes_after_the_other_activations_have_cleaned_up():
    thinker = FunctionNode(hang)

    async def think_once_and_hang(activation):
        yield Emission("rows", 1)
        async for emission in hang(activation):
            yield emission

    thinker = FunctionNode(think_once_and_hang)
    with pytest.raises(KeyError):
        await read(open_call(make_runtime(thinker=thinker, talker=FunctionNode(fail))))
    assert thinker.events == ["start", "cancelled", "clean"]


async def test_failure_of_one_call_leaves_the_others_alone():
    async def fail_if_asked(activation):
        async for chunk in activation.inputs["prompt"]:
            if chunk.payload == "bad":
                raise KeyError("weights")
            yield Emission("text", chunk.payload, last=True)

    runtime = make_runtime(thinker=FunctionNode(fail_if_asked))
    good, bad = open_call(runtime, {"text"}, "good", "good"), open_call(runtime, {"text"}, "bad", "bad")
    with pytest.raises(KeyError):
        await read(bad)
    assert await read_payloads(good) == {"text": ["good"]}


async def test_failure_is_raised_at_every_read():
    call = open_call(make_runtime(thinker=FunctionNode(fail)))
    for _ in range(2):
        with pytest.raises(KeyError):
            await anext(call)


async def test_failure_during_clean_up_is_noted_on_the_first_one():
    async def fail_twice(activation):
        try:
            yield Emission("rows", 1)
            await asyncio.get_running_loop().create_future()
        finally:
            raise RuntimeError("cannot even stop")

    with pytest.raises(KeyError) as failure:
        await read(open_call(make_runtime(thinker=FunctionNode(fail_twice), talker=FunctionNode(fail))))
    assert "'thinker.generate' raised RuntimeError('cannot even stop')" in "\n".join(failure.value.__notes__)


async def test_failure_while_the_reader_closes_is_logged(caplog):
    async def fail_to_stop(activation):
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            raise RuntimeError("cannot even stop")
        yield

    call = open_call(make_runtime(thinker=FunctionNode(fail_to_stop)))
    await spin()
    await call.aclose()
    assert "call 'call': node 'thinker.generate' raised while the call was closed" in caplog.text


async def test_undeclared_field_fails_the_call():
    async def emit_typo(activation):
        yield Emission("txt", "hello")

    with pytest.raises(GraphError, match=r"'thinker.generate' emitted field 'txt'.*did you mean 'text'"):
        await read(open_call(make_runtime(thinker=FunctionNode(emit_typo))))


async def test_activation_cancelled_from_outside_fails_its_call():
    async def cancel_itself(activation):
        asyncio.current_task().cancel()
        await asyncio.sleep(0)
        yield Emission("text", "never")

    runtime = make_runtime(thinker=FunctionNode(cancel_itself))
    with pytest.raises(CallAborted, match=r"'thinker.generate' of call 'call' was cancelled from outside"):
        await read(open_call(runtime))
    assert runtime.statistics() == NOTHING_LEFT


# ---- leaving early ----


async def test_abort_returns_after_every_activation_has_cleaned_up():
    nodes = make_speech_nodes(talker=FunctionNode(hang))
    runtime = GraphRuntime(make_speech_plan(), nodes)
    call = open_call(runtime)
    await anext(call)
    await spin()
    await call.abort("user left")
    assert nodes["thinker"].events[-1] == "clean"
    assert nodes["talker"].events == ["start", "cancelled", "clean"]
    assert runtime.statistics() == NOTHING_LEFT
    with pytest.raises(CallAborted, match="'call' aborted: user left"):
        await anext(call)


async def test_abort_wakes_a_waiting_reader():
    call = open_call(make_runtime(thinker=FunctionNode(hang)))
    reader = asyncio.create_task(read(call))
    await spin()
    await call.abort("user left")
    with pytest.raises(CallAborted):
        await reader


async def test_abort_before_the_first_step_starts_nothing():
    nodes = make_speech_nodes()
    runtime = GraphRuntime(make_speech_plan(), nodes)
    await open_call(runtime).abort()
    assert nodes["thinker"].events == []
    assert runtime.statistics() == NOTHING_LEFT


async def test_two_aborts_at_once_both_wait():
    thinker = FunctionNode(hang)
    call = open_call(make_runtime(thinker=thinker))
    await spin()
    await asyncio.gather(call.abort("first"), call.abort("second"))
    assert thinker.events == ["start", "cancelled", "clean"]
    with pytest.raises(CallAborted, match="first"):
        await anext(call)


async def test_abort_after_the_end_changes_nothing():
    call = open_call(make_runtime())
    await read(call)
    await call.abort()
    assert await read(call) == {}


async def test_abort_that_is_itself_cancelled_still_aborts():
    runtime = make_runtime(thinker=FunctionNode(hang))
    call = open_call(runtime)
    await spin()
    aborting = asyncio.create_task(call.abort())
    await asyncio.sleep(0)
    aborting.cancel()
    await spin()
    assert runtime.statistics() == NOTHING_LEFT


async def test_node_may_abort_its_own_call():
    async def give_up(activation):
        await activation.context["call"].abort("bored")
        yield Emission("text", "never")

    context = {}
    call = context["call"] = open_call(make_runtime(thinker=FunctionNode(give_up)), context=context)
    with pytest.raises(CallAborted, match="bored"):
        await read(call)


async def test_aclose_ends_iteration_without_an_error():
    runtime = make_runtime(talker=FunctionNode(hang))
    call = open_call(runtime)
    await anext(call)
    await call.aclose()
    await call.aclose()
    assert await read(call) == {}
    assert runtime.statistics() == NOTHING_LEFT


async def test_aclose_after_the_end_drops_what_was_not_read():
    call = open_call(make_runtime())
    await spin(50)
    await call.aclose()
    assert await read(call) == {}


async def test_leaving_the_with_block_closes_the_call():
    runtime = make_runtime(talker=FunctionNode(hang))
    async with open_call(runtime) as call:
        await anext(call)
    assert runtime.statistics() == NOTHING_LEFT


async def test_cancelled_reader_closes_the_call_by_its_with_block():
    runtime = make_runtime(thinker=FunctionNode(hang))

    async def serve():
        async with open_call(runtime) as call:
            await read(call)

    reader = asyncio.create_task(serve())
    await spin()
    reader.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reader
    assert runtime.statistics() == NOTHING_LEFT


class Stubborn:
    """Ignores every cancellation until ``may_end`` is set, and then yields."""

    def __init__(self):
        self.may_end = asyncio.Event()

    async def forward(self, activation):
        while not self.may_end.is_set():
            with suppress(asyncio.CancelledError):
                await self.may_end.wait()
        yield Emission("text", "late")


async def test_an_abort_waits_for_a_node_that_ignores_it_only_so_long_and_names_it(caplog):
    clock, thinker = ManualClock(), Stubborn()
    runtime = make_runtime(clock=clock, thinker=thinker)
    call = open_call(runtime)
    await spin()
    aborting = asyncio.ensure_future(call.abort())
    await spin()
    clock.advance(CANCEL_TIMEOUT_S - 0.1)
    await spin()
    assert not aborting.done()
    clock.advance(0.1)
    await aborting
    assert runtime.statistics() == NOTHING_LEFT
    assert "call 'call': node 'thinker.generate' has not ended 10 s after it was cancelled" in caplog.text
    again = open_call(runtime, {"text"})  # of the same id
    await spin()
    thinker.may_end.set()
    assert await read_payloads(again) == {"text": ["late"]}
    assert clock.num_armed == 0


async def test_a_node_that_ignores_that_its_output_is_not_read_holds_no_call_up():
    clock, talker, graph = ManualClock(), Stubborn(), make_speech_graph()
    graph.graph_call("say", ["text", "audio"], until=["text"])
    nodes = make_speech_nodes(talker=talker)
    runtime = GraphRuntime(GraphParser(graph).parse(), nodes, clock=clock)
    call = runtime.open("call", {"prompt": "w"}, entry="say")
    reading = asyncio.ensure_future(read(call))
    await spin()
    assert not reading.done()
    clock.advance(CANCEL_TIMEOUT_S)
    await reading
    assert runtime.statistics() == NOTHING_LEFT
    talker.may_end.set()
    await spin()


async def test_call_leaves_no_reference_cycle_with_its_payload():
    class Payload:
        pass

    async def swallow(activation):
        async for _ in activation.inputs["prompt"]:
            yield Emission("text", "done", last=True)

    runtime = make_runtime(thinker=FunctionNode(swallow))
    await read(open_call(runtime, {"text"}, prompt=Payload()))
    runtime._controllers["thinker.generate"]._node.activations.clear()
    gc.collect()
    assert not [thing for thing in gc.get_objects() if type(thing) is Payload]


# ---- deadlines ----


async def test_deadline_aborts_the_call_and_names_the_running_nodes():
    clock = ManualClock()
    nodes = make_speech_nodes(talker=FunctionNode(hang))
    runtime = GraphRuntime(make_speech_plan(), nodes, clock=clock)
    call = open_call(runtime, {"text", "audio"}, deadline_s=2.0)
    await spin()
    clock.advance(1.9)
    assert runtime.statistics().num_open_calls == 1
    clock.advance(0.1)
    with pytest.raises(
        DeadlineExceeded,
        match=r"'call' .* deadline, 2 s after .*; nodes still running: talker.generate; outputs .*: audio",
    ):
        await read(call)
    assert nodes["talker"].events == ["start", "cancelled", "clean"]
    assert runtime.statistics() == NOTHING_LEFT


async def test_call_that_ends_in_time_disarms_its_deadline():
    clock = ManualClock()
    await read(open_call(make_runtime(clock=clock), deadline_s=2.0))
    assert clock.num_armed == 0


async def test_deadline_runs_on_the_event_loop_by_default():
    call = open_call(make_runtime(thinker=FunctionNode(hang)), deadline_s=1e-6)
    with pytest.raises(DeadlineExceeded):
        await read(call)


# ---- opening and closing ----


@pytest.mark.parametrize(
    ("call", "complaint"),
    [
        ({"outputs": {"vido"}}, "no output 'vido'; valid: text, audio, codec_ids"),
        ({"outputs": {"txt"}}, "no output 'txt'; did you mean 'text'?"),
        ({"outputs": set()}, "asks for no output; valid: text, audio, codec_ids"),
        ({"inputs": {}}, r"outputs \['text'\] need input 'prompt'"),
        ({"inputs": {"prompt": 1, "promt": 1}}, "no input 'promt'; did you mean 'prompt'?"),
        ({"deadline_s": 0}, "deadline_s is 0, but must be greater than 0"),
    ],
)
async def test_malformed_call_is_rejected_and_leaves_nothing(call, complaint):
    runtime = make_runtime()
    with pytest.raises(InvalidRequest, match=complaint):
        runtime.open("call", **{"inputs": {"prompt": "w"}, "outputs": {"text"}, **call})
    assert runtime.statistics() == NOTHING_LEFT


async def test_id_of_an_open_call_cannot_be_used_again_until_it_ends():
    runtime = make_runtime()
    call = open_call(runtime)
    with pytest.raises(InvalidRequest, match="call 'call' of graph 'speech': a call of this id is still open"):
        open_call(runtime)
    await read(call)
    assert await read(open_call(runtime))


async def test_every_role_needs_a_node():
    nodes = make_speech_nodes()
    del nodes["talker"]
    with pytest.raises(GraphError, match=r"no node is bound to role 'talker'; .*valid: thinker, token2wav"):
        GraphRuntime(make_speech_plan(), nodes)


async def test_node_for_an_unknown_role_is_rejected():
    with pytest.raises(GraphError, match="has no role 'talkr'; did you mean 'talker'"):
        make_runtime(talkr=FunctionNode(talk))


async def test_link_that_fails_at_the_start_leaves_nothing():
    class BrokenLink(ShufflingLink):
        def send(self, frame):
            raise OSError("unplugged")

    runtime = make_runtime(link=BrokenLink(random.Random(0)))
    with pytest.raises(OSError, match="unplugged"):
        open_call(runtime)
    assert runtime.statistics() == NOTHING_LEFT


async def test_statistics_count_calls_activations_and_frames():
    runtime = make_runtime(talker=FunctionNode(hang))
    call = open_call(runtime)
    await spin()
    assert runtime.statistics() == FlowStatistics(
        num_open_calls=1,
        num_waiting_calls=0,
        num_running_activations=1,  # the talker
        num_buffered_frames=6,  # three words unread by the user, three rows unread by the talker
    )
    await call.aclose()


async def test_closing_the_runtime_aborts_calls_and_rejects_new_ones():
    thinker = FunctionNode(hang)
    runtime = make_runtime(thinker=thinker)
    calls = [open_call(runtime, call_id=f"c{i}") for i in range(3)]
    await spin()
    await runtime.aclose()
    await runtime.aclose()
    assert thinker.events.count("clean") == 3
    assert runtime.statistics() == NOTHING_LEFT
    for call in calls:
        with pytest.raises(CallAborted, match="the runtime was closed"):
            await anext(call)
    with pytest.raises(OmniError, match="the runtime is closed"):
        open_call(runtime)


async def test_one_node_object_serves_concurrent_activations():
    thinker = FunctionNode(think)
    runtime = make_runtime(thinker=thinker)
    await asyncio.gather(*(read(open_call(runtime, {"text"}, f"c{i}")) for i in range(3)))
    assert len({activation.call_id for activation in thinker.activations}) == 3


# ---- sessions ----


async def test_calls_of_one_session_run_one_after_the_other():
    thinker = FunctionNode(think)
    runtime = make_runtime(thinker=thinker)
    calls = [open_call(runtime, {"text"}, call_id=f"c{i}", session="s") for i in range(3)]
    assert runtime.statistics().num_waiting_calls == 2
    answers = [await read_payloads(call) for call in reversed(calls)]
    assert [activation.call_id for activation in thinker.activations] == ["c0", "c1", "c2"]
    assert thinker.events == ["start", "clean"] * 3
    assert all(answer == {"text": ["w0", "w1", "w2"]} for answer in answers)
    assert runtime.statistics() == NOTHING_LEFT


async def test_sessions_do_not_wait_for_one_another():
    runtime = make_runtime(talker=FunctionNode(hang))
    stuck = open_call(runtime, {"audio"}, call_id="stuck", session="a")
    assert await read_payloads(open_call(runtime, {"text"}, call_id="b", session="b")) == {"text": ["w0", "w1", "w2"]}
    await stuck.aclose()


async def test_call_that_waits_for_its_session_can_be_aborted():
    thinker = FunctionNode(hang)
    runtime = make_runtime(thinker=thinker)
    first = open_call(runtime, call_id="first", session="s")
    waiting = open_call(runtime, call_id="waiting", session="s")
    await waiting.abort()
    with pytest.raises(CallAborted):
        await read(waiting)
    assert runtime.statistics().num_open_calls == 1
    await first.aclose()
    assert len(thinker.activations) <= 1
    assert runtime.statistics() == NOTHING_LEFT


async def test_deadline_holds_while_a_call_waits_for_its_session():
    clock = ManualClock()
    runtime = make_runtime(clock=clock, thinker=FunctionNode(hang))
    first = open_call(runtime, call_id="first", session="s")
    waiting = open_call(runtime, call_id="waiting", session="s", deadline_s=1.0)
    clock.advance(1.0)
    with pytest.raises(DeadlineExceeded, match="waited for another call of session 's'"):
        await read(waiting)
    await first.aclose()


async def test_failure_of_a_call_lets_the_next_of_its_session_in():
    runtime = make_runtime(talker=FunctionNode(fail))
    broken = open_call(runtime, {"audio"}, call_id="broken", session="s")
    following = open_call(runtime, {"text"}, call_id="following", session="s")
    with pytest.raises(KeyError):
        await read(broken)
    assert await read_payloads(following) == {"text": ["w0", "w1", "w2"]}


async def test_closing_the_runtime_ends_calls_that_wait_for_their_session():
    runtime = make_runtime(thinker=FunctionNode(hang))
    calls = [open_call(runtime, call_id=f"c{i}", session="s") for i in range(3)]
    await runtime.aclose()
    for call in calls:
        with pytest.raises(CallAborted):
            await read(call)
    assert runtime.statistics() == NOTHING_LEFT


# ---- back-pressure ----


def emit_rows(number, sent):
    async def forward(activation):
        assert [chunk.payload async for chunk in activation.inputs["prompt"]] == ["w"]
        for row in range(number):
            yield Emission("rows", row, last=row == number - 1)
            sent.append(row)

    return FunctionNode(forward)


def read_after_gate(gate):
    async def forward(activation):
        await gate.wait()
        async for chunk in activation.inputs["rows"]:
            yield Emission("codes", chunk.payload, last=chunk.last)

    return FunctionNode(forward)


async def test_slow_consumer_holds_its_producer_back():
    sent, gate = [], asyncio.Event()
    runtime = make_runtime(thinker=emit_rows(1000, sent), talker=read_after_gate(gate))
    call = open_call(runtime, {"codec_ids"})
    await spin(200)
    assert WINDOW - 1 <= len(sent) <= WINDOW
    assert runtime.statistics().num_buffered_frames == WINDOW
    gate.set()
    assert await read_payloads(call) == {"codec_ids": list(range(1000))}


class Painter(Role):
    paint = interface([["prompt"]], {"image": Field("image", streamed=True, window=3)})


class Framer(Role):
    frame = interface([["image"]], {"framed": Field("image", streamed=True, window=2)})


async def test_large_pieces_have_a_window_of_their_own_on_every_edge():
    """Three pieces wait at the framer and three at the user, who reads them directly; two framed ones at the user."""
    painted, framed = [], []

    async def paint(activation):
        for number in range(100):
            yield Emission("image", number)
            painted.append(number)

    async def frame(activation):
        async for chunk in activation.inputs["image"]:
            yield Emission("framed", chunk.payload)
            framed.append(chunk.payload)

    graph = Graph("pictures")
    images = graph.role(Painter, "painter").paint(prompt=graph.placeholder("prompt")).image
    graph.output(framed=graph.role(Framer, "framer").frame(image=images).framed, image=images)
    nodes = {"painter": FunctionNode(paint), "framer": FunctionNode(frame)}
    runtime = GraphRuntime(GraphParser(graph).parse(), nodes)
    alone = runtime.open("alone", {"prompt": "a cat"}, {"framed"})
    await spin(100)
    assert (len(painted), len(framed)) == (2 + 3 - 1, 2 - 1)  # the last of each waits in its yield
    assert await read_payloads(alone) == {"framed": list(range(100))}
    painted.clear()
    both = runtime.open("both", {"prompt": "a cat"}, {"framed", "image"})
    await spin(100)
    assert len(painted) == 3 - 1
    assert await read_payloads(both) == {"framed": list(range(100)), "image": list(range(100))}


def test_a_window_is_that_of_a_stream():
    for field in ({"window": 0, "streamed": True}, {"window": 3}):
        with pytest.raises(GraphError, match="window"):
            Field("image", **field)


async def test_user_that_does_not_read_holds_the_whole_chain_back():
    sent, gate = [], asyncio.Event()
    gate.set()
    runtime = make_runtime(thinker=emit_rows(1000, sent), talker=read_after_gate(gate))
    call = open_call(runtime, {"codec_ids"})
    await spin(500)
    assert runtime.statistics().num_buffered_frames <= 2 * WINDOW
    assert len(sent) <= 2 * WINDOW + 1
    assert await read_payloads(call) == {"codec_ids": list(range(1000))}


async def test_producer_that_is_held_back_can_be_aborted():
    sent, gate = [], asyncio.Event()
    thinker = emit_rows(1000, sent)
    runtime = make_runtime(thinker=thinker, talker=read_after_gate(gate))
    call = open_call(runtime, {"codec_ids"})
    await spin(200)
    await call.abort()
    assert thinker.events == ["start", "clean"]  # closed where it yields
    assert runtime.statistics() == NOTHING_LEFT


@pytest.mark.parametrize("when", ["before it reads", "after it has read some"])
async def test_consumer_that_stops_reading_lets_its_producer_go_on(when):
    async def leave_early(activation):
        if when == "after it has read some":
            async for _ in activation.inputs["rows"]:
                break
        yield Emission("codes", 1, last=True)

    async def talk_and_write(activation):
        for row in range(1000):
            yield Emission("rows", row, last=row == 999)
        yield Emission("text", "done", last=True)

    runtime = make_runtime(thinker=FunctionNode(talk_and_write), talker=FunctionNode(leave_early))
    assert await read_payloads(open_call(runtime, {"codec_ids", "text"})) == {"codec_ids": [1], "text": ["done"]}


@pytest.mark.parametrize("seed", range(20))
async def test_credit_survives_a_link_that_shuffles_and_repeats(seed):
    gate = asyncio.Event()
    gate.set()
    link = ShufflingLink(random.Random(seed))
    runtime = make_runtime(thinker=emit_rows(500, []), talker=read_after_gate(gate), link=link)
    assert await read_payloads(open_call(runtime, {"codec_ids"})) == {"codec_ids": list(range(500))}
    await spin()


class Splitter(Role):
    split = interface(
        inputs_or=[["prompt"]], outputs={"left": Field("text", streamed=True), "right": Field("text", streamed=True)}
    )


class Zipper(Role):
    zip = interface(inputs_or=[["left", "right"]], outputs={"both": Field("text")})


@pytest.mark.parametrize("first, second", [("left", "right"), ("right", "left")])
async def test_reader_that_waits_for_one_field_lets_its_producer_fill_the_other(first, second):
    async def split(activation):
        for field in ("left", "right"):
            for number in range(5 * WINDOW):
                yield Emission(field, number, last=number == 5 * WINDOW - 1)

    async def zip_up(activation):
        numbers = [chunk.payload async for chunk in activation.inputs[first]]
        yield Emission("both", numbers == [chunk.payload async for chunk in activation.inputs[second]])

    graph = Graph("g")
    halves = graph.role(Splitter, "splitter").split(prompt=graph.placeholder("prompt"))
    graph.output(both=graph.role(Zipper, "zipper").zip(left=halves.left, right=halves.right).both)
    nodes = {"splitter": FunctionNode(split), "zipper": FunctionNode(zip_up)}
    runtime = GraphRuntime(GraphParser(graph).parse(), nodes)
    assert await asyncio.wait_for(read_payloads(open_call(runtime, {"both"})), 10) == {"both": [True]}


async def test_transfer_function_that_has_all_it_wants_lets_the_producer_go_on():
    """While the activation works on its last chunk, which may take longer than the rest of the stream."""
    sent, gate = [], asyncio.Event()

    async def only_first(chunks, call):
        async for chunk in chunks:
            yield Chunk(chunk.payload, last=True)

    async def work_on_each(activation):
        async for chunk in activation.inputs["rows"]:
            await gate.wait()
            yield Emission("codes", chunk.payload, last=chunk.last)

    runtime = make_runtime(thinker=emit_rows(1000, sent), talker=FunctionNode(work_on_each), to_talker=only_first)
    call = open_call(runtime, {"codec_ids"})
    await spin(2000)
    assert len(sent) == 1000
    assert runtime.statistics().num_buffered_frames == 0
    gate.set()
    assert await read_payloads(call) == {"codec_ids": [0]}
    assert runtime.statistics() == NOTHING_LEFT
