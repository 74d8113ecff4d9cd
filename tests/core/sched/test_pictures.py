"""Pictures in the real scheduler, driven as the engine core drives it: random requests, few pages and slots, aborts."""

import random
from collections import defaultdict
from dataclasses import dataclass, field

import msgspec
import pytest
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from tests.core.sched.drive import assert_is_idle, make_scheduler
from tests.core.sched.random_requests import BLOCK_SIZE, Engine
from tests.core.sched.test_canvases import (
    ALWAYS,
    CANVAS,
    LAST_TEXT,
    NUM_PROMPT,
    expected_steps,
    make_image,
    make_plan,
    random_plan,
)
from tests.fuzz import seeds
from vllm_omni.core.sched.stream import StreamScheduler
from vllm_omni.messages.canvas_step import PICTURE
from vllm_omni.messages.stage_step import STAGE_ARGS, StreamSchedulerOutput
from vllm_omni.unified.plan import Guidance, ImagePlan

TEXT, END_OF_TEXT, END_OF_PICTURE = 4, 3, 7
MAX_STEPS = 2000


def make_request(
    request_id: str, plan: ImagePlan | None, engine: Engine, *, max_tokens: int, has_image: bool
) -> Request:
    args = {STAGE_ARGS: {PICTURE: msgspec.to_builtins(plan)}} if plan is not None else None
    params = SamplingParams(max_tokens=max_tokens, stop_token_ids=[END_OF_PICTURE], extra_args=args)
    return Request(
        request_id,
        list(range(10, 10 + NUM_PROMPT)),
        params,
        None,
        mm_features=[make_image(request_id, 0, LAST_TEXT - 2)] if has_image else [],
        block_hasher=get_request_block_hasher(BLOCK_SIZE, sha256) if engine.prefix_caching else None,
    )


@dataclass
class World:
    """A scheduler, and what a runner makes of its steps: texts of one token repeated, and pictures that end."""

    engine: Engine
    scheduler: StreamScheduler = field(init=False)
    plans: dict[str, ImagePlan | None] = field(default_factory=dict)
    seen: dict[str, list[tuple[int, str]]] = field(default_factory=lambda: defaultdict(list))  # canvases, in order
    tokens: dict[str, list[int]] = field(default_factory=lambda: defaultdict(list))
    finished: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.scheduler = make_scheduler(StreamScheduler, self.engine)
        self.scheduler.canvases._has_spans = True  # the model is one of texts

    def submit(self, request_id: str, plan: ImagePlan | None, *, max_tokens: int = 3, has_image: bool = False) -> None:
        self.plans[request_id] = plan
        request = make_request(request_id, plan, self.engine, max_tokens=max_tokens, has_image=has_image)
        self.scheduler.add_request(request)

    def step(self, *aborted: str) -> SchedulerOutput:
        """One step, during which requests are aborted."""
        output = self.scheduler.schedule()
        self.scheduler.finish_requests(aborted, RequestStatus.FINISHED_ABORTED)
        sampled = self._execute(output)
        ids = list(sampled)
        runner_output = ModelRunnerOutput(
            req_ids=ids,
            req_id_to_index={one: index for index, one in enumerate(ids)},
            sampled_token_ids=list(sampled.values()),
        )
        for outputs in self.scheduler.update_from_output(output, runner_output).values():
            for one in outputs.outputs:
                self.tokens[one.request_id] += one.new_token_ids
                if one.finish_reason is not None:
                    self.finished[one.request_id] = str(one.finish_reason)
        assert all(request.status == RequestStatus.RUNNING for request in self.scheduler.running)
        return output

    def _execute(self, output: SchedulerOutput) -> dict[str, list[int]]:
        steps = output.canvases if isinstance(output, StreamSchedulerOutput) else {}
        sampled: dict[str, list[int]] = {}
        for request_id in output.num_scheduled_tokens:
            request = self.scheduler.requests.get(request_id)
            is_text = request_id not in steps and request is not None and not request.is_prefill_chunk
            sampled[request_id] = [TEXT] if is_text else []
        for step in steps.values():
            if step.together_with:
                self.seen[step.request_id].append((step.step, step.branch))
        for request_id in {step.request_id for step in steps.values()}:
            plan = self.plans[request_id]
            if plan is not None and len(self.seen[request_id]) == len(expected_steps(plan)):
                sampled[request_id] = [END_OF_PICTURE]  # maybe in the step of another branch
        return sampled

    def run(self, *aborts: tuple[int, str]) -> None:
        """Until nothing is left."""
        for number in range(MAX_STEPS):
            if not self.scheduler.requests:
                assert not self.scheduler.canvases
                assert_is_idle(self.scheduler)
                return
            self.step(*(name for at, name in aborts if at == number))
        raise AssertionError(f"left: {list(self.scheduler.requests)}")

    def check(self, request_id: str) -> None:
        plan = self.plans[request_id]
        assert request_id in self.finished
        if plan is None:
            return
        assert sorted(self.seen[request_id]) == expected_steps(plan)
        *text, last = self.tokens[request_id]
        assert last == END_OF_PICTURE
        if plan.end_of_text is not None:
            assert text.pop() == END_OF_TEXT
        assert set(text) <= {TEXT}


