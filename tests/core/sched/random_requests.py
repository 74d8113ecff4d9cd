"""Recorded random streams of requests: what arrives and what is aborted at which step, and how large the engine is.

A stream is a pure function of its seed, and holds no vLLM objects: each scheduler that it is driven through gets
requests of its own.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from typing import Any

from tests.core.sched.costs import TRUE, scaled

BLOCK_SIZE = 4
IMAGE_TOKEN = 9
MAX_SESSIONS, MAX_SESSION_LEN = 2, 48
MEAN_STEP_S = 0.01


@dataclass(frozen=True)
class Image:
    name: str  # two images of one name have the same content
    offset: int  # in the prompt
    length: int  # placeholders, each of one embedding


@dataclass(frozen=True)
class PlannedRequest:
    request_id: str
    prompt: tuple[int, ...]
    images: tuple[Image, ...]
    max_tokens: int
    priority: int = 0
    arrival_time: float = 0.0
    slo: dict[str, float] | None = None
    adapter: int = 0  # none
    encode_only: bool = False
    elsewhere: tuple[str, ...] = ()  # names of images that another engine has encoded
    # Of a session, whose inputs have one id: whether another may come. One that says no has no input, and ends it.
    resumable: bool = False


@dataclass(frozen=True)
class Engine:
    """What of an engine's configuration the scheduler sees."""

    num_blocks: int = 200
    max_num_seqs: int = 8
    max_num_batched_tokens: int = 32
    encoder_cache_size: int = 64  # embeddings
    encoder_budget: int = 64  # embeddings a step, stock's own limit
    prefix_caching: bool = True
    policy: str = "fcfs"
    chunked_images: bool = True
    max_adapters: int = 0  # in one batch; 0: the engine has none
    num_spec_tokens: int = 0  # drafts of a step; 0: the engine drafts none
    ec_role: str | None = None  # of a RelayECConnector


@dataclass
class Stream:
    seed: int
    engine: Engine
    arrivals: dict[int, list[PlannedRequest]] = field(default_factory=dict)  # by step
    aborts: dict[int, list[str]] = field(default_factory=dict)

    @property
    def requests(self) -> list[PlannedRequest]:
        return [request for arrived in self.arrivals.values() for request in arrived]

    @property
    def num_steps(self) -> int:
        return max([*self.arrivals, *self.aborts], default=0) + 1


def make_prompt(rng: random.Random, parts: list[int | Image]) -> tuple[tuple[int, ...], tuple[Image, ...]]:
    """Text of so many tokens, and images, one behind the other."""
    prompt: list[int] = []
    images = []
    for part in parts:
        if isinstance(part, Image):
            images.append(Image(part.name, len(prompt), part.length))
            prompt += [IMAGE_TOKEN] * part.length
        else:
            prompt += [rng.randrange(10, 14) for _ in range(part)]
    return tuple(prompt), tuple(images)


def make_stream(
    seed: int, *, text_only: bool = False, num_requests: int = 16, engine: Engine | None = None, max_image: int = 24
) -> Stream:
    """Text and images, prefixes and images that recur, too few blocks on some, aborts at any time."""
    rng = random.Random(seed)
    if engine is None:
        engine = Engine(
            num_blocks=rng.choice([26, 26, 30, 200]),
            max_num_seqs=rng.choice([2, 4, 8]),
            max_num_batched_tokens=rng.choice([8, 16, 32, 64]),
            encoder_cache_size=rng.choice([max_image, 40, 200]),
            encoder_budget=rng.choice([max_image, 64, 200]),
            prefix_caching=rng.random() < 0.6,
            policy=rng.choice(["fcfs", "fcfs", "priority"]),
            chunked_images=rng.random() < 0.8,
            max_adapters=rng.choice([0, 0, 1]),
        )
        if not engine.chunked_images:  # vLLM rejects a budget into which an image does not fit
            engine = Engine(**{**vars(engine), "max_num_batched_tokens": max(32, engine.max_num_batched_tokens)})
    stream = Stream(seed, engine)
    lengths = {f"image-{number}": rng.randint(1, max_image) for number in range(8)}
    lengths["image-0"] = max_image
    prefixes = [[rng.randrange(10, 14) for _ in range(rng.choice([4, 9, 16]))] for _ in range(2)]
    for number in range(num_requests):
        parts: list[int | Image] = [rng.randint(1, 12)]
        if not text_only and rng.random() < 0.6:
            parts = [rng.randint(0, 6)]
            for _ in range(rng.choice([1, 1, 2])):
                name = rng.choice(sorted(lengths))
                parts += [Image(name, 0, lengths[name]), rng.randint(0, 5)]
            parts.append(1)
        prefix = rng.choice(prefixes) if rng.random() < 0.4 else []
        prompt, images = make_prompt(rng, parts)
        request = PlannedRequest(
            request_id=str(number),
            prompt=(*prefix, *prompt),
            images=tuple(Image(image.name, image.offset + len(prefix), image.length) for image in images),
            max_tokens=rng.randint(1, 12),
            priority=rng.randrange(3),
            arrival_time=float(number),
            adapter=rng.randrange(3) if engine.max_adapters else 0,
        )
        step = rng.randrange(num_requests)
        stream.arrivals.setdefault(step, []).append(request)
        if rng.random() < 0.15:
            stream.aborts.setdefault(step + rng.randrange(15), []).append(request.request_id)
    return stream


