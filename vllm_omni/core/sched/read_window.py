"""``ReadWindow``: how many tokens, or pieces of sound, a request may be ahead of its reader.

The front end reports what was taken as a session's next input (``report_of``), which ``Scheduler.add_request`` gets
for a request that it knows: the order of messages is kept, and the engine core needs no method of ours.

From: Omni-Flow, section 3.2.2 (sequences); SGLang-Omni (communication), Streaming Flow.
"""

from __future__ import annotations

import time

from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.request import Request

from vllm_omni.messages.stage_step import NUM_READ, WINDOW

NUM_REPORTS = 4
"""Reports of a reader in a window: each costs the engine a message."""


class ReadWindow:
    """The account of one request.

    Args:
        size: outputs that it may be ahead.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._num_read = 0

    @classmethod
    def of(cls, request: Request) -> ReadWindow | None:
        """The window that a request's arguments ask for."""
        size = _argument(request, WINDOW)
        return None if size is None else cls(size)

    def is_full(self, num_made: int) -> bool:
        """Whether the request must wait for its reader.

        Args:
            num_made: outputs so far.
        """
        return num_made - self._num_read >= self.size

    def note_read(self, num_read: int) -> None:
        self._num_read = num_read


def num_read_of(request: Request) -> int | None:
    """What a report says; None: it is a request."""
    return _argument(request, NUM_READ)


def report_of(request_id: str, num_read: int) -> EngineCoreRequest:
    """A report for the engine core.

    Args:
        request_id: the engine's own, of one sequence.
        num_read: outputs of the request that were taken, from its start on.
    """
    params = SamplingParams(max_tokens=1, extra_args={NUM_READ: num_read})
    return EngineCoreRequest(request_id, [0], None, params, None, time.time(), None, None, None)


def _argument(request: Request, name: str) -> int | None:
    params = request.sampling_params
    return None if params is None or params.extra_args is None else params.extra_args.get(name)
