"""A stage as a node: requests that a transfer function makes become requests to its engine."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from typing import Any

import pytest
import torch
from vllm.logprobs import Logprob
from vllm.outputs import CompletionOutput, RequestOutput

from vllm_omni.engine.node import StageNode
from vllm_omni.engine.request_record import RequestRecord
from vllm_omni.errors import CallAborted, DeadlineExceeded, GraphError, InvalidRequest, StageFailed
from vllm_omni.flow import (
    Activation,
    CallInfo,
    Chunk,
    Emission,
    EndReason,
    Field,
    Graph,
    GraphParser,
    GraphRuntime,
    Role,
    interface,
)
from vllm_omni.messages.outputs import OmniRequestOutput
from vllm_omni.messages.report import Reporter, ignore
from vllm_omni.messages.stage_output import StageOutput
from vllm_omni.model_executor.frames import Images, Sentences, Tokens
from vllm_omni.model_executor.pipeline import RequestContext, StageRequest, StageSpec
from vllm_omni.model_executor.routes import ByKind, ByReply
from vllm_omni.process.status import StageStatus


class Writer(Role):
    write = interface([["prompt"], ["draft"]], {"text": Field("text", streamed=True)})


class Editor(Role):
    edit = interface([["draft"]], {"text": Field("text", streamed=True)})


class Stage(StageNode):
    """Answers every request with one output."""

    name = "writer"
    spec = StageSpec("writer", "", "text")

    def __init__(self) -> None:
        self.suffixes: list[str] = []
        self.args: list[Any] = []

    async def generate(
        self,
        request: StageRequest,
        context: RequestContext,
        wanted: frozenset[str],
        suffix: str = "",
        report: Reporter = ignore,
    ) -> AsyncGenerator[OmniRequestOutput, None]:
        self.suffixes.append(suffix)
        self.args.append(request.args)
        yield OmniRequestOutput.of(RequestOutput("id", request.prompt, None, None, outputs=[], finished=True))

    def current_status(self) -> StageStatus:
        return StageStatus()


class BreakingStage(Stage):
    """Answers a request, and raises before its end."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error

    async def generate(self, request: StageRequest, *args: Any) -> AsyncGenerator[OmniRequestOutput, None]:
        async for output in super().generate(request, *args):
            yield output
        raise self.error


class PublishingStage(Stage):
    spec = StageSpec("writer", "", "text", publishing_fields=frozenset({"text"}))


async def test_a_request_names_the_nodes_that_read_what_its_stage_publishes() -> None:
    graph = Graph("g")
    prompt = graph.placeholder("prompt").via(to_request)
    reply = graph.role(Writer, "writer").write(prompt=prompt)
    editors = [graph.role(Editor, name).edit(draft=reply.text.via(to_request)) for name in ("first", "second")]
    graph.output(text=reply.text, **{f"edited{n}": editor.text for n, editor in enumerate(editors)})
    wanted = {"edited0": ["first.edit"], "edited1": ["second.edit"], "text": ["entry"]}
    for outputs in (["edited0"], ["edited1"], ["edited0", "edited1"], list(wanted)):
        writer, others = PublishingStage(), {"first": Stage(), "second": Stage()}
        runtime = GraphRuntime(GraphParser(graph).parse(), {"writer": writer, **others})
        async for _ in runtime.open("call", {"prompt": 2}, outputs, context=RequestContext("request", {}, {})):
            pass
        assert writer.args == [{"readers": sorted(node for name in outputs for node in wanted[name])}]
        assert all(args == {} for stage in others.values() for args in stage.args)


async def to_request(chunks: AsyncIterator[Chunk], call: CallInfo) -> AsyncIterator[Chunk]:
    async for _ in chunks:
        yield Chunk(StageRequest("draft"), last=True)


async def run(stage: Stage, to_prompt: Any, to_draft: Any) -> RequestRecord:
    graph = Graph("g")
    writer = graph.role(Writer, "writer")
    reply = writer.write(prompt=graph.placeholder("prompt").via(to_prompt))
    writer.write(draft=reply.text.via(to_draft))
    graph.output(text=reply.text)
    context, record = RequestContext("request", {}, {}), RequestRecord()
    runtime = GraphRuntime(GraphParser(graph).parse(), {"writer": stage})
    async for _ in runtime.open("request", {"prompt": 2}, ["text"], context=context, on_report=record.add):
        pass
    return record


async def twice(chunks: AsyncIterator[Chunk], call: CallInfo) -> AsyncIterator[Chunk]:
    async for chunk in chunks:
        for _ in range(2):
            yield Chunk(StageRequest(str(chunk.payload)))


