"""``StreamScheduler``: does not schedule what waits for another stage.

A request of a consumer waits for the rows of its stream; one of a producer, for credits. What arrived leaves with the
step that needs it, in the step's ``SchedulerOutput``, and so reaches every rank of a tensor-parallel stage: there is
one reader, whatever the number of workers.

From: vLLM-Omni (paper), section 3.3 (stages that overlap); SGLang-Omni (communication, Streaming Flow).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from typing import Any

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from vllm_omni.errors import RelayError
from vllm_omni.kv.kv_connector import RelayKVConnector
from vllm_omni.messages.payload import TensorRef, decode, unpack
from vllm_omni.messages.stage_step import STAGE_ARGS, StreamSchedulerOutput, StreamUpdate
from vllm_omni.relay import StreamReader
from vllm_omni.relay.hub import RelayHub, process_hub

logger = logging.getLogger(__name__)


class _Gate:
    """The consumer's side of one request: how many rows it has, and what it may compute with them."""

    def __init__(self, hub: RelayHub, args: Mapping[str, Any]) -> None:
        payloads = [decode(data) for data in args["payloads"]]
        (ref,) = (ref for payload in payloads for ref in payload.streams.values())
        self.num_own_tokens: int = args["num_own_tokens"]
        self.error = ""
        self._num_rows = sum(payload.tensors["rows"].num_rows for payload in payloads)
        self._has_told_end = False
        self._reader: StreamReader | None = None
        self._connecting: Future[StreamReader] = hub.read_stream(ref)

    def is_open(self, num_tokens: int) -> bool:
        """Whether the rows of so many tokens of the request are here."""
        if self._has_told_end or self.error:
            return True
        if self._reader is None:
            if not self._connecting.done():
                return False
            try:
                self._reader = self._connecting.result()
            except RelayError as exc:
                self.error = str(exc)
                return True
        if self._num_rows + self._reader.num_unread >= num_tokens - self.num_own_tokens:
            return True
        return self._reader.has_ended or self._reader.is_broken

    def take(self) -> StreamUpdate | None:
        """What came since the last call."""
        if self._has_told_end:
            return None
        rows, ended = None, False
        if not self.error:
            assert self._reader is not None, "nothing is scheduled before its stream is connected"
            try:
                ended = self._reader.has_ended  # first: what is read after it is all there is
                rows = self._reader.read_nowait()
            except RelayError as exc:
                self.error = str(exc)
        self._has_told_end = ended or bool(self.error)
        if rows is None or not len(rows):
            return StreamUpdate(None, ended, self.error) if self._has_told_end else None
        self._num_rows += len(rows)
        return StreamUpdate(rows, ended, self.error)

    def close(self) -> None:
        # Not cancelled: a reader that comes all the same would be nobody's, and hold the stream for ever.
        self._connecting.add_done_callback(_close_reader)


def _close_reader(connecting: Future[StreamReader]) -> None:
    if connecting.exception() is None:
        connecting.result().close()


