"""``POST /drain`` and ``/undrain``: take an engine of a stage out of service, and put it back."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from fastapi import APIRouter, Depends, Request
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, Field
from vllm.entrypoints.serve.utils.api_utils import validate_json_request

from vllm_omni.entrypoints.async_omni import AsyncOmni
from vllm_omni.entrypoints.openai.mistakes import check_fields

MAX_TIMEOUT_S = 86400.0

draining_router = APIRouter()


class UndrainRequest(BaseModel):
    model_config = ConfigDict(extra="allow")  # unknown fields are rejected with the nearest name

    engine: str = Field(description="The engine's name on `/health`: `talker/1`.")


class DrainRequest(UndrainRequest):
    timeout_s: float = Field(
        default=0.0, ge=0, le=MAX_TIMEOUT_S, description="How long to wait for the requests that run there, in seconds."
    )


@draining_router.post("/drain", dependencies=[Depends(validate_json_request)])
async def drain(request: DrainRequest, raw_request: Request) -> JSONResponse:
    """Give an engine no new requests, and wait until none runs there, or the time is over."""
    check_fields(request)
    omni: AsyncOmni = raw_request.app.state.engine_client
    await omni.drain_engine(request.engine, request.timeout_s)
    return JSONResponse(_report(omni, request.engine))


@draining_router.post("/undrain", dependencies=[Depends(validate_json_request)])
async def undrain(request: UndrainRequest, raw_request: Request) -> JSONResponse:
    """Give a drained engine requests again."""
    check_fields(request)
    omni: AsyncOmni = raw_request.app.state.engine_client
    omni.undrain_engine(request.engine)
    return JSONResponse(_report(omni, request.engine))


def _report(omni: AsyncOmni, name: str) -> dict[str, Any]:
    engine = omni.orchestrator.engines[name]
    return {"engine": name, "num_requests": engine.num_requests, **asdict(engine.current_status())}
