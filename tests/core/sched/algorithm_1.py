"""Algorithm 1 of HydraInfer, written out line by line for a state of plain values, with its slips mended.

Slow and without vLLM: what ``EPDScheduler`` gets out of vLLM's scheduler must be this. Caches are ample here.
"""

from __future__ import annotations

from dataclasses import dataclass

from tests.core.sched.random_requests import Image


@dataclass(frozen=True)
class View:
    """A request as it stands before the iteration."""

    request_id: str
    num_tokens: int  # that are known
    num_computed: int
    is_decoding: bool
    images: tuple[Image, ...]

    def images_needed(self, num_computed: int) -> list[Image]:
        return [image for image in self.images if image.offset + image.length > num_computed]

    def chunk(self, num_left: int, ready: set[str]) -> int:
        """Tokens of a prefill: up to the first image that is not encoded."""
        end = min(self.num_tokens, self.num_computed + num_left)
        for image in self.images_needed(self.num_computed):
            if image.name not in ready:
                end = min(end, max(self.num_computed, image.offset))
                break
        return end - self.num_computed


@dataclass(frozen=True)
class State:
    running: list[View]  # as they were admitted
    waiting: list[View]  # in the queue's order
    ready: set[str]  # images that are encoded
    is_encoding: bool
    num_put_off: int  # times in a row that an encode gave way to a prefill


@dataclass(frozen=True)
class Limits:
    token_budget: int
    image_budget: int
    patience: int
    min_prefill_tokens: int
    max_num_batched_tokens: int
    max_num_seqs: int


def algorithm_1(state: State, limits: Limits) -> tuple[dict[str, int], list[str]]:
    """Tokens by request, and the images whose encode begins."""
    batch: dict[str, int] = {}
    # 7-10: all decodes.
    for request in state.running:
        if request.is_decoding:
            batch[request.request_id] = 1
    budget = len(batch) + max(limits.token_budget - len(batch), limits.min_prefill_tokens)
    budget = min(budget, limits.max_num_batched_tokens)
    # 11-15: the prefills that run.
    has_prefill = False
    for request in state.running:
        if not request.is_decoding:
            size = request.chunk(budget - sum(batch.values()), state.ready)
            if size:
                has_prefill = True
                batch[request.request_id] = size
    # 16-19, mended: new requests whether or not a prefill runs, until the queue ends. Those whose images are encoded
    # need none, as text does.
    num_running = len(state.running)
    for request in state.waiting:
        needed = request.images_needed(request.num_computed)
        if num_running == limits.max_num_seqs or sum(batch.values()) >= budget:
            break
        if needed and needed[0].name not in state.ready:
            continue
        has_prefill = True
        num_running += 1
        batch[request.request_id] = request.chunk(budget - sum(batch.values()), state.ready)
    # 20-28, corrected: an encode is deferred a limited number of times, and what does not fit waits.
    encodes: dict[str, int] = {}
    if state.is_encoding or (has_prefill and state.num_put_off < limits.patience):
        return batch, []
    for request in (*state.running, *state.waiting):
        for image in request.images_needed(request.num_computed + batch.get(request.request_id, 0)):
            if image.name in state.ready or image.name in encodes:
                continue
            if encodes and sum(encodes.values()) + image.length > limits.image_budget:
                return batch, list(encodes)
            encodes[image.name] = image.length
    return batch, list(encodes)
