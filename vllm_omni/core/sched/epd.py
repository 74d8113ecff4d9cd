"""``EPDScheduler``: encode, prefill and decode are batched by stage, within budgets that keep tokens coming.

From: HydraInfer, section 4.2, Algorithm 1, with five corrections:

* Lines 16 to 19 admit new text only while a prefill already runs, so that an engine without one never starts. Here new
  text is admitted whenever tokens of the budget are left.
* Its loops over the waiting queue do not end on one that runs empty. Here they do.
* While new prefills keep coming, its encodes never run. Here an encode is deferred for at most ``patience`` steps in a
  row, and with SLOs only for first tokens that it would make late.
* A canvas, and an image whose tokens see each other, has its tokens of one iteration together, however few the budget
  allows: beside decodes, ``patience`` iterations in a row may leave it out.
* ``n_e < tau_e`` is tested before a request's images are added, so that all but one of them may exceed it. Here an
  image that does not fit waits, unless it is the only one of its batch.

Lines 29 to 31 (migration) are where vLLM has them: a request whose KV cache travels is held by its connector.
Embeddings of images that are elsewhere (``kv/ec_connector.py``) are pulled in the order in which images are encoded.
"""

from __future__ import annotations

from typing import Any

from vllm.v1.core.encoder_cache_manager import EncoderCacheManager
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.request_queue import FCFSRequestQueue, RequestQueue, SchedulingPolicy
from vllm.v1.engine import EngineCoreEventType, EngineCoreOutput, EngineCoreOutputs
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from vllm_omni.config.budgets import EPD_CONFIG, EPDConfig, encodes_in_thread
from vllm_omni.core.sched import unqueued
from vllm_omni.core.sched.canvases import plan_of
from vllm_omni.core.sched.image_cache import ImageCache
from vllm_omni.core.sched.profile import Profile, make_profile
from vllm_omni.core.sched.stream import StreamScheduler
from vllm_omni.epd.budget import Budgets, SloBudgets, make_budgets
from vllm_omni.epd.cost import LanguageLoad
from vllm_omni.epd.deadlines import Deadlines
from vllm_omni.epd.encode_planner import EncodePacing, EncodePlanner
from vllm_omni.epd.image_needs import ImageNeeds
from vllm_omni.epd.image_transfers import EncodeTasks, ImagePulls
from vllm_omni.epd.iterations import Iterations, load_of_decodes, load_of_step
from vllm_omni.errors import ConfigError, InvalidRequest
from vllm_omni.kv.ec_connector import RelayECConnector, RelayECReport
from vllm_omni.messages.epd_step import EPDModelRunnerOutput, EPDSchedulerOutput
from vllm_omni.messages.failure import Failure
from vllm_omni.messages.images import EncodeItem, EncodeReport


