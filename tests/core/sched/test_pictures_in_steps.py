"""Pictures in the steps of vLLM's scheduler, with real requests and pages, beside texts and within budgets."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import msgspec
import pytest
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from tests.core.sched.drive import make_scheduler
from tests.core.sched.random_requests import BLOCK_SIZE, Engine
from vllm_omni.config.budgets import EPD_CONFIG
from vllm_omni.core.sched.epd import EPDScheduler
from vllm_omni.core.sched.stream import StreamScheduler
from vllm_omni.messages.canvas_step import PICTURE
from vllm_omni.messages.stage_step import STAGE_ARGS, StreamSchedulerOutput
from vllm_omni.unified.plan import Guidance, ImagePlan

NUM_STEPS = 4
END = 1  # the token with which a picture ends
PROMPT = 6
CANVAS = 18  # of a grid of 4 by 4
PLAN = ImagePlan((4, 4), NUM_STEPS, guidance=Guidance(1.0))
GUIDED = ImagePlan((4, 4), NUM_STEPS, guidance=Guidance(2.0, 1.0, (0.0, 1.0)), without_text=((0, 3),))
ENGINE = Engine(num_blocks=40, max_num_seqs=8, max_num_batched_tokens=64)


def make_request(request_id: str, plan: ImagePlan | None = None, max_tokens: int = 100) -> Request:
    args = None if plan is None else {STAGE_ARGS: {PICTURE: msgspec.to_builtins(plan)}}
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, stop_token_ids=[END], extra_args=args)
    hasher = get_request_block_hasher(BLOCK_SIZE, sha256)
    return Request(request_id, list(range(PROMPT)), params, None, block_hasher=hasher)


class Runner:
    """The runner's half of an iteration: texts get a token, and a picture its last one when its steps are done."""

    def __init__(self, scheduler: StreamScheduler) -> None:
        self._scheduler = scheduler
        self._computed: dict[str, set[str]] = {}  # branches of the last denoise step, by picture

    def execute(self, output: SchedulerOutput) -> None:
        canvases = output.canvases if isinstance(output, StreamSchedulerOutput) else {}
        sampled: dict[str, list[int]] = {one: [] for one in output.num_scheduled_tokens}
        for request_id in output.num_scheduled_tokens:
            step = canvases.get(request_id)
            if step is None:
                if not self._scheduler.requests[request_id].is_prefill_chunk:
                    sampled[request_id] = [7]
            elif step.together_with and step.step + 1 == NUM_STEPS:
                computed = self._computed.setdefault(step.request_id, set())
                computed.add(step.branch)
                if computed == set(step.together_with):
                    sampled[step.request_id] = [END]  # whether or not the request is in this iteration
        rows = {one: index for index, one in enumerate(sampled)}
        made = ModelRunnerOutput(list(sampled), rows, sampled_token_ids=list(sampled.values()))
        self._scheduler.update_from_output(output, made)


def run(scheduler: StreamScheduler, requests: Sequence[Request], max_iterations: int = 200) -> list[dict[str, int]]:
    """Iterate until the pictures have ended; returns the tokens of each iteration, by request."""
    pictures = [request.request_id for request in requests if request.sampling_params.extra_args]  # type: ignore[union-attr]
    for request in requests:
        scheduler.add_request(request)
    steps, runner = [], Runner(scheduler)
    while any(one in scheduler.requests for one in pictures):
        assert len(steps) < max_iterations, "the pictures do not end"
        output = scheduler.schedule()
        steps.append(dict(output.num_scheduled_tokens))
        runner.execute(output)
    return steps


def make_epd(**epd: Any) -> EPDScheduler:
    return make_scheduler(EPDScheduler, ENGINE, {EPD_CONFIG: epd})


def test_each_denoise_step_has_all_tokens_of_the_canvas_and_a_text_its_own() -> None:
    scheduler = make_scheduler(StreamScheduler, ENGINE)
    steps = run(scheduler, [make_request("text"), make_request("picture", PLAN)])
    assert steps[0] == {"text": PROMPT, "picture": PROMPT - BLOCK_SIZE}, "their prompts are equal"
    assert steps[1:] == [{"text": 1, "picture": CANVAS}] * NUM_STEPS
    scheduler.finish_requests("text", RequestStatus.FINISHED_ABORTED)
    assert scheduler.kv_cache_manager.usage == 0.0


def test_beside_a_text_a_budget_without_room_defers_a_canvas_for_patience_iterations() -> None:
    scheduler = make_epd(token_budget=8, image_budget=64, patience=3, min_prefill_tokens=1)
    steps = run(scheduler, [make_request("text"), make_request("picture", PLAN)])
    drawn = [index for index, one in enumerate(steps) if one.get("picture", 0) >= CANVAS]
    assert [after - now for now, after in pairwise(drawn)] == [4] * (NUM_STEPS - 1)
    written = next(index for index, one in enumerate(steps) if one.get("text") == 1)
    assert all(one["text"] == 1 for one in steps[written:]), "each iteration has the text's token"


def test_without_texts_a_budget_without_room_defers_nothing() -> None:
    scheduler = make_epd(token_budget=8, image_budget=64, patience=3, min_prefill_tokens=1)
    steps = run(scheduler, [make_request("picture", PLAN)])
    assert [one["picture"] for one in steps[-NUM_STEPS:]] == [CANVAS] * NUM_STEPS
    assert len(steps) == 1 + NUM_STEPS


@pytest.mark.parametrize("max_tokens", [18, 20, 36, 64])
def test_branches_of_a_step_need_no_common_iteration(max_tokens: int) -> None:
    engine = Engine(num_blocks=40, max_num_seqs=8, max_num_batched_tokens=max_tokens)
    scheduler = make_scheduler(StreamScheduler, engine)
    steps = run(scheduler, [make_request("text"), make_request("picture", GUIDED), make_request("other", GUIDED)])
    for name in ("picture", "other"):
        for branch in ("", "#text"):
            canvases = [one[f"{name}{branch}"] for one in steps if one.get(f"{name}{branch}", 0) >= CANVAS]
            assert canvases == [CANVAS] * NUM_STEPS, name
    assert scheduler.requests.keys() == {"text"}
    assert sum(one.get("text", 0) for one in steps) > PROMPT, "the text goes on"


def test_a_picture_uses_the_prefix_of_an_earlier_one() -> None:
    scheduler = make_scheduler(StreamScheduler, ENGINE)
    first = run(scheduler, [make_request("picture", PLAN)])
    second = run(scheduler, [make_request("again", PLAN)])
    assert first[0]["picture"] == PROMPT
    assert second[0]["again"] == PROMPT - PROMPT // BLOCK_SIZE * BLOCK_SIZE
    pool = scheduler.kv_cache_manager.block_pool
    assert len(pool.cached_block_hash_to_block) == PROMPT // BLOCK_SIZE, "pages of a canvas are cached"
