"""``Autoscaling``: proposes how many replicas the stages should have, and starts and ends them if told to."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress

from vllm_omni.deploy.autoscale import Autoscaler, Bounds, Load, Proposal
from vllm_omni.engine.latency_metrics import LatencyMetrics
from vllm_omni.engine.metrics import METRICS
from vllm_omni.engine.scaling import Scaling
from vllm_omni.engine.stage import StageEngine

logger = logging.getLogger(__name__)

PERIOD_S = 1.0


class Autoscaling:
    """Looks at the stages that can be scaled once a second.

    Args:
        is_automatic: what it proposes is done; otherwise logged.

    Attributes:
        proposals: by stage, while what it has is not what it should have.
    """

    def __init__(
        self,
        scaling: Scaling,
        engines_of: Callable[[str], list[StageEngine]],
        latency: LatencyMetrics,
        *,
        is_automatic: bool,
    ) -> None:
        stages = {one.stage: Bounds(one.target, one.max_replicas) for one in scaling.report()}
        self._autoscaler = Autoscaler(stages)
        self._scaling = scaling
        self._engines_of = engines_of
        self._latency = latency
        self.is_automatic = is_automatic
        self.proposals: dict[str, Proposal] = {}
        self._counted = dict.fromkeys(stages, (0, 0))  # requests with an SLO that have ended, and that met it

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Look inside the block."""
        task = asyncio.create_task(self._run(), name="autoscaling")
        try:
            yield
        finally:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(PERIOD_S)
            try:
                self.look()
            except Exception:  # the next look may succeed
                logger.exception("no replicas are proposed")

    def look(self) -> None:
        """Propose, and scale if it is automatic."""
        for stage in self._scaling.report():
            proposal = self._autoscaler.propose(stage.stage, self._load_of(stage.stage, stage.replicas, stage.target))
            if proposal is None:
                self.proposals.pop(stage.stage, None)
                continue
            is_new = self.proposals.get(stage.stage, Proposal(0, "")).replicas != proposal.replicas
            self.proposals[stage.stage] = proposal
            if is_new:
                verb = "scaled" if self.is_automatic else "should be scaled"
                said = "stage %s: %s from %d to %d replicas: %s"
                logger.info(said, stage.stage, verb, stage.replicas, *proposal)
            if self.is_automatic:
                self._scaling.set_target(stage.stage, proposal.replicas)

    def _load_of(self, name: str, replicas: int, target: int) -> Load:
        engines = self._engines_of(name)
        totals = [METRICS.totals(engine.vllm_config) for engine in engines]
        counts = self._latency.slo_totals[name]
        with_slo, met = counts.with_slo - self._counted[name][0], counts.met - self._counted[name][1]
        self._counted[name] = counts.with_slo, counts.met
        return Load(
            replicas,
            target,
            engines[0].vllm_config.scheduler_config.max_num_seqs,
            sum(engine.num_requests for engine in engines),
            sum(one.num_waiting for one in totals if one is not None),
            max(engine.start_s for engine in engines),
            met / with_slo if with_slo else None,
        )
