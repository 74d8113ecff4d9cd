"""The router by itself: assignments, time-outs and terminations, without engines."""

import dataclasses
import heapq
import random
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, get_args

import pytest

from tests.fuzz import seeds
from vllm_omni.config.epd import KINDS, Balance, EPDDeployment, Tasks
from vllm_omni.epd.assignment import RequestSize
from vllm_omni.epd.held_pages import PAGE_TOKENS
from vllm_omni.epd.router import MAX_TERMINATIONS, Assignment, Recovery, RequestState, Router
from vllm_omni.messages.token_names import TokenNames

SIZE = RequestSize(num_embeds=50, num_prompt_tokens=100, num_reply_tokens=10)
DEPLOYMENT = EPDDeployment(admission_timeout_s=10, recovery_timeout_s=30)


class World:
    """Instances that run or do not, and a clock."""

    def __init__(self, mix: str, deployment: EPDDeployment = DEPLOYMENT, *, has_pool: bool = False) -> None:
        self.now = 0.0
        self.down: set[str] = set()
        kinds = {f"{kind}{number}": Tasks[kind] for number, kind in enumerate(mix.split())}
        self.router = Router(
            kinds, deployment, lambda name: name not in self.down, clock=lambda: self.now, has_pool=has_pool
        )

    def assign(self, request: RequestState) -> Assignment:
        assignment = self.router.assign(request)
        assert assignment is not None
        return assignment


def test_a_request_passes_through_its_tasks() -> None:
    world, request = World("E P D"), RequestState(SIZE, todo=Tasks.EPD)
    passed = []
    while request.todo:
        assignment = world.assign(request)
        assert world.router.statistics().work[assignment.instance] == SIZE.work(assignment.tasks, None)
        world.router.complete(request, assignment)
        world.router.release(assignment)
        passed.append((assignment.instance, assignment.tasks))
    assert passed == [("E0", Tasks.E), ("P1", Tasks.P), ("D2", Tasks.D)]
    statistics = world.router.statistics()
    assert not any(statistics.work.values())
    assert (statistics.num_tasks, statistics.num_redone) == ({"E0": 1, "P1": 1, "D2": 1}, 0)


def test_the_instance_with_least_work_gets_the_next_request() -> None:
    world = World("PD PD")
    first = world.assign(RequestState(RequestSize(0, 500, 10)))
    second = world.assign(RequestState(RequestSize(0, 100, 10)))
    third = world.assign(RequestState(RequestSize(0, 100, 10)))
    assert first.instance != second.instance == third.instance


def test_a_request_that_does_not_start_in_time_moves_to_an_instance_with_no_more_work() -> None:
    world, request = World("PD PD"), RequestState(SIZE)
    first = world.assign(request)
    assert world.router.may_withdraw(request, first)  # the other one is idle
    others = [world.assign(RequestState(SIZE)) for _ in range(2)]
    (busy,) = [one for one in others if one.instance != first.instance]
    assert world.router.statistics().work[first.instance] == 2 * world.router.statistics().work[busy.instance]
    assert world.router.may_withdraw(request, first)  # equal work afterwards
    world.router.release(next(one for one in others if one is not busy))
    assert not world.router.may_withdraw(request, first)  # it would be moved back in turn
    world.router.release(busy)
    world.router.withdraw(request, first)
    world.router.release(first)
    again = world.assign(request)
    assert again.instance != first.instance
    assert world.router.statistics().num_redone == 1
    # When no other instance is left, the one that was avoided gets it.
    world.router.withdraw(request, again)
    world.down.add(again.instance)
    assert world.assign(request).instance == first.instance
    world.router.complete(request, again)
    assert not request.avoided


def test_a_request_waits_for_an_instance_until_its_deadline() -> None:
    world, request = World("E PD"), RequestState(SIZE)
    world.down.add("PD1")
    assert world.router.assign(request) is None
    assert world.router.recovery_left_s(request) == 30
    world.now = 20
    assert world.router.assign(request) is None
    assert world.router.recovery_left_s(request) == 10
    world.down.clear()
    assert world.assign(request).instance == "PD1"
    world.down.add("PD1")  # another wait has another deadline
    assert world.router.assign(request) is None
    assert world.router.recovery_left_s(request) == 30
    world.now = 60
    assert world.router.recovery_left_s(request) == 0


