"""A stage as a node: requests that a transfer function makes become requests to its engine."""

from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

import pytest
from vllm.outputs import RequestOutput

from vllm_omni.engine.node import StageNode
from vllm_omni.errors import CallAborted, DeadlineExceeded, InvalidRequest, StageFailed
from vllm_omni.flow import CallInfo, Chunk, Field, Graph, GraphParser, GraphRuntime, Role, interface
from vllm_omni.messages.outputs import OmniRequestOutput
from vllm_omni.model_executor.pipeline import RequestContext, StageRequest
from vllm_omni.process.status import StageStatus


class Writer(Role):
    write = interface([["prompt"], ["draft"]], {"text": Field("text", streamed=True)})


class Editor(Role):
    edit = interface([["draft"]], {"text": Field("text", streamed=True)})


class Stage(StageNode):
    """Answers every request with one output."""

    name = "writer"

    def __init__(self) -> None:
        self.suffixes: list[str] = []

    async def generate(
        self, request: StageRequest, context: RequestContext, wanted: frozenset[str], suffix: str = ""
    ) -> AsyncGenerator[OmniRequestOutput, None]:
        self.suffixes.append(suffix)
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


async def run(stage: Stage, to_prompt: Any, to_draft: Any) -> RequestContext:
    graph = Graph("g")
    writer = graph.role(Writer, "writer")
    reply = writer.write(prompt=graph.placeholder("prompt").via(to_prompt))
    writer.write(draft=reply.text.via(to_draft))
    graph.output(text=reply.text)
    context = RequestContext("request", {}, {})
    runtime = GraphRuntime(GraphParser(graph).parse(), {"writer": stage})
    async for _ in runtime.open("request", {"prompt": 2}, ["text"], context=context):
        pass
    return context


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
    assert stage.suffixes == ["", "-1", "+", "++"]


async def test_durations_of_the_requests_and_iterations_of_a_stage_add_up(seconds: None) -> None:
    context = await run(Stage(), twice, again)
    assert context.stage_durations == {"writer": 4.0}


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
