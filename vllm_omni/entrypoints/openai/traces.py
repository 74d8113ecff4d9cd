"""``GET /traces``: the latest requests, and the trace of each."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse

from vllm_omni.engine.chrome_trace import chrome_trace
from vllm_omni.engine.traces import MAX_REQUESTS, RequestTrace
from vllm_omni.entrypoints.async_omni import AsyncOmni
from vllm_omni.entrypoints.openai.schema import answers
from vllm_omni.errors import UnknownRequest
from vllm_omni.messages.span import SpanKind
from vllm_omni.names import suggest

traces_router = APIRouter()


@traces_router.get("/traces", responses=answers())
async def list_traces(raw_request: Request) -> JSONResponse:
    """The latest requests that have ended, the last one first: their ids, and the seconds of each stage."""
    omni: AsyncOmni = raw_request.app.state.engine_client
    return JSONResponse({"requests": [_summary(trace) for trace in omni.orchestrator.traces.latest()]})


@traces_router.get("/traces/{request_id}", responses=answers())
async def get_trace(request_id: str, raw_request: Request) -> JSONResponse:
    """The trace of a request that has ended, in Chrome's format."""
    omni: AsyncOmni = raw_request.app.state.engine_client
    traces = omni.orchestrator.traces
    if (trace := traces.find(request_id)) is None:
        nearest = suggest(request_id, [one.request_id for one in traces.latest()])
        raise UnknownRequest(f"no request {request_id!r} among the last {MAX_REQUESTS} that have ended: {nearest}")
    return JSONResponse(chrome_trace(trace))


def _summary(trace: RequestTrace) -> dict[str, Any]:
    stages: dict[str, float] = {}
    for span in trace.spans:
        if span.kind in (SpanKind.STAGE, SpanKind.FUNCTION):
            stages[span.name] = stages.get(span.name, 0.0) + span.ended_at - span.began_at
    return {
        "id": trace.request_id,
        "graph": trace.graph,
        "began_at": trace.began_at,
        "seconds": trace.ended_at - trace.began_at,
        "stages": stages,
        "error": trace.error or None,
    }