def test_what_happens_when_an_instance_terminates() -> None:
    router = World("PD PD").router
    for given, is_resumable, recovery in [
        (0, True, Recovery.REPEAT),
        (0, False, Recovery.REPEAT),  # the user has nothing yet, so any reply will do
        (5, True, Recovery.RESUME),
        (5, False, Recovery.NOT_RESUMABLE),
    ]:
        request = RequestState(SIZE, todo=Tasks.D, is_resumable=is_resumable, num_given=given)
        assert router.recover(request) is recovery, (given, is_resumable)
        # A resumed reply has another prompt, so its KV cache is computed anew.
        assert request.todo == (Tasks.PD if recovery is Recovery.RESUME else Tasks.D)
    assert router.statistics().num_redone == 3


def test_a_request_that_terminates_instances_is_failed() -> None:
    router, request = World("PD").router, RequestState(SIZE, is_resumable=True)
    found = [router.recover(request) for _ in range(MAX_TERMINATIONS + 1)]
    assert found == [Recovery.REPEAT] * MAX_TERMINATIONS + [Recovery.TOO_MANY]


def test_an_instance_that_is_left_out_gets_no_new_tasks() -> None:
    world = World("PD PD")
    world.router.kinds = {"PD1": Tasks.PD}
    assert [world.assign(RequestState(SIZE)).instance for _ in range(2)] == ["PD1", "PD1"]


# -- pages that instances hold -----------------------------------------------------------------------------------------

AFFINITY = dataclasses.replace(DEPLOYMENT, balance="affinity")


def turn_of(conversation: int, num_tokens: int, **more: Any) -> RequestState:
    """A prompt that begins as the conversation's other ones do."""
    names = TokenNames([conversation, *range(1, num_tokens)])
    return RequestState(RequestSize(0, num_tokens, 10), names, **more)


def run(world: World, request: RequestState, num_found: int = 0) -> Assignment:
    """Assign, compute, and end."""
    assignment = world.assign(request)
    world.router.note_found(request, assignment, num_found)
    world.router.release(assignment)
    return assignment


def test_a_conversation_returns_to_the_instance_that_holds_its_pages() -> None:
    world = World("PD PD PD", AFFINITY)
    homes = [run(world, turn_of(number, 640)).instance for number in range(9)]
    assert Counter(homes) == dict.fromkeys(world.router.kinds, 3)
    for num_tokens in (1280, 1920):
        assert [run(world, turn_of(number, num_tokens)).instance for number in range(9)] == homes
    assert world.router.statistics().num_chosen == {"load": 9, "pages": 18}


def test_only_what_is_not_held_counts_as_work() -> None:
    world = World("PD PD", AFFINITY)
    run(world, turn_of(0, 640))
    assignment = world.assign(turn_of(0, 1000))
    assert world.router.statistics().work[assignment.instance] == 1000 - 640 + 10
    world.router.release(assignment)
    assert not any(world.router.statistics().work.values())


def test_a_prefix_that_all_ask_for_spreads_to_all_instances() -> None:
    """An instance that holds it gets requests until more work waits there than the prefix would be elsewhere."""
    world = World("PD PD PD PD", AFFINITY)
    homes = Counter(world.assign(turn_of(0, 640)).instance for _ in range(400))
    assert set(homes) == set(world.router.kinds)
    work = world.router.statistics().work.values()
    assert max(work) - min(work) <= 640 + 10


def test_without_a_common_prefix_work_is_balanced() -> None:
    world = World("PD PD PD PD", AFFINITY)
    homes = Counter(world.assign(turn_of(number, 640)).instance for number in range(400))
    assert Counter(homes.values()) == {100: 4}


def test_pages_of_a_reply_are_held_for_the_next_turn() -> None:
    world, request = World("PD PD", AFFINITY), turn_of(0, 640)
    assignment = world.assign(request)
    world.router.note_reply(request, assignment, range(640, 960))
    world.router.release(assignment)
    again = world.assign(turn_of(0, 1280))
    assert again.instance == assignment.instance
    assert world.router.statistics().work[again.instance] == 1280 - 960 + 10


def test_pages_of_an_instance_that_terminated_are_elsewhere_only_with_a_pool() -> None:
    for has_pool in (False, True):
        world = World("PD PD", AFFINITY, has_pool=has_pool)
        first = run(world, turn_of(0, 640))
        world.down.add(first.instance)
        world.router.forget_pages(first.instance)
        second = world.assign(turn_of(0, 640))
        assert second.instance != first.instance
        expected = 640 * (0.1 if has_pool else 1) + 10
        assert world.router.statistics().work[second.instance] == pytest.approx(expected, abs=1)


