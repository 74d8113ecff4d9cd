"""``RequestRecord``: what the nodes of a request have reported, added up in the front end."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from vllm_omni.engine.flow_metrics import FlowMetrics, Leased
from vllm_omni.engine.traces import RequestTrace, Traces
from vllm_omni.messages.payload import Payload
from vllm_omni.messages.report import NodeReport
from vllm_omni.messages.timeline import StageTimes


@dataclass
class RequestRecord:
    """The state of a request in the front end; nodes do not see it."""

    arrived_at: float = field(default_factory=time.time)
    stage_durations: dict[str, float] = field(default_factory=dict)  # seconds; those of a loop's iterations add up
    stage_times: dict[str, StageTimes] = field(default_factory=dict)  # of autoregressive stages, task by task
    published: list[Payload] = field(default_factory=list)  # by the stages, released at the end
    trace: RequestTrace | None = None
    metrics: FlowMetrics | None = None
    leased: Leased = field(default_factory=Leased)

    @classmethod
    def of(cls, prompt: Any, metrics: FlowMetrics | None = None) -> RequestRecord:
        """The record of a request that starts; one whose prompt vLLM's chat handler has rendered arrived before."""
        if isinstance(prompt, dict) and "arrival_time" in prompt:
            return cls(arrived_at=prompt["arrival_time"], metrics=metrics)
        return cls(metrics=metrics)

    def add(self, report: NodeReport) -> None:
        """Add what a node has reported."""
        if report.seconds is not None:
            self.stage_durations[report.node] = self.stage_durations.get(report.node, 0.0) + report.seconds
        if (task := report.task) is not None:
            self.stage_times.setdefault(report.node, StageTimes(task.sent_at, task.ended_at)).add(task)
        self.published += report.published
        if self.trace is not None:
            self.trace.add(report.spans)
        if self.metrics is not None:
            self.metrics.observe(report, self.leased)

    def note_answered(self) -> None:
        """The user gets the last output."""
        if self.trace is not None:
            self.trace.error = ""

    def end(self, traces: Traces) -> None:
        """The request is over: what its stages have published is released."""
        if self.metrics is not None:
            self.metrics.release(self.leased)
        if self.trace is not None:
            traces.end(self.trace)
