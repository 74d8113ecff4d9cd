"""``EncodeTasks``: requests whose images are encoded and put into the relay, and which never reach the language model.

From: HydraInfer, section 4.1 (a request's stages are tasks of their own).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from vllm.v1.request import Request

from vllm_omni.kv.ec_connector import Put, PutRejection
from vllm_omni.messages.failure import Failure


@dataclass
class EncodeTask:
    request: Request
    missing: dict[str, int]  # identifier -> index of the first of its images that are not in the relay yet
    asked: set[str] = field(default_factory=set)  # of them, those whose put has been ordered
    waits_until: float | None = None  # for room in the relay


class EncodeTasks:
    """The scheduler's book on them.

    Args:
        timeout_s: how long a task waits for room in the relay.
    """

    def __init__(self, clock: Callable[[], float], timeout_s: float) -> None:
        self._clock = clock
        self._timeout_s = timeout_s
        self._tasks: dict[str, EncodeTask] = {}

    def __len__(self) -> int:
        return len(self._tasks)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._tasks

    def add(self, request: Request) -> None:
        missing: dict[str, int] = {}
        for index, feature in enumerate(request.mm_features):
            missing.setdefault(feature.identifier, index)
        self._tasks[request.request_id] = EncodeTask(request, missing)

    def get(self, request_id: str) -> EncodeTask | None:
        return self._tasks.get(request_id)

    def remove(self, request_id: str) -> None:
        self._tasks.pop(request_id, None)

    def in_order(self, key: Callable[[Request], tuple[float, float]]) -> list[Request]:
        """Those that may begin an encode or a put, first come first.

        While one waits for room in the relay, no other begins: it would wait, too, with an image in the cache.
        """
        waiting = [task.request for task in self._tasks.values() if task.waits_until is not None]
        return sorted(waiting or [task.request for task in self._tasks.values()], key=key)

    @property
    def are_held(self) -> bool:
        """Whether one waits for room in the relay."""
        return any(task.waits_until is not None for task in self._tasks.values())

    def has_put(self, put: Put) -> EncodeTask | None:
        """An image is in the relay; the task, if it was the last one."""
        task = self._tasks.get(put.request_id)
        if task is None or task.missing.pop(put.identifier, None) is None:
            return None
        task.asked.discard(put.identifier)
        task.waits_until = None
        return task if not task.missing else None

    def refuse(self, put: Put, refusal: PutRejection) -> Failure | None:
        """There was no room in the relay: once more with a later step, unless that is hopeless."""
        task = self._tasks.get(put.request_id)
        if task is None:
            return None
        task.asked.discard(put.identifier)
        if refusal.is_final:
            return Failure(f"the embeddings of image {put.identifier!r} cannot be put: {refusal.message}")
        if task.waits_until is None:
            task.waits_until = self._clock() + self._timeout_s
        elif self._clock() > task.waits_until:
            return Failure(f"no room in the relay within {self._timeout_s:g} s: {refusal.message}")
        return None

    def forget_asked(self, identifier: str | None) -> None:
        """Orders that wait for an image (None: for any) are void: it will not come."""
        for task in self._tasks.values():
            task.asked -= task.asked if identifier is None else {identifier}
