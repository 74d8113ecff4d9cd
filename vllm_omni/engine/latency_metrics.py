"""Requests' latency by part and their SLO attainment, in each answer and on ``/metrics``."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.metrics_core import Metric
from vllm.config import VllmConfig

from vllm_omni.config.budgets import EPD_CONFIG, EPDConfig
from vllm_omni.engine.latency import break_down
from vllm_omni.engine.metrics import STAGE_LABEL
from vllm_omni.engine.request_record import RequestRecord
from vllm_omni.errors import CallAborted, InvalidRequest
from vllm_omni.messages.slo import Slo, SloReport, SloState

PART_LABEL = "part"
_SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.2, 0.3, 0.5, 0.75, 1, 1.5, 2, 3, 5, 7.5, 10, 20, 30, 60, 120)


@dataclass
class Counts:
    answers: int = 0
    with_slo: int = 0
    met: int = 0


class LatencyMetrics:
    """The metrics of one server, in a registry of its own (see ``StageMetrics``)."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()

        def histogram(name: str, what: str, *labels: str) -> Histogram:
            return Histogram(f"vllm_omni:{name}_seconds", what, labels, buckets=_SECONDS, registry=self._registry)

        def counter(name: str, what: str) -> Counter:
            return Counter(f"vllm_omni:slo_{name}", what, [STAGE_LABEL], registry=self._registry)

        parts = "Seconds of a request by part; the parts of a request sum to its latency in the stage."
        self.parts = histogram("latency_part", parts, STAGE_LABEL, PART_LABEL)
        self.read = histogram("read", "Seconds in which a prompt was tokenized and its media processed, with its wait.")
        ended = "Requests with an SLO that have ended; those aborted by their owner are not counted."
        self.requests = counter("requests", ended)
        self.met = counter("met", "Requests that met it: the TTFT, and at least 90% of the gaps between tokens.")
        strictly = "Requests that met the TTFT, and the TPOT at the gaps' 99th percentile."
        self.met_strictly = counter("met_strictly", strictly)
        self.missed_ttft = counter("missed_ttft", "Requests whose first token was late or missing.")
        self.missed_tpot = counter("missed_tpot", "Requests with more than 10% of their gaps late.")
        self.failed = counter("failed", "Requests that ended with an error.")

        # Since the last call of ``take``: by stage, seconds by part.
        self._sums: defaultdict[str, dict[str, float]] = defaultdict(dict)
        self._counts: defaultdict[str, Counts] = defaultdict(Counts)
        self.slo_totals: defaultdict[str, Counts] = defaultdict(Counts)  # since the start: by stage

    def collect(self) -> Iterable[Metric]:
        return self._registry.collect()

    def take(self) -> dict[str, str]:
        """Describe the latency of the requests that each stage has answered since the last call, for its log line."""
        sums, self._sums = self._sums, defaultdict(dict)
        counts, self._counts = self._counts, defaultdict(Counts)
        described = {}
        for stage, count in counts.items():
            said = []
            if count.answers:
                said.append(_describe_latency(sums[stage], count.answers))
            if count.with_slo:
                said.append(f"SLO met: {count.met} of {count.with_slo} reqs")
            described[stage] = ", ".join(said)
        return described

    def observe(self, stage: str, parts: Mapping[str, float]) -> None:
        sums = self._sums[stage]
        for part, seconds in parts.items():
            self.parts.labels(stage, part).observe(seconds)
            sums[part] = sums.get(part, 0.0) + seconds
        self._counts[stage].answers += 1

    def count(self, stage: str, report: SloReport, *, has_failed: bool = False) -> None:
        is_met = report.is_met and not has_failed
        for counts in (self._counts[stage], self.slo_totals[stage]):
            counts.with_slo += 1
            counts.met += is_met
        for counter, counted in (
            (self.requests, True),
            (self.met, is_met),
            (self.met_strictly, report.is_met_strictly and not has_failed),
            (self.missed_ttft, not report.is_ttft_met),
            (self.missed_tpot, not report.is_tpot_met),
            (self.failed, has_failed),
        ):
            counter.labels(stage).inc(int(counted))  # 0 creates the metric


class RequestLatency:
    """Measures one request, from the times that its stages have reported.

    Args:
        record: of the request, in which they are added up.
        first_stage: its latency counts from the request's arrival; that of other stages, from their first task.
        slos: by stage.
        continued: stages that continue what another stage has read -> that one: their SLO counts from there.
    """

    def __init__(
        self,
        record: RequestRecord,
        first_stage: str,
        slos: Mapping[str, Slo],
        metrics: LatencyMetrics,
        continued: Mapping[str, str] | None = None,
    ) -> None:
        self._record = record
        self._first_stage = first_stage
        self._slos = slos
        self._metrics = metrics
        self._continued = continued or {}

    def end(self) -> tuple[dict[str, dict[str, float]], dict[str, SloReport]]:
        """The request was answered: its latency by part, and its SLO attainment, both by stage."""
        parts = {
            stage: break_down(self._arrived_at(stage), times.ended_at, times.timelines)
            for stage, times in self._record.stage_times.items()
        }
        for stage, of_stage in parts.items():
            self._metrics.observe(stage, of_stage)
        reports = {stage: self._report(stage) for stage in self._slos if stage in self._record.stage_times}
        for stage, report in reports.items():
            self._metrics.count(stage, report)
        return parts, reports

    def fail(self, exc: BaseException) -> None:
        """The request ended with an error and missed its SLOs; its own errors and aborts are not counted."""
        if isinstance(exc, CallAborted | InvalidRequest):
            return
        for stage in self._slos:
            self._metrics.count(stage, self._report(stage), has_failed=True)

    def _arrived_at(self, stage: str) -> float:
        if stage == self._first_stage or stage not in self._record.stage_times:
            return self._record.arrived_at
        return self._record.stage_times[stage].began_at

    def _report(self, stage: str) -> SloReport:
        state = SloState(self._slos[stage], self._arrived_at(self._continued.get(stage, stage)))
        times = self._record.stage_times.get(stage)
        for index, num_tokens, at in times.token_times if times is not None else ():
            state.add_tokens(num_tokens, at, index)
        return state.report()


def default_slo(vllm_config: VllmConfig) -> Slo:
    """The latency targets that the deployment gives to requests without their own."""
    return EPDConfig.parse(vllm_config.additional_config.get(EPD_CONFIG) or {}).slo


def _describe_latency(sums: Mapping[str, float], number: int) -> str:
    """The mean latency of so many requests, and its parts.

    Args:
        sums: part -> seconds of all of them.
    """
    parts = {name: 1000 * seconds / number for name, seconds in sums.items()}
    means = ", ".join(f"{name.replace('_', ' ')} {ms:.1f}" for name, ms in parts.items() if ms >= 0.05)
    return f"Avg latency of {number} reqs: {sum(parts.values()):.1f} ms" + (f" ({means})" if means else "")
