"""``GET`` and ``POST /scale``: how many replicas the stages have, and shall have."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Depends, Request
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, Field
from vllm.entrypoints.serve.utils.api_utils import validate_json_request

from vllm_omni.engine.scaling import DRAIN_TIMEOUT_S
from vllm_omni.entrypoints.async_omni import AsyncOmni
from vllm_omni.entrypoints.openai.draining import MAX_TIMEOUT_S
from vllm_omni.entrypoints.openai.mistakes import check_fields

scaling_router = APIRouter()


class ScaleRequest(BaseModel):
    model_config = ConfigDict(extra="allow")  # unknown fields are rejected with the nearest name

    stage: str = Field(description="One with `max_replicas`.")
    replicas: int = Field(description="How many shall run.")
    timeout_s: float = Field(
        default=DRAIN_TIMEOUT_S,
        ge=0,
        le=MAX_TIMEOUT_S,
        description="How long a replica that is to end may have requests, in seconds; then it stays.",
    )


@scaling_router.get("/scale")
async def scales(raw_request: Request) -> JSONResponse:
    """The stages that can be scaled: replicas that run and that shall, and what their load proposes."""
    return JSONResponse(_report(raw_request))


@scaling_router.post("/scale", dependencies=[Depends(validate_json_request)])
async def scale(request: ScaleRequest, raw_request: Request) -> JSONResponse:
    """Have replicas of a stage started or ended; the answer comes at once."""
    check_fields(request)
    omni: AsyncOmni = raw_request.app.state.engine_client
    omni.orchestrator.scaling.set_target(request.stage, request.replicas, request.timeout_s)
    return JSONResponse(_report(raw_request))


def _report(raw_request: Request) -> dict[str, Any]:
    omni: AsyncOmni = raw_request.app.state.engine_client
    autoscaling = raw_request.app.state.autoscaling
    proposals = {name: one._asdict() for name, one in autoscaling.proposals.items()}
    stages = [one._asdict() | {"proposal": proposals.get(one.stage)} for one in omni.orchestrator.scaling.report()]
    return {"stages": stages, "autoscale": autoscaling.is_automatic}