class EPDScheduler(StreamScheduler):
    """Algorithm 1 around vLLM's scheduler, which still allocates, preempts and caches.

    vLLM's ``schedule`` takes the running requests in their order and then the waiting ones, within a token budget, and
    cuts a prompt before an image that its encoder cache does not have. So each iteration puts the decodes first, sets
    the budget, skips requests that wait for an image, and then, unless that would make a prefill late, starts a batch
    of images that the runner encodes beside the language model.

    Without budgets (``EPDConfig.is_on``) every decision is vLLM's own, unless images are pulled or put
    (``RelayECConnector``): then there are budgets without limits.

    Attributes:
        epd: the configuration.
        budgets: None: off.
        deadlines: the requests with an SLO.
        tasks: requests that only encode; pulls: images that are elsewhere; needs: which images a request needs.
        planner: starts encodes and pulls.
        pacing: when a batch of images may start.
        iterations: the iterations in flight.
        profile: the measurement before the first request, until it is over.
    """

    encoder_cache_manager: Any  # an ImageCache, with budgets
    waiting: RequestQueue
    kv_holding_waiting: RequestQueue
    max_num_scheduled_tokens: int

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.epd = EPDConfig.parse(self.vllm_config.additional_config.get(EPD_CONFIG, {}))
        self.relay_ec = self.ec_connector if isinstance(self.ec_connector, RelayECConnector) else None
        self.budgets: Budgets | None = None
        self.deadlines = Deadlines(self.epd.patience, self._seconds_to_token)
        self.iterations = Iterations()
        self._num_deferred = 0  # iterations in a row without what has its tokens together
        self.profile: Profile | None = None
        self._encodes_in_thread = encodes_in_thread(self.vllm_config)
        self.pacing = EncodePacing(self.epd, self.deadlines, is_threaded=self._encodes_in_thread)
        if self.epd.is_on or self.relay_ec is not None:
            has_own_cache = type(self.encoder_cache_manager) is not EncoderCacheManager
            if self.is_encoder_decoder or has_own_cache or (self.is_mm_encoder_only and self.relay_ec is None):
                raise ConfigError(
                    f"{EPD_CONFIG}: budgets and RelayECConnector are for decoder-only models with vLLM's own encoder "
                    "cache manager, and an instance that only encodes needs RelayECConnector for budgets"
                )
            self.turn_on(self.encoder_cache_manager.cache_size)
            num_kv_tokens = (self.kv_cache_config.num_blocks - 1) * self.block_size  # vLLM reserves one block
            self.profile = make_profile(self.vllm_config, self.epd, num_kv_tokens, self.hash_block_size)
        else:
            self._compose(self.encoder_cache_manager)

    def turn_on(self, num_embeds: int) -> None:
        """Use budgets, and an image cache of this size, in which images are encoded beside the steps."""
        cache = ImageCache(num_embeds)
        if self.ec_connector is not None:
            cache.is_elsewhere = self.ec_connector.has_cache_item
        self.encoder_cache_manager = cache
        self._compose(cache)
        if self.epd.is_on:
            self.budgets = make_budgets(self.epd, self.max_num_scheduled_tokens, num_embeds)
        else:
            self.budgets = Budgets(self.max_num_scheduled_tokens, self.max_num_encoder_input_tokens)

    def _compose(self, cache: Any) -> None:
        self.needs = ImageNeeds(
            cache, lambda request: self.kv_cache_manager.get_computed_blocks(request)[1], self.num_external_tokens
        )
        self.tasks = EncodeTasks(self.relay_ec, cache, lambda: self.clock())
        self.pulls = ImagePulls(self.relay_ec, cache, self.vllm_config.parallel_config.tensor_parallel_size)
        self.planner = EncodePlanner(
            cache,
            self.needs,
            self.tasks,
            self.pulls,
            self.relay_ec,
            is_rejected=self._reject_on_encoder_cache_embed_mismatch,
            on_start=self.timelines.start_image,
            on_end=lambda identifier: self.timelines.end_image(identifier, self.requests),
        )

    # -- profile ------------------------------------------------------------------------------------------------------

    def has_requests(self) -> bool:
        # The engine core steps while this holds, so that a profile starts without a request.
        return super().has_requests() or (self.profile is not None and self.pause_state is PauseState.UNPAUSED)

    def _continue_profile(self, profile: Profile, now: float) -> None:
        if profile.plan.is_late(now):
            self.finish_requests(profile.request_ids, RequestStatus.FINISHED_ABORTED)
        if self.planner.is_encoding or any(request_id in self.requests for request_id in profile.request_ids):
            return
        if requests := profile.next_requests(now):
            for request in requests:
                super().add_request(request)
            self.budgets = profile.budgets
            return
        assert self.epd.tpot_ms is not None
        self.profile = None
        budgets = make_budgets(self.epd, self.max_num_scheduled_tokens, self.encoder_cache_manager.cache_size)
        assert isinstance(budgets, SloBudgets)
        self.budgets = profile.plan.finish(budgets, self.epd.tpot_ms / 1000, now)
        self.reset_prefix_cache()
        self.encoder_cache_manager.evict_unused()

    def _waits_for_profile(self, request: Request) -> bool:
        return self.profile is not None and not self.profile.owns(request.request_id)

    # -- start and end of a request -----------------------------------------------------------------------------------

    def add_request(self, request: Request) -> None:
        if self.gates.note_read(request):
            return
        is_new = request.request_id not in self.requests  # else a session's next input
        if is_new and not self._is_for_queue(request):
            return
        super().add_request(request)
        # A picture has no first token to wait for.
        if self.budgets is not None and request.request_id not in self.deadlines and plan_of(request) is None:
            params = request.sampling_params
            self.deadlines.add_request(request, params.extra_args if params is not None else None, self.epd.slo)

    def _is_for_queue(self, request: Request) -> bool:
        """Read a new request's ``ec_transfer_params``; encode tasks and rejected requests are added without vLLM."""
        try:
            params = unqueued.read_params(request, self.relay_ec, only_encodes=self.is_mm_encoder_only)
        except InvalidRequest as exc:
            self._add_unqueued(request)
            self.planner.failures[request.request_id] = Failure(str(exc), is_invalid=True)
            return False
        if params.encode_only:
            self._add_unqueued(request)
            self.tasks.add(request)
            return False
        if params.images:
            self.pulls.add(request.request_id, params.images)
        return True

    def _add_unqueued(self, request: Request) -> None:
        self.requests[request.request_id] = request
        if self.log_stats:
            request.record_event(EngineCoreEventType.QUEUED)
        self.timelines.note_queued(request)

    def get_request_counts(self) -> tuple[int, int]:
        num_running, num_waiting = super().get_request_counts()
        return num_running, num_waiting + len(self.tasks) + len(self.planner.failures)

    def reset_encoder_cache(self) -> None:
        super().reset_encoder_cache()
        self.planner.reset()

    def _free_request(self, request: Request, delay_free_blocks: bool = False) -> Any:
        self.planner.remove(request.request_id)
        self.deadlines.remove(request.request_id)
        return super()._free_request(request, delay_free_blocks)

    # -- schedule: order, budget, vLLM's schedule, encodes ------------------------------------------------------------

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        if self.budgets is None:
            return super().schedule(throttle_prefills)
        now = self.clock()
        self.deadlines.start_step()
        if self.profile is not None:
            self._continue_profile(self.profile, now)
        admitted = {request: index for index, request in enumerate(self.running)}
        decodes, prefills = self._put_in_order(now)
        of_decodes = load_of_decodes(decodes)
        limit_s = self.deadlines.limit_s(self.budgets, decodes, of_decodes, prefills, self.waiting, now)
        upstream_budget = self.max_num_scheduled_tokens
        budget = self._with_room(self._token_budget(of_decodes, prefills, limit_s), of_decodes.num_decodes, prefills)
        self.max_num_scheduled_tokens = min(upstream_budget, budget)
        try:
            output = super().schedule(throttle_prefills)
        finally:
            self.max_num_scheduled_tokens = upstream_budget
            # Restore the order of admission: vLLM preempts the last request.
            self.running.sort(key=lambda request: admitted.get(request, len(admitted)))
        decoding = {request.request_id for request in decodes}
        self.iterations.start(load_of_step(output.num_scheduled_tokens, self.requests, decoding), now)
        return self._with_encodes(output, limit_s)

    def _put_in_order(self, now: float) -> tuple[list[Request], list[Request]]:
        """Put decodes first, and other requests in the order of their deadlines; returns (decodes, prefills)."""
        decodes: list[Request] = []
        prefills: list[Request] = []
        for request in self.running:
            is_decode = not request.is_prefill_chunk and not self.canvases.owns(request)
            (decodes if is_decode else prefills).append(request)
        if len(self.deadlines):
            prefills = self.deadlines.in_order(prefills, now)
            # Under the priority policy, the operator's order stands.
            if self.policy is SchedulingPolicy.FCFS and len(self.waiting) > 1:
                self.waiting = FCFSRequestQueue(self.deadlines.in_order(self.waiting, now))
        prefills = self.canvases.in_order(prefills)
        self.running = decodes + prefills
        return decodes, prefills

    def _order_of_canvases(self) -> list[Request]:
        return super()._order_of_canvases() if self.budgets is None else self.running

    def _with_room(self, budget: int, num_decodes: int, prefills: list[Request]) -> int:
        """The budget of tokens, raised where what has its tokens together would wait for too long.

        What an iteration then computes is more than the latency targets allow; ``EPDConfig.patience`` says how often.
        """
        next_ones = prefills or [one for one in self.waiting if not self.canvases.is_held(one)][:1]
        self.canvases.prepare()
        needed = num_decodes + max(map(self.canvases.num_together, next_ones), default=0)
        is_deferred = budget < needed and num_decodes > 0 and self._num_deferred < self.epd.patience
        self._num_deferred = self._num_deferred + 1 if is_deferred else 0
        return budget if is_deferred else max(budget, needed)

    def _token_budget(self, load: LanguageLoad, prefills: list[Request], limit_s: float | None) -> int:
        assert self.budgets is not None
        context = max((request.num_computed_tokens for request in prefills), default=0)
        shares_iteration = self.planner.is_encoding and not self._encodes_in_thread
        num_encoding = self.planner.num_embeds_in_flight if shares_iteration else 0
        num_prefill = self.budgets.num_tokens(load, context, limit_s, num_encoding)
        return load.num_decodes + max(num_prefill, self.epd.min_prefill_tokens)

    def _seconds_to_token(self, request: Request) -> float:
        """The least time to the request's next token, with the machine to itself."""
        assert self.budgets is not None
        computed = self.needs.num_computed(request)
        load = LanguageLoad().with_prefill(max(1, request.num_tokens - computed), computed)
        return self.budgets.seconds_alone(load, self.needs.num_missing_embeds(request))

    def _handle_blocked_waiting_request(self, request: Request) -> bool:
        # Upstream's hook for requests that are not ready: it skips them without holding up those behind them.
        if self._waits_for_profile(request) or not super()._handle_blocked_waiting_request(request):
            return False
        if self.budgets is None:
            return True
        if self.lora_config and request.lora_request and not self._has_adapter_room(request.lora_request.lora_int_id):
            return False
        return not request.mm_features or self.needs.has_next(request)

    def _has_adapter_room(self, adapter: int) -> bool:
        # Upstream asserts that the adapters of the running requests fit into a step. Here a running request may have
        # waited for its image while another was admitted in its place.
        running = {request.lora_request.lora_int_id for request in self.running if request.lora_request}
        return adapter in running or len(running) < self.lora_config.max_loras

    # -- encodes of a step --------------------------------------------------------------------------------------------

    def _with_encodes(self, output: SchedulerOutput, limit_s: float | None) -> SchedulerOutput:
        encodes: list[EncodeItem] = []
        read_last: set[str] = set()
        if self.pause_state is PauseState.UNPAUSED:  # an encode that starts in a pause could end with new weights
            encodes, read_last = self._start_encodes(output, limit_s)
        values = dict(vars(output))
        if self.relay_ec is not None and self.relay_ec.has_work:
            values["ec_connector_metadata"] = self.relay_ec.build_connector_meta(output)
        elif not self.planner.is_encoding:
            return output
        num_layers, max_seconds = self._encode_limits(output, limit_s)
        # The runner must have freed what was evicted here before the new images come.
        evicted = self.encoder_cache_manager.get_freed_mm_hashes()
        values["free_encoder_mm_hashes"] = output.free_encoder_mm_hashes + [
            one for one in evicted if one not in read_last
        ]
        return EPDSchedulerOutput(
            **values,
            encodes=encodes,
            free_behind_forward=[one for one in evicted if one in read_last],
            num_encode_layers=num_layers,
            max_seconds=max_seconds,
        )

    def _start_encodes(self, output: SchedulerOutput, limit_s: float | None) -> tuple[list[EncodeItem], set[str]]:
        """Start pulls and, if none is in flight, a batch: (its images, those that the step is the last to read)."""
        assert self.budgets is not None
        max_embeds, read_last = None, set()
        if not self.planner.is_encoding:
            requests = [self.requests[request_id] for request_id in output.num_scheduled_tokens]
            max_embeds = self.pacing.num_embeds(self.budgets, self.iterations.latest, requests, limit_s)
        if max_embeds is not None:
            read_last = self._free_images(output)
        elif not self.pulls.has_sources and not len(self.tasks):
            return [], read_last
        scheduled = output.num_scheduled_tokens.keys()
        encodes = self.planner.plan(self._image_order(), scheduled, self.requests.values(), max_embeds)
        if encodes:
            self.pacing.note_start()
        return encodes, read_last

    def _encode_limits(self, output: SchedulerOutput, limit_s: float | None) -> tuple[int | None, float | None]:
        """How far the batch in flight may advance beside the step: layers, and seconds of the whole iteration."""
        assert self.budgets is not None
        if not output.total_num_scheduled_tokens or not self.planner.is_encoding or self._encodes_in_thread:
            return None, None
        num_layers = self.budgets.num_layers(self.iterations.latest.load, self.planner.num_embeds_in_flight, limit_s)
        return num_layers, self.iterations.seconds_left(limit_s, self.clock()) if limit_s is not None else None

    def _free_images(self, output: SchedulerOutput) -> set[str]:
        """Free images that their requests need no more after the step; returns what its requests read.

        Upstream does so after the step, too late for the batch that starts with it: with a cache of one image, every
        second iteration would be without an encode.
        """
        if self.num_spec_tokens:  # a drafter reads them after the forward
            return set()
        identifiers = set()
        for request_id in output.num_scheduled_tokens:
            request = self.requests[request_id]
            if held := self.encoder_cache_manager.get_cached_input_ids(request):
                identifiers |= {request.mm_features[index].identifier for index in held}
                self._free_encoder_inputs(request)
        return identifiers

    def _image_order(self) -> list[Request]:
        """Requests with images that wait for nothing but an image."""
        running = filter(self._needs_only_images, self.running)
        waiting = filter(self._needs_only_images, (*self.kv_holding_waiting, *self.waiting))
        if self.profile is not None:
            return [*running, *waiting]
        return list(self.tasks.merge_into(running, waiting, self._place))

    def _needs_only_images(self, request: Request) -> bool:
        if not request.mm_features or self._is_blocked_waiting_status(request.status):
            return False
        return not self.gates.is_held(request) and not self._waits_for_profile(request)

    def _place(self, request: Request) -> tuple[float, float]:
        return request.priority if self.policy is SchedulingPolicy.PRIORITY else 0, request.arrival_time

    # -- update: observe, report, vLLM's update -----------------------------------------------------------------------

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        now = self.clock()
        if self.budgets is not None:
            runner = model_runner_output
            report = runner.encode_report if isinstance(runner, EPDModelRunnerOutput) else None
            self._observe(report, now)
            if report is not None:
                self.planner.take_encodes(report, self.requests)
        # Before upstream's update, which notifies the front end of requests that have ended.
        ended = self._end_unscheduled(model_runner_output)
        outputs = unqueued.add_outputs(super().update_from_output(scheduler_output, model_runner_output), ended)
        self.iterations.set_running(bool(self.running))
        if self.profile is not None:
            return self.profile.without_own(outputs)
        if not len(self.deadlines):
            return outputs
        for one in (one for of_client in outputs.values() for one in of_client.outputs):
            if one.new_token_ids:
                self.deadlines.add_tokens(one.request_id, len(one.new_token_ids), now)
        return outputs

    def _observe(self, report: EncodeReport | None, now: float) -> None:
        assert self.budgets is not None
        load, seconds = self.iterations.end(now)
        if report is not None:
            seconds -= report.seconds
        if report is not None and report.num_layers and not report.loaded:
            self.budgets.observe_encode(
                self.planner.num_embeds_in_flight, report.num_layers, report.num_layers_of_batch, report.seconds
            )
        if load != LanguageLoad() and seconds > 0:
            self.budgets.observe_language(load, seconds)

    def _end_unscheduled(self, model_runner_output: ModelRunnerOutput) -> list[tuple[int, EngineCoreOutput]]:
        """End the encode tasks that are complete and the requests that failed: (client index, output) of each."""
        outputs = []
        connector_output = model_runner_output.ec_connector_output
        report = connector_output.ec_connector_worker_meta if connector_output is not None else None
        if self.relay_ec is not None and isinstance(report, RelayECReport):
            for request_id in self.planner.take_transfers(report):
                request = self.requests[request_id]
                request.status = RequestStatus.FINISHED_STOPPED
                kv, ec = self._free_request(request)
                outputs.append(unqueued.last_output(request, kv_transfer_params=kv, ec_transfer_params=ec))
        outputs += unqueued.fail(self, list(self.planner.failures.items()))
        self.planner.failures.clear()  # of requests that had ended by themselves
        return outputs
