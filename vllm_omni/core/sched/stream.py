"""``StreamScheduler``: vLLM's scheduler for autoregressive stages, which holds requests that wait for another stage.

A request of a consumer waits for the rows of its stream; one of a producer, for credits (``StreamGates``). Rows
leave with the step that needs them, in its ``SchedulerOutput``, and so reach every rank of a tensor-parallel stage.

From: vLLM-Omni (paper), section 3.3 (stages that overlap); SGLang-Omni (communication, Streaming Flow).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.metrics.stats import SchedulerStats
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from vllm_omni.core.sched.cached_rows import CachedRows
from vllm_omni.core.sched.canvases import Canvases, denoises
from vllm_omni.core.sched.named_rows import NamedRows
from vllm_omni.core.sched.read_window import ReadWindow, num_read_of
from vllm_omni.core.sched.timeline import RequestTimelines
from vllm_omni.core.sched.token_pictures import TokenPictures
from vllm_omni.errors import RelayError
from vllm_omni.kv.ec_connector import RelayECConnector
from vllm_omni.kv.kv_connector import RelayKVConnector, relay_connector
from vllm_omni.messages.epd_step import EPDModelRunnerOutput
from vllm_omni.messages.media_counts import MediaCounts
from vllm_omni.messages.payload import ROWS, Payload, TensorRef, decode, unpack
from vllm_omni.messages.stage_step import StreamSchedulerOutput, StreamUpdate, stage_args
from vllm_omni.messages.timeline import TIMELINES
from vllm_omni.model_executor.row_cache import keeps_rows, pool_keeps_rows
from vllm_omni.relay import StreamReader
from vllm_omni.relay.hub import RelayHub, process_hub
from vllm_omni.unified.layout import layout_of

logger = logging.getLogger(__name__)


class StreamGate:
    """The stream that one request reads: how many rows arrived, and which tokens they allow to compute."""

    def __init__(self, hub: RelayHub, payloads: Sequence[Payload], num_own_tokens: int) -> None:
        (ref,) = (ref for payload in payloads for ref in payload.streams.values())
        self.num_own_tokens = num_own_tokens
        self.error = ""
        self._num_rows = sum(rows.num_rows for payload in payloads if (rows := payload.tensors.get(ROWS)) is not None)
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


def _min_of(counts: Iterable[Callable[[], int]]) -> int:
    return min(count() for count in counts)


class StreamGates:
    """A request that reads a stream waits for its rows; one that writes streams, for credits of all of their readers;
    one whose tokens are read while they are made, for that reader, too (``ReadWindow``).

    The scheduler reads, not the workers, and sends rows with the step that needs them: one reader, however many ranks.
    """

    def __init__(self, hub: RelayHub) -> None:
        self._hub = hub
        self._gates: dict[str, StreamGate] = {}  # by request that reads a stream
        self._credits: dict[str, Callable[[], int]] = {}  # of the slowest reader, by request that writes streams
        self._windows: dict[str, ReadWindow] = {}

    def __bool__(self) -> bool:
        """Whether any request may have to wait."""
        return bool(self._gates or self._credits or self._windows)

    def connections(self) -> list[Future[StreamReader]]:
        """The connections of the streams that requests read, made or still being made."""
        return [gate.connecting for gate in self._gates.values()]

    def add(self, request: Request) -> None:
        """Open the stream that the request reads, and its window, if its arguments name them."""
        if (window := ReadWindow.of(request)) is not None:
            self._windows[request.request_id] = window
        args = stage_args(request.sampling_params)
        if args.get("num_own_tokens") is None:
            return
        payloads = [decode(data) for data in args["payloads"]]
        if any(payload.streams for payload in payloads):
            self._gates[request.request_id] = StreamGate(self._hub, payloads, args["num_own_tokens"])

    def remove(self, request_id: str) -> None:
        gate = self._gates.pop(request_id, None)
        if gate is not None:
            gate.close()
        self._credits.pop(request_id, None)
        self._windows.pop(request_id, None)

    def note_read(self, request: Request) -> bool:
        """Take a report of what a request's reader has taken; False: it is a request."""
        if (num_read := num_read_of(request)) is None:
            return False
        if (window := self._windows.get(request.request_id)) is not None:  # else it has ended
            window.note_read(num_read)
        return True

    def is_held(self, request: Request) -> bool:
        """Whether the request must wait for a row, for credit, or for its reader."""
        if self.is_ahead(request):
            return True
        gate = self._gates.get(request.request_id)
        if gate is not None and not gate.is_open(request.num_tokens):
            return True
        credits = self._credits.get(request.request_id)
        return credits is not None and credits() < 1

    def is_ahead(self, request: Request) -> bool:
        """Whether the request is as far ahead of its reader as it may be."""
        window = self._windows.get(request.request_id)
        return window is not None and window.is_full(request.num_output_tokens)

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
            elif readers := [count for ref in payload.streams.values() if (count := self._count(request_id, ref))]:
                self._credits[request_id] = partial(_min_of, readers)

    def _count(self, request_id: str, ref: TensorRef) -> Callable[[], int] | None:
        try:
            return self._hub.credits_of(ref)
        except RelayError as exc:
            logger.warning("request %s: the credits of its stream are unknown: %s", request_id, exc)
            return None


