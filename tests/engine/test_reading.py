"""What an engine is told of its reader, without an engine."""

from types import SimpleNamespace
from typing import Any

from vllm.sampling_params import RequestOutputKind, SamplingParams

from vllm_omni.engine.reading import PIECES_AHEAD, TOKENS_AHEAD, Reading
from vllm_omni.messages.stage_step import FRAME_CHUNKS, NUM_READ, STAGE_ARGS, WINDOW


class Engine:
    """Notes reports; ``received`` is what its output processor has got."""

    def __init__(self, *, data_parallel_size: int = 1, stream_interval: int = 1) -> None:
        self.vllm_config = SimpleNamespace(
            parallel_config=SimpleNamespace(data_parallel_size=data_parallel_size),
            scheduler_config=SimpleNamespace(stream_interval=stream_interval),
        )
        self.received: dict[str, int] = {}
        self.reports: list[tuple[str, int]] = []

    def num_received(self, request_id: str) -> dict[str, int]:
        assert request_id == "request"
        return dict(self.received)

    async def report_read(self, request_id: str, num_read: int) -> None:
        self.reports.append((request_id, num_read))


def read(engine: Any, *, generates_tokens: bool = True, **params: Any) -> tuple[Reading, dict[str, Any]]:
    """A reader, and the arguments that the engine gets."""
    made = SamplingParams(**{"output_kind": RequestOutputKind.DELTA, **params})
    return Reading(engine, "request", made, generates_tokens=generates_tokens), made.extra_args or {}


def test_only_replies_that_are_read_while_they_are_made_have_a_window() -> None:
    assert read(Engine())[1] == {WINDOW: TOKENS_AHEAD}
    assert read(Engine(), output_kind=RequestOutputKind.FINAL_ONLY)[1] == {}
    assert read(Engine(data_parallel_size=2))[1] == {}
    assert read(Engine(), generates_tokens=False)[1] == {}
    codec = {STAGE_ARGS: {FRAME_CHUNKS: {"first": 1, "size": 25}}}
    assert read(Engine(), generates_tokens=False, extra_args=codec)[1] == {**codec, WINDOW: PIECES_AHEAD}


def test_outputs_that_come_in_lots_of_tokens_fit_into_the_window() -> None:
    assert read(Engine(stream_interval=1000))[1] == {WINDOW: 2000}


def test_a_user_sets_no_window_and_sends_no_report() -> None:
    mine = {"mine": 1, WINDOW: 1, NUM_READ: 1}
    assert read(Engine(), extra_args=mine)[1] == {"mine": 1, WINDOW: TOKENS_AHEAD}
    assert read(Engine(), extra_args=mine, output_kind=RequestOutputKind.FINAL_ONLY)[1] == {"mine": 1}
    assert mine == {"mine": 1, WINDOW: 1, NUM_READ: 1}


async def test_each_sequence_is_reported_a_quarter_of_the_window_at_a_time() -> None:
    engine, quarter = Engine(), TOKENS_AHEAD // 4
    reading, _ = read(engine)
    for num_tokens in range(1, 2 * TOKENS_AHEAD):
        engine.received = {"a": num_tokens} if num_tokens > quarter else {"a": num_tokens, "b": 2}
        reading.note_pulled()
        await reading.report()
    assert engine.reports == [("a", count) for count in range(quarter, 2 * TOKENS_AHEAD, quarter)]


async def test_what_arrives_while_an_output_is_read_is_not_yet_read() -> None:
    engine = Engine()
    reading, _ = read(engine)
    engine.received = {"a": 100}
    reading.note_pulled()
    engine.received = {"a": 400}
    await reading.report()
    assert engine.reports == [("a", 100)]