def test_branches_that_end_together_leave_the_running_requests() -> None:
    world = World(Engine())
    plan = make_plan(num_steps=4, guidance=Guidance(interval=(0.5, 1.0)))
    world.submit("a", plan)
    for _ in range(4):
        world.step()
    assert [request.request_id for request in world.scheduler.running] == ["a"]
    world.run()
    world.check("a")


def test_a_text_that_never_ends_leaves_room_for_its_picture() -> None:
    world = World(Engine(max_num_batched_tokens=128))
    world.submit("a", make_plan(end_of_text=END_OF_TEXT), max_tokens=1000)
    world.run()
    world.check("a")
    assert NUM_PROMPT + len(world.tokens["a"]) - 1 + CANVAS + 1 == world.scheduler.max_model_len


def test_a_picture_needs_one_slot_at_a_time() -> None:
    """Branches that have been computed release theirs for those that they wait for."""
    world = World(Engine(max_num_seqs=1, max_num_batched_tokens=16))
    for name in "ab":
        world.submit(name, make_plan())
    world.submit("c", None)
    world.run()
    for name in "abc":
        world.check(name)


def test_an_abort_of_any_step_leaves_nothing_and_other_pictures_end() -> None:
    for number in range(12):
        world = World(Engine(max_num_batched_tokens=16))
        for name in "ab":
            world.submit(name, make_plan(num_steps=2, guidance=ALWAYS))
        world.run((number, "a"))
        world.check("b")


def check_random(seed: int) -> None:
    rng = random.Random(seed)
    engine = Engine(
        num_blocks=rng.choice((14, 20, 40, 200)),
        max_num_seqs=rng.choice((1, 2, 3, 8)),
        max_num_batched_tokens=rng.choice((16, 24, 32, 64)),
        prefix_caching=rng.random() < 0.5,
    )
    world = World(engine)
    for number in range(rng.randint(1, 6)):
        plan = random_plan(rng) if rng.random() < 0.7 else None
        if plan is not None and rng.random() < 0.3:
            plan = msgspec.structs.replace(plan, end_of_text=END_OF_TEXT)
        world.submit(str(number), plan, max_tokens=rng.randint(1, 6), has_image=rng.random() < 0.5)
        for _ in range(rng.randrange(8)):
            world.step()
    aborts = [(rng.randrange(40), name) for name in world.plans if rng.random() < 0.2]
    world.run(*aborts)
    for name in world.plans.keys() - {name for _, name in aborts}:
        world.check(name)


@pytest.mark.fuzz
@pytest.mark.timeout(0)
def test_random_pictures_and_texts_end_whatever_the_engine_has_room_for() -> None:
    for seed in seeds(200):
        try:
            check_random(seed)
        except Exception as exc:
            raise AssertionError(f"FUZZ_SEED={seed}: {exc!r}") from exc
