"""How vLLM's generators of chats and completions end the stream of a reply that fails, without an engine."""

import json
import logging
from collections.abc import AsyncGenerator
from typing import Any

import pytest
from vllm.exceptions import RetryableRequestError
from vllm.sampling_params import SamplingParams

from vllm_omni.entrypoints.deadline import Deadline
from vllm_omni.entrypoints.openai.chat import OmniServingChat
from vllm_omni.entrypoints.openai.completion import OmniServingCompletion
from vllm_omni.entrypoints.openai.engine import EngineWithArguments
from vllm_omni.entrypoints.openai.protocol import OmniChatCompletionRequest, OmniCompletionRequest
from vllm_omni.errors import (
    DeadlineExceeded,
    InvalidRequest,
    OmniError,
    ShuttingDown,
    StageFailed,
    StageUnavailable,
)

ERRORS = [
    (DeadlineExceeded("late"), 504, "GatewayTimeoutError", None),
    (ShuttingDown("later"), 503, "ServiceUnavailableError", None),
    (StageUnavailable("talker", "restarts"), 503, "ServiceUnavailableError", None),
    (InvalidRequest("wrong", param="prompt"), 400, "BadRequestError", "prompt"),
    (StageFailed("talker", "died"), 500, "InternalServerError", None),
]


class FailingEngine:
    def __init__(self, error: Exception) -> None:
        self.error = error
        self.arguments: dict[str, Any] = {}

    async def generate(self, *_: Any, **arguments: Any) -> AsyncGenerator[Any, None]:
        self.arguments = arguments
        raise self.error
        yield


def outputs_of(error: Exception) -> AsyncGenerator[Any, None]:
    engine = EngineWithArguments(FailingEngine(error), Deadline(None))  # type: ignore[arg-type]
    return engine.generate("x", SamplingParams())


def stream_of_chat(error: Exception) -> AsyncGenerator[str, None]:
    chat = OmniServingChat.__new__(OmniServingChat)
    chat.parser_cls, chat.enable_force_include_usage = None, False
    request = OmniChatCompletionRequest(messages=[{"role": "user", "content": "x"}], stream=True)
    outputs = outputs_of(error)
    return chat.chat_completion_stream_generator(request, outputs, "1", "tiny", [], None, None)


def stream_of_completion(error: Exception) -> AsyncGenerator[str, None]:
    completion = OmniServingCompletion.__new__(OmniServingCompletion)
    completion.enable_force_include_usage = False
    request = OmniCompletionRequest(prompt="x", stream=True)
    outputs = outputs_of(error)
    numbered = ((0, output) async for output in outputs)
    return completion.completion_stream_generator(request, [], numbered, "1", 0, "tiny", 1, None, None)


@pytest.mark.parametrize("stream_of", [stream_of_chat, stream_of_completion])
@pytest.mark.parametrize(("error", "code", "kind", "param"), ERRORS, ids=repr)
async def test_a_stream_ends_with_the_status_and_type_of_its_error(
    stream_of: Any, error: OmniError, code: int, kind: str, param: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    said, done = [line async for line in stream_of(error)]
    assert done == "data: [DONE]\n\n"
    expected = {"message": str(error), "type": kind, "code": code, "param": param}
    assert json.loads(said.removeprefix("data: "))["error"] == expected
    tracebacks = [record for record in caplog.records if record.exc_info]
    assert len(tracebacks) == (code == 500)
    assert [record.levelno for record in caplog.records] == [logging.ERROR if code == 500 else logging.WARNING]


async def test_other_handlers_of_vllm_get_an_error_of_its_own_for_what_may_be_tried_again() -> None:
    with pytest.raises(RetryableRequestError, match="later"):
        await anext(outputs_of(ShuttingDown("later")))


async def test_a_request_takes_its_deadline_from_its_field_alone() -> None:
    engine = FailingEngine(InvalidRequest("end"))
    of_request = EngineWithArguments(engine, Deadline(60), modalities=["text"])  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match="end"):
        await anext(of_request.generate("x", SamplingParams()))
    assert 59 < engine.arguments["deadline_s"] <= 60
    assert engine.arguments["modalities"] == ["text"]
    with pytest.raises(InvalidRequest, match="deadline_s: a field of the request itself") as rejected:
        of_request.generate("x", SamplingParams(extra_args={"deadline_s": 5}))
    assert rejected.value.param == "deadline_s"
