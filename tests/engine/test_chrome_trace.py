"""Traces in Chrome's format."""

import json

from vllm_omni.engine.chrome_trace import chrome_trace
from vllm_omni.engine.traces import RequestTrace, Traces
from vllm_omni.messages.span import Span, SpanKind


def a_trace(*spans: Span) -> RequestTrace:
    trace = Traces().begin("chat-1", "omni", 10.0)
    trace.ended_at, trace.error = 12.0, ""
    trace.add(spans)
    return trace


def run(began_at: float, ended_at: float, id: int, track: str = "talker", error: str = "") -> Span:
    return Span("talker", SpanKind.STAGE, began_at, ended_at, track, id, attributes={"outputs": 3}, error=error)


def tracks(events: list[dict[str, object]]) -> dict[object, object]:
    return {one["tid"]: one["args"]["name"] for one in events if one["ph"] == "M"}  # type: ignore[index]


def test_times_are_microseconds_and_tracks_are_named() -> None:
    written = json.loads(json.dumps(chrome_trace(a_trace(run(10.25, 11.0, 1, "talker/1")))))
    request, talker = [one for one in written["traceEvents"] if one["ph"] == "X"]
    assert (request["name"], request["ts"], request["dur"]) == ("chat-1", 10_000_000.0, 2_000_000.0)
    assert (talker["name"], talker["ts"], talker["dur"]) == ("talker", 10_250_000.0, 750_000.0)
    assert talker["args"] == {"outputs": 3}
    assert tracks(written["traceEvents"])[talker["tid"]] == "talker/1"


def test_runs_that_overlap_have_tracks_of_their_own_and_parts_stay_with_their_run() -> None:
    part = Span("prefill execution", SpanKind.PART, 11.0, 11.5, "talker", 4, parent=2)
    written = chrome_trace(a_trace(run(10.0, 11.5, 1), run(10.5, 11.8, 2), run(11.6, 12.0, 3), part))
    runs = [one for one in written["traceEvents"] if one["name"] == "talker"]
    first, second, third = (one["tid"] for one in runs)
    assert first == third != second
    (of_part,) = [one["tid"] for one in written["traceEvents"] if one["name"] == "prefill execution"]
    assert of_part == second
    assert tracks(written["traceEvents"])[second] == "talker (2)"


def test_an_error_is_shown() -> None:
    written = chrome_trace(a_trace(run(10.0, 11.0, 1, error="its engine has died")))
    assert written["traceEvents"][1]["args"]["error"] == "its engine has died"
