"""``StreamGates``: which requests must wait for another stage, and what arrived for the others.

From: vLLM-Omni (paper), section 3.3 (stages that overlap); SGLang-Omni (communication, Streaming Flow).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request

from vllm_omni.errors import RelayError
from vllm_omni.messages.payload import Payload, TensorRef, decode, unpack
from vllm_omni.messages.stage_step import STAGE_ARGS, StreamUpdate
from vllm_omni.relay import StreamReader
from vllm_omni.relay.hub import RelayHub

logger = logging.getLogger(__name__)


class _Gate:
    """The stream that one request reads: how many rows arrived, and which tokens they allow to compute."""

    def __init__(self, hub: RelayHub, payloads: Sequence[Payload], num_own_tokens: int) -> None:
        (ref,) = (ref for payload in payloads for ref in payload.streams.values())
        self.num_own_tokens = num_own_tokens
        self.error = ""
        self._num_rows = sum(payload.tensors["rows"].num_rows for payload in payloads)
        self._is_end_taken = False
        self._reader: StreamReader | None = None
        self.connecting: Future[StreamReader] = hub.read_stream(ref)

    def is_open(self, num_tokens: int) -> bool:
        """Whether the rows of the request's first ``num_tokens`` tokens arrived, or no more will."""
        if self._is_end_taken or self.error:
            return True
        if self._reader is None:
            if not self.connecting.done():
                return False
            try:
                self._reader = self.connecting.result()
            except RelayError as exc:
                self.error = str(exc)
                return True
        if self._num_rows + self._reader.num_unread >= num_tokens - self.num_own_tokens:
            return True
        return self._reader.has_ended or self._reader.is_broken

    def take(self) -> StreamUpdate | None:
        """Take the rows that arrived since the last call; None if nothing changed."""
        if self._is_end_taken:
            return None
        rows, ended = None, False
        if not self.error:
            assert self._reader is not None, "nothing is scheduled before its stream is connected"
            try:
                ended = self._reader.has_ended  # asked first: a row that arrives after the read is not lost
                rows = self._reader.read_nowait()
            except RelayError as exc:
                self.error = str(exc)
        self._is_end_taken = ended or bool(self.error)
        if rows is None or not len(rows):
            return StreamUpdate(None, ended, self.error) if self._is_end_taken else None
        self._num_rows += len(rows)
        return StreamUpdate(rows, ended, self.error)

    def close(self) -> None:
        # Not cancelled: a reader that connected all the same would have no owner, and hold the stream open.
        self.connecting.add_done_callback(_close_reader)


def _close_reader(connecting: Future[StreamReader]) -> None:
    if connecting.exception() is None:
        connecting.result().close()


class StreamGates:
    """A request that reads a stream waits for its rows; one that writes a stream waits for credits.

    The scheduler reads, not the workers, and sends rows with the step that needs them: one reader, however many ranks.
    """

    def __init__(self, hub: RelayHub) -> None:
        self._hub = hub
        self._gates: dict[str, _Gate] = {}  # by request that reads a stream
        self._credits: dict[str, Callable[[], int]] = {}  # by request that writes one

    def __bool__(self) -> bool:
        """Whether any request reads or writes a stream."""
        return bool(self._gates or self._credits)

    def connections(self) -> list[Future[StreamReader]]:
        """The connections of the streams that requests read, made or still being made."""
        return [gate.connecting for gate in self._gates.values()]

    def add(self, request: Request) -> None:
        """Open the stream that the request reads, if its arguments name one."""
        params = request.sampling_params
        args: Mapping[str, Any] | None = (params.extra_args or {}).get(STAGE_ARGS) if params is not None else None
        if not args or args.get("num_own_tokens") is None:
            return
        payloads = [decode(data) for data in args["payloads"]]
        if any(payload.streams for payload in payloads):
            self._gates[request.request_id] = _Gate(self._hub, payloads, args["num_own_tokens"])

    def remove(self, request_id: str) -> None:
        gate = self._gates.pop(request_id, None)
        if gate is not None:
            gate.close()
        self._credits.pop(request_id, None)

    def is_held(self, request: Request) -> bool:
        """Whether the request must wait for a row, or for credit."""
        gate = self._gates.get(request.request_id)
        if gate is not None and not gate.is_open(request.num_tokens):
            return True
        credits = self._credits.get(request.request_id)
        return credits is not None and credits() < 1

    def writes_stream(self, request: Request) -> bool:
        return request.request_id in self._credits

    def take_rows(self, request_ids: Iterable[str]) -> dict[str, StreamUpdate]:
        """Take what arrived for these requests, to be sent with their step."""
        updates = {}
        for request_id in request_ids:
            gate = self._gates.get(request_id)
            if gate is not None and (update := gate.take()) is not None:
                updates[request_id] = update
        return updates

    def watch_outputs(self, output: ModelRunnerOutput, alive: Collection[str]) -> None:
        """Watch the credits of streams that the step's requests opened: a request's first payload names its stream.

        Args:
            alive: requests that have not ended. Upstream drops the outputs of others, so that their payloads are
                released here.
        """
        for request_id, packed in zip(output.req_ids, output.pooler_output or (), strict=False):
            if packed is None or request_id in self._credits:
                continue
            payload = unpack(packed)
            if request_id not in alive:
                self._hub.release_payload(payload, for_all=True)
            for ref in payload.streams.values() if request_id in alive else ():
                self._watch(request_id, ref)

    def _watch(self, request_id: str, ref: TensorRef) -> None:
        try:
            credits = self._hub.credits_of(ref)
        except RelayError as exc:
            logger.warning("request %s: the credits of its stream are unknown: %s", request_id, exc)
            return
        if credits is not None:
            self._credits[request_id] = credits
