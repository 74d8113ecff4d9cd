"""Stage arguments of a request, and a step of a streamed stage: vLLM's ``SchedulerOutput`` with rows.

From: vLLM-Omni (paper), section 3.3.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from vllm.v1.core.sched.output import SchedulerOutput

STAGE_ARGS = "omni"
"""Key of ``SamplingParams.extra_args`` under which a request's stage arguments travel (msgpack types only):

``publish`` (bool)            publish the stage's rows for the next stage; of media, keep the references
``unopened`` (bool)           the front end does not fetch published media: only other stages read them
``payloads`` (list[bytes])    encoded ``relay.Payload`` of the previous stage, in order; where one has a stream, its
                              rows follow those of the payloads while the request runs
``num_own_tokens`` (int)      with a stream: tokens of the prompt that need no row of the previous stage; a step needs
                              that many rows fewer than tokens
``inputs`` (dict[str, str])   of a diffusion stage: argument of its pipeline -> key in the payloads
anything else                 arguments of the model (speaker, seed, codec_ids, ...)
"""


class StreamUpdate(NamedTuple):
    """Rows that arrived for a request since its last step."""

    rows: torch.Tensor | None  # [n, size], host; None: no rows
    last: bool  # no rows follow
    error: str = ""  # why no rows follow, if the stream broke


@dataclass
class StreamSchedulerOutput(SchedulerOutput):
    """vLLM's, with the rows that the step's requests read."""

    # request id -> its new rows; only of requests that this step schedules
    streams: dict[str, StreamUpdate] = field(default_factory=dict)