def make_slo_budgets(seed: int) -> dict[str, Any]:
    """Random ones of which costs are known, ten times too low or too high, or not at all."""
    rng = random.Random(f"costs of {seed}")
    cost = rng.choice([TRUE, scaled(0.1), scaled(10.0), None])
    return {
        "tpot_ms": 10.0,
        "cost": vars(cost) if cost else None,
        "profile_s": 0,
        "patience": rng.choice([1, 5, 64]),
        "min_prefill_tokens": rng.choice([1, 16]),
    }


def with_slos(stream: Stream) -> Stream:
    """The same, where most requests have an SLO, which is nothing that they could not miss."""
    rng = random.Random(f"slos of {stream.seed}")
    changed = Stream(stream.seed, stream.engine, aborts=stream.aborts)
    for step, requests in stream.arrivals.items():
        changed.arrivals[step] = [
            replace(
                request,
                arrival_time=step * MEAN_STEP_S,
                slo={
                    "ttft_ms": rng.choice([1.0, 20.0, 100.0, 1e6]),
                    "tpot_ms": rng.choice([1.0, 5.0, 10.0, 1e6]),
                    "tpot_share": rng.choice([0.5, 0.9, 0.99]),
                }
                if rng.random() < 0.8
                else None,
            )
            for request in requests
        ]
    return changed


def with_migration(stream: Stream) -> Stream:
    """The same, where some requests are encode tasks, and some of the images of others are elsewhere."""
    rng = random.Random(f"migration of {stream.seed}")
    changed = Stream(stream.seed, replace(stream.engine, ec_role="ec_both"), aborts=stream.aborts)
    for step, requests in stream.arrivals.items():
        changed.arrivals[step] = []
        for request in requests:
            if request.images and rng.random() < 0.4:
                request = replace(request, encode_only=True)
            elif rng.random() < 0.6:
                names = {image.name for image in request.images if rng.random() < 0.7}
                request = replace(request, elsewhere=tuple(sorted(names)))
            changed.arrivals[step].append(request)
    return changed


def with_sessions(stream: Stream) -> Stream:
    """The same, where some requests are sessions, which get more text and images later, and end later still.

    ``MAX_SESSIONS`` of them: one that waits for input keeps its blocks, and vLLM does not preempt it.
    """
    rng = random.Random(f"sessions of {stream.seed}")
    changed = Stream(stream.seed, stream.engine, aborts=stream.aborts)
    lengths = {image.name: image.length for request in stream.requests for image in request.images}
    short = [one.request_id for one in stream.requests if len(one.prompt) + one.max_tokens <= MAX_SESSION_LEN]
    sessions = rng.sample(short, min(MAX_SESSIONS, len(short)))
    for step, requests in stream.arrivals.items():
        for request in requests:
            is_session = request.request_id in sessions
            changed.arrivals.setdefault(step, []).append(replace(request, resumable=is_session))
            num_tokens, at = len(request.prompt) + request.max_tokens, step
            while is_session:
                at += rng.randint(1, 12)
                parts: list[int | Image] = [rng.randint(1, 6)]
                if lengths and rng.random() < 0.5:
                    name = rng.choice(sorted(lengths))
                    parts += [Image(name, 0, lengths[name]), 1]
                prompt, images = make_prompt(rng, parts)
                max_tokens = rng.randint(1, 6)
                num_tokens += len(prompt) + max_tokens
                is_session = num_tokens <= MAX_SESSION_LEN
                more = replace(request, prompt=prompt, images=images, max_tokens=max_tokens, resumable=True)
                end = replace(request, prompt=(0,), images=())
                changed.arrivals.setdefault(at, []).append(more if is_session else end)
    return changed


def make_budgets(seed: int) -> dict[str, int | None]:
    """Random ones, most of them smaller than what they are to hold."""
    rng = random.Random(f"budgets of {seed}")
    return {
        "token_budget": rng.choice([1, 4, 16, 64]),
        "image_budget": rng.choice([1, 10, 24, 100]),
        "num_encode_layers": rng.choice([None, 1, 2, 5]),
        "patience": rng.choice([1, 5, 64]),
        "min_prefill_tokens": rng.choice([1, 4, 16]),
    }
