"""``Reading``: reports to an engine how far the reader of a request has come, so that the engine waits for it.

The path back from a slow user: its unread outputs fill their window, the node that makes them is not read on
(``flow``), so that its engine's outputs are not read, and the engine stops; a streaming decoder then takes no rows,
which holds its talker, and so on to the first stage. A reader that waits for something else opens the windows of all
that it reads (``flow.run.credit``), so that no two stages wait for each other.

From: Omni-Flow, section 3.2.2 (sequences); SGLang-Omni (communication), Streaming Flow.
"""

from __future__ import annotations

from collections.abc import Mapping

from vllm.config import VllmConfig
from vllm.sampling_params import RequestOutputKind, SamplingParams

from vllm_omni.core.sched.read_window import NUM_REPORTS
from vllm_omni.engine.stage_llm import StageLLM
from vllm_omni.messages.stage_step import FRAME_CHUNKS, NUM_READ, WINDOW, stage_args

TOKENS_AHEAD = 256
"""Tokens that an engine may be ahead of their reader: seconds of a fast one, so that none waits for a busy loop."""

PIECES_AHEAD = 4
"""Pieces of sound that a streaming decoder may be ahead: each has up to some seconds."""


class Reading:
    """The reader of one request.

    Args:
        params: the request's own; the window is written into them. None is for a request that is answered in one
            piece, and where vLLM spreads a stage's requests over several engine cores: it sends a report to any.
        generates_tokens: False: of the stages that make media, only those that decode a stream have a window.
    """

    def __init__(self, llm: StageLLM, request_id: str, params: SamplingParams, *, generates_tokens: bool) -> None:
        self._llm = llm
        self._request_id = request_id
        window = _window_of(params, llm.vllm_config, generates_tokens)
        # What the user put under our keys must not reach the scheduler.
        extra_args = {key: value for key, value in (params.extra_args or {}).items() if key not in (WINDOW, NUM_READ)}
        params.extra_args = {**extra_args, WINDOW: window} if window else extra_args or None
        self._step = window and max(window // NUM_REPORTS, 1)
        self._pulled: Mapping[str, int] = {}
        self._reported: dict[str, int] = {}

    def note_pulled(self) -> None:
        """Call it with each output, before its reader gets it."""
        if self._step is not None:
            self._pulled = self._llm.num_received(self._request_id)

    async def report(self) -> None:
        """Call it when the reader asks for the next output."""
        for request_id, num_read in self._pulled.items():
            assert self._step is not None
            if num_read - self._reported.get(request_id, 0) >= self._step:
                self._reported[request_id] = num_read
                await self._llm.report_read(request_id, num_read)


def _window_of(params: SamplingParams, vllm_config: VllmConfig, generates_tokens: bool) -> int | None:
    """Outputs that the engine may be ahead."""
    if vllm_config.parallel_config.data_parallel_size > 1 or params.output_kind is not RequestOutputKind.DELTA:
        return None
    if not generates_tokens:
        return PIECES_AHEAD if FRAME_CHUNKS in stage_args(params) else None
    return max(TOKENS_AHEAD, 2 * vllm_config.scheduler_config.stream_interval)
