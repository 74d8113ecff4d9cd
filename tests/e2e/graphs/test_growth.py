"""What one more call of a served graph costs while a thousand others are open, and what a thousand leave behind.

Counted are the lines of this project that run, and objects, so the result depends on no clock.
"""

import asyncio
import gc
import sys
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from transformers import PreTrainedConfig

import vllm_omni
from tests.e2e.engines import MARKS
from tests.engine_threads import engine_threads
from tests.reference import llama
from vllm_omni.entrypoints.async_omni import AsyncOmni
from vllm_omni.flow import Activation, Emission, Field, Graph, Role, interface
from vllm_omni.messages.outputs import collect
from vllm_omni.model_executor.pipeline import FunctionSpec, Pipeline, StageRequest, StageSpec

pytestmark = [*MARKS, pytest.mark.timeout(400), pytest.mark.long]

FEW, MANY = 10, 1000
GROWTH = 1.2
NUM_MEASURED = 5
ENGINE_ARGS: dict[str, Any] = {
    "dtype": "float32",
    "enforce_eager": True,
    "max_model_len": 64,
    "num_gpu_blocks_override": 64,
    "skip_tokenizer_init": True,
}
PARAMS = {"temperature": 0.0, "max_tokens": 1, "detokenize": False}
OPEN = "open"  # the ids of calls that stay open begin so
OURS = str(Path(vllm_omni.__file__).parent)

Line = tuple[str, str]


class Editor(Role):
    edit = interface([["prompt"]], {"prompt": Field("text")})


class Writer(Role):
    write = interface([["prompt"]], {"text": Field("text")})


class Holder(Role):
    hold = interface([["text"]], {"text": Field("text")})


async def edit(activation: Activation) -> AsyncIterator[Emission]:
    async for chunk in activation.inputs["prompt"]:
        yield Emission("prompt", StageRequest({"prompt_token_ids": chunk.payload.prompt["prompt_token_ids"][::-1]}))


class Held:
    """A function that keeps some calls open."""

    def __init__(self) -> None:
        self.may_end = asyncio.Event()
        self.num_held = 0

    async def hold(self, activation: Activation) -> AsyncIterator[Emission]:
        async for chunk in activation.inputs["text"]:
            if activation.context.request_id.startswith(OPEN):
                self.num_held += 1
                await self.may_end.wait()
                self.num_held -= 1
            yield Emission("text", chunk.payload)


def make_pipeline(held: Held) -> type[Pipeline]:
    class GrowingPipeline(Pipeline):
        modalities = {"text": "text"}
        stages = (StageSpec("writer", "", "text"),)
        functions = (FunctionSpec("editor", edit), FunctionSpec("holder", held.hold))
        deployment = {"stages": {"writer": {"engine_type": "ar", "engine_args": ENGINE_ARGS}}}

        def __init__(self, model: str, hf_config: PreTrainedConfig, revision: str | None = None) -> None:
            self.graph = graph = Graph("growing")
            edited = graph.role(Editor, "editor").edit(prompt=graph.placeholder("prompt"))
            written = graph.role(Writer, "writer").write(prompt=edited.prompt)
            graph.output(text=graph.role(Holder, "holder").hold(text=written.text).text)

        def validate(self, options: Mapping[str, Any]) -> dict[str, Any]:
            return {}

    return GrowingPipeline


@contextmanager
def counted_lines(counts: Counter[Line]) -> Iterator[None]:
    """Count the lines of this project that this thread executes, each time, by file and function."""

    def trace(frame: FrameType, event: str, arg: Any) -> Any:
        code = frame.f_code
        if not code.co_filename.startswith(OURS):
            return None
        if event == "line":
            counts[code.co_filename.removeprefix(OURS), code.co_name] += 1
        return trace

    earlier = sys.gettrace()
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(earlier)


class Calls:
    """Calls of the graph, some of which stay open."""

    def __init__(self, omni: AsyncOmni, held: Held) -> None:
        self.omni, self.held = omni, held
        self._open: list[asyncio.Task[None]] = []
        self._num_calls = 0

    async def ask(self, kind: str = "call") -> None:
        self._num_calls += 1
        prompt = {"prompt_token_ids": [1, 5, 6, 7]}
        answer = await collect(self.omni.generate(prompt, PARAMS, f"{kind}-{self._num_calls}"))
        assert len(answer.outputs[0].token_ids) == 1

    async def open(self, number: int) -> None:
        """Have so many calls open, all of which have passed the engine."""
        self._open += [asyncio.create_task(self.ask(OPEN)) for _ in range(number - len(self._open))]
        while self.held.num_held < number:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        assert self.omni.orchestrator.runtime.statistics().num_open_calls == number

    async def end(self) -> None:
        self.held.may_end.set()
        await asyncio.gather(*self._open)
        self._open.clear()
        self.held.may_end.clear()

    async def lines_of_one(self) -> Counter[Line]:
        """The fewest lines that one call took: a periodic check may run beside it."""
        found = []
        for _ in range(NUM_MEASURED):
            counts: Counter[Line] = Counter()
            with counted_lines(counts):
                await self.ask()
            found.append(counts)
        return min(found, key=Counter.total)


@pytest.fixture(scope="module")
async def calls(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Calls]:
    held = Held()
    with engine_threads():
        omni = AsyncOmni(str(llama.build(tmp_path_factory.mktemp("growth"))), pipeline=make_pipeline(held))
        try:
            yield Calls(omni, held)
        finally:
            omni.shutdown()


async def test_a_call_costs_as_much_beside_a_thousand_open_ones_as_beside_ten(calls: Calls) -> None:
    await calls.ask()
    try:
        await calls.open(FEW)
        few = await calls.lines_of_one()
        await calls.open(MANY)
        many = await calls.lines_of_one()
    finally:
        await calls.end()
    assert few.total() > 200, "the call's own lines were not seen"
    assert many.total() <= GROWTH * few.total(), f"{few.total()} -> {many.total()} lines: {(many - few).most_common(5)}"


def objects() -> Counter[str]:
    """What the garbage collector knows of, by type."""
    gc.collect()
    return Counter(f"{type(one).__module__}.{type(one).__qualname__}" for one in gc.get_objects())


async def test_a_thousand_calls_leave_nothing(calls: Calls) -> None:
    """Front end and engine are in this process. The first round fills what is kept for all calls."""

    async def count() -> Counter[str]:
        await calls.ask()  # loops of threads keep what they had last, which may be a hundred calls' outputs
        return objects()

    for _ in range(2):
        before = await count()
        await calls.open(MANY)
        await calls.end()
    grown = await count() - before
    assert max(grown.values(), default=0) < MANY // 4, grown.most_common(5)