def test_a_pool_makes_instances_more_alike() -> None:
    """What the other one would read is hardly more than nothing: less work decides."""
    for has_pool in (False, True):
        world = World("PD PD", AFFINITY, has_pool=has_pool)
        home = run(world, turn_of(0, 640)).instance
        busy = world.assign(turn_of(0, 640 + 200))
        assert busy.instance == home
        assert (world.assign(turn_of(0, 640)).instance == home) != has_pool


def test_a_request_that_reads_no_pool_gets_no_share_of_it() -> None:
    world = World("PD PD", AFFINITY, has_pool=True)
    first = run(world, turn_of(0, 640))
    world.down.add(first.instance)
    second = world.assign(turn_of(0, 640, reads_pool=False))
    assert world.router.statistics().work[second.instance] == 650


def test_an_expired_tail_is_computed_and_counts_as_work() -> None:
    world = World("PD PD", AFFINITY)
    world.down = {"PD1"}
    for conversation in range(2):
        run(world, turn_of(conversation, 64 * PAGE_TOKENS))
    # The engine has evicted the second conversation, so the first one, which was used before, has gone, too.
    run(world, turn_of(1, 65 * PAGE_TOKENS), num_found=128)
    assignment = world.assign(turn_of(0, 64 * PAGE_TOKENS))
    assert world.router.statistics().work[assignment.instance] == 64 * PAGE_TOKENS + 10


def test_what_a_request_cannot_read_says_nothing_of_what_is_held() -> None:
    world = World("PD PD", AFFINITY)
    run(world, turn_of(0, 64 * PAGE_TOKENS))
    run(world, turn_of(0, 64 * PAGE_TOKENS, reads_cache=False), num_found=0)
    assignment = world.assign(turn_of(0, 64 * PAGE_TOKENS))
    assert world.router.statistics().work[assignment.instance] == 10


@pytest.mark.fuzz
def test_no_instance_is_chosen_that_is_down_and_none_is_left_behind() -> None:
    """Random conversations, with and without a pool, some of them of one prefix, while instances come and go."""
    for seed in seeds(300):
        rng = random.Random(seed)
        world = World("PD " * rng.randint(2, 5), AFFINITY, has_pool=rng.random() < 0.5)
        running: list[Assignment] = []
        lengths: Counter[int] = Counter()
        for _ in range(200):
            for name in world.router.kinds:
                if rng.random() < 0.02:
                    world.down ^= {name}
                    world.router.forget_pages(name)
            conversation = rng.randrange(8)
            lengths[conversation] += rng.randrange(1, 300)
            request = turn_of(conversation, lengths[conversation], session=rng.choice([None, "a", "b"]))
            assignment = world.router.assign(request)
            assert (assignment is None) == (world.down == set(world.router.kinds)), seed
            if assignment is None:
                continue
            assert assignment.instance not in world.down and assignment.work >= 0, seed
            work = world.router.statistics().work
            least = min(work[name] for name in set(work) - world.down)
            assert request.session or work[assignment.instance] - least <= request.size.num_prompt_tokens + 10, seed
            if rng.random() < 0.7:
                world.router.note_found(request, assignment, rng.randrange(lengths[conversation] + 1))
            running.append(assignment)
            rng.shuffle(running)
            while len(running) > 6:
                world.router.release(running.pop())
        for assignment in running:
            world.router.release(assignment)
        assert not any(world.router.statistics().work.values()), seed


# -- a random simulation -----------------------------------------------------------------------------------------------


