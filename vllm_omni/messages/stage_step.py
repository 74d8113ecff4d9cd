"""Stage arguments of a request, and a step of a streamed stage: vLLM's ``SchedulerOutput`` with rows.

From: vLLM-Omni (paper), section 3.3.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypedDict

import torch
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.output import SchedulerOutput

from vllm_omni.messages.canvas_step import CanvasStep, Tail
from vllm_omni.messages.token_step import TokenStep

STAGE_ARGS = "omni"
"""Key of ``SamplingParams.extra_args`` under which a request's stage arguments travel (msgpack types only):

``publish`` (bool)            publish the stage's rows for other stages; of media, keep the references
``readers`` (list[str])       nodes of the graph that read what is published; each gets its own references
``cached_rows`` (bool)        with ``publish``: rows of a prefix found in the cache may be published, too
``unopened`` (bool)           the front end does not fetch published media: only other stages read them
``payloads`` (list[bytes])    encoded ``relay.Payload`` of the previous stage, in order; where one has a stream, its
                              rows follow those of the payloads while the request runs
``row_names`` (bytes)         encoded ``TokenNames`` of the prompt's rows, by which they are found in the prefix cache;
                              without them it is not read
``num_own_tokens`` (int)      with a stream: tokens of the prompt that need no row of the previous stage; a step needs
                              that many rows fewer than tokens
``frame_chunks`` (dict)       of a stage that decodes a talker's frames (``FRAME_CHUNKS``)
``picture`` (dict)            the ``ImagePlan`` of a request that asks for a picture
``token_picture`` (dict)      the ``TokenPlan`` of a request whose reply is a picture
``inputs`` (dict[str, str])   of a diffusion stage: argument of its pipeline -> key in the payloads
anything else                 arguments of the model (speaker, seed, codec_ids, ...)
"""

WINDOW = "omni_window"
"""Key of ``SamplingParams.extra_args``: outputs that the request may be ahead of its reader (``ReadWindow``)."""

NUM_READ = "omni_num_read"
"""Likewise, in a report, which is no request: outputs that the reader has taken."""

FRAME_CHUNKS = "frame_chunks"
"""Stage argument of a request that decodes frames while they are made: ``first`` and ``size`` of its chunks."""


def stage_args(params: SamplingParams | None) -> dict[str, Any]:
    """A request's stage arguments, the very dictionary; empty: it has none."""
    return (params.extra_args or {}).get(STAGE_ARGS, {}) if params is not None else {}


class Readers(TypedDict):
    """Arguments of ``RelayHub.publish``."""

    readers: Sequence[str]
    is_opened: bool


def readers_of(args: Mapping[str, Any]) -> Readers:
    """The readers of what a request generates, by its stage arguments."""
    return {"readers": args.get("readers", ()), "is_opened": not args.get("unopened")}


class StreamUpdate(NamedTuple):
    """Rows that arrived for a request since its last step."""

    rows: torch.Tensor | None  # [n, size], host; None: no rows
    last: bool  # no rows follow
    error: str = ""  # why no rows follow, if the stream broke


@dataclass
class StreamSchedulerOutput(SchedulerOutput):
    """vLLM's, with the rows that the step's requests read, and the canvases of pictures."""

    # request id -> its new rows; only of requests that this step schedules
    streams: dict[str, StreamUpdate] = field(default_factory=dict)
    # request id -> what is computed of it for a picture; likewise
    canvases: dict[str, CanvasStep] = field(default_factory=dict)
    # request id -> the end of its sequence, where that is not what was sampled; likewise
    tails: dict[str, Tail] = field(default_factory=dict)
    # of pictures that are written as tokens: which of them get one
    token_step: TokenStep = field(default_factory=TokenStep)
