"""What the nodes of a request report, added up."""

import msgspec
import pytest

from vllm_omni.engine.request_record import RequestRecord
from vllm_omni.messages.payload import Payload
from vllm_omni.messages.report import NodeReport
from vllm_omni.messages.request import RequestContext
from vllm_omni.messages.span import Span, SpanKind
from vllm_omni.messages.timeline import Mark, Task, TaskTimes, Timeline

SPAN = Span("writer", SpanKind.STAGE, 1.0, 2.0, "writer/0", 7, 3, {"outputs": 1}, "it died")


def test_a_request_arrived_when_its_prompt_was_rendered() -> None:
    assert RequestRecord.of({"prompt_token_ids": [1], "arrival_time": 7.0}).arrived_at == 7.0
    assert RequestRecord.of("hello").arrived_at > 7.0


def test_the_activations_of_a_node_add_up() -> None:
    record = RequestRecord()
    for report in (NodeReport("writer", 1.0), NodeReport("tool", 0.25), NodeReport("writer", 0.5)):
        record.add(report)
    assert record.stage_durations == {"writer": 1.5, "tool": 0.25}


def test_tasks_and_leases_are_kept_until_the_request_is_over() -> None:
    record, payload = RequestRecord(), Payload(values={"num_rows": 1})
    timeline = Timeline(Task.WHOLE, [(Mark.QUEUED, 1.0)])
    record.add(NodeReport("writer", task=TaskTimes(Task.WHOLE, 1.0, 3.0, [timeline])))
    record.add(NodeReport("writer", task=TaskTimes(Task.WHOLE, 4.0, 5.0), published=[payload]))
    times = record.stage_times["writer"]
    assert (times.began_at, times.ended_at, times.timelines[0]) == (1.0, 5.0, timeline)
    assert times.timelines[1].marks == [(Mark.QUEUED, 4.0), (Mark.ENDED, 5.0)]
    assert record.published == [payload]
    assert not record.stage_durations


def test_no_node_can_write_into_the_context_of_a_request() -> None:
    with pytest.raises(AttributeError):
        RequestContext("request", {}, {}).priority = 1  # type: ignore[misc]


def test_a_report_travels() -> None:
    timeline = Timeline(Task.DECODE, [(Mark.QUEUED, 1.0), (Mark.TOKEN, 2.0)])
    times = TaskTimes(Task.DECODE, 1.0, 3.0, [timeline], [(0, 1, 2.0)])
    report = NodeReport("writer", 0.5, times, [Payload(values={"num_rows": 1})], [SPAN])
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(report), type=NodeReport) == report