async def again(chunks: AsyncIterator[Chunk], call: CallInfo) -> AsyncIterator[Chunk]:
    prompts = [chunk.payload.prompt async for chunk in chunks if chunk.payload is not None]
    if len(prompts[-1]) < 3:
        yield Chunk(StageRequest(prompts[-1] + "+"), last=True)


@pytest.fixture
def seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every look at the clock takes a second."""
    ticks = iter(range(1000))
    monkeypatch.setattr("vllm_omni.engine.node.time.monotonic", lambda: float(next(ticks)))


async def test_every_request_of_a_call_has_an_id_of_its_own() -> None:
    stage = Stage()
    await run(stage, twice, again)
    assert stage.suffixes == ["", "-1", "+0", "+0+0"]  # the number is the loop's


async def test_durations_of_the_requests_and_iterations_of_a_stage_add_up(seconds: None) -> None:
    record = await run(Stage(), twice, again)
    assert record.stage_durations == {"writer": 4.0}


async def run_behind(first: Stage, to_last: Any) -> None:
    """The last stage reads two others, so the call continues where the first of them fails, and the last reads that."""
    graph = Graph("g")
    prompt, last = graph.placeholder("prompt"), graph.role(Editor, "last")
    reply = last.edit(draft=graph.role(Editor, "first").edit(draft=prompt.via(twice)).text.via(to_last))
    last.edit(draft=graph.role(Editor, "other").edit(draft=prompt.via(twice)).text.via(to_last))
    graph.output(text=reply.text)
    stages = {"first": first, "other": Stage(), "last": Stage()}
    runtime = GraphRuntime(GraphParser(graph).parse(), stages)
    async for _ in runtime.open("request", {"prompt": 2}, ["text"], context=RequestContext("request", {}, {})):
        pass


async def each(chunks: AsyncIterator[Chunk], call: CallInfo) -> AsyncIterator[Chunk]:
    async for chunk in chunks:
        yield Chunk(StageRequest(chunk.payload.prompt))


@pytest.mark.parametrize(
    "error",
    [InvalidRequest("bad"), DeadlineExceeded("late"), CallAborted("left"), StageFailed("first", "died"), KeyError("x")],
    ids=repr,
)
async def test_an_error_of_an_earlier_stage_passes_through_its_reader(
    error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(type(error)) as raised:
        await run_behind(BreakingStage(error), each)
    assert raised.value is error
    assert [note.partition(" of ")[0] for note in error.__notes__] == ["in node 'first.edit'", "in node 'last.edit'"]
    assert "could not be made" not in caplog.text


async def test_an_error_that_a_transfer_function_makes_of_an_earlier_stages_is_the_readers() -> None:
    async def translate(chunks: AsyncIterator[Chunk], call: CallInfo) -> AsyncIterator[Chunk]:
        try:
            async for chunk in each(chunks, call):
                yield chunk
        except InvalidRequest as exc:
            raise InvalidRequest("worse") from exc

    with pytest.raises(StageFailed, match=r"stage 'writer': its request could not be made: .*worse"):
        await run_behind(BreakingStage(InvalidRequest("bad")), translate)


@pytest.mark.parametrize(
    "error",
    [ValueError("bad"), InvalidRequest("bad"), KeyError("bad"), CallAborted("bad"), StageFailed("other", "bad")],
    ids=repr,
)
async def test_an_error_of_a_transfer_function_is_the_stages(error: Exception) -> None:
    async def fail(chunks: AsyncIterator[Chunk], call: CallInfo) -> AsyncIterator[Chunk]:
        async for chunk in chunks:
            raise error
            yield chunk

    with pytest.raises(StageFailed, match=r"stage 'writer': its request could not be made: .*bad") as raised:
        await run(Stage(), twice, fail)
    assert raised.value.__cause__ is error


def output(text: str = "", token_ids: Sequence[int] = (), **media: Any) -> OmniRequestOutput:
    completion = CompletionOutput(0, text, list(token_ids), None, None)
    made = OmniRequestOutput.of(RequestOutput("id", None, [1], None, outputs=[completion], finished=False))
    made.multimodal_output = media
    return made


class Speaker(Role):
    answer = interface(
        [["prompt"], ["left", "right"]],
        {"text": Field("text", streamed=True), "call": Field("text"), "image": Field("image", streamed=True)},
    )


class Scripted(Stage):
    """Answers every request with the same outputs."""

    def __init__(self, outputs: Sequence[OmniRequestOutput], **spec: Any) -> None:
        super().__init__()
        self.prompts: list[Any] = []
        self.are_read_whole: list[bool] = []
        self.outputs = outputs
        self.spec = StageSpec("speaker", "", "text", **spec)
        self.whole_fields = {"answer": {"call"}}

    async def generate(
        self,
        request: StageRequest,
        context: RequestContext,
        wanted: frozenset[str],
        suffix: str = "",
        report: Reporter = ignore,
    ) -> AsyncGenerator[OmniRequestOutput, None]:
        self.prompts.append(request.prompt)
        self.are_read_whole.append(request.is_read_whole)
        for one in self.outputs:
            yield one


async def speak(stage: Stage, inputs: Mapping[str, Any], outputs: Sequence[str]) -> dict[str, Any]:
    """The payloads of each output, and the reason where it ended without one."""
    graph = Graph("g")
    speaker = graph.role(Speaker, "speaker")
    said = speaker.answer(**{name: graph.placeholder(name) for name in inputs})
    graph.output(text=said.text, call=said.call, image=said.image)
    runtime = GraphRuntime(GraphParser(graph).parse(), {"speaker": stage})
    got: dict[str, Any] = {}
    async for frame in runtime.open("request", inputs, outputs, context=RequestContext("request", {}, {})):
        if frame.payload is not None:
            got.setdefault(frame.field, []).append(frame.payload)
        elif frame.field not in got:
            got[frame.field] = frame.reason
    return got


async def test_a_join_makes_its_requests_of_all_fields() -> None:
    async def combine(activation: Activation) -> AsyncIterator[Chunk]:
        left = [chunk.payload async for chunk in activation.inputs["left"]]
        async for chunk in activation.inputs["right"]:
            yield Chunk(StageRequest([*left, chunk.payload]))

    stage = Scripted([output("yes")], combine={"answer": combine})
    await speak(stage, {"left": 1, "right": 2}, ["text"])
    assert stage.prompts == [[1, 2]]


async def test_an_engine_chooses_a_branch_and_the_other_is_not_reached() -> None:
    async def route(outputs: AsyncIterator[StageOutput], activation: Activation) -> AsyncIterator[Emission]:
        async for one in outputs:
            yield Emission("call" if one.outputs[0].text.startswith("use") else "text", one)

    for text, taken, other in (("use it", "call", "text"), ("hello", "text", "call")):
        stage = Scripted([output(text)], route={"answer": route})
        got = await speak(stage, {"prompt": StageRequest("?")}, ["text", "call"])
        assert got[taken][0].outputs[0].text == text
        assert got[other] is EndReason.EMPTY


async def test_replies_go_as_a_whole_to_the_fields_that_are_chosen_for_them() -> None:
    def choose(reply: StageOutput, activation: Activation) -> str:
        assert activation.wanted == {"text", "call"}
        return "call" if reply.outputs[0].text.startswith("use") else "text"

    for pieces, taken, other in ((["u", "se", " it"], "call", "text"), (["hel", "lo"], "text", "call")):
        outputs = [output(text) for text in pieces]
        outputs[-1].finished = True
        got = await speak(
            Scripted(outputs, route={"answer": ByReply(choose)}), {"prompt": StageRequest("?")}, ["text", "call"]
        )
        assert [one.outputs[0].text for one in got[taken]] == ["".join(pieces)]
        assert got[other] is EndReason.EMPTY


async def test_outputs_go_to_the_fields_of_their_kind() -> None:
    picture = torch.zeros(1, 2, 2, 3)
    mixed = output("see", images=picture)
    mixed.outputs = []
    stage = Scripted([output("hello"), mixed], route={"answer": ByKind(text="text", image="image")})
    got = await speak(stage, {"prompt": StageRequest("?")}, ["text", "image"])
    assert [one.outputs[0].text for one in got["text"]] == ["hello"]
    assert [one.multimodal_output["images"] for one in got["image"]] == [picture]
    with pytest.raises(GraphError, match=r"field 'picture': kind 'images': did you mean 'image'"):
        ByKind(picture="images")


async def test_a_field_that_is_not_streamed_gets_everything_at_once() -> None:
    stage = Scripted([output("a", [1]), output("b", [2, 3])])
    got = await speak(stage, {"prompt": StageRequest("?")}, ["text", "call"])
    (whole,) = got["call"]
    assert (whole.outputs[0].text, list(whole.outputs[0].token_ids)) == ("ab", [1, 2, 3])
    assert [one.outputs[0].text for one in got["text"]] == ["a", "b"]


async def test_a_reply_is_read_whole_where_nothing_reads_a_piece() -> None:
    async def route(outputs: AsyncIterator[StageOutput], activation: Activation) -> AsyncIterator[Emission]:
        async for one in outputs:
            yield Emission("call", one)

    pieces: Mapping[str, dict[str, Any]] = {
        "read by a route": {"route": {"answer": route}},
        "cut into frames": {"frames": {"call": Tokens}},
        "published": {"publishing_fields": frozenset({"call"})},
    }
    for spec, outputs, is_whole in (
        ({}, ["call"], True),
        ({}, ["call", "text"], False),
        ({"route": {"answer": ByKind(call="text")}}, ["call"], True),
        ({"route": {"answer": ByKind(call="text")}}, ["call", "text"], False),
        ({"route": {"answer": ByReply(lambda reply, activation: "call")}}, ["call"], True),
        *((one, ["call"], False) for one in pieces.values()),
    ):
        stage = Scripted([output("yes")], **spec)
        await speak(stage, {"prompt": StageRequest("?")}, outputs)
        assert stage.are_read_whole == [is_whole], (spec, outputs)


async def test_frames_do_not_depend_on_how_the_engine_cuts_its_outputs() -> None:
    text = "One. Two... three? 3.5!\nrest"
    for size in (1, 3, 7, len(text)):
        parts = [output(text[at : at + size]) for at in range(0, len(text), size)]
        got = await speak(Scripted(parts, frames={"text": Sentences}), {"prompt": StageRequest("?")}, ["text"])
        assert [one.outputs[0].text for one in got["text"]] == ["One. ", "Two... ", "three? ", "3.", "5!\n", "rest"]
    for ids in ([[1, 2], [3]], [[1], [2], [3]]):
        parts = [output("", some) for some in ids]
        got = await speak(Scripted(parts, frames={"text": Tokens}), {"prompt": StageRequest("?")}, ["text"])
        assert [one.outputs[0].token_ids for one in got["text"]] == [[1], [2], [3]]
    parts = [output(images=torch.arange(12).view(3, 1, 1, 4))]
    got = await speak(Scripted(parts, frames={"image": Images}), {"prompt": StageRequest("?")}, ["image"])
    assert [one.multimodal_output["images"].tolist()[0][0][0][0] for one in got["image"]] == [0, 4, 8]


async def test_a_request_of_another_type_is_the_pipelines_fault() -> None:
    with pytest.raises(StageFailed, match=r"'writer': its request is a str: the pipeline must make a StageRequest"):
        await speak(Scripted([]), {"prompt": "hello"}, ["text"])


async def test_an_error_of_a_route_is_the_pipelines_and_one_of_the_engine_stays() -> None:
    async def broken(outputs: AsyncIterator[StageOutput], activation: Activation) -> AsyncIterator[Emission]:
        async for one in outputs:
            raise InvalidRequest("no such field")
            yield Emission("text", one)

    with pytest.raises(StageFailed, match=r"'writer': its outputs could not be routed: .*no such field"):
        await speak(Scripted([output("a")], route={"answer": broken}), {"prompt": StageRequest("?")}, ["text"])

    class Rejecting(Scripted):
        async def generate(self, *args: Any) -> AsyncGenerator[OmniRequestOutput, None]:
            raise InvalidRequest("too long")
            yield output()

    stage = Rejecting([], route={"answer": ByKind(text="text")})
    with pytest.raises(InvalidRequest, match="too long"):
        await speak(stage, {"prompt": StageRequest("?")}, ["text"])


async def test_nodes_of_one_stage_have_request_ids_of_their_own() -> None:
    stage = Scripted([output("a")])
    stage.whole_fields = {"answer": set(), "other": set()}
    suffixes: list[str] = []

    async def generate(
        request: StageRequest, context: RequestContext, wanted: frozenset[str], suffix: str, report: Reporter
    ) -> AsyncGenerator[OmniRequestOutput, None]:
        suffixes.append(suffix)
        yield output("a")

    stage.generate = generate  # type: ignore[method-assign]
    await speak(stage, {"prompt": StageRequest("?")}, ["text"])
    assert suffixes == [".answer"]


class Waiting(Scripted):
    """Answers with its outputs and then waits."""

    async def generate(self, *args: Any) -> AsyncGenerator[OmniRequestOutput, None]:
        async for one in super().generate(*args):
            yield one
        await asyncio.Event().wait()


async def test_the_clean_up_of_combine_and_route_is_part_of_an_activation_that_is_aborted() -> None:
    closed: list[str] = []

    async def combine(activation: Activation) -> AsyncIterator[Chunk]:
        try:
            async for chunk in activation.inputs["prompt"]:
                yield Chunk(chunk.payload)
        finally:
            closed.append("combine")

    async def route(outputs: AsyncIterator[StageOutput], activation: Activation) -> AsyncIterator[Emission]:
        try:
            async for one in outputs:
                for _ in range(1000):  # until it waits for its reader, who does not come
                    yield Emission("text", one)
        finally:
            closed.append("route")

    for stage in (
        Waiting([output("a")], combine={"answer": combine}),
        Waiting([output("a")], combine={"answer": combine}, route={"answer": route}),
    ):
        graph = Graph("g")
        speaker = graph.role(Speaker, "speaker")
        graph.output(text=speaker.answer(prompt=graph.placeholder("prompt")).text)
        runtime = GraphRuntime(GraphParser(graph).parse(), {"speaker": stage})
        context = RequestContext("request", {}, {})
        call = runtime.open("request", {"prompt": StageRequest("?")}, ["text"], context=context)
        await anext(call)
        await call.abort()
        closed.append("call")
    assert closed == ["combine", "call", "route", "combine", "call"]


async def test_the_clean_up_of_combine_precedes_the_end_of_its_activation() -> None:
    closed: list[str] = []

    async def combine(activation: Activation) -> AsyncIterator[Chunk]:
        try:
            yield Chunk(StageRequest("?"), last=True)
        finally:
            await asyncio.sleep(0)
            closed.append("combine")

    await speak(Scripted([output("a")], combine={"answer": combine}), {"prompt": 1}, ["text"])
    assert closed == ["combine"]


async def test_a_combine_that_is_no_generator_may_fail_as_one() -> None:
    def combine(activation: Activation) -> AsyncIterator[Chunk]:
        raise InvalidRequest("no such tool")

    with pytest.raises(StageFailed, match=r"'writer': its request could not be made: .*no such tool"):
        await speak(Scripted([output("a")], combine={"answer": combine}), {"prompt": 1}, ["text"])


def of_choice(index: int, text: str, logprob: float) -> OmniRequestOutput:
    completion = CompletionOutput(index, text, [index], None, [{index: Logprob(logprob)}])
    return OmniRequestOutput.of(RequestOutput("id", None, [1], None, outputs=[completion], finished=False))


async def test_a_reader_of_everything_changes_nothing_for_the_readers_of_the_pieces() -> None:
    outputs = [of_choice(0, "a", -1), of_choice(1, "x", -2), of_choice(0, "b", -3), of_choice(1, "y", -4)]
    got = await speak(Scripted(outputs), {"prompt": StageRequest("?")}, ["text", "call"])
    (whole,) = got["call"]
    assert [(one.text, list(one.token_ids), len(one.logprobs)) for one in whole.outputs] == [
        ("ab", [0, 0], 2),
        ("xy", [1, 1], 2),
    ]
    pieces = [(one.outputs[0].text, one.outputs[0].token_ids, len(one.outputs[0].logprobs)) for one in got["text"]]
    assert pieces == [("a", [0], 1), ("x", [1], 1), ("b", [0], 1), ("y", [1], 1)]


async def test_frames_are_those_of_the_first_of_several_answers() -> None:
    outputs = [
        of_choice(0, "One. ", -1),
        of_choice(1, "Eins. ", -1),
        of_choice(0, "Two.", -1),
        of_choice(1, "Zwei.", -1),
    ]
    got = await speak(Scripted(outputs, frames={"text": Sentences}), {"prompt": StageRequest("?")}, ["text"])
    assert [one.outputs[0].text for one in got["text"]] == ["One. ", "Two."]
    got = await speak(Scripted(outputs, frames={"text": Tokens}), {"prompt": StageRequest("?")}, ["text"])
    assert [one.outputs[0].token_ids for one in got["text"]] == [[0], [0]]


async def test_frames_of_fields_that_are_cut_alike_stay_together() -> None:
    """So that a join below meets what was made of the same token; other fields have frames of their own."""

    async def prompt() -> AsyncIterator[Chunk]:
        yield Chunk(StageRequest("?"), last=True)

    frames = {"left": Tokens, "right": Tokens, "line": Sentences}
    stage = Scripted([output("a ", [1, 2]), output("b.", [3])], frames=frames)
    stage.whole_fields = {}
    inputs, context = {"prompt": prompt()}, RequestContext("request", {}, {})
    activation = Activation("request", "speaker.answer", "answer", 1, inputs, frozenset(frames), context)
    yields = [[(one.field, one.payload.outputs[0]) for one in together] async for together in stage.forward(activation)]
    assert [[field for field, _ in one] for one in yields if len(one) == 1] == [["line"]]
    pairs = [{field: list(made.token_ids) for field, made in one} for one in yields if len(one) == 2]
    assert pairs == [{"left": [token], "right": [token]} for token in (1, 2, 3)]
