"""The real scheduler with pictures that are written as tokens, driven as the engine core drives it."""

import random
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
from tests.fuzz import seeds
from vllm_omni.core.sched.stream import StreamScheduler
from vllm_omni.messages.stage_step import STAGE_ARGS, StreamSchedulerOutput
from vllm_omni.messages.token_step import TOKEN_PICTURE, TokenStep
from vllm_omni.unified.tokens import TokenPlan

NUM_TOKENS = 6  # of a picture
UNCONDITIONAL = (1, 2, 2, 2, 3)
MAX_STEPS = 3000


def make_request(request_id: str, plan: TokenPlan | None, num_prompt: int = 5, **fields: Any) -> Request:
    args = {STAGE_ARGS: {TOKEN_PICTURE: msgspec.to_builtins(plan)}} if plan is not None else None
    params = SamplingParams(max_tokens=9, ignore_eos=True, extra_args=args)
    hasher = get_request_block_hasher(BLOCK_SIZE, sha256)
    return Request(request_id, [1, *range(4, num_prompt + 2), 3], params, None, block_hasher=hasher, **fields)


def guided_plan(**fields: Any) -> TokenPlan:
    return TokenPlan(**{"num_tokens": NUM_TOKENS, "scale": 5.0, "unconditional": UNCONDITIONAL, **fields})


class World:
    """A scheduler, and a runner without a model: a token is a function of its request and its place."""

    def __init__(self, **engine: Any) -> None:
        self.scheduler = make_scheduler(StreamScheduler, Engine(**engine))
        self.tokens: dict[str, list[int]] = {}  # that the runner knows, by request
        self.answers: dict[str, list[int]] = {}  # that were reported
        self.num_alone = 0
        self.num_preemptions = 0

    def submit(self, *requests: Request) -> None:
        for request in requests:
            self.scheduler.add_request(request)

    def step(self) -> TokenStep:
        output = self.scheduler.schedule()
        made = self.execute(output)
        for outputs in self.scheduler.update_from_output(output, made).values():
            for one in outputs.outputs:
                self.answers.setdefault(one.request_id, []).extend(one.new_token_ids)
        self.check_pairs()
        return step_of(output)

    def check_pairs(self) -> None:
        """Both of a pair have the same reply."""
        requests = self.scheduler.requests
        for request_id in [one for one in requests if one.endswith("#unconditional")]:
            own = requests[request_id.partition("#")[0]]
            assert list(requests[request_id].output_token_ids) == list(own.output_token_ids)

    def execute(self, output: SchedulerOutput) -> ModelRunnerOutput:
        step = step_of(output)
        self.num_alone += len(step.alone)
        self.num_preemptions += len(output.preempted_req_ids or ())
        cached = output.scheduled_cached_reqs
        starts = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        for new in output.scheduled_new_reqs:
            starts[new.req_id] = new.num_computed_tokens
            self.tokens[new.req_id] = list(new.prompt_token_ids or ())
        owns = {partner: own for own, partner in step.sampled.items() if partner is not None}
        sampled: list[list[int]] = []
        for request_id, num_tokens in output.num_scheduled_tokens.items():
            known = self.tokens[request_id]
            end = starts[request_id] + num_tokens
            assert end <= len(known), "no token is computed before it is known"
            if end < len(known) or request_id in step.alone:
                assert request_id not in {*step.sampled, *owns}
                sampled.append([])
                continue
            own = owns.get(request_id, request_id)
            is_picture = request_id.startswith(("guided", "plain"))
            assert not is_picture or own in step.sampled, "a picture is sampled, or alone"
            sampled.append([token(own, len(self.answers.get(own, ())))])
        for request_id, tokens in zip(output.num_scheduled_tokens, sampled, strict=True):
            self.tokens[request_id] += tokens
        ids = list(output.num_scheduled_tokens)
        return ModelRunnerOutput(ids, {one: row for row, one in enumerate(ids)}, sampled)

    def run(self) -> None:
        """Until all requests have ended."""
        for _ in range(MAX_STEPS):
            if not self.scheduler.requests:
                break
            self.step()
        assert not self.scheduler.requests, "requests wait for ever"
        self.check_idle()

    def check_idle(self) -> None:
        assert not self.scheduler.token_pictures
        assert not self.scheduler.running and not self.scheduler.waiting
        assert self.scheduler.kv_cache_manager.usage == 0.0


def token(request_id: str, index: int) -> int:
    """Of a reply; an id of ``drive.make_config``'s vocabulary."""
    return 5 + (sum(request_id.encode()) + 3 * index) % 11


def step_of(output: SchedulerOutput) -> TokenStep:
    return output.token_step if isinstance(output, StreamSchedulerOutput) else TokenStep()


PARTNER = "guided#unconditional"