@dataclass
class Simulation:
    """Requests on instances that start late, terminate and recover; time passes from event to event."""

    rng: random.Random
    world: World
    events: list[tuple[float, int, str, RequestState, Assignment | None]] = field(default_factory=list)
    ends: dict[int, str] = field(default_factory=dict)  # request -> how it ended
    done: dict[int, list[Tasks]] = field(default_factory=dict)  # request -> its complete tasks, since it (re)started

    def at(self, delay_s: float, what: str, request: RequestState, assignment: Assignment | None = None) -> None:
        heapq.heappush(self.events, (self.world.now + delay_s, self.rng.getrandbits(60), what, request, assignment))

    def run(self) -> None:
        while self.events:
            self.world.now, _, what, request, assignment = heapq.heappop(self.events)
            if assignment is None:
                self.assign(request)
            elif assignment.instance in self.world.down:
                self.terminated(request, assignment)
            elif what == "complete":
                self.complete(request, assignment)
            elif self.world.router.may_withdraw(request, assignment):  # "not started"
                self.world.router.withdraw(request, assignment)
                self.release(request, assignment)
            else:
                self.at(self.rng.expovariate(1 / 5), "complete", request, assignment)
            if self.rng.random() < 0.2:  # an instance terminates or recovers
                self.world.down ^= {self.rng.choice(list(self.world.router.kinds))}

    def assign(self, request: RequestState) -> None:
        router, world = self.world.router, self.world
        assignment = router.assign(request)
        if assignment is None:
            left = router.recovery_left_s(request)
            if left <= 0:
                self.ends[id(request)] = "no instance"
            else:
                self.at(min(left, self.rng.expovariate(1 / 3)), "assign", request)
            return
        assert assignment.instance not in world.down
        assert assignment.tasks == request.todo.leading(assignment.tasks) != Tasks(0)
        assert world.router.kinds[assignment.instance] != Tasks.E or assignment.tasks == Tasks.E
        if request.keeps_together and Tasks.P in assignment.tasks:
            assert Tasks.D in assignment.tasks or Tasks.D not in world.router.kinds[assignment.instance]
        starts_in_time = self.rng.random() < 0.8
        self.at(self.rng.expovariate(1 / 5), "complete" if starts_in_time else "not started", request, assignment)

    def complete(self, request: RequestState, assignment: Assignment) -> None:
        if Tasks.D in assignment.tasks and self.rng.random() < 0.3:  # first a part of the reply
            request.num_given += 1
            self.at(1.0, "complete", request, assignment)
            return
        self.done.setdefault(id(request), []).append(assignment.tasks)
        self.world.router.complete(request, assignment)
        self.release(request, assignment)
        if not request.todo:
            self.ends[id(request)] = "complete"

    def terminated(self, request: RequestState, assignment: Assignment) -> None:
        recovery = self.world.router.recover(request)
        if recovery is Recovery.RESUME:
            self.done.pop(id(request), None)
        if recovery in (Recovery.TOO_MANY, Recovery.NOT_RESUMABLE):
            assert request.num_terminations > MAX_TERMINATIONS or (request.num_given and not request.is_resumable)
            self.ends[id(request)] = recovery.name
            self.world.router.release(assignment)
            return
        self.release(request, assignment)

    def release(self, request: RequestState, assignment: Assignment) -> None:
        self.world.router.release(assignment)
        if request.todo:
            self.at(0.0, "assign", request)


@pytest.mark.fuzz
def test_every_request_ends_and_no_work_is_left() -> None:
    ends = set()
    for seed in seeds(1000):
        rng = random.Random(seed)
        mix = [*rng.choices(KINDS, k=rng.randint(1, 4)), rng.choice(["PD", "EPD", "D"])]
        deployment = dataclasses.replace(DEPLOYMENT, balance=rng.choice(get_args(Balance)))
        simulation = Simulation(rng, World(" ".join(mix), deployment))
        requests = []
        for _ in range(rng.randint(1, 20)):
            size = RequestSize(rng.randrange(100), rng.randrange(1, 200), rng.randrange(1, 100))
            request = RequestState(size, TokenNames([rng.randrange(2)] * 130))
            request.todo |= rng.choice([Tasks.E, Tasks(0)])
            request.keeps_together, request.is_resumable = rng.random() < 0.3, rng.random() < 0.5
            request.session = rng.choice([None, "a", "b"])
            requests.append(request)
            simulation.at(rng.uniform(0, 20), "assign", request)
        simulation.run()
        statistics = simulation.world.router.statistics()
        assert not any(statistics.work.values()), seed
        assert simulation.ends.keys() == {id(request) for request in requests}, seed
        assert sum(statistics.num_tasks.values()) == sum(request.num_assignments for request in requests), seed
        for request in requests:
            if simulation.ends[id(request)] == "complete":
                done = simulation.done[id(request)]
                assert done[-1] & Tasks.D and sum(map(len, done)) == len(set().union(*done)), (seed, done)
        ends |= set(simulation.ends.values())
    assert ends == {"complete", "no instance", "TOO_MANY", "NOT_RESUMABLE"}
