"""``EncodePacing``: when a batch of images may start, and how large it may be. ``EncodePlanner``: which images are
encoded or pulled next, and whose room in the image cache they take.

From: HydraInfer, section 4.2, Algorithm 1 (batches of images, which yield to prefills), and section 4.3.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum

from vllm_omni.config.budgets import EPDConfig
from vllm_omni.epd.budget import Budgets
from vllm_omni.epd.deadlines import Deadlines
from vllm_omni.epd.engine_request import ImageCache, ImageRelay, Request, TransferReport
from vllm_omni.epd.image_needs import ImageNeeds
from vllm_omni.epd.image_transfers import EncodeTasks, ImagePulls
from vllm_omni.epd.iterations import Iteration
from vllm_omni.messages.failure import Failure
from vllm_omni.messages.images import EncodeItem, EncodeReport
from vllm_omni.messages.timeline import Mark


@dataclass(eq=False)
class EncodePacing:
    """Defers encodes that would delay a first token, for at most ``patience`` steps in a row."""

    config: EPDConfig
    deadlines: Deadlines
    is_threaded: bool  # images are encoded in a thread, and take no time of an iteration
    num_deferrals: int = 0  # in a row

    def num_embeds(
        self, budgets: Budgets, step: Iteration, requests: Collection[Request], limit_s: float | None
    ) -> int | None:
        """Embeddings of a batch that starts now; None: it is deferred.

        Args:
            step: the language batch that was scheduled, and when.
            requests: in the step.
            limit_s: planned duration of the iteration.
        """
        max_embeds = budgets.num_embeds(step.load, None if self.is_threaded else limit_s)
        if self.num_deferrals < self.config.patience and self._delays_first_token(budgets, step, requests, max_embeds):
            self.num_deferrals += 1
            return None
        return max_embeds

    def note_start(self) -> None:
        """A batch has started."""
        self.num_deferrals = 0

    def _delays_first_token(
        self, budgets: Budgets, step: Iteration, requests: Collection[Request], max_embeds: int
    ) -> bool:
        """Whether an encode now would delay the step's prefills in a way that matters."""
        if not step.load.num_prefill_tokens or not self.config.is_on:
            return False
        if self.config.tpot_ms is None:
            return True
        # With SLOs, only a first token matters that is in time without the encode and late with it.
        without_s, with_s = (budgets.seconds_alone(step.load, num_embeds) for num_embeds in (0, max_embeds))
        return self.deadlines.is_first_token_made_late(requests, step.scheduled_at, without_s, with_s)


class _Next(Enum):
    IMAGE = "look at the next image of the request"
    REQUEST = "look at the next request"
    END = "the plan is complete"


@dataclass
class _Plan:
    order: Sequence[Request]
    scheduled: Collection[str]  # requests of the step's language batch: what they read must stay
    others: Collection[Request]  # all requests of the engine
    max_embeds: int | None  # of the batch; None: no encode starts now
    batch: list[EncodeItem] = field(default_factory=list)
    num_embeds: int = 0


