"""What a step of denoising is told by the scheduler, and what it tells.

A step calls the denoiser once for each scheduled request, and a request takes as many steps as its pipeline makes
calls. How many these are the pipeline alone knows, so the runner says when a request has ended: by its one token
(``max_tokens`` is 1), which it gives in that step and in no other.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import ModelRunnerOutput

from vllm_omni.errors import InvalidRequest
from vllm_omni.messages.cache_update import DiTCacheUpdate
from vllm_omni.messages.payload import Payload, pack

logger = logging.getLogger(__name__)


@dataclass
class DenoiseSchedulerOutput(SchedulerOutput):
    """vLLM's, with what the scheduler decided on the cache since the last step."""

    cache_update: DiTCacheUpdate = field(default_factory=lambda: DiTCacheUpdate({}, []))


class CallSize(NamedTuple):
    """The call of the denoiser that a request waits for."""

    num_rows: int
    num_bytes: int  # of its tensors
    num_cache_bytes: int = 0  # what the entries of the request need in the denoiser's cache; 0: it has no cache


class Failure(NamedTuple):
    """Why a request ended without an answer."""

    message: str
    is_invalid: bool  # the request is at fault, not the stage


@dataclass
class DenoiseOutput(ModelRunnerOutput):
    """vLLM's, with what became of the requests that gave no token."""

    pending: dict[str, CallSize] = field(default_factory=dict)  # request id -> what it waits for
    failures: dict[str, Failure] = field(default_factory=dict)  # request id -> why it is over


def make_output(
    request_ids: Sequence[str],
    payloads: Mapping[str, Payload],
    *,
    ended: Collection[str],
    failures: Mapping[str, Failure],
    pending: Mapping[str, CallSize] | None = None,
) -> DenoiseOutput:
    """The output of a step for these requests.

    Args:
        payloads: of those that have something to tell: their answer, or their progress.
        ended: which have their answer.
    """
    return DenoiseOutput(
        req_ids=list(request_ids),
        req_id_to_index={request_id: index for index, request_id in enumerate(request_ids)},
        sampled_token_ids=[[0] if request_id in ended else [] for request_id in request_ids],
        pooler_output=[pack(payloads[one]) if one in payloads else None for one in request_ids],
        pending=dict(pending or {}),
        failures=dict(failures),
    )


def make_failure(request_id: str, exc: Exception, *, is_invalid: bool | None = None) -> Failure:
    """What the request is not to blame for is logged.

    Args:
        is_invalid: whether it is; by default a ``ValueError`` says so.
    """
    is_invalid = isinstance(exc, ValueError) if is_invalid is None else is_invalid
    if not is_invalid:
        logger.error("request %s failed", request_id, exc_info=exc)
    return Failure(str(exc) if isinstance(exc, InvalidRequest) else f"{type(exc).__name__}: {exc}", is_invalid)
