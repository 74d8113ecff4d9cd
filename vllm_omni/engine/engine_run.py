"""``EngineRun``: what the front end notes about one run of a request on an engine, and reports."""

from __future__ import annotations

import time
from collections.abc import Mapping

from vllm.sampling_params import SamplingParams

from vllm_omni.engine.latency import Phase, phases_of
from vllm_omni.engine.stage_llm import StageLLM
from vllm_omni.errors import CallAborted
from vllm_omni.messages.outputs import OmniRequestOutput
from vllm_omni.messages.report import NodeReport, Reporter
from vllm_omni.messages.span import Attribute, Span, SpanKind, new_span_id
from vllm_omni.messages.timeline import TaskNotes, TaskTimes, task_of

TRACEPARENT = "traceparent"
"""The header of W3C trace contexts: version-trace-span-flags."""


class EngineRun:
    """One run: its times for the request's latency, its span for traces, and what the engine has published.

    Args:
        stage: name of the stage.
        engine: name of the engine: the stage's, "talker/1" or "thinker/PD0".
        request_id: unique to the run.
        report: see ``StageEngine.run``.
    """

    def __init__(
        self,
        stage: str,
        engine: str,
        llm: StageLLM,
        request_id: str,
        params: SamplingParams,
        report: Reporter,
        *,
        generates_tokens: bool,
    ) -> None:
        self._stage = stage
        self._engine = engine
        self._llm = llm
        self._request_id = request_id
        self._params = params
        self._report = report
        self._generates_tokens = generates_tokens
        self._span_id = new_span_id()
        self._began_at = time.time()
        self._first_output_at = 0.0
        self._num_outputs = self._num_prompt_tokens = self._num_tokens = 0
        self._is_reported = False

    def headers(self, given: Mapping[str, str] | None) -> dict[str, str] | None:
        """The trace headers of the engine's request: its span is a child of this run's."""
        if not given or TRACEPARENT not in given:
            return None if given is None else dict(given)
        version, trace, _, flags = given[TRACEPARENT].split("-")[:4]
        return {**given, TRACEPARENT: f"{version}-{trace}-{self._span_id:016x}-{flags}"}

    def note_output(self, output: OmniRequestOutput) -> None:
        """Note an output; before the last one is passed on, the times of the run are reported."""
        self._first_output_at = self._first_output_at or time.time()
        self._num_outputs += 1
        self._num_prompt_tokens = len(output.prompt_token_ids or ()) or self._num_prompt_tokens
        self._num_tokens += sum(len(one.token_ids) for one in output.outputs)
        if output.finished:
            self._report_times(None)

    def end(self, error: BaseException | None) -> None:
        """Report what the engine has published, and the times if the run has ended early."""
        if not self._is_reported:
            self._report_times(error)
        if published := self._llm.published.pop(self._request_id, None):
            self._report(NodeReport(self._stage, published=published))

    def _report_times(self, error: BaseException | None) -> None:
        self._is_reported = True
        notes, now = self._llm.notes.pop(self._request_id, TaskNotes()), time.time()
        timelines = list(notes.timelines.values())
        task = None
        if self._generates_tokens:
            task = TaskTimes(task_of(self._params.extra_args), self._began_at, now, timelines, notes.token_times)
        attributes: dict[str, Attribute] = {"request": self._request_id, "outputs": self._num_outputs}
        if task is not None:
            attributes |= {"task": task.task.value, "prompt_tokens": self._num_prompt_tokens}
            attributes["output_tokens"] = self._num_tokens
        if self._first_output_at:
            attributes["first_output_ms"] = round(1000 * (self._first_output_at - self._began_at), 3)
        run = Span(
            self._stage,
            SpanKind.STAGE,
            self._began_at,
            now,
            self._engine,
            self._span_id,
            attributes=attributes,
            error="" if error is None else _text_of(error),
        )
        parts = [self._part(phase, now) for timeline in timelines for phase in phases_of(timeline, now)]
        self._report(NodeReport(self._stage, task=task, spans=[run, *parts]))

    def _part(self, phase: Phase, ended_at: float) -> Span:
        """What the engine did for a while; clocks of two processes may differ by a little."""
        began, ended = (min(max(at, self._began_at), ended_at) for at in (phase.begin, phase.end))
        name = phase.part.replace("_", " ")
        return Span(name, SpanKind.PART, began, ended, self._engine, new_span_id(), self._span_id)


def _text_of(error: BaseException) -> str:
    """Aborts have no text of their own."""
    return str(error) or (CallAborted.__name__ if isinstance(error, GeneratorExit) else type(error).__name__)
