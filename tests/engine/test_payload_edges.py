"""Each reader of published tensors sees its own references, before its transfer function."""

from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest

from vllm_omni.engine.payload_edges import PayloadEdges
from vllm_omni.flow import (
    Activation,
    CallInfo,
    Chunk,
    Emission,
    Field,
    Graph,
    GraphParser,
    GraphRuntime,
    Role,
    interface,
    parse_graphs,
)
from vllm_omni.messages.payload import Payload, TensorRef
from vllm_omni.messages.stage_output import StageOutput
from vllm_omni.model_executor.pipeline import StageSpec

TEXT, ROWS = Field("text", streamed=True), Field("rows", streamed=True)
REF = TensorRef("shm", (2, 3), "float32", b"", 1)
PAYLOAD = Payload({"rows": REF}, {}, {"a.read": REF, "b.read": REF}, {"b.read": {}})


class Writer(Role):
    write = interface([["prompt"]], {"text": TEXT, "rows": ROWS})


class Reader(Role):
    read = interface([["rows"]], {"text": TEXT})


async def spoil(chunks: AsyncIterator[Chunk], call: CallInfo) -> AsyncIterator[Chunk]:
    """What a function does to its payloads concerns no other reader."""
    async for chunk in chunks:
        yield Chunk(list(chunk.payload.payloads), last=chunk.last)
        chunk.payload.payloads.clear()


async def fail(chunks: AsyncIterator[Chunk], call: CallInfo) -> AsyncIterator[Chunk]:
    async for _ in chunks:
        raise ValueError("no")
    yield Chunk(None)


class WriterNode:
    async def forward(self, activation: Activation) -> AsyncIterator[Sequence[Emission]]:
        async for chunk in activation.inputs["prompt"]:
            output = StageOutput(chunk.payload, payloads=[PAYLOAD])
            yield [Emission(field, output) for field in activation.wanted]


class ReaderNode:
    def __init__(self) -> None:
        self.got: list[Any] = []

    async def forward(self, activation: Activation) -> AsyncIterator[Emission]:
        async for chunk in activation.inputs["rows"]:
            self.got.append(chunk.payload)
        yield Emission("text", "read")


async def run(first: Any = None, second: Any = None, *, published: str = "rows") -> tuple[ReaderNode, ReaderNode]:
    graph = Graph("g")
    reply = graph.role(Writer, "writer").write(prompt=graph.placeholder("prompt"))
    sources = [reply.rows if one is None else reply.rows.via(one) for one in (first, second)]
    a, b = (graph.role(Reader, name).read(rows=source).text for name, source in zip("ab", sources, strict=True))
    graph.output(text=reply.text, a=a, b=b)
    spec = StageSpec("writer", "", "text", publishing_fields=frozenset({published}))
    plan = GraphParser(graph).parse()
    plan = PayloadEdges([plan], {"writer": spec}).with_own_payloads(plan)
    readers = ReaderNode(), ReaderNode()
    runtime = GraphRuntime(plan, {"writer": WriterNode(), "a": readers[0], "b": readers[1]})
    async for frame in runtime.open("call", {"prompt": "id"}, ["text", "a", "b"], deadline_s=10):
        if frame.field == "text" and frame.payload is not None:
            assert frame.payload.payloads == [PAYLOAD]  # the user's end is no reader
    return readers


async def test_two_readers_see_their_own() -> None:
    a, b = await run(spoil)
    assert a.got == [[Payload({"rows": REF}, {}, {"rows": REF})]]
    assert [output.payloads for output in b.got] == [[Payload({}, {}, {"rows": REF})]]


async def test_fields_that_are_not_published_pass_unchanged() -> None:
    a, b = await run(published="text")
    assert [output.payloads for reader in (a, b) for output in reader.got] == [[PAYLOAD], [PAYLOAD]]


async def test_an_error_names_the_function_that_raised_it() -> None:
    with pytest.raises(ValueError, match="no") as error:
        await run(fail)
    assert "in transfer function 'fail' on edge writer.write.rows -> a.read.rows" in "; ".join(error.value.__notes__)


def test_readers_of_other_graphs_are_known() -> None:
    inner = Graph("inner")
    reply = inner.role(Writer, "writer").write(prompt=inner.placeholder("prompt"))
    inner.output(rows=reply.rows)
    inner.graph_call("write", ["rows"])
    reading = Graph("reading")
    rows = reading.placeholder("rows", ROWS)
    texts = {name: reading.role(Reader, name).read(rows=rows).text for name in "ab"}
    reading.output(**texts)
    reading.graph_call("read", ["a", "b"])
    outer = Graph("outer")
    read = outer.graph_ref(reading).read(rows=outer.graph_ref(inner).write(prompt=outer.placeholder("prompt")).rows)
    outer.output(a=read.a, b=read.b)
    spec = StageSpec("writer", "", "text", publishing_fields=frozenset({"rows"}))
    plans = list(parse_graphs([outer]).values())
    edges = PayloadEdges(plans, {"writer": spec})
    assert edges.outer_readers == {("writer.write", "rows"): {"a.read", "b.read"}}
    assert edges.entered == {"a.read", "b.read"}
    narrowed = {
        str(edge): edge.transfer
        for plan in plans
        for node in edges.with_own_payloads(plan).nodes.values()
        for edge in node.slots
        if edge.transfer is not None
    }
    assert set(narrowed) == {"entry.rows -> a.read.rows", "entry.rows -> b.read.rows"}
