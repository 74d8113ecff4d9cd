"""``Iterations``: when iterations of an engine started and ended, and what each took."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple

from vllm_omni.epd.cost import LanguageLoad
from vllm_omni.epd.engine_request import Request


class Iteration(NamedTuple):
    load: LanguageLoad
    scheduled_at: float


class Iterations:
    """The iterations in flight, in the order in which they were scheduled, and in which they end.

    An iteration starts with the end of the one before if requests kept running, as the gap between two tokens does: the
    engine core's work between the two counts, and a batch may be scheduled before the last one has ended.
    """

    def __init__(self) -> None:
        self._in_flight: deque[Iteration] = deque()
        self._last_end = 0.0
        self._continues = False  # whether requests kept running after the last end

    def __len__(self) -> int:
        return len(self._in_flight)

    @property
    def latest(self) -> Iteration:
        return self._in_flight[-1]

    def start(self, load: LanguageLoad, now: float) -> None:
        self._in_flight.append(Iteration(load, now))

    def end(self, now: float) -> tuple[LanguageLoad, float]:
        """End the oldest iteration: its language batch, and the seconds that it took."""
        load, scheduled_at = self._in_flight.popleft()
        seconds = now - (self._last_end if self._continues else max(scheduled_at, self._last_end))
        self._last_end = now
        return load, seconds

    def set_running(self, are_running: bool) -> None:
        """Note, after the end of an iteration, whether requests keep running."""
        self._continues = are_running

    def seconds_left(self, limit_s: float, now: float) -> float | None:
        """Time left of the latest iteration; None: unknown, as the one before has not ended."""
        if len(self._in_flight) > 1:
            return None
        started_at = self._last_end if self._continues else self.latest.scheduled_at
        return max(0.0, started_at + limit_s - now)


def load_of_decodes(decodes: Iterable[Request]) -> LanguageLoad:
    """The language batch of the next iteration before prompts are added."""
    load = LanguageLoad()
    for request in decodes:
        num_tokens = request.num_tokens_with_spec + request.num_output_placeholders - request.num_computed_tokens
        load = load.with_decode(num_tokens, request.num_computed_tokens)
    return load


def load_of_step(
    num_scheduled_tokens: Mapping[str, int], requests: Mapping[str, Request], decoding: Collection[str]
) -> LanguageLoad:
    """The language batch that was scheduled; vLLM has counted its tokens as computed."""
    load = LanguageLoad()
    for request_id, num_tokens in num_scheduled_tokens.items():
        context = requests[request_id].num_computed_tokens - num_tokens
        extended = load.with_decode if request_id in decoding else load.with_prefill
        load = extended(num_tokens, context)
    return load
