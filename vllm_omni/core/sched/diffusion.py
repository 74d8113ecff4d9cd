"""``DiffusionScheduler``: first in, first out, for engines whose requests have no token steps.

From: vLLM-Omni design document, section 7.
"""

from __future__ import annotations

from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import RequestStatus


class DiffusionScheduler(Scheduler):
    """Admits waiting requests in the order of their arrival, at most ``max_num_seqs`` in a step.

    Every scheduled request is answered by the step that schedules it (``OneShotExecutor``) and ends there by its
    ``max_tokens`` of 1. Adding, aborting and finishing are upstream's.
    """

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        # Upstream plans token budgets, KV blocks and encoder inputs here; none of them exists for these requests.
        new_requests = []
        is_paused = self.pause_state is not PauseState.UNPAUSED
        while self.waiting and not is_paused and len(self.running) < self.max_num_running_reqs:
            request = self.waiting.pop_request()
            request.status = RequestStatus.RUNNING
            self.running.append(request)
            new_requests.append(NewRequestData.from_request(request, block_ids=()))
        output = SchedulerOutput(
            scheduled_new_reqs=new_requests,
            scheduled_cached_reqs=CachedRequestData.make_empty(),
            num_scheduled_tokens={request.req_id: 1 for request in new_requests},
            total_num_scheduled_tokens=len(new_requests),
            scheduled_spec_decode_tokens={},
            scheduled_encoder_inputs={},
            finished_req_ids=self.finished_req_ids,
            free_encoder_mm_hashes=[],
        )
        self._update_after_schedule(output)
        return output