class StreamScheduler(Scheduler):
    """Upstream's scheduler for stages that stream to each other.

    Requests that wait keep their place in ``running``, their KV blocks and their seat in the batch.
    """

    running: list[Request]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.hub = process_hub(self.vllm_config.additional_config)
        self.gates: dict[str, _Gate] = {}  # of requests that read a stream
        self.credits: dict[str, Callable[[], int]] = {}  # of requests that write one

    def add_request(self, request: Request) -> None:
        super().add_request(request)
        params = request.sampling_params
        args = (params.extra_args or {}).get(STAGE_ARGS) if params is not None else None
        if args and args.get("num_own_tokens") is not None and any(decode(data).streams for data in args["payloads"]):
            self.gates[request.request_id] = _Gate(self.hub, args)

    def _free_request(self, request: Request, delay_free_blocks: bool = False) -> Any:
        # Upstream calls this for whatever way a request ends.
        gate = self.gates.pop(request.request_id, None)
        if gate is not None:
            gate.close()
        self.credits.pop(request.request_id, None)
        return super()._free_request(request, delay_free_blocks)

    def finish_requests(self, request_ids: str | Iterable[str] | None, finished_status: RequestStatus) -> list[Request]:
        finished = super().finish_requests(request_ids, finished_status)
        connector = self.connector
        if finished_status is RequestStatus.FINISHED_ABORTED and isinstance(connector, RelayKVConnector):
            # Upstream knows nothing any more of a request that had just ended, and nobody may have read its output.
            ids = {request_ids} if isinstance(request_ids, str) else set(request_ids or ())
            connector.abort_announced(ids - {request.request_id for request in finished})
        return finished

    def num_external_tokens(self, request: Request) -> int:
        """Tokens of a waiting request's prompt that need not be computed here: their pages will be pulled."""
        if self.connector is None or request.num_computed_tokens:
            return 0
        if isinstance(self.connector, RelayKVConnector):
            return self.connector.num_announced_tokens(request)
        # vLLM's own connectors take the mark away when they have begun.
        is_external = (request.kv_transfer_params or {}).get("do_remote_prefill")
        return request.num_prompt_tokens if is_external else 0

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        if not self.gates and not self.credits:
            return super().schedule(throttle_prefills)
        running = self.running
        held = {request for request in running if self._is_held(request)}
        if not held:
            return self._with_rows(super().schedule(throttle_prefills))
        self.running = [request for request in running if request not in held]
        # Upstream counts these as requests that are not scheduled and keep their place in the runner's batch.
        self.num_waiting_for_streaming_input += len(held)
        try:
            output = super().schedule(throttle_prefills)
        finally:
            self.num_waiting_for_streaming_input -= len(held)
            kept = set(self.running)
            old = [request for request in running if request in held or request in kept]
            self.running = old + [request for request in self.running if request not in set(running)]
        if not output.total_num_scheduled_tokens and self.waiting:
            self._make_room(held)
        return self._with_rows(output)

    def _handle_blocked_waiting_request(self, request: Request) -> bool:
        # Upstream's hook for what is not ready: it skips the request without holding up those behind it.
        if (self.gates or self.credits) and self._is_held(request):
            return False
        return super()._handle_blocked_waiting_request(request)

    def _is_held(self, request: Request) -> bool:
        gate = self.gates.get(request.request_id)
        if gate is not None and not gate.is_open(request.num_tokens):
            return True
        credits = self.credits.get(request.request_id)
        return credits is not None and credits() < 1

    def _make_room(self, held: set[Request]) -> None:
        """Preempt a request without credits for the sake of those that cannot be admitted.

        Otherwise two stages can wait for each other: this one for a reader that the next stage has not admitted, the
        next for rows of a request that is not admitted here.
        """
        for request in reversed(self.running):
            if request in held and request.request_id in self.credits and not self._is_alone(request):
                self.running.remove(request)
                self._preempt_request(request, time.monotonic())
                return

    def _is_alone(self, request: Request) -> bool:
        return all(self._is_held(waiting) for waiting in self.waiting)

    def _with_rows(self, output: SchedulerOutput) -> SchedulerOutput:
        streams = {}
        for request_id in output.num_scheduled_tokens:
            gate = self.gates.get(request_id)
            if gate is not None and (update := gate.take()) is not None:
                streams[request_id] = update
        return StreamSchedulerOutput(**vars(output), streams=streams) if streams else output

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        # The first payload of a request names the stream that its runner opened.
        for request_id, packed in zip(
            model_runner_output.req_ids, model_runner_output.pooler_output or (), strict=False
        ):
            if packed is None or request_id in self.credits:
                continue
            payload = unpack(packed)
            if request_id not in self.requests:  # aborted during the step: upstream drops its output
                self.hub.release_payload(payload, for_all=True)
            for ref in payload.streams.values() if request_id in self.requests else ():
                self._watch(request_id, ref)
        return super().update_from_output(scheduler_output, model_runner_output)

    def _watch(self, request_id: str, ref: TensorRef) -> None:
        try:
            credits = self.hub.credits_of(ref)
        except RelayError as exc:
            logger.warning("request %s: its stream's credits are not known: %s", request_id, exc)
            return
        if credits is not None:
            self.credits[request_id] = credits
