"""``UserAway``: ends a request whose user has stopped reading, so that no stage waits for it for ever."""

from __future__ import annotations

import asyncio
from types import TracebackType

from vllm_omni import envs
from vllm_omni.errors import CallAborted
from vllm_omni.flow import GraphCall


class UserAway:
    """From an output of a call, which its user has, until the user asks for the next one.

    The stages of the call may be held by outputs that are not read for ``VLLM_OMNI_READER_TIMEOUT_S``.
    """

    def __init__(self, call: GraphCall) -> None:
        self._call = call
        self._timeout_s = envs.VLLM_OMNI_READER_TIMEOUT_S

    def __enter__(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(self._timeout_s, self._check)

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._timer.cancel()

    def _check(self) -> None:
        """A reader that has all there is holds no stage, nor does one of a call whose stages have ended."""
        if self._call.num_buffered and self._call.running_nodes:
            said = f"its outputs were not read for {self._timeout_s:g} s, and its stages waited for that"
            self._call.stop(CallAborted(f"call {self._call.call_id!r} aborted: {said}"))
        else:
            self.__enter__()
