"""A reply whose rows are streamed: its stage computes them again behind prompt and tokens."""

import asyncio
from collections.abc import AsyncGenerator
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.sampling_params import SamplingParams

from vllm_omni.engine.streamed_reply import StreamedReplies, StreamedReply
from vllm_omni.errors import StageFailed
from vllm_omni.messages.outputs import OmniRequestOutput
from vllm_omni.messages.payload import ROWS, Payload, TensorRef
from vllm_omni.messages.report import NodeReport, Reporter, ignore
from vllm_omni.model_executor.pipeline import RequestContext, StageRequest

STREAM = TensorRef("shm", (8, 2), "float32", b"", 1)
OTHER = TensorRef("shm", (8, 2), "float32", b"", 2)
UNREAD = TensorRef("shm", (8, 2), "float32", b"", 3)
WANTED = frozenset({"rows"})


class Stage:
    """Replies with the tokens 1, 2, 3 and publishes with the first."""

    config = SimpleNamespace(name="thinker")

    def __init__(self, failure: Exception | None = None) -> None:
        self.failure = failure
        self.values: dict[str, Any] = {}
        self.got: list[tuple[StageRequest, RequestContext, str]] = []

    async def generate(
        self, request: StageRequest, context: RequestContext, wanted: frozenset[str], suffix: str, report: Reporter
    ) -> AsyncGenerator[OmniRequestOutput, None]:
        assert wanted == WANTED
        self.got.append((request, context, suffix))
        for token in (1, 2, 3):
            completion = CompletionOutput(0, "", [token], None, None)
            output = OmniRequestOutput.of(RequestOutput("id", None, [0], None, [completion], token == 3))
            if token == 1:
                (reader, *others) = request.args["readers"]
                streams = {reader: STREAM} | dict.fromkeys(others, OTHER)
                output.payloads = [Payload(values=self.values or len(self.got), streams=streams)]
                report(NodeReport("thinker", 1.0, published=output.payloads))
            yield output
            if self.failure is not None:
                raise self.failure


def make_reply(stage: Stage) -> tuple[StreamedReply, RequestContext]:
    context = RequestContext("a", {"thinker": SamplingParams(stop=["x"], max_tokens=9)}, {})
    return StreamedReply(
        stage, StageRequest("Hello", {"x": 1, "readers": ["talker", "other"]}), context, WANTED, ".0"
    ), context  # type: ignore[arg-type]


async def read(reply: StreamedReply, replies: StreamedReplies | None = None) -> list[int]:
    return [
        token
        async for output in reply.follow(StreamedReplies() if replies is None else replies, ignore)
        for token in output.outputs[0].token_ids
    ]


async def test_a_reply_is_known_by_its_stream_until_its_request_ends() -> None:
    replies, (reply, _) = StreamedReplies(), make_reply(Stage())
    replies.add("b", UNREAD, reply)
    assert await read(reply, replies) == [1, 2, 3]
    assert replies.find(STREAM) is replies.find(OTHER) is reply and len(replies) == 3
    replies.forget("a")
    replies.forget("unknown")
    assert replies.find(STREAM) is None and replies.find(UNREAD) is reply and len(replies) == 1


async def test_rows_are_computed_again_of_the_prompt_and_all_tokens_that_were_processed() -> None:
    stage = Stage()
    reply, context = make_reply(stage)
    await read(reply)
    reports: list[NodeReport] = []
    for number in (2, 3):
        payload = Payload(values=number, streams={ROWS: STREAM})
        assert await reply.compute_rows_again(OTHER, reports.append) == [payload]
    for (request, again, suffix), number in zip(stage.got[1:], (1, 2), strict=True):
        assert (request.prompt, request.given) == ("Hello", (1, 2))
        assert request.args == {"x": 1, "readers": ["other"]}  # whose stream it was
        params: Any = again.params["thinker"]
        assert (params.max_tokens, params.temperature, params.stop) == (1, 0.0, [])
        assert suffix == f".0-r{number}"
        assert again.request_id == context.request_id
    assert [(one.seconds, one.published[0].values) for one in reports] == [(None, 2), (None, 3)]


async def test_frames_came_with_the_tokens_and_are_not_computed_again() -> None:
    stage = Stage()
    stage.values = {"frame": [1, 2]}
    reply, _ = make_reply(stage)
    await read(reply)
    frame = Payload(values={"frame": [1, 2]})
    assert await reply.compute_rows_again(STREAM, ignore) == [frame]
    assert len(stage.got) == 1


async def test_rows_are_computed_again_only_when_the_reply_has_ended() -> None:
    stage = Stage()
    reply, _ = make_reply(stage)
    outputs = reply.follow(StreamedReplies(), ignore)
    await anext(outputs)
    again = asyncio.create_task(reply.compute_rows_again(STREAM, ignore))
    await asyncio.sleep(0)
    assert len(stage.got) == 1
    async for _ in outputs:
        pass
    await again
    assert stage.got[1][0].given == (1, 2)


async def test_a_reply_that_failed_is_not_repeated() -> None:
    stage = Stage(StageFailed("thinker", "died"))
    reply, _ = make_reply(stage)
    for attempt in (read(reply), reply.compute_rows_again(STREAM, ignore)):
        with pytest.raises(StageFailed, match="'thinker': died"):
            await attempt
    assert len(stage.got) == 1


async def test_a_reply_that_is_left_early_ends_the_wait_for_it() -> None:
    reply, _ = make_reply(Stage())
    outputs = reply.follow(StreamedReplies(), ignore)
    await anext(outputs)
    await outputs.aclose()
    with pytest.raises(StageFailed, match="'thinker': its reply was left"):
        await reply.compute_rows_again(STREAM, ignore)
