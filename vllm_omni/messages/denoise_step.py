"""Input and output of one engine step of a diffusion stage.

A step calls the denoiser once for each scheduled request; a request takes as many steps as its pipeline makes calls.
Only the pipeline knows this number, so the runner reports the end of a request: by its one token (``max_tokens`` is 1),
returned in that step and in no other.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import ModelRunnerOutput

from vllm_omni.messages.cache_update import DiTCacheUpdate
from vllm_omni.messages.failure import Failure
from vllm_omni.messages.payload import Payload, pack


@dataclass
class DenoiseSchedulerOutput(SchedulerOutput):
    """vLLM's output of a scheduler, with its cache decisions since the last step."""

    cache_update: DiTCacheUpdate = field(default_factory=lambda: DiTCacheUpdate({}, []))


class CallSize(NamedTuple):
    """Size of the denoiser call that a request waits for."""

    num_rows: int
    num_bytes: int  # of its tensors
    num_cache_bytes: int = 0  # needed by the request's cache entries; 0: its denoiser has no cache


@dataclass
class DenoiseOutput(ModelRunnerOutput):
    """vLLM's output of a runner, with the state of the requests without a token."""

    pending: dict[str, CallSize] = field(default_factory=dict)  # request id -> its next call
    failures: dict[str, Failure] = field(default_factory=dict)  # request id -> why it ended


def make_output(
    request_ids: Sequence[str],
    payloads: Mapping[str, Payload],
    *,
    ended: Collection[str],
    failures: Mapping[str, Failure],
    pending: Mapping[str, CallSize] | None = None,
) -> DenoiseOutput:
    """Make the output of a step.

    Args:
        payloads: request id -> its result, preview or progress.
        ended: ids of the requests that have their result.
    """
    return DenoiseOutput(
        req_ids=list(request_ids),
        req_id_to_index={request_id: index for index, request_id in enumerate(request_ids)},
        sampled_token_ids=[[0] if request_id in ended else [] for request_id in request_ids],
        pooler_output=[pack(payloads[one]) if one in payloads else None for one in request_ids],
        pending=dict(pending or {}),
        failures=dict(failures),
    )
