"""What a request tells its stage, and what a scheduler sends its runner with a step of a streamed stage.

From: vLLM-Omni (paper), section 3.3.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from vllm.v1.core.sched.output import SchedulerOutput

STAGE_ARGS = "omni"
"""Key of ``SamplingParams.extra_args`` under which a request's stage arguments travel (msgpack types only):

``publish`` (bool)            publish the stage's rows for the next stage
``payloads`` (list[bytes])    encoded ``relay.Payload`` of the previous stage, in order; where one has a stream, its
                              rows follow those of the payloads while the request runs
``num_own_tokens`` (int)      with a stream: tokens of the prompt that need no row of the previous stage; so many rows
                              fewer than tokens must be there before a step
anything else                 arguments of the model (speaker, seed, codec_ids, ...)
"""


class StreamUpdate(NamedTuple):
    """What came for a request since its last step."""

    rows: torch.Tensor | None  # [n, size], host; None: none
    last: bool  # none follow
    error: str = ""  # why none follow, if the stream broke


@dataclass
class StreamSchedulerOutput(SchedulerOutput):
    """vLLM's, with the rows that the step needs."""

    # request id -> what is new; only requests that this step schedules
    streams: dict[str, StreamUpdate] = field(default_factory=dict)