@dataclass(eq=False)
class EncodePlanner:
    """Starts encodes and pulls in the order of the requests. At most one batch of encodes is in flight.

    No request waits forever, down to a cache of one image: the first request that cannot continue without an image may
    take the room of all requests behind it, and of its own later images, and never of a request before it. So an image
    that is ready stays until its request has used it, or a request before it needs the room.
    """

    cache: ImageCache
    needs: ImageNeeds
    tasks: EncodeTasks
    pulls: ImagePulls
    relay: ImageRelay | None
    # Fails a request whose image has another size in the cache (request, index, identifier, size in the cache, size),
    # and says whether it did.
    is_rejected: Callable[[Request, int, str, int, int], bool]
    on_start: Callable[[str, Mark], None]  # an image starts to be encoded or pulled
    on_end: Callable[[str], None]  # an image is ready or lost
    num_embeds_in_flight: int = 0  # of the last batch
    failures: dict[str, Failure] = field(default_factory=dict)  # request -> why it cannot continue; for the scheduler
    _in_flight: dict[str, str] = field(default_factory=dict)  # identifier -> request that its encode was started for
    _suspects: set[str] = field(default_factory=set)  # identifiers of a batch that the encoder failed on

    @property
    def is_encoding(self) -> bool:
        return len(self.cache.in_flight) > len(self.pulls)

    # -- start --------------------------------------------------------------------------------------------------------

    def plan(
        self, order: Sequence[Request], scheduled: Collection[str], others: Collection[Request], max_embeds: int | None
    ) -> list[EncodeItem]:
        """Take room for images to pull, and for a batch to encode: of at least one image, up to ``max_embeds``.

        Args:
            order: requests with images that wait for nothing but an image.
            scheduled: requests of the step's language batch, whose images are read.
            others: all requests of the engine.
            max_embeds: None: no encode starts now.
        """
        plan = _Plan(order, scheduled, others, max_embeds)
        self._fill(plan)
        if plan.batch:
            self.num_embeds_in_flight = sum(item.num_embeds for item in plan.batch)
            self._in_flight = {item.feature.identifier: item.request_id for item in plan.batch}
            for identifier in self._in_flight:
                self.on_start(identifier, Mark.ENCODE_BEGAN)
        return plan.batch

    def _fill(self, plan: _Plan) -> None:
        for place, request in enumerate(plan.order):
            task = self.tasks.get(request.request_id)
            needed = self.needs.needed(request) if task is None else list(task.missing.values())
            for index in needed:
                match self._plan_image(plan, place, index, needed):
                    case _Next.END:
                        return
                    case _Next.REQUEST:
                        break

    def _plan_image(self, plan: _Plan, place: int, index: int, needed: Sequence[int]) -> _Next:
        cache, request = self.cache, plan.order[place]
        identifier = request.mm_features[index].identifier
        size = request.get_num_encoder_embeds(index)
        known = cache.get_cached_num_encoder_embeds(request, index)
        if known is not None:  # ready, or in flight
            if self.is_rejected(request, index, identifier, known, size):
                return _Next.REQUEST
            cache.refer(request, index)
            self.tasks.order_put(request, identifier)
            return _Next.IMAGE
        if cache.is_elsewhere(identifier):
            return _Next.IMAGE
        source = self.pulls.source_of(request.request_id, identifier)
        if source is None and (obstacle := self._find_obstacle(plan, request, index, size)) is not None:
            return obstacle
        if not cache.can_start(request, index):
            if index != needed[0]:
                return _Next.REQUEST
            if plan.batch or not self._make_room(plan, place, needed):
                return _Next.END
        self._start(plan, request, index, size, source)
        return _Next.IMAGE

    def _find_obstacle(self, plan: _Plan, request: Request, index: int, size: int) -> _Next | None:
        """What follows if the image cannot be encoded in this batch; None: it can."""
        feature = request.mm_features[index]
        if feature.data is None:
            message = f"image {feature.identifier!r} is lost, and the request has no data to encode it from"
            self.failures[request.request_id] = Failure(message)
            return _Next.REQUEST
        if plan.max_embeds is None:
            return _Next.REQUEST
        names = {feature.identifier, *(item.feature.identifier for item in plan.batch)}
        is_full = plan.num_embeds + size > plan.max_embeds or names & self._suspects
        if not plan.batch or not is_full:
            return None
        if not self.pulls.has_sources:
            return _Next.END
        plan.max_embeds = None  # the batch is complete; pulls of requests behind this one still start
        return _Next.REQUEST

    def _start(self, plan: _Plan, request: Request, index: int, size: int, source: bytes | None) -> None:
        feature = request.mm_features[index]
        is_in_runner = not self.cache.start(request, index)
        if source is not None and not is_in_runner:
            self.on_start(feature.identifier, Mark.PULL_BEGAN)
            self.pulls.start(request.request_id, feature.identifier, source, size)
            return
        if not is_in_runner:
            plan.batch.append(EncodeItem(request.request_id, feature))
            plan.num_embeds += size
        self.tasks.order_put(request, feature.identifier)

    def _make_room(self, plan: _Plan, place: int, needed: Sequence[int]) -> bool:
        """Make room for the first image needed, at the cost of requests behind, whose images are encoded again."""
        cache, request = self.cache, plan.order[place]
        if request.request_id not in plan.scheduled:
            # Images that it needed before the prefix cache had their tokens, by another request.
            for index in cache.get_cached_input_ids(request) - set(needed):
                cache.free_encoder_input(request, index)
            if cache.can_start(request, needed[0]):
                return True
        for other in self._behind(plan, place):
            if cache.get_cached_input_ids(other):
                cache.free(other)
                if cache.can_start(request, needed[0]):
                    return True
        for later in reversed(needed[1:]):
            cache.free_encoder_input(request, later)
        return cache.can_start(request, needed[0])

    @staticmethod
    def _behind(plan: _Plan, place: int) -> Iterable[Request]:
        """Requests that may lose an image to the one at ``place``: those held for other reasons, then the last ones.

        Not those of this step: the runner frees an image before it computes.
        """
        kept = {one.request_id for one in plan.order[: place + 1]} | set(plan.scheduled)
        in_order = {one.request_id for one in plan.order}
        held = [one for one in plan.others if one.request_id not in in_order]
        return [one for one in (*held, *reversed(plan.order[place + 1 :])) if one.request_id not in kept]

    # -- end ----------------------------------------------------------------------------------------------------------

    def take_encodes(self, report: EncodeReport, alive: Collection[str]) -> None:
        """Process what the runner reports of the batch in flight.

        Args:
            alive: requests that have not ended.
        """
        for identifier, message in report.failed.items():
            self._fail(identifier, message, was_alone=len(report.failed) == 1, alive=alive)
        for identifier in report.encoded:
            self._suspects.discard(identifier)
            self.cache.finish(identifier)
            self.on_end(identifier)
            started_for = self._in_flight.pop(identifier, "")
            if self.relay is not None and started_for in alive and identifier not in report.loaded:
                self.relay.count_encode(started_for)

    def _fail(self, identifier: str, message: str, *, was_alone: bool, alive: Collection[str]) -> None:
        """Fail the request for which an image was encoded; for other requests, it is encoded again.

        If the batch had several images, any of them may be the cause: each is encoded again, alone.
        """
        self._lose(identifier)
        self.cache.lose(identifier)
        started_for = self._in_flight.pop(identifier, "")
        if not was_alone:
            self._suspects.add(identifier)
            return
        self._suspects.discard(identifier)
        if started_for in alive:
            self.failures[started_for] = Failure(f"image {identifier!r} cannot be encoded: {message}")

    def take_transfers(self, report: TransferReport) -> list[str]:
        """Process the puts and pulls that ended; returns the encode tasks that are complete."""
        ready, lost = self.pulls.take(report)
        for identifier in ready:
            self.on_end(identifier)
        for identifier in lost:
            self._lose(identifier)
        complete, failures = self.tasks.take_puts(report)
        self.failures |= failures
        return complete

    def _lose(self, identifier: str) -> None:
        self.on_end(identifier)
        self.tasks.forget_orders(identifier)

    def remove(self, request_id: str) -> None:
        self.tasks.remove(request_id)
        self.pulls.remove(request_id)
        self.needs.remove(request_id)
        self.failures.pop(request_id, None)

    def reset(self) -> None:
        """Forget what is in flight: the cache has been emptied."""
        self.pulls.reset()
        self._in_flight.clear()
        self._suspects.clear()
        self.tasks.forget_orders(None)
