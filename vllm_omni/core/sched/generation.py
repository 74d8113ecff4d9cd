"""``GenerationScheduler``: requests that their engine answers in one step (``OneShotExecutor``), such as a vocoder's.

From: vLLM-Omni (paper), section 3.3 (generation engines without token steps).
"""

from __future__ import annotations

from typing import Any

from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request

from vllm_omni.core.sched import one_token
from vllm_omni.relay.hub import process_hub


class GenerationScheduler(Scheduler):
    """Each step has the oldest requests, up to ``max_num_seqs``; each of them ends with the step."""

    running: list[Request]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.hub = process_hub(self.vllm_config.additional_config)

    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        return True  # there is none; upstream would preempt running requests

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        # Upstream plans token budgets and KV blocks here; these requests have neither.
        batch = list(self.requests.values()) if self.pause_state is PauseState.UNPAUSED else []
        output = SchedulerOutput(**one_token.start_step(self, batch[: self.max_num_running_reqs]))
        self._update_after_schedule(output)
        return output

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        one_token.release_dropped(self, self.hub, model_runner_output)
        failed = one_token.finish_failed(self, model_runner_output)
        return one_token.add_outputs(super().update_from_output(scheduler_output, model_runner_output), failed)
