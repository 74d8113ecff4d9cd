"""Requests of an engine that stand in none of vLLM's queues: encode tasks, and requests that are rejected on arrival.

From: HydraInfer, section 4.1 (a request's stages are tasks of their own).
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import Any

from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.request import Request, RequestStatus

from vllm_omni.errors import InvalidRequest
from vllm_omni.kv.ec_connector import ECParams, RelayECConnector, parse_params
from vllm_omni.messages.failure import Failure

logger = logging.getLogger(__name__)


def read_params(request: Request, relay_ec: RelayECConnector | None, *, only_encodes: bool) -> ECParams:
    """Read ``ec_transfer_params``.

    Raises:
        InvalidRequest: this engine cannot do what the request asks for.
    """
    params = parse_params(request)
    if relay_ec is None:
        if params.encode_only:
            raise InvalidRequest("ec_transfer_params: encode_only needs an instance with RelayECConnector")
        return ECParams()  # vLLM warns about others
    if params.encode_only and not relay_ec.is_producer:
        raise InvalidRequest("ec_transfer_params: encode_only, and this instance is a consumer (ec_role)")
    if only_encodes and not params.encode_only:
        raise InvalidRequest("this instance only encodes; give ec_transfer_params = {'encode_only': True}")
    return params if params.encode_only or relay_ec.is_consumer else ECParams()


def fail(scheduler: Scheduler, failures: Iterable[tuple[str, Failure]]) -> list[tuple[int, EngineCoreOutput]]:
    """End requests with an error, wherever they stand; returns (client index, output) of each that had not ended."""
    outputs = []
    for request_id, failure in failures:
        for request in scheduler.finish_requests(request_id, RequestStatus.FINISHED_ERROR):
            logger.error("request %s: %s", request_id, failure.message)
            outputs.append(last_output(request, ec_transfer_params=failure.report))
    return outputs


def last_output(request: Request, **fields: Any) -> tuple[int, EngineCoreOutput]:
    """The output that ends a request without a token, with these fields, and the index of its client."""
    output = EngineCoreOutput(
        request_id=request.request_id,
        new_token_ids=[],
        finish_reason=request.get_finished_reason(),
        events=request.take_events(),
        trace_headers=request.trace_headers,
        **fields,
    )
    return request.client_index, output


def add_outputs(
    outputs: dict[int, EngineCoreOutputs], more: Sequence[tuple[int, EngineCoreOutput]]
) -> dict[int, EngineCoreOutputs]:
    """Add outputs of requests, each with its client's index, to those of a step."""
    for client_index, output in more:
        outputs.setdefault(client_index, EngineCoreOutputs()).outputs.append(output)
    return outputs
