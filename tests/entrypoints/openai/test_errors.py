"""Errors over HTTP have OpenAI's shape, say what is valid, and blame the right field."""

import logging
from typing import Any

import httpx
import pytest
from fastapi import FastAPI, HTTPException
from vllm.exceptions import GenerationError

from vllm_omni.entrypoints.openai.errors import add_error_handlers, end_of_stream
from vllm_omni.entrypoints.openai.protocol import OmniChatCompletionRequest, SpeechRequest
from vllm_omni.errors import DeadlineExceeded, InvalidRequest, Overloaded, ShuttingDown, StageFailed

APP = FastAPI()
add_error_handlers(APP)
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "Hello"}]}


@APP.post("/v1/chat/completions")
async def chat(request: OmniChatCompletionRequest) -> None:
    request.check()


@APP.post("/v1/audio/speech")
async def speech(request: SpeechRequest) -> None:
    raise InvalidRequest("unknown voice", param="voice")


@APP.get("/raises/{name}")
async def raises(name: str) -> None:
    raise {
        "overloaded": Overloaded("later", retry_after_s=7),
        "failed": StageFailed("talker", "died"),
        "recursion": RecursionError("too deep"),
        "forbidden": HTTPException(403, "not for you"),
    }[name]


@APP.delete("/raises/{name}")
async def remove(name: str) -> None:
    pass


async def ask(method: str, path: str, **body: Any) -> tuple[int, dict[str, Any]]:
    transport = httpx.ASGITransport(APP)
    async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
        response = await client.request(method, path, **body)
    return response.status_code, response.json()["error"]


@pytest.mark.parametrize(
    ("path", "body", "param", "message"),
    [
        ("chat/completions", {**CHAT, "modalites": ["text"]}, "modalites", "did you mean 'modalities'?"),
        ("chat/completions", {**CHAT, "audio": {"vocie": "x"}}, "audio.vocie", "did you mean 'voice'?"),
        ("chat/completions", {**CHAT, "max_tokens": "many"}, "max_tokens", "max_tokens = 'many': input should be"),
        ("chat/completions", {"messages": [{"role": "user", "content": 5}]}, "messages.0.content", "valid string"),
        ("chat/completions", {"messages": [{"content": "x"}]}, "messages.0.role", "role: is missing"),
        ("chat/completions", {**CHAT, "slo": {"ttft_ms": 9}, "use_beam_search": True}, "slo", "cannot be combined"),
        ("chat/completions", {}, "messages", "messages: is missing"),
        ("audio/speech", {"inptu": "x"}, "input", "input: is missing"),
        ("audio/speech", {"input": "x", "speed": 5}, "speed", "speed = 5: input should be less than or equal to 4"),
        ("audio/speech", {"input": "x", "stream_format": "see"}, "stream_format", "should be 'audio' or 'sse'"),
        ("audio/speech", {"input": "x"}, "voice", "unknown voice"),
    ],
)
async def test_a_wrong_field_is_named_with_what_is_valid(
    path: str, body: dict[str, Any], param: str, message: str
) -> None:
    status, error = await ask("POST", f"/v1/{path}", json=body)
    assert (status, error["code"], error["type"], error["param"]) == (400, 400, "BadRequestError", param)
    assert message in error["message"]


SCHEMA = "response_format.json_schema"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"tools": [{"type": "functon", "function": {"name": "x"}}], "max_tokens": "many"},
            "max_tokens = 'many': input should be a valid integer, unable to parse string as an integer; "
            "tools.0.type = 'functon': input should be 'function'",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": 5}}},
            f"{SCHEMA}.name: is missing; {SCHEMA}.schema = 5: input should be a valid dictionary",
        ),
        (
            {"response_format": {"type": "json", "json_schema": {"schema": 5}}},
            "response_format.type = 'json': input should be 'text', 'json_object' or 'json_schema'; "
            "response_format.type = 'json': input should be 'structural_tag'",
        ),
        (
            {"messages": [{"role": "user", "content": 5}, {"role": "assistant", "content": "x", "name": 5}]},
            "messages.0.content = 5: input should be a valid string; messages.0.content = 5: input should be iterable; "
            "messages.0.content = 5: input should be a valid list; and 1 more",
        ),
    ],
    ids=["beside another", "of the class that is meant", "of no class", "in two objects"],
)
async def test_every_mistake_is_reported_and_none_that_is_no_mistake(fields: dict[str, Any], message: str) -> None:
    status, error = await ask("POST", "/v1/chat/completions", json=CHAT | fields)
    assert (status, error["message"]) == (400, message)