def test_a_picture_and_its_partner_get_each_token_together() -> None:
    world = World()
    world.submit(make_request("guided", guided_plan()))
    steps = [world.step() for _ in range(NUM_TOKENS)]
    assert steps == [TokenStep({"guided": PARTNER}, [])] * NUM_TOKENS
    assert len(world.answers["guided"]) == NUM_TOKENS and PARTNER not in world.answers
    world.check_idle()


def test_a_picture_without_guidance_has_no_partner() -> None:
    world = World()
    world.submit(make_request("plain", guided_plan(scale=1.0)))
    assert list(world.scheduler.requests) == ["plain"]
    assert world.step() == TokenStep({"plain": None}, [])
    world.run()
    assert len(world.answers["plain"]) == NUM_TOKENS


def test_the_partner_reads_the_unconditional_prompt() -> None:
    world = World()
    world.submit(make_request("guided", guided_plan(), priority=3, cache_salt="salt"))
    partner = world.scheduler.requests[PARTNER]
    assert partner.prompt_token_ids == list(UNCONDITIONAL)
    assert (partner.priority, partner.cache_salt) == (3, "salt")


def test_a_plan_s_seed_is_that_of_the_sampling() -> None:
    world = World()
    request = make_request("guided", guided_plan(seed=7))
    assert request.sampling_params is not None and request.sampling_params.sampling_type.name == "RANDOM"
    world.submit(request)
    assert request.sampling_params.seed == 7 and request.sampling_params.sampling_type.name == "RANDOM_SEED"


def test_one_that_is_complete_before_its_partner_gets_no_token() -> None:
    """The step has room for one prompt and a part of the other."""
    world = World(max_num_batched_tokens=8)
    world.submit(make_request("guided", guided_plan()))
    assert world.step() == TokenStep({}, ["guided"])
    assert world.step() == TokenStep({"guided": PARTNER}, [])
    world.run()
    assert len(world.answers["guided"]) == NUM_TOKENS


def test_one_whose_partner_is_not_admitted_computes_nothing() -> None:
    world = World(max_num_seqs=2)
    world.submit(make_request("text", None), make_request("guided", guided_plan()))
    assert world.step() == TokenStep({}, ["guided"])  # the text has the other slot
    for _ in range(8):
        output = world.scheduler.schedule()
        assert list(output.num_scheduled_tokens) == ["text"]
        world.scheduler.update_from_output(output, world.execute(output))
    world.run()
    assert len(world.answers["guided"]) == NUM_TOKENS


@pytest.mark.parametrize("num_steps", [0, 1, 3])
def test_an_abort_ends_the_partner(num_steps: int) -> None:
    world = World()
    world.submit(make_request("guided", guided_plan()), make_request("text", None))
    for _ in range(num_steps):
        world.step()
    world.scheduler.finish_requests("guided", RequestStatus.FINISHED_ABORTED)
    assert list(world.scheduler.requests) == ["text"]
    world.run()


@pytest.mark.parametrize("seed", seeds(300))
def test_random_requests_end_with_all_of_their_tokens(seed: int) -> None:
    rng = random.Random(seed)
    longest = rng.choice([5, 11])
    blocks_of_two = 2 * -(-(longest + NUM_TOKENS) // BLOCK_SIZE)
    world = World(
        num_blocks=1 + blocks_of_two + rng.choice([0, 1, 4, 50]),
        max_num_seqs=rng.choice([2, 3, 8]),
        max_num_batched_tokens=rng.choice([8, 9, 16, 64]),
        prefix_caching=rng.random() < 0.5,
        policy=rng.choice(["fcfs", "fcfs", "priority"]),
    )
    requests = {}
    for number in range(rng.randint(2, 9)):
        kind = rng.choice(["guided", "guided", "plain", "text"])
        plan = {"guided": guided_plan(), "plain": guided_plan(scale=1.0), "text": None}[kind]
        made = make_request(
            f"{kind}{number}", plan, rng.randint(3, longest), priority=rng.randint(0, 1), arrival_time=float(number)
        )
        requests[made.request_id] = made
    waiting, aborted = list(requests.values()), set()
    while waiting:
        if rng.random() < 0.5:
            world.submit(waiting.pop(0))
        if rng.random() < 0.1 and (alive := [one for one in world.scheduler.requests if "#" not in one]):
            aborted.add(one := rng.choice(alive))
            world.scheduler.finish_requests(one, RequestStatus.FINISHED_ABORTED)
        world.step()
    world.run()
    for request_id in requests.keys() - aborted:
        num_tokens = 9 if request_id.startswith("text") else NUM_TOKENS
        assert world.answers[request_id] == [token(request_id, index) for index in range(num_tokens)]
    assert not any("#" in request_id for request_id in world.answers)
