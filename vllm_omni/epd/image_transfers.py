"""``EncodeTasks``: requests whose images are encoded and put into the relay, and which never reach the language model.
``ImagePulls``: embeddings of images that another engine computed, copied from its relay into the image cache.

From: HydraInfer, sections 4.1 (a request's stages are tasks of their own) and 4.3 (pull-based migration of images).
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from vllm_omni.epd.engine_request import ImageCache, ImageRelay, Request, TransferReport
from vllm_omni.messages.failure import Failure
from vllm_omni.messages.images import Put, PutRejection

Key = tuple[float, float]


@dataclass
class EncodeTask:
    request: Request
    missing: dict[str, int]  # identifier -> index of the first of its images, of those that are not in the relay yet
    ordered: set[str] = field(default_factory=set)  # of these, the identifiers whose put has been ordered
    deadline: float | None = None  # for room in the relay; None: the task does not wait for room


@dataclass(eq=False)
class EncodeTasks:
    """The encode tasks of an engine, in no queue of vLLM's: only their images are scheduled.

    A task needs room in the cache for an image only while the image is encoded and put into the relay.
    """

    relay: ImageRelay | None  # takes the images; None: the engine has no encode tasks
    cache: ImageCache
    clock: Callable[[], float]
    _tasks: dict[str, EncodeTask] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self._tasks)

    def add(self, request: Request) -> None:
        missing: dict[str, int] = {}
        for index, feature in enumerate(request.mm_features):
            missing.setdefault(feature.identifier, index)
        self._tasks[request.request_id] = EncodeTask(request, missing)

    def get(self, request_id: str) -> EncodeTask | None:
        return self._tasks.get(request_id)

    def remove(self, request_id: str) -> None:
        self._tasks.pop(request_id, None)

    def merge_into(
        self, running: Iterable[Request], waiting: Iterable[Request], key: Callable[[Any], Key]
    ) -> Iterator[Request]:
        """Put the tasks that may start an encode or a put among other requests with images.

        Running requests come first, and then waiting requests and tasks by ``key``. While some tasks wait for room in
        the relay, no other starts, which would wait, too, and hold an image in the cache; and all requests go first.
        """
        held = [task.request for task in self._tasks.values() if task.deadline is not None]
        tasks = deque(sorted(held or [task.request for task in self._tasks.values()], key=key))
        yield from running
        for request in waiting:
            while tasks and not held and key(tasks[0]) < key(request):
                yield tasks.popleft()
            yield request
        yield from tasks

    def order_put(self, request: Request, identifier: str) -> None:
        """Order that an image, which is in the cache or will be, is put into the relay, if the request is a task."""
        task = self._tasks.get(request.request_id)
        if task is not None and identifier not in task.ordered:
            assert self.relay is not None
            task.ordered.add(identifier)
            self.relay.start_put(request.request_id, identifier)

    def forget_orders(self, identifier: str | None) -> None:
        """Cancel the orders that wait for an image (None: for any), which will not come."""
        for task in self._tasks.values():
            task.ordered -= task.ordered if identifier is None else {identifier}

    def take_puts(self, report: TransferReport) -> tuple[list[str], dict[str, Failure]]:
        """Process the puts that ended: the tasks that are complete, and those that failed."""
        complete, failures = [], {}
        for put, payload in report.put.items():
            if self._end_put(put, payload):
                complete.append(put.request_id)
        for put, rejection in report.rejected.items():
            if failure := self._reject_put(put, rejection):
                failures[put.request_id] = failure
        return complete, failures

    def _end_put(self, put: Put, payload: bytes) -> bool:
        """Whether it was the last image of its task."""
        assert self.relay is not None
        task = self._tasks.get(put.request_id)
        if task is None:  # aborted meanwhile
            self.relay.release(payload)
            return False
        self.relay.add_image(*put, payload)
        for index, feature in enumerate(task.request.mm_features):
            if feature.identifier == put.identifier:
                self.cache.free_encoder_input(task.request, index)
        if task.missing.pop(put.identifier, None) is None:
            return False
        task.ordered.discard(put.identifier)
        task.deadline = None
        return not task.missing

    def _reject_put(self, put: Put, rejection: PutRejection) -> Failure | None:
        """Repeat a put for which the relay had no room with a later step, unless that is hopeless."""
        task = self._tasks.get(put.request_id)
        if task is None:
            return None
        assert self.relay is not None
        task.ordered.discard(put.identifier)
        if rejection.is_final:
            return Failure(f"the embeddings of image {put.identifier!r} cannot be put: {rejection.message}")
        timeout_s = self.relay.put_timeout_s
        if task.deadline is None:
            task.deadline = self.clock() + timeout_s
        elif self.clock() > task.deadline:
            return Failure(f"no room in the relay within {timeout_s:g} s: {rejection.message}")
        return None


@dataclass(eq=False)
class ImagePulls:
    """Where the images of requests are, and which of them are being pulled."""

    relay: ImageRelay | None
    cache: ImageCache
    num_ranks: int  # that pull each image, each for itself
    _sources: dict[str, dict[str, bytes]] = field(default_factory=dict)  # request -> identifier -> payload
    _in_flight: dict[str, str] = field(default_factory=dict)  # identifier -> request whose payload is pulled
    _num_ranks_done: Counter[str] = field(default_factory=Counter)  # by identifier in flight

    def __len__(self) -> int:
        """Images in flight."""
        return len(self._in_flight)

    @property
    def has_sources(self) -> bool:
        """Whether a request has images elsewhere."""
        return bool(self._sources)

    def add(self, request_id: str, images: dict[str, bytes]) -> None:
        self._sources[request_id] = images

    def remove(self, request_id: str) -> None:
        self._sources.pop(request_id, None)

    def source_of(self, request_id: str, identifier: str) -> bytes | None:
        return self._sources.get(request_id, {}).get(identifier)

    def start(self, request_id: str, identifier: str, payload: bytes, num_embeds: int) -> None:
        assert self.relay is not None
        self._in_flight[identifier] = request_id
        self.relay.start_pull(identifier, payload, num_embeds)

    def take(self, report: TransferReport) -> tuple[list[str], list[str]]:
        """Process the pulls that ended: identifiers that are ready, and identifiers that are lost.

        An image that is lost is encoded here instead.
        """
        ready = [one for one in report.pulled.keys() - report.lost.keys() if self._add_rank(one, report.pulled[one])]
        lost = [identifier for identifier in report.lost if self._lose(identifier)]
        return ready, lost

    def _add_rank(self, identifier: str, num_ranks: int) -> bool:
        self._num_ranks_done[identifier] += num_ranks
        is_known = identifier in self._in_flight
        if is_known and self._num_ranks_done[identifier] < self.num_ranks:
            return False
        del self._num_ranks_done[identifier]
        if is_known:
            del self._in_flight[identifier]
            self.cache.finish(identifier)
        else:  # forgotten meanwhile
            self.cache.drop(identifier)
        return is_known

    def _lose(self, identifier: str) -> bool:
        self._num_ranks_done.pop(identifier, None)
        request_id = self._in_flight.pop(identifier, None)
        if request_id is None:
            return False
        self._sources.get(request_id, {}).pop(identifier, None)
        self.cache.lose(identifier)
        return True

    def reset(self) -> None:
        """Forget the images in flight: the cache has been emptied."""
        self._in_flight.clear()