class StreamScheduler(Scheduler):
    """Requests that wait for a stream keep their place in ``running``, their KV blocks and their slot in the batch.

    Attributes:
        gates: the streams of requests.
        cached_rows: what requests whose rows are read may take from the prefix cache.
        named_rows: the names of blocks of prompts that are rows of another stage.
        canvases: the pictures that requests ask for.
        token_pictures: those that are written as tokens.
        timelines: when what was done for a request, if the engine's ``additional_config`` asks for it.
        clock: seconds, comparable to vLLM's ``Request.arrival_time``.
    """

    running: list[Request]
    clock: Callable[[], float] = staticmethod(time.time)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        additional_config = self.vllm_config.additional_config
        self.hub = process_hub(additional_config)
        self._media_counts: MediaCounts | None = None  # of the step that is being updated from
        self.gates = StreamGates(self.hub)
        self.cached_rows = CachedRows(
            self.block_size,
            is_on=keeps_rows(self.vllm_config, self.kv_cache_config),
            has_connector=self.connector is not None and not pool_keeps_rows(self.vllm_config),
        )
        self.named_rows = NamedRows(self.vllm_config.cache_config, self.hash_block_size)
        self.canvases = Canvases(
            super().add_request,
            super().finish_requests,
            has_spans=denoises(self.vllm_config.model_config.hf_config),
            max_model_len=self.max_model_len,
            layout=layout_of(self.vllm_config.model_config.hf_config),
        )
        self.token_pictures = TokenPictures(super().add_request, super().finish_requests)
        self.timelines = RequestTimelines(lambda: self.clock(), is_on=bool(additional_config.get(TIMELINES)))

    # -- start and end of a request -----------------------------------------------------------------------------------

    def add_request(self, request: Request) -> None:
        if self.gates.note_read(request):
            return
        if request.request_id not in self.requests:  # else a session's next input
            self.timelines.note_queued(request)
            self.named_rows.add(request)
        self.cached_rows.add(request)
        super().add_request(request)
        self.gates.add(request)
        self.canvases.add(request)
        self.token_pictures.add(request)

    def _free_request(self, request: Request, delay_free_blocks: bool = False) -> Any:
        # Upstream calls this however a request ends, and sends what it returns with the request's last output.
        self.gates.remove(request.request_id)
        self.cached_rows.release(request)
        kv_transfer_params, ec_transfer_params = super()._free_request(request, delay_free_blocks)
        if timeline := self.timelines.end(request):
            kv_transfer_params = {**(kv_transfer_params or {}), **timeline}
        return kv_transfer_params, ec_transfer_params

    def finish_requests(self, request_ids: str | Iterable[str] | None, finished_status: RequestStatus) -> list[Request]:
        finished = super().finish_requests(request_ids, finished_status)
        self.canvases.end(self.requests)
        self.token_pictures.end(self.requests)
        if finished_status is RequestStatus.FINISHED_ABORTED:
            # Upstream ignores requests that had just ended; their last output may never have been read.
            ids = {request_ids} if isinstance(request_ids, str) else set(request_ids or ())
            for connector in (relay_connector(self.connector), self.ec_connector):
                if isinstance(connector, RelayKVConnector | RelayECConnector):
                    connector.abort_announced(ids - {request.request_id for request in finished})
        return finished

    def num_external_tokens(self, request: Request) -> int:
        """Tokens of a waiting request's prompt that are not computed here, as their KV pages will be pulled."""
        if self.connector is None or request.num_computed_tokens:
            return 0
        if (relay := relay_connector(self.connector)) is not None:
            return relay.num_announced_tokens(request)
        # vLLM's own connectors remove the mark once they have started.
        is_external = (request.kv_transfer_params or {}).get("do_remote_prefill")
        return request.num_prompt_tokens if is_external else 0

    def _get_local_prefix_cache_hit(self, request: Request) -> tuple[KVCacheBlocks, int, int, bool]:
        if not self.cached_rows.has_connector:
            return super()._get_local_prefix_cache_hit(request)
        if not self.cached_rows.may_read(request):
            hit = super()._get_local_prefix_cache_hit(request)
            self.cached_rows.note_own(request, hit[1])
            return hit
        # Upstream reads no pages of a connector while this is set.
        request.skip_reading_prefix_cache = False
        blocks, num_tokens, boundary, has_diverged = super()._get_local_prefix_cache_hit(request)
        request.skip_reading_prefix_cache = True
        num_with_rows = self.cached_rows.num_tokens_with_rows(blocks.blocks[0])
        if num_with_rows < num_tokens:
            blocks, num_tokens = self.kv_cache_manager.truncate_computed_blocks(blocks, num_with_rows), num_with_rows
        return blocks, num_tokens, boundary, has_diverged

    def _update_waiting_for_remote_kv(self, request: Request) -> None:
        num_tokens = request.num_computed_tokens
        super()._update_waiting_for_remote_kv(request)
        if self.cached_rows.has_connector:
            (blocks,) = self.kv_cache_manager.get_blocks(request.request_id).blocks
            self.cached_rows.note_loaded(request, blocks, num_tokens)

    def _preempt_request(self, request: Request, *args: Any, **kwargs: Any) -> None:
        self.cached_rows.release(request)
        super()._preempt_request(request, *args, **kwargs)
        self.timelines.note_preempted(request)

    def _set_kv_fetch_stage(self, request: Request, stage: str | None) -> None:
        # Upstream tracks here, for its statistics, the requests whose KV cache is being transferred.
        super()._set_kv_fetch_stage(request, stage)
        self.timelines.note_kv_fetch(request, stage)

    def reset_encoder_cache(self) -> None:
        super().reset_encoder_cache()
        self.timelines.forget_images()

    # -- one iteration ------------------------------------------------------------------------------------------------

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        started_at = self.clock()
        if self.canvases:
            self.canvases.prepare()
            self.running = self._order_of_canvases()
        output = self._schedule_open(throttle_prefills) if self.gates else super().schedule(throttle_prefills)
        if self.canvases:
            output = self._with_canvases(output)
        if self.token_pictures:
            output = self._with_token_pictures(output)
        self.timelines.note_scheduled(output, self.requests, started_at)
        return output

    def _schedule_open(self, throttle_prefills: bool) -> SchedulerOutput:
        """Schedule without the running requests that wait for a stream; waiting ones are skipped by upstream's hook."""
        running = self.running
        held = {request for request in running if self.gates.is_held(request)}
        if not held:
            return self._with_rows(super().schedule(throttle_prefills))
        self.running = [request for request in running if request not in held]
        # Upstream's count of requests that are not scheduled and keep their place in the runner's batch.
        self.num_waiting_for_streaming_input += len(held)
        try:
            output = super().schedule(throttle_prefills)
        finally:
            self.num_waiting_for_streaming_input -= len(held)
            kept = set(self.running)
            old = [request for request in running if request in held or request in kept]
            self.running = old + [request for request in self.running if request not in set(running)]
        if not output.total_num_scheduled_tokens and self.waiting:
            self._preempt_producer(held)
        elif self.waiting and len(self.running) >= self.max_num_running_reqs:  # slow readers have slots of others
            self._preempt_producer({one for one in held if self.gates.is_ahead(one)})
        return self._with_rows(output)

    def _handle_blocked_waiting_request(self, request: Request) -> bool:
        # Upstream's hook for requests that are not ready: it skips them without holding up those behind them.
        if self.canvases.is_held(request):
            return False
        return not self.gates.is_held(request) and super()._handle_blocked_waiting_request(request)

    def _preempt_producer(self, held: set[Request]) -> None:
        """Preempt one request without credits, or with a slow reader, if that lets a waiting request be admitted.

        Otherwise two stages can wait for each other: this one for a reader that the next stage has not admitted, and
        the next stage for rows of a request that is not admitted here; and slow readers would keep others out.
        """
        if all(self.gates.is_held(waiting) for waiting in self.waiting):
            return
        for request in reversed(self.running):
            if request in held and (self.gates.writes_stream(request) or self.gates.is_ahead(request)):
                self.running.remove(request)
                self._preempt_request(request, time.monotonic())
                return

    def _with_rows(self, output: SchedulerOutput) -> SchedulerOutput:
        streams = self.gates.take_rows(output.num_scheduled_tokens)
        return StreamSchedulerOutput(**vars(output), streams=streams) if streams else output

    def _update_request_with_output(
        self, request: Request, new_token_ids: list[int], *args: Any, **kwargs: Any
    ) -> tuple[list[int], bool]:
        new_token_ids, stopped = super()._update_request_with_output(request, new_token_ids, *args, **kwargs)
        new_token_ids, stopped = self.canvases.prefaces.note_tokens(request, new_token_ids, has_stopped=stopped)
        if stopped and self.canvases.start_behind_text(request):
            return [*new_token_ids[:-1], request.output_token_ids[-1]], False
        return self.token_pictures.reported(request, new_token_ids), stopped

    def _reserve_prefill_lookahead(self, request: Request, num_computed_tokens: int, num_new_tokens: int) -> int:
        # Upstream's last word on how many tokens of a request a step has, for running and for waiting requests.
        num_new_tokens = super()._reserve_prefill_lookahead(request, num_computed_tokens, num_new_tokens)
        num_new_tokens = self.token_pictures.limit(request, num_computed_tokens, num_new_tokens)
        return self.canvases.limit(request, num_computed_tokens, num_new_tokens)

    def _order_of_canvases(self) -> list[Request]:
        return self.canvases.in_order(self.running)

    def _with_canvases(self, output: SchedulerOutput) -> SchedulerOutput:
        steps, tails = self.canvases.take(output), self.canvases.prefaces.take(output.num_scheduled_tokens)
        if not output.total_num_scheduled_tokens and self.waiting and (idle := self.canvases.idle()):
            # Branches that have been computed hold pages or slots for which those that they wait for are waiting.
            self.running.remove(idle[0])
            self._preempt_request(idle[0], time.monotonic())
        if isinstance(output, StreamSchedulerOutput):
            output.canvases, output.tails = steps, tails
            return output
        return StreamSchedulerOutput(**vars(output), canvases=steps, tails=tails) if steps or tails else output

    def _with_token_pictures(self, output: SchedulerOutput) -> SchedulerOutput:
        step = self.token_pictures.take(output)
        if not output.total_num_scheduled_tokens and self.waiting and (held := self.token_pictures.held()):
            # Requests hold slots or pages for which their partners, or those of others, are waiting.
            self.running.remove(held[0])
            self._preempt_request(held[0], time.monotonic())
        if isinstance(output, StreamSchedulerOutput):
            output.token_step = step
            return output
        return StreamSchedulerOutput(**vars(output), token_step=step)

    def make_stats(self, *args: Any, **kwargs: Any) -> SchedulerStats | None:
        stats = super().make_stats(*args, **kwargs)
        if stats is not None and self._media_counts is not None:
            # Upstream's field for what only an EC connector and its metrics read.
            stats.ec_connector_stats = {**(stats.ec_connector_stats or {}), **self._media_counts.to_statistics()}
        return stats

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        runner = model_runner_output
        self._media_counts = runner.media_counts if isinstance(runner, EPDModelRunnerOutput) else None
        self.timelines.note_step_end(scheduler_output, model_runner_output)
        self.gates.watch_outputs(model_runner_output, self.requests)
        for request_id in model_runner_output.req_ids:
            # Upstream reads the outputs of a step's requests; another branch of the request has completed its picture.
            if request_id not in scheduler_output.num_scheduled_tokens and request_id in self.requests:
                scheduler_output.num_scheduled_tokens[request_id] = 1
                self.requests[request_id].num_in_flight_tokens += 1
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        self.canvases.end(self.requests)
        self.token_pictures.end(self.requests)
        self.timelines.add_to(outputs, self.requests)
        return outputs
