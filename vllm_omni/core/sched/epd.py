"""``EPDScheduler``: encode, prefill and decode are batched by stage, within budgets that keep tokens coming.

From: HydraInfer, section 4.2, Algorithm 1, with its slips mended:

* Lines 16 to 19 admit new text only while a prefill already runs, so that an engine without one never begins. Here new
  text is admitted whenever tokens are left.
* Its loops over the waiting queue never end on one that runs empty. Here they end.
* While new prefills keep coming its encodes never run. Here an encode is put off ``patience`` times in a row at most,
  and with SLOs only for first tokens that it would make late.
* ``n_e < tau_e`` is asked before a request's images are added, and so is exceeded by all but one of them. Here an image
  that does not fit waits, unless it is the batch's only one.

Lines 29 to 31 (migration) are where vLLM has them: a request whose caches travel is held by its connector. Embeddings
of images that are elsewhere (``kv/ec_connector.py``) are pulled as others are encoded: in order, when there is room.
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from vllm.v1.core.encoder_cache_manager import EncoderCacheManager
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.request_queue import FCFSRequestQueue, RequestQueue, SchedulingPolicy
from vllm.v1.engine import EngineCoreEventType, EngineCoreOutput, EngineCoreOutputs
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from vllm_omni.core.sched.encode_task import EncodeTasks
from vllm_omni.core.sched.image_cache import ImageCache
from vllm_omni.core.sched.profile import Profile
from vllm_omni.core.sched.stream import StreamScheduler
from vllm_omni.epd.budget import Budgets, EPDConfig, FixedBudgets, SloBudgets
from vllm_omni.epd.cost import CostModel, LanguageLoad
from vllm_omni.epd.deadlines import Deadlines
from vllm_omni.errors import ConfigError, InvalidRequest
from vllm_omni.kv.ec_connector import RelayECConnector, RelayECReport, parse_params
from vllm_omni.messages.epd_step import (
    EPD_CONFIG,
    EncodeItem,
    EncodeReport,
    EPDModelRunnerOutput,
    EPDSchedulerOutput,
    encodes_in_thread,
)
from vllm_omni.messages.failure import Failure
from vllm_omni.messages.slo import Slo, slo_of
from vllm_omni.messages.timeline import Mark

logger = logging.getLogger(__name__)


class Iteration(NamedTuple):
    """One that is under way."""

    load: LanguageLoad
    scheduled_at: float


class EPDScheduler(StreamScheduler):
    """Algorithm 1 around vLLM's scheduler, which still allocates, preempts and caches.

    vLLM's ``schedule`` takes the running requests in their order and then the waiting ones, within a token budget, and
    cuts a prompt before an image that its encoder cache does not have. So each iteration puts the decodes first, sets
    the budget, passes over who waits for an image, and then, if there is no prefill that it would make late, begins a
    batch of images that the runner encodes beside the language model. At most one such batch is under way.

    Why nothing waits for ever, down to a cache of one image: requests with images have an order (running ones as they
    were admitted, then the waiting queue). The first that cannot go on without an image may take the room of all behind
    it, its own later images included, and never of one before it. So an image that is ready stays until its request has
    used it, or a request before it needs the room; and the first request always gets on.

    Without budgets (``EPDConfig.is_on``) every decision is vLLM's own, unless images come from elsewhere or go there
    (``RelayECConnector``): then there are budgets that bind nothing.

    Encode tasks stand in the same order, by their arrival, and outside of vLLM's queues: nothing of them is scheduled
    but their images. They need room for an image only while it is encoded and put into the relay.
    """

    encoder_cache_manager: Any  # an ImageCache, with budgets
    waiting: RequestQueue
    kv_holding_waiting: RequestQueue
    max_num_scheduled_tokens: int

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.epd = EPDConfig.parse(self.vllm_config.additional_config.get(EPD_CONFIG, {}))
        self.deadlines = Deadlines(self.epd.patience, self._seconds_to_token)
        self.budgets: Budgets | None = None
        self._num_encodes_put_off = 0  # in a row
        self._num_embeds_in_flight = 0
        self.relay_ec = self.ec_connector if isinstance(self.ec_connector, RelayECConnector) else None
        put_timeout_s = self.relay_ec.put_timeout_s if self.relay_ec is not None else 0.0
        self.encode_tasks = EncodeTasks(lambda: self.clock(), put_timeout_s)
        self._sources: dict[str, dict[str, bytes]] = {}  # by request: payloads of images that are elsewhere
        self._pulls: dict[str, str] = {}  # identifiers under way -> request whose payload it is
        self._encoding: dict[str, str] = {}  # identifiers under way -> request that it was begun for
        self._failures: dict[str, Failure] = {}  # by request: to be told
        self._suspects: set[str] = set()  # identifiers of a batch that could not be encoded
        self._num_ranks = self.vllm_config.parallel_config.tensor_parallel_size  # that pull, each for itself
        self._num_ranks_pulled: Counter[str] = Counter()  # of pulls under way
        self._known_hits: dict[str, int] = {}  # of waiting requests with images: tokens that the prefix cache has
        self._under_way: deque[Iteration] = deque()
        self._last_update_at = 0.0
        self._goes_on = False  # whether the last update left requests that ran, so that nobody was waited for
        self.profile: Profile | None = None  # until it is over
        self._encodes_in_thread = encodes_in_thread(self.vllm_config)
        if self.epd.is_on or self.relay_ec is not None:
            self._turn_on()

    def _turn_on(self) -> None:
        manager = self.encoder_cache_manager
        is_foreign_encoder = self.is_mm_encoder_only and self.relay_ec is None
        if self.is_encoder_decoder or is_foreign_encoder or type(manager) is not EncoderCacheManager:
            raise ConfigError(
                f"{EPD_CONFIG}: budgets and RelayECConnector are for decoder-only models with vLLM's own encoder cache "
                "manager, and an instance that only encodes needs RelayECConnector for budgets"
            )
        self.encoder_cache_manager = ImageCache(manager.cache_size)
        if self.ec_connector is not None:
            self.encoder_cache_manager.is_elsewhere = self.ec_connector.has_cache_item
        if not self.epd.is_on:
            self.budgets = FixedBudgets(self.max_num_scheduled_tokens, self.max_num_encoder_input_tokens)
        elif self.epd.tpot_ms is None:
            assert self.epd.token_budget is not None and self.epd.image_budget is not None
            self.budgets = FixedBudgets(self.epd.token_budget, self.epd.image_budget, self.epd.num_encode_layers)
        else:
            self.budgets = self._make_slo_budgets(self.epd.cost)
            # Engines of a data-parallel group step together, and there none may begin by itself.
            is_alone = self.vllm_config.parallel_config.data_parallel_size == 1
            if self.epd.cost is None and self.epd.profile_s and is_alone and not self.is_mm_encoder_only:
                self.profile = Profile(self.vllm_config, self.epd.profile_s, self._num_kv_tokens, self.hash_block_size)

    @property
    def _num_kv_tokens(self) -> int:
        return (self.kv_cache_config.num_blocks - 1) * self.block_size  # vLLM keeps one block as nobody's

    # -- measured before the first request ----------------------------------------------------------------------------

    def has_requests(self) -> bool:
        # What makes the engine core step: a profile begins by itself.
        return super().has_requests() or (self.profile is not None and self.pause_state is PauseState.UNPAUSED)

    def _go_on_with_profile(self, now: float) -> None:
        profile = self.profile
        assert profile is not None
        if profile.is_late(now):
            self.finish_requests(profile.request_ids, RequestStatus.FINISHED_ABORTED)
        if self._is_encoding or any(request_id in self.requests for request_id in profile.request_ids):
            return
        if requests := profile.next_requests(now):
            for request in requests:
                super().add_request(request)
            self.budgets = profile.budgets
            return
        self.profile = None
        self.budgets = self._budgets_from(profile, now)
        self.reset_prefix_cache()
        self.encoder_cache_manager.evict_unused()

    def _waits_for_profile(self, request: Request) -> bool:
        return self.profile is not None and not self.profile.owns(request.request_id)

    def _budgets_from(self, profile: Profile, now: float) -> Budgets:
        try:
            cost = profile.cost()
        except Exception:  # whatever the samples are, the engine serves
            logger.warning("epd: what was measured fits no cost model", exc_info=True)
            cost = None
        budgets = self._make_slo_budgets(cost)
        budgets.num_layers_of_batch = profile.log.num_layers_of_batch
        if not profile.is_complete:
            budgets.go_on_learning(profile.log)
        assert self.epd.tpot_ms is not None
        profile.tell(budgets, self.epd.tpot_ms / 1000, now)
        return budgets

    def _make_slo_budgets(self, cost: CostModel | None) -> SloBudgets:
        return SloBudgets(
            cost,
            self.epd.margin,
            max_tokens=self.epd.token_budget or self.max_num_scheduled_tokens,
            max_embeds=self.epd.image_budget or self.encoder_cache_manager.cache_size,
        )

    # -- requests come and go -----------------------------------------------------------------------------------------

    def add_request(self, request: Request) -> None:
        if request.ec_transfer_params is not None and request.request_id not in self.requests:
            try:
                if self._take_params(request):
                    return
            except InvalidRequest as exc:
                self._keep_apart(request)
                self._failures[request.request_id] = Failure(str(exc), is_invalid=True)
                return
        elif self.is_mm_encoder_only and self.relay_ec is not None:
            self._keep_apart(request)
            self._failures[request.request_id] = Failure(
                "this instance only encodes; give ec_transfer_params = {'encode_only': True}", is_invalid=True
            )
            return
        super().add_request(request)
        if self.budgets is None or request.request_id in self.deadlines:  # the next input of a session
            return
        params = request.sampling_params
        slo = default = Slo(self.epd.ttft_ms, self.epd.tpot_ms, self.epd.tpot_share)
        try:
            slo = slo_of(params.extra_args if params is not None else None, default)
        except InvalidRequest as exc:  # the front end refuses it; an exception here would end the engine
            logger.warning("request %s: served as one without an SLO of its own: %s", request.request_id, exc)
        if slo:
            self.deadlines.add(request, slo)

    def _take_params(self, request: Request) -> bool:
        """Whether it is an encode task, and nothing of vLLM's queues. Raises ``InvalidRequest``."""
        params = parse_params(request)
        if self.relay_ec is None:
            if params.encode_only:
                raise InvalidRequest("ec_transfer_params: encode_only needs an instance with RelayECConnector")
            return False  # vLLM warns of it
        if params.encode_only:
            if not self.relay_ec.is_producer:
                raise InvalidRequest("ec_transfer_params: encode_only, and this instance is a consumer (ec_role)")
            self._keep_apart(request)
            self.encode_tasks.add(request)
            return True
        if self.is_mm_encoder_only:
            raise InvalidRequest("ec_transfer_params: this instance only encodes; give encode_only")
        if params.images and self.relay_ec.is_consumer:
            self._sources[request.request_id] = params.images
        return False

    def _keep_apart(self, request: Request) -> None:
        """Of the engine's requests, and in no queue."""
        self.requests[request.request_id] = request
        if self.timelines is not None:
            self.timelines.note_queued(request)
        if self.log_stats:
            request.record_event(EngineCoreEventType.QUEUED)

    def finish_requests(self, request_ids: str | Iterable[str] | None, finished_status: RequestStatus) -> list[Request]:
        finished = super().finish_requests(request_ids, finished_status)
        if finished_status is RequestStatus.FINISHED_ABORTED and self.relay_ec is not None:
            ids = {request_ids} if isinstance(request_ids, str) else set(request_ids or ())
            self.relay_ec.abort_announced(ids - {request.request_id for request in finished})
        return finished

    def get_request_counts(self) -> tuple[int, int]:
        num_running, num_waiting = super().get_request_counts()
        return num_running, num_waiting + len(self.encode_tasks) + len(self._failures)

    def reset_encoder_cache(self) -> None:
        super().reset_encoder_cache()
        self._pulls.clear()
        self._encoding.clear()
        self._suspects.clear()
        self.encode_tasks.forget_asked(None)

    def _free_request(self, request: Request, delay_free_blocks: bool = False) -> Any:
        self.encode_tasks.remove(request.request_id)
        self._sources.pop(request.request_id, None)
        self._failures.pop(request.request_id, None)
        self.deadlines.remove(request.request_id)
        self._known_hits.pop(request.request_id, None)
        return super()._free_request(request, delay_free_blocks)

    # -- one iteration ------------------------------------------------------------------------------------------------

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        if self.budgets is None:
            return super().schedule(throttle_prefills)
        now = self.clock()
        self.deadlines.begin_step()
        if self.profile is not None:
            self._go_on_with_profile(now)
        admitted = {request: index for index, request in enumerate(self.running)}
        decodes = [request for request in self.running if not request.is_prefill_chunk]
        prefills = [request for request in self.running if request.is_prefill_chunk]
        if self.deadlines.states:
            prefills = self.deadlines.in_order(prefills, now)
            # Under the priority policy the operator's order stands.
            if self.policy is SchedulingPolicy.FCFS and len(self.waiting) > 1:
                self.waiting = FCFSRequestQueue(self.deadlines.in_order(self.waiting, now))
        self.running = decodes + prefills
        of_decodes = self._load_of_decodes(decodes)
        limit_s = self.deadlines.limit_s(self.budgets, decodes, of_decodes, prefills, self.waiting, now)
        stock_budget = self.max_num_scheduled_tokens
        self.max_num_scheduled_tokens = min(stock_budget, self._token_budget(of_decodes, prefills, limit_s))
        try:
            output = super().schedule(throttle_prefills)
        finally:
            self.max_num_scheduled_tokens = stock_budget
            # The order of admission is kept: vLLM preempts the last.
            self.running.sort(key=lambda request: admitted.get(request, len(admitted)))
        load = self._load_of(output, {request.request_id for request in decodes})
        self._under_way.append(Iteration(load, now))
        return self._with_encodes(output, load, limit_s)

    def _token_budget(self, load: LanguageLoad, prefills: list[Request], limit_s: float | None) -> int:
        assert self.budgets is not None
        context = max((request.num_computed_tokens for request in prefills), default=0)
        is_shared = self._is_encoding and not self._encodes_in_thread  # the iteration, with the batch of images
        num_encoding = self._num_embeds_in_flight if is_shared else 0
        num_prefill = self.budgets.num_tokens(load, context, limit_s, num_encoding)
        return load.num_decodes + max(num_prefill, self.epd.min_prefill_tokens)

    @staticmethod
    def _load_of_decodes(decodes: list[Request]) -> LanguageLoad:
        load = LanguageLoad()
        for request in decodes:
            num_tokens = request.num_tokens_with_spec + request.num_output_placeholders - request.num_computed_tokens
            load = load.with_decode(num_tokens, request.num_computed_tokens)
        return load

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
            apart = self._update_apart(model_runner_output)
            return _with_outputs(super().update_from_output(scheduler_output, model_runner_output), apart)
        now = self.clock()
        report = model_runner_output.encode_report if isinstance(model_runner_output, EPDModelRunnerOutput) else None
        self._observe(report, now)
        if report is not None:
            for identifier, message in report.failed.items():
                self._lose_encode(identifier, message, was_alone=len(report.failed) == 1)
            for identifier in report.encoded:
                self._suspects.discard(identifier)
                self.encoder_cache_manager.finish(identifier)
                self._note_image_end(identifier)
                begun_for = self._encoding.pop(identifier, "")
                if self.relay_ec is not None and begun_for in self.requests:
                    self.relay_ec.count_encode(begun_for)
        # Before upstream's: it tells the front end of what has ended.
        apart = self._update_apart(model_runner_output)
        outputs = _with_outputs(super().update_from_output(scheduler_output, model_runner_output), apart)
        self._goes_on = bool(self.running)
        if self.profile is not None:
            return self.profile.without_own(outputs)
        for of_client in outputs.values():
            for one in of_client.outputs:
                if one.new_token_ids:
                    self.deadlines.add_tokens(one.request_id, len(one.new_token_ids), now)
        return outputs

    def _lose_encode(self, identifier: str, message: str, was_alone: bool) -> None:
        """The encoder failed: so does the request that asked; others that want the image have it tried again.

        Of several images in a batch any may be the bad one: each is tried again, alone.
        """
        self.encoder_cache_manager.lose(identifier)
        self._note_image_end(identifier)
        self.encode_tasks.forget_asked(identifier)
        begun_for = self._encoding.pop(identifier, "")
        if not was_alone:
            self._suspects.add(identifier)
            return
        self._suspects.discard(identifier)
        if begun_for in self.requests:
            self._failures[begun_for] = Failure(f"image {identifier!r} cannot be encoded: {message}")

    def _update_apart(self, model_runner_output: ModelRunnerOutput) -> list[tuple[int, EngineCoreOutput]]:
        """What is told of requests that no step has scheduled."""
        if self.relay_ec is None and not self._failures:
            return []
        ended: list[Request] = []
        connector_output = model_runner_output.ec_connector_output
        report = connector_output.ec_connector_worker_meta if connector_output is not None else None
        if isinstance(report, RelayECReport):
            ended = self._take_report(report)
        outputs = []
        for request in ended:
            request.status = RequestStatus.FINISHED_STOPPED
            outputs.append((request.client_index, self._ending(request, *self._free_request(request))))
        failures = self._failures
        for request_id, failure in list(failures.items()):
            for request in self.finish_requests(request_id, RequestStatus.FINISHED_ERROR):
                logger.error("request %s: %s", request_id, failure.message)
                params = {"error": failure.message, "invalid": failure.is_invalid}
                outputs.append((request.client_index, self._ending(request, None, params)))
        failures.clear()  # whoever had ended by itself
        return outputs

    @staticmethod
    def _ending(
        request: Request, kv_transfer_params: dict[str, Any] | None, ec_transfer_params: dict[str, Any] | None
    ) -> EngineCoreOutput:
        return EngineCoreOutput(
            request_id=request.request_id,
            new_token_ids=[],
            finish_reason=request.get_finished_reason(),
            kv_transfer_params=kv_transfer_params,
            ec_transfer_params=ec_transfer_params,
            events=request.take_events(),
            trace_headers=request.trace_headers,
        )

    def _take_report(self, report: RelayECReport) -> list[Request]:
        """What came of puts and pulls; the encode tasks that have ended."""
        assert self.relay_ec is not None
        manager: ImageCache = self.encoder_cache_manager
        for identifier in report.pulled.keys() - report.lost.keys():
            self._num_ranks_pulled[identifier] += report.pulled[identifier]
            if identifier not in self._pulls:  # forgotten meanwhile
                manager.drop(identifier)
            elif self._num_ranks_pulled[identifier] < self._num_ranks:
                continue
            else:
                del self._pulls[identifier]
                manager.finish(identifier)
                self._note_image_end(identifier)
            del self._num_ranks_pulled[identifier]
        for identifier in report.lost:
            self._num_ranks_pulled.pop(identifier, None)
            asked_by = self._pulls.pop(identifier, None)
            if asked_by is not None:
                self._note_image_end(identifier)
                self._sources.get(asked_by, {}).pop(identifier, None)  # from here on it is encoded here
                manager.lose(identifier)
                self.encode_tasks.forget_asked(identifier)
        ended = []
        for put, payload in report.put.items():
            if put.request_id not in self.encode_tasks:  # aborted meanwhile
                self.relay_ec.release(payload)
                continue
            self.relay_ec.add_image(*put, payload)
            task = self.encode_tasks.has_put(put)
            request = self.requests[put.request_id]
            for index, feature in enumerate(request.mm_features):
                if feature.identifier == put.identifier:
                    manager.free_encoder_input(request, index)
            if task is not None:
                ended.append(task.request)
        for put, refusal in report.rejected.items():
            if failure := self.encode_tasks.refuse(put, refusal):
                self._failures[put.request_id] = failure
        return ended

    def _observe(self, report: EncodeReport | None, now: float) -> None:
        assert self.budgets is not None
        load, scheduled_at = self._under_way.popleft()  # vLLM updates in the order in which it scheduled
        # An iteration begins with the end of the last, as the gap between two tokens does: what the engine core does
        # between them counts, and the next batch may be scheduled before the last has ended.
        seconds = now - (self._last_update_at if self._goes_on else max(scheduled_at, self._last_update_at))
        self._last_update_at = now
        if report is not None and report.num_layers:
            seconds -= report.seconds
            self.budgets.observe_encode(
                self._num_embeds_in_flight, report.num_layers, report.num_layers_of_batch, report.seconds
            )
        if load != LanguageLoad() and seconds > 0:
            self.budgets.observe_language(load, seconds)

    def _handle_blocked_waiting_request(self, request: Request) -> bool:
        # Upstream's hook for what is not ready: it skips the request without holding up those behind it.
        if self._waits_for_profile(request):
            return False
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

    # -- images -------------------------------------------------------------------------------------------------------

    def _note_image_start(self, identifier: str, mark: Mark) -> None:
        if self.timelines is not None:
            self.timelines.start_image(identifier, mark)

    def _note_image_end(self, identifier: str) -> None:
        if self.timelines is not None:
            self.timelines.end_image(identifier, self.requests)

    @property
    def _is_encoding(self) -> bool:
        return len(self.encoder_cache_manager.in_flight) > len(self._pulls)

    def _num_computed(self, request: Request, is_fresh: bool = False) -> int:
        """Tokens of the request that need no embeddings any more: computed, in the prefix cache, or to be pulled."""
        if request.num_computed_tokens or not request.mm_features:
            return request.num_computed_tokens
        if num_external := self.num_external_tokens(request):
            return num_external - 1  # the last one is computed again
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

    def _needed(self, request: Request) -> list[int]:
        """Indices of the images that the request waits for, or will."""
        task = self.encode_tasks.get(request.request_id)
        if task is not None:
            return list(task.missing.values())
        needed = list(self._images_needed(request, self._num_computed(request)))
        if not all(self._is_at_hand(request, index) for index in needed):
            needed = list(self._images_needed(request, self._num_computed(request, is_fresh=True)))
        return needed

    def _is_at_hand(self, request: Request, index: int) -> bool:
        manager = self.encoder_cache_manager
        return manager.is_ready(request, index) or manager.is_elsewhere(request.mm_features[index].identifier)

    def _in_order(self) -> Iterator[Request]:
        """Requests with images that nothing but an image holds up."""
        tasks = deque(self.encode_tasks.in_order(self._place) if self.profile is None else ())
        if self.encode_tasks.are_held:  # whoever is not, goes first
            yield from self._in_queues()
            yield from tasks
            return
        for request in self._in_queues():
            while (
                tasks and request.status is not RequestStatus.RUNNING and self._place(tasks[0]) < self._place(request)
            ):
                yield tasks.popleft()
            yield request
        yield from tasks

    def _place(self, request: Request) -> tuple[float, float]:
        return request.priority if self.policy is SchedulingPolicy.PRIORITY else 0, request.arrival_time

    def _in_queues(self) -> Iterator[Request]:
        for request in (*self.running, *self.kv_holding_waiting, *self.waiting):
            if request.mm_features and not self._is_blocked_waiting_status(request.status):
                if self.gates.is_held(request):
                    continue
                if not self._waits_for_profile(request):
                    yield request

    def _has_prefill_to_protect(self, output: SchedulerOutput, load: LanguageLoad, max_embeds: int) -> bool:
        """Whether the step has a prompt whose first token would come later by an encode, and that matters."""
        assert self.budgets is not None
        if not load.num_prefill_tokens or not self.epd.is_on:
            return False
        if self.epd.tpot_ms is None:
            return True
        # With SLOs it matters to a first token that is in time without the encode, and with it is not.
        now = self._under_way[-1].scheduled_at
        without_s, with_s = (self.budgets.seconds_alone(load, num_embeds) for num_embeds in (0, max_embeds))
        return self.deadlines.is_first_token_made_late(output.num_scheduled_tokens, now, without_s, with_s)

    def _with_encodes(self, output: SchedulerOutput, load: LanguageLoad, limit_s: float | None) -> SchedulerOutput:
        assert self.budgets is not None
        is_paused = self.pause_state is not PauseState.UNPAUSED  # what begins now would end with other weights
        if is_paused and not self._is_encoding:
            return output
        max_embeds = None
        if not self._is_encoding and not is_paused:
            image_s = None if self._encodes_in_thread else limit_s
            budget = self.budgets.num_embeds(load, image_s) if self.epd.is_on else self.max_num_encoder_input_tokens
            if self._num_encodes_put_off < self.epd.patience and self._has_prefill_to_protect(output, load, budget):
                self._num_encodes_put_off += 1
            else:
                max_embeds = budget
        encodes: list[EncodeItem] = []
        read_last = self._give_back(output) if max_embeds is not None else set()
        if max_embeds is not None or (not is_paused and (self._sources or len(self.encode_tasks))):
            encodes = self._begin(output, max_embeds)
        if encodes:
            self._num_encodes_put_off = 0
            self._num_embeds_in_flight = sum(item.num_embeds for item in encodes)
            self._encoding = {item.feature.identifier: item.request_id for item in encodes}
            for identifier in self._encoding:
                self._note_image_start(identifier, Mark.ENCODE_BEGAN)
        values = dict(vars(output))
        if self.relay_ec is not None and self.relay_ec.has_work:
            values["ec_connector_metadata"] = self.relay_ec.build_connector_meta(output)
        elif not self._is_encoding:
            return output
        num_layers = max_seconds = None
        if output.total_num_scheduled_tokens and self._is_encoding and not self._encodes_in_thread:
            num_layers = self.budgets.num_layers(load, self._num_embeds_in_flight, limit_s)
            max_seconds = self._seconds_left(limit_s)
        # What was evicted here must have left the runner before the new images come.
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

    def _give_back(self, output: SchedulerOutput) -> set[str]:
        """Give back images that their requests need no more behind the step; returns what its requests read.

        Upstream does it when it is told of the step's end: too late for the batch that begins with it. With a cache of
        one image every second iteration would be without an encode.
        """
        if self.num_spec_tokens:  # a drafter reads them behind the forward
            return set()
        identifiers = set()
        for request_id in output.num_scheduled_tokens:
            request = self.requests[request_id]
            if held := self.encoder_cache_manager.get_cached_input_ids(request):
                identifiers |= {request.mm_features[index].identifier for index in held}
                self._free_encoder_inputs(request)
        return identifiers

    def _seconds_left(self, limit_s: float | None) -> float | None:
        """Of the iteration, which began with the end of the last if somebody got a token there; None: no limit."""
        if limit_s is None or len(self._under_way) > 1:  # the batch before is still running: its end is not known
            return None
        began_at = self._last_update_at if self._goes_on else self._under_way[-1].scheduled_at
        return max(0.0, began_at + limit_s - self.clock())

    def _begin(self, output: SchedulerOutput, max_embeds: int | None) -> list[EncodeItem]:
        """Take room for images to pull, and for a batch to encode of up to so many embeddings, of one image at least.

        ``max_embeds`` None: nothing is encoded now.
        """
        manager: ImageCache = self.encoder_cache_manager
        order = list(self._in_order())
        batch: list[EncodeItem] = []
        num_embeds = 0
        for place, request in enumerate(order):
            needed = self._needed(request)
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
                    self._put(request, feature.identifier)
                    continue
                if manager.is_elsewhere(feature.identifier):
                    continue
                payload = self._sources.get(request.request_id, {}).get(feature.identifier)
                if payload is None:
                    if feature.data is None:
                        self._failures[request.request_id] = Failure(
                            f"image {feature.identifier!r} is lost, and the request has no data to encode it from"
                        )
                        break
                    if max_embeds is None:
                        break
                    names = {feature.identifier, *(item.feature.identifier for item in batch)}
                    if batch and (names & self._suspects or num_embeds + size > max_embeds):
                        if not self._sources:
                            return batch
                        max_embeds = None  # what can be pulled is not held up
                        break
                is_waited_for = index == needed[0]
                if not manager.can_begin(request, index):
                    if not is_waited_for:
                        break
                    if batch or not self._make_cache_room(output, order, place, needed):
                        return batch
                if not manager.begin(request, index):
                    self._put(request, feature.identifier)
                elif payload is not None:
                    assert self.relay_ec is not None
                    self._pulls[feature.identifier] = request.request_id
                    self._note_image_start(feature.identifier, Mark.PULL_BEGAN)
                    self.relay_ec.start_pull(feature.identifier, payload, size)
                else:
                    batch.append(EncodeItem(request.request_id, feature))
                    num_embeds += size
                    self._put(request, feature.identifier)
        return batch

    def _put(self, request: Request, identifier: str) -> None:
        """Order an image that is in the cache, or will be, to be put into the relay, if the request is for that."""
        task = self.encode_tasks.get(request.request_id)
        if task is not None and identifier not in task.asked:
            assert self.relay_ec is not None
            task.asked.add(identifier)
            self.relay_ec.start_put(request.request_id, identifier)

    def _make_cache_room(self, output: SchedulerOutput, order: list[Request], place: int, needed: list[int]) -> bool:
        """For the first of the images needed, at the cost of what is behind its request: who loses encodes again."""
        manager: ImageCache = self.encoder_cache_manager
        request = order[place]
        if request.request_id not in output.num_scheduled_tokens:
            # What it needed once, and the prefix cache has had since for another request.
            for index in manager.get_cached_input_ids(request) - set(needed):
                manager.free_encoder_input(request, index)
            if manager.can_begin(request, needed[0]):
                return True
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


def _with_outputs(
    outputs: dict[int, EngineCoreOutputs], more: list[tuple[int, EngineCoreOutput]]
) -> dict[int, EngineCoreOutputs]:
    for client_index, one in more:
        outputs.setdefault(client_index, EngineCoreOutputs()).outputs.append(one)
    return outputs
