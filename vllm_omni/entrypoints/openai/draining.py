"""``POST /drain`` and ``/undrain``: take an engine, or all engines of a host, out of service, and put them back."""

from __future__ import annotations

from collections.abc import Sequence

from fastapi import APIRouter, Depends, Request
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, Field
from vllm.entrypoints.serve.utils.api_utils import validate_json_request

from vllm_omni.engine.draining import DrainedEngine
from vllm_omni.entrypoints.async_omni import AsyncOmni
from vllm_omni.entrypoints.openai.mistakes import check_fields

MAX_TIMEOUT_S = 86400.0

draining_router = APIRouter()


class UndrainRequest(BaseModel):
    model_config = ConfigDict(extra="allow")  # unknown fields are rejected with the nearest name

    name: str = Field(description="An engine's or a host's name on `/health`: `talker/1`, `box-a`.")


class DrainRequest(UndrainRequest):
    timeout_s: float = Field(
        default=0.0, ge=0, le=MAX_TIMEOUT_S, description="How long to wait for the requests that run there, in seconds."
    )


@draining_router.post("/drain", dependencies=[Depends(validate_json_request)])
async def drain(request: DrainRequest, raw_request: Request) -> JSONResponse:
    """Give engines no new requests, and wait until they are idle, or the time is over."""
    check_fields(request)
    omni: AsyncOmni = raw_request.app.state.engine_client
    return _answer(await omni.drain(request.name, request.timeout_s))


@draining_router.post("/undrain", dependencies=[Depends(validate_json_request)])
async def undrain(request: UndrainRequest, raw_request: Request) -> JSONResponse:
    """Give drained engines requests again."""
    check_fields(request)
    omni: AsyncOmni = raw_request.app.state.engine_client
    return _answer(omni.undrain(request.name))


def _answer(engines: Sequence[DrainedEngine]) -> JSONResponse:
    return JSONResponse({"engines": [one.report() for one in engines]})
