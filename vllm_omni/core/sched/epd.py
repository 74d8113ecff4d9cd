"""``EPDScheduler``: encode, prefill and decode are batched by stage, within budgets that keep tokens coming.

From: HydraInfer, section 4.2, Algorithm 1, with its slips mended:

* Lines 16 to 19 admit new text only while a prefill already runs, so that an engine without one never begins. Here new
  text is admitted whenever tokens are left.
* Its loops over the waiting queue never end on one that runs empty. Here they end.
* While new prefills keep coming its encodes never run. Here an encode is put off ``patience`` times in a row at most.
* ``n_e < tau_e`` is asked before a request's images are added, and so is exceeded by all but one of them. Here an image
  that does not fit waits, unless it is the batch's only one.

Lines 29 to 31 (migration) are where vLLM has them: a request whose caches travel is held by its connector.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from vllm.v1.core.encoder_cache_manager import EncoderCacheManager
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.request_queue import FCFSRequestQueue, RequestQueue, SchedulingPolicy
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request

from vllm_omni.core.sched.budget import (
    EPD_CONFIG,
    SLO_ARGS,
    Budgets,
    EPDConfig,
    FixedBudgets,
    SloBudgets,
    SloState,
)
from vllm_omni.core.sched.cost import LanguageLoad
from vllm_omni.core.sched.image_cache import ImageCache
from vllm_omni.core.sched.stream import StreamScheduler
from vllm_omni.errors import ConfigError
from vllm_omni.model_executor.epd_step import EncodeItem, EncodeReport, EPDModelRunnerOutput, EPDSchedulerOutput

TPOT_FACTOR_OF_LOST = 2.0


class EPDScheduler(StreamScheduler):
    """Algorithm 1 around vLLM's scheduler, which still allocates, preempts and caches.

    vLLM's ``schedule`` takes the running requests in their order and then the waiting ones, within a token budget, and
    cuts a prompt before an image that its encoder cache does not have. So each iteration puts the decodes first, sets
    the budget, passes over who waits for an image, and then, if no prefill was scheduled, begins a batch of images that
    the runner encodes beside the language model. At most one such batch is under way.

    Why nothing waits for ever, down to a cache of one image: requests with images have an order (running ones as they
    were admitted, then the waiting queue). The first that cannot go on without an image may take the room of all behind
    it, its own later images included, and never of one before it. So an image that is ready stays until its request has
    used it, or a request before it needs the room; and the first request always gets on.

    Without budgets (``EPDConfig.is_on``) every decision is vLLM's own.
    """

    encoder_cache_manager: Any  # an ImageCache, with budgets
    waiting: RequestQueue
    kv_holding_waiting: RequestQueue
    max_num_scheduled_tokens: int
    clock: Callable[[], float] = staticmethod(time.time)  # the clock of vLLM's ``Request.arrival_time``

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.epd = EPDConfig.parse(self.vllm_config.additional_config.get(EPD_CONFIG, {}))
        self.slos: dict[str, SloState] = {}
        self.budgets: Budgets | None = None
        self._num_encodes_put_off = 0  # in a row
        self._num_embeds_in_flight = 0
        self._known_hits: dict[str, int] = {}  # of waiting requests with images: tokens that the prefix cache has
        self._under_way: deque[tuple[LanguageLoad, float]] = deque()  # iterations: their load, and when they began
        self._last_update_at = 0.0
        if self.epd.is_on:
            self._turn_on()

    def _turn_on(self) -> None:
        manager = self.encoder_cache_manager
        if self.is_encoder_decoder or self.is_mm_encoder_only or type(manager) is not EncoderCacheManager:
            raise ConfigError(
                f"{EPD_CONFIG}: budgets are for decoder-only models that encode their own images, with vLLM's own "
                "encoder cache manager; take them out of the stage's additional_config"
            )
        self.encoder_cache_manager = ImageCache(manager.cache_size)
        if self.ec_connector is not None:
            self.encoder_cache_manager.is_elsewhere = self.ec_connector.has_cache_item
        if self.epd.tpot_ms is None:
            assert self.epd.token_budget is not None and self.epd.image_budget is not None
            self.budgets = FixedBudgets(self.epd.token_budget, self.epd.image_budget, self.epd.num_encode_layers)
        else:
            self.budgets = SloBudgets(
                self.epd.cost,
                self.epd.margin,
                max_tokens=self.epd.token_budget or self.max_num_scheduled_tokens,
                max_embeds=self.epd.image_budget or manager.cache_size,
            )

    # -- requests come and go -----------------------------------------------------------------------------------------

    def add_request(self, request: Request) -> None:
        super().add_request(request)
        if self.budgets is None or request.request_id in self.slos:  # the next input of a session
            return
        params = request.sampling_params
        own = ((params.extra_args or {}).get(SLO_ARGS) if params is not None else None) or {}
        ttft_ms = own.get("ttft_ms", self.epd.ttft_ms)
        tpot_ms = own.get("tpot_ms", self.epd.tpot_ms)
        if ttft_ms is None and tpot_ms is None:
            return
        self.slos[request.request_id] = SloState(
            arrived_at=request.arrival_time,
            ttft_s=ttft_ms / 1000 if ttft_ms is not None else None,
            tpot_s=tpot_ms / 1000 if tpot_ms is not None else None,
            max_gaps=max(0, request.max_tokens - 1),
        )

    def _free_request(self, request: Request, delay_free_blocks: bool = False) -> Any:
        self.slos.pop(request.request_id, None)
        self._known_hits.pop(request.request_id, None)
        return super()._free_request(request, delay_free_blocks)

    # -- one iteration ------------------------------------------------------------------------------------------------

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        if self.budgets is None:
            return super().schedule(throttle_prefills)
        now = self.clock()
        admitted = {request: index for index, request in enumerate(self.running)}
        decodes = [request for request in self.running if not request.is_prefill_chunk]
        prefills = [request for request in self.running if request.is_prefill_chunk]
        if self.slos:
            prefills.sort(key=lambda request: self._urgency(request, now))
            self._sort_waiting(now)
        self.running = decodes + prefills
        tpot_s = self._tpot_s(decodes, now)
        stock_budget = self.max_num_scheduled_tokens
        self.max_num_scheduled_tokens = min(stock_budget, self._token_budget(decodes, prefills, tpot_s))
        try:
            output = super().schedule(throttle_prefills)
        finally:
            self.max_num_scheduled_tokens = stock_budget
            # The order of admission is kept: vLLM preempts the last.
            self.running.sort(key=lambda request: admitted.get(request, len(admitted)))
        load = self._load_of(output, {request.request_id for request in decodes})
        self._under_way.append((load, now))
        return self._with_encodes(output, load, tpot_s)

    def _token_budget(self, decodes: list[Request], prefills: list[Request], tpot_s: float | None) -> int:
        assert self.budgets is not None
        load = LanguageLoad()
        for request in decodes:
            num_tokens = request.num_tokens_with_spec + request.num_output_placeholders - request.num_computed_tokens
            load = load.with_decode(num_tokens, request.num_computed_tokens)
        context = max((request.num_computed_tokens for request in prefills), default=0)
        num_prefill = self.budgets.num_tokens(load, context, tpot_s, self._is_encoding)
        return load.num_decodes + max(num_prefill, self.epd.min_prefill_tokens)

    def _tpot_s(self, decodes: list[Request], now: float) -> float | None:
        """The shortest gap that a decode asks for; None: none does."""
        gaps = []
        for request in decodes:
            slo = self.slos.get(request.request_id)
            if slo is not None and slo.tpot_s is not None:
                # Who cannot meet its SLO any more gives way, and yet does not stand still for a whole encode.
                gaps.append(slo.tpot_s * (TPOT_FACTOR_OF_LOST if slo.is_lost(now) else 1))
        return min(gaps, default=None)

    def _load_of(self, output: SchedulerOutput, decoding: set[str]) -> LanguageLoad:
        load = LanguageLoad()
        for request_id, num_tokens in output.num_scheduled_tokens.items():
            context = self.requests[request_id].num_computed_tokens - num_tokens  # upstream has advanced it
            extended = load.with_decode if request_id in decoding else load.with_prefill
            load = extended(num_tokens, context)
        return load

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        if self.budgets is None:
            return super().update_from_output(scheduler_output, model_runner_output)
        now = self.clock()
        report = model_runner_output.encode_report if isinstance(model_runner_output, EPDModelRunnerOutput) else None
        self._observe(report, now)
        if report is not None:
            for identifier in report.encoded:
                self.encoder_cache_manager.finish(identifier)
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        for of_client in outputs.values():
            for one in of_client.outputs:
                if one.new_token_ids and (slo := self.slos.get(one.request_id)) is not None:
                    slo.add_tokens(now)
        return outputs

    def _observe(self, report: EncodeReport | None, now: float) -> None:
        assert self.budgets is not None
        load, scheduled_at = self._under_way.popleft()  # vLLM updates in the order in which it scheduled
        # Where the next batch is scheduled before the last has ended, an iteration begins with the end of the last.
        seconds = now - max(scheduled_at, self._last_update_at)
        self._last_update_at = now
        if report is not None:
            seconds -= report.seconds
            self.budgets.observe_encode(
                self._num_embeds_in_flight, report.num_layers, report.num_layers_of_batch, report.seconds
            )
        if load != LanguageLoad() and seconds > 0:
            self.budgets.observe_language(load, seconds)

    def _handle_blocked_waiting_request(self, request: Request) -> bool:
        # Upstream's hook for what is not ready: it skips the request without holding up those behind it.
        if not super()._handle_blocked_waiting_request(request):
            return False
        if self.budgets is None:
            return True
        if self.lora_config and request.lora_request and not self._has_adapter_room(request.lora_request.lora_int_id):
            return False
        if not request.mm_features:
            return True
        # What was known of the prefix cache decides cheaply about who waits; who would be admitted is looked up anew.
        for is_fresh in (False, True):
            first = next(self._images_needed(request, self._num_computed(request, is_fresh)), None)
            if first is not None and not self._is_at_hand(request, first):
                return False
        return True

    def _has_adapter_room(self, adapter: int) -> bool:
        # Upstream counts the adapters of the step's requests, and asserts that those of the running ones are not more:
        # here a running request may have waited for its image while another was admitted in its place.
        running = {request.lora_request.lora_int_id for request in self.running if request.lora_request}
        return adapter in running or len(running) < self.lora_config.max_loras

    # -- whose turn it is ---------------------------------------------------------------------------------------------

    def _urgency(self, request: Request, now: float) -> tuple[bool, float]:
        """Least slack first; behind them who cannot meet its SLO any more, for a while."""
        slo = self.slos.get(request.request_id)
        if slo is None:
            return False, float("inf")
        gives_way = slo.num_steps_given_way < self.epd.patience and slo.is_lost(now, self._seconds_to_token(request))
        return gives_way, slo.deadline - self._seconds_to_token(request)

    def _seconds_to_token(self, request: Request) -> float:
        """What the request's next token takes at least, with the machine to itself."""
        assert self.budgets is not None
        computed = self._num_computed(request)
        num_embeds = sum(
            request.get_num_encoder_embeds(one)
            for one in self._images_needed(request, computed)
            if not self._is_at_hand(request, one)
        )
        load = LanguageLoad().with_prefill(max(1, request.num_tokens - computed), computed)
        return self.budgets.seconds_alone(load, num_embeds)

    def _sort_waiting(self, now: float) -> None:
        # Under the priority policy the operator's order stands.
        if self.policy is not SchedulingPolicy.FCFS or len(self.waiting) < 2:
            return
        keys = {request: self._urgency(request, now) for request in self.waiting}
        for request, (gives_way, _) in keys.items():
            if gives_way:
                self.slos[request.request_id].num_steps_given_way += 1
        self.waiting = FCFSRequestQueue(sorted(self.waiting, key=keys.__getitem__))

    # -- images -------------------------------------------------------------------------------------------------------

    @property
    def _is_encoding(self) -> bool:
        return bool(self.encoder_cache_manager.in_flight)

    def _num_computed(self, request: Request, is_fresh: bool = False) -> int:
        """Tokens of the request that need no embeddings any more: computed, or in the prefix cache."""
        if request.num_computed_tokens or not request.mm_features:
            return request.num_computed_tokens
        if is_fresh or request.request_id not in self._known_hits:
            self._known_hits[request.request_id] = self.kv_cache_manager.get_computed_blocks(request)[1]
        return self._known_hits[request.request_id]

    def _images_needed(self, request: Request, num_computed: int) -> Iterator[int]:
        """Indices of the images that have embeddings behind so many computed tokens, in the prompt's order."""
        for index, feature in enumerate(request.mm_features):
            position = feature.mm_position
            start = max(0, num_computed - position.offset)
            if start < position.length:
                first, last = position.get_embeds_indices_in_range(start, position.length)
                if first < last:
                    yield index

    def _is_at_hand(self, request: Request, index: int) -> bool:
        manager = self.encoder_cache_manager
        return manager.is_ready(request, index) or manager.is_elsewhere(request.mm_features[index].identifier)

    def _in_order(self) -> Iterator[Request]:
        """Requests with images that nothing but an image holds up."""
        for request in (*self.running, *self.kv_holding_waiting, *self.waiting):
            if request.mm_features and not self._is_blocked_waiting_status(request.status):
                if (self.gates or self.credits) and self._is_held(request):
                    continue
                yield request

    def _with_encodes(self, output: SchedulerOutput, load: LanguageLoad, tpot_s: float | None) -> SchedulerOutput:
        assert self.budgets is not None
        encodes: list[EncodeItem] = []
        if not self._is_encoding:
            if self.pause_state is not PauseState.UNPAUSED:
                return output  # what begins now would end with other weights
            if load.num_prefill_tokens and self._num_encodes_put_off < self.epd.patience:
                self._num_encodes_put_off += 1
                return output
            encodes = self._begin_encodes(output, self.budgets.num_embeds(load, tpot_s))
            if not encodes:
                return output
            self._num_encodes_put_off = 0
            self._num_embeds_in_flight = sum(item.num_embeds for item in encodes)
        num_layers = None
        if output.total_num_scheduled_tokens:
            num_layers = self.budgets.num_layers(load, self._num_embeds_in_flight, tpot_s)
        # What _begin_encodes evicted must have left the runner before the new images come.
        freed = output.free_encoder_mm_hashes + self.encoder_cache_manager.get_freed_mm_hashes()
        values = {**vars(output), "free_encoder_mm_hashes": freed}
        return EPDSchedulerOutput(**values, encodes=encodes, num_encode_layers=num_layers)

    def _begin_encodes(self, output: SchedulerOutput, max_embeds: int) -> list[EncodeItem]:
        """Take room for a batch of images of up to so many embeddings, of one image at least."""
        manager: ImageCache = self.encoder_cache_manager
        order = list(self._in_order())
        batch: list[EncodeItem] = []
        num_embeds = 0
        for place, request in enumerate(order):
            needed = list(self._images_needed(request, self._num_computed(request)))
            if not all(self._is_at_hand(request, index) for index in needed):
                needed = list(self._images_needed(request, self._num_computed(request, is_fresh=True)))
            for index in needed:
                feature = request.mm_features[index]
                known = manager.get_cached_num_encoder_embeds(request, index)
                size = request.get_num_encoder_embeds(index)
                if known is not None and self._reject_on_encoder_cache_embed_mismatch(
                    request, index, feature.identifier, known, size
                ):
                    break
                if known is not None:  # ready, or of this batch
                    manager.refer(request, index)
                    continue
                if manager.is_elsewhere(feature.identifier):
                    continue
                if batch and num_embeds + size > max_embeds:
                    return batch
                is_waited_for = index == needed[0]
                if not manager.can_begin(request, index):
                    if not is_waited_for:
                        break
                    if batch or not self._make_cache_room(output, order, place, needed):
                        return batch
                if manager.begin(request, index):
                    batch.append(EncodeItem(request.request_id, feature))
                    num_embeds += size
        return batch

    def _make_cache_room(self, output: SchedulerOutput, order: list[Request], place: int, needed: list[int]) -> bool:
        """For the first of the images needed, at the cost of what is behind its request: who loses encodes again."""
        manager: ImageCache = self.encoder_cache_manager
        request = order[place]
        # What this step computes with stays: the runner frees before it computes.
        kept = {one.request_id for one in order[: place + 1]} | output.num_scheduled_tokens.keys()
        in_order = {one.request_id for one in order}
        held_up = [one for one in self.requests.values() if one.request_id not in in_order]
        for other in (*held_up, *reversed(order[place + 1 :])):
            if other.request_id not in kept and manager.get_cached_input_ids(other):
                manager.free(other)
                if manager.can_begin(request, needed[0]):
                    return True
        for later in reversed(needed[1:]):
            manager.free_encoder_input(request, later)
        return manager.can_begin(request, needed[0])


class AsyncEPDScheduler(EPDScheduler, AsyncScheduler):
    """The same over vLLM's asynchronous scheduler, for engines that schedule a batch before the last one has ended."""
