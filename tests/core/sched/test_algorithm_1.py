"""The scheduler decides as a slow transcription of the paper's algorithm does, in all states that streams lead to."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import Request

from tests.core.sched.algorithm_1 import Limits, State, View, algorithm_1
from tests.core.sched.drive import LayeredRunner, drive, make_scheduler
from tests.core.sched.random_requests import Engine, Image, PlannedRequest, Stream
from tests.fuzz import num_cases
from vllm_omni.config.budgets import EPD_CONFIG
from vllm_omni.core.sched.epd import EPDScheduler
from vllm_omni.messages.epd_step import EPDSchedulerOutput

IMAGE_LENGTHS = [1, 3, 8, 20]  # an image's name says which
NUM_PARTS = 4


class WatchedScheduler(EPDScheduler):
    """Writes down each state that it decides in."""

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        manager = self.encoder_cache_manager
        self.state = State(
            running=[view(request) for request in self.running],
            waiting=[view(request) for request in self.waiting],
            ready=set(manager.cached) - manager.in_flight,
            is_encoding=bool(manager.in_flight),
            num_put_off=self.pacing.num_deferrals,
        )
        return super().schedule(throttle_prefills)


def view(request: Request) -> View:
    return View(
        request_id=request.request_id,
        num_tokens=request.num_tokens,
        num_computed=request.num_computed_tokens,
        is_decoding=bool(request.num_computed_tokens) and not request.is_prefill_chunk,
        images=tuple(
            Image(feature.identifier, feature.mm_position.offset, feature.mm_position.length)
            for feature in request.mm_features
        ),
    )


parts = st.one_of(st.integers(1, 12), st.sampled_from([Image(f"image-{n}", 0, n) for n in IMAGE_LENGTHS]))


@st.composite
def streams(draw: st.DrawFn) -> Stream:
    engine = Engine(
        num_blocks=1000,
        encoder_cache_size=1000,
        prefix_caching=False,
        max_num_seqs=draw(st.integers(1, 5)),
        max_num_batched_tokens=draw(st.sampled_from([5, 16, 64])),
    )
    stream = Stream(0, engine)
    for number in range(draw(st.integers(1, 6))):
        prompt: list[int] = []
        images = []
        for part in draw(st.lists(parts, min_size=1, max_size=NUM_PARTS)):
            if isinstance(part, Image):
                images.append(Image(part.name, len(prompt), part.length))
                prompt += [9] * part.length
            else:
                prompt += [10] * part
        prompt.append(10)
        request = PlannedRequest(str(number), tuple(prompt), tuple(images), max_tokens=draw(st.integers(1, 6)))
        stream.arrivals.setdefault(draw(st.integers(0, 8)), []).append(request)
        if draw(st.integers(0, 9)) == 0:
            stream.aborts.setdefault(draw(st.integers(0, 12)), []).append(str(number))
    return stream


@pytest.mark.fuzz
@settings(max_examples=num_cases(600), deadline=None, derandomize=True)
@given(
    stream=streams(),
    token_budget=st.integers(1, 40),
    image_budget=st.integers(1, 30),
    num_layers=st.one_of(st.none(), st.integers(1, 5)),
    patience=st.integers(1, 6),
    min_prefill_tokens=st.integers(1, 10),
)
def test_every_decision_is_algorithm_1s(
    stream: Stream,
    token_budget: int,
    image_budget: int,
    num_layers: int | None,
    patience: int,
    min_prefill_tokens: int,
) -> None:
    limits = Limits(
        token_budget=token_budget,
        image_budget=image_budget,
        patience=patience,
        min_prefill_tokens=min_prefill_tokens,
        max_num_batched_tokens=stream.engine.max_num_batched_tokens,
        max_num_seqs=stream.engine.max_num_seqs,
    )
    epd = {
        "token_budget": token_budget,
        "image_budget": image_budget,
        "num_encode_layers": num_layers,
        "patience": patience,
        "min_prefill_tokens": min_prefill_tokens,
    }
    scheduler = make_scheduler(WatchedScheduler, stream.engine, {EPD_CONFIG: epd})

    def check(output: SchedulerOutput) -> None:
        encodes = output.encodes if isinstance(output, EPDSchedulerOutput) else []
        decided = output.num_scheduled_tokens, [item.feature.identifier for item in encodes]
        assert decided == algorithm_1(scheduler.state, limits)

    drive(scheduler, stream, runner=LayeredRunner(scheduler), on_step=check)