async def test_fields_of_openai_that_have_no_effect_are_accepted() -> None:
    transport = httpx.ASGITransport(APP)
    async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
        response = await client.post("/v1/chat/completions", json={**CHAT, "store": False, "service_tier": "auto"})
    assert response.status_code == 200


async def test_a_body_that_is_no_json_is_rejected() -> None:
    headers = {"content-type": "application/json"}
    for content, message in ((b"{", "not valid JSON"), (b"[" * 100_000, "nested too deeply")):
        status, error = await ask("POST", "/v1/audio/speech", content=content, headers=headers)
        assert status == 400 and message in error["message"], error


async def test_an_unknown_route_or_method_is_answered_with_the_valid_ones() -> None:
    status, error = await ask("POST", "/v1/chat/completion", json=CHAT)
    assert (status, error["type"]) == (404, "NotFoundError")
    assert "did you mean '/v1/chat/completions'?" in error["message"]
    status, error = await ask("GET", "/v1/chat/completions")
    assert (status, error["type"]) == (405, "MethodNotAllowedError")
    assert "must be one of POST" in error["message"]
    status, error = await ask("PUT", "/raises/failed")
    assert "must be one of DELETE, GET" in error["message"]


@pytest.mark.parametrize(
    ("name", "status", "kind", "message"),
    [
        ("overloaded", 429, "TooManyRequestsError", "later"),
        ("failed", 500, "InternalServerError", "stage 'talker': died"),
        ("recursion", 400, "BadRequestError", "nested too deeply"),
        ("forbidden", 403, "ForbiddenError", "not for you"),
    ],
)
async def test_an_error_has_the_status_of_its_fault(name: str, status: int, kind: str, message: str) -> None:
    code, error = await ask("GET", f"/raises/{name}")
    assert (code, error["code"], error["type"]) == (status, status, kind)
    assert message in error["message"]


async def test_an_overloaded_server_says_when_to_try_again() -> None:
    async with httpx.AsyncClient(transport=httpx.ASGITransport(APP), base_url="http://server") as client:
        response = await client.get("/raises/overloaded")
    assert response.headers["Retry-After"] == "7"


def test_a_stream_ends_with_the_error_and_its_traceback_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    body = end_of_stream(StageFailed("talker", "died"), "speech")
    assert (body["error"]["code"], body["error"]["type"]) == (500, "InternalServerError")
    assert [(one.levelno, bool(one.exc_info)) for one in caplog.records] == [(logging.ERROR, True)]


@pytest.mark.parametrize(
    ("error", "code", "kind"),
    [
        (ShuttingDown("later"), 503, "ServiceUnavailableError"),
        (DeadlineExceeded("late"), 504, "GatewayTimeoutError"),
        (InvalidRequest("wrong"), 400, "BadRequestError"),
    ],
    ids=repr,
)
@pytest.mark.parametrize("is_hidden", [False, True], ids=["ours", "as vLLM's"])
def test_an_error_that_is_no_defect_ends_a_stream_without_a_traceback(
    error: Exception, code: int, kind: str, is_hidden: bool, caplog: pytest.LogCaptureFixture
) -> None:
    raised = error
    if is_hidden:
        raised = GenerationError(str(error))
        raised.__cause__ = error
    body = end_of_stream(raised, "speech")
    assert (body["error"]["code"], body["error"]["type"], body["error"]["message"]) == (code, kind, str(error))
    assert [(one.levelno, one.exc_info) for one in caplog.records] == [(logging.WARNING, None)]
