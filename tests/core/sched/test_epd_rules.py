"""Single rules of the scheduler, each in the smallest situation that shows it."""

import random
from concurrent.futures import wait

import pytest
import torch
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import Request, RequestStatus

from tests.core.sched.costs import TRUE
from tests.core.sched.drive import LayeredRunner, make_request, make_scheduler
from tests.core.sched.random_requests import IMAGE_TOKEN, Engine, Image, PlannedRequest
from vllm_omni.config.budgets import EPD_CONFIG
from vllm_omni.core.sched.epd import EPDScheduler
from vllm_omni.core.sched.image_cache import ENCODER
from vllm_omni.epd.budget import SloBudgets
from vllm_omni.epd.cost import LanguageLoad
from vllm_omni.epd.deadlines import TPOT_FACTOR_OF_LOST
from vllm_omni.messages.epd_step import EPDSchedulerOutput
from vllm_omni.messages.payload import Payload, encode
from vllm_omni.messages.stage_step import STAGE_ARGS, StreamSchedulerOutput
from vllm_omni.relay import InlineRelay
from vllm_omni.relay.shm import ShmRelay

ENGINE = Engine(max_num_batched_tokens=64, prefix_caching=False)


class World:
    """A scheduler, its runner and a clock."""

    def __init__(self, engine: Engine = ENGINE, **epd: object) -> None:
        if "tpot_ms" not in epd:
            epd = {"token_budget": 64, "image_budget": 64, **epd}
        self.engine = engine
        self.scheduler = make_scheduler(EPDScheduler, engine, {EPD_CONFIG: epd})
        self.now = 0.0
        self.scheduler.clock = lambda: self.now  # type: ignore[method-assign]
        self.runner = LayeredRunner(self.scheduler)

    def add(self, name: str, *parts: int | str, max_tokens: int = 20, slo: dict[str, float] | None = None) -> Request:
        """Parts are numbers of text tokens, and images by name, as long as the number that the name begins with."""
        prompt: list[int] = []
        images = []
        for part in parts:
            if isinstance(part, int):
                prompt += [10] * part
            else:
                length = int(part.rstrip("abcdefgh"))
                images.append(Image(part, len(prompt), length))
                prompt += [IMAGE_TOKEN] * length
        planned = PlannedRequest(name, tuple(prompt), tuple(images), max_tokens, arrival_time=self.now, slo=slo)
        request = make_request(planned, self.engine)
        self.scheduler.add_request(request)
        return request

    def step(self, seconds: float = 0.0) -> SchedulerOutput:
        output = self.scheduler.schedule()
        runner_output = self.runner.execute(output)
        self.now += seconds
        self.scheduler.update_from_output(output, runner_output)
        return output

    def steps(self, number: int) -> list[SchedulerOutput]:
        return [self.step() for _ in range(number)]


def encodes(output: SchedulerOutput) -> list[str]:
    return [item.feature.identifier for item in output.encodes] if isinstance(output, EPDSchedulerOutput) else []


def scheduled(output: SchedulerOutput) -> dict[str, int]:
    return output.num_scheduled_tokens


# -- encodes ----------------------------------------------------------------------------------------------------------


def test_an_encode_runs_beside_the_decodes_and_its_request_joins_at_its_end() -> None:
    world = World(num_encode_layers=2)
    world.add("1", 4)
    world.step()
    world.add("2", 3, "8a", 2)
    outputs = world.steps(4)
    assert [encodes(output) for output in outputs] == [["8a"], [], [], []]
    assert [scheduled(output) for output in outputs] == [{"1": 1}, {"1": 1}, {"1": 1}, {"1": 1, "2": 13}]
    assert [output.num_encode_layers for output in outputs[:3]] == [2, 2, 2]  # type: ignore[attr-defined]


def test_an_encode_with_nothing_beside_it_goes_to_its_end() -> None:
    world = World(num_encode_layers=1)
    world.add("1", "8a", 1)
    output = world.step()
    assert encodes(output) == ["8a"] and output.num_encode_layers is None  # type: ignore[attr-defined]
    assert scheduled(world.step()) == {"1": 9}


def test_images_of_several_requests_are_one_batch_within_the_budget() -> None:
    world = World(image_budget=20)
    for name, image in [("1", "8a"), ("2", "8b"), ("3", "8c")]:
        world.add(name, image, 1)
    assert [encodes(world.step()) for _ in range(2)] == [["8a", "8b"], []]
    world.step()
    assert encodes(world.step()) == []
    assert world.runner.num_encodes == 3


def test_an_image_larger_than_the_budget_is_a_batch_of_its_own() -> None:
    world = World(image_budget=4)
    world.add("1", "8a", 1)
    world.add("2", "2b", 1)
    assert encodes(world.step()) == ["8a"]


def test_an_image_of_two_requests_is_encoded_once() -> None:
    world = World(num_encode_layers=1)
    world.add("1", 2, "8a", 1)
    world.add("2", 3, "8a", 1)
    world.steps(8)
    assert world.runner.num_encodes == 1
    assert {request.request_id for request in world.scheduler.running} == {"1", "2"}


def test_what_the_prefix_cache_has_is_not_encoded() -> None:
    world = World(Engine(max_num_batched_tokens=64, encoder_cache_size=8))
    world.add("1", "8a", 4, max_tokens=1)
    world.steps(2)
    world.add("2", "8b", 1, max_tokens=1)  # takes the room of the first image
    world.steps(2)
    world.add("3", "8a", 4, max_tokens=1)
    assert scheduled(world.step()) == {"3": 4}
    assert world.runner.num_encodes == 2


def test_text_is_not_held_up_by_a_request_that_waits_for_an_image() -> None:
    world = World(num_encode_layers=1)
    world.add("1", 4)
    world.step()
    world.add("2", "8a", 1)
    world.step()
    world.add("3", 5)
    assert scheduled(world.step()) == {"1": 1, "3": 5}


def test_an_encode_is_deferred_for_prefills_for_patience_steps() -> None:
    world = World(patience=3, token_budget=4, min_prefill_tokens=4)
    world.add("1", 100, max_tokens=1)
    world.add("2", "8a", 1)
    assert [encodes(output) for output in world.steps(5)] == [[], [], [], ["8a"], []]


def test_a_running_prompt_stops_before_its_next_image_and_resumes_with_it() -> None:
    world = World(Engine(max_num_batched_tokens=64, prefix_caching=False, encoder_cache_size=8))
    world.add("1", 2, "8a", 3, "8b", 1)
    tokens = [scheduled(world.step()) for _ in range(4)]
    assert tokens == [{}, {"1": 13}, {}, {"1": 9}]


def test_the_first_that_waits_takes_the_room_of_those_behind_it() -> None:
    world = World(Engine(max_num_batched_tokens=64, prefix_caching=False, encoder_cache_size=16, max_num_seqs=1))
    world.add("1", 2, "8a", 3, "16b", 1)
    world.add("2", "8c", 1)
    outputs = world.steps(4)
    assert [encodes(output) for output in outputs] == [["8a", "8c"], [], ["16b"], []]
    assert set(outputs[2].free_encoder_mm_hashes) == {"8a", "8c"}
    world.scheduler.finish_requests("1", RequestStatus.FINISHED_ABORTED)
    assert encodes(world.step()) == ["8c"]


def test_the_last_in_order_loses_its_room_first() -> None:
    world = World(Engine(max_num_batched_tokens=64, prefix_caching=False, encoder_cache_size=32, max_num_seqs=1))
    world.add("1", 2, "16a", 3, "24b", 1)
    world.add("2", "8c", 1)
    world.add("3", "8d", 1)
    outputs = world.steps(3)
    assert [encodes(output) for output in outputs] == [["16a", "8c", "8d"], [], ["24b"]]
    assert set(outputs[2].free_encoder_mm_hashes) == {"16a", "8d"}


def test_a_request_without_its_first_image_loses_its_own_later_one() -> None:
    """The prefix cache had the first image, so that the second was encoded; then it lost the first."""
    world = World(Engine(num_blocks=13, max_num_batched_tokens=64, encoder_cache_size=16, max_num_seqs=1))
    world.add("1", "16a", 4, max_tokens=1)
    world.steps(2)
    world.add("2", 30, max_tokens=17)  # takes all blocks in the end
    world.step()
    third = world.add("3", "16a", 4, "16b", 1, max_tokens=1)
    assert [encodes(output) for output in world.steps(2)] == [["16b"], []]
    while "2" in world.scheduler.requests:
        world.step()
    outputs = world.steps(4)
    assert [encodes(output) for output in outputs] == [["16a"], [], ["16b"], []]
    assert [scheduled(output) for output in outputs] == [{}, {"3": 20}, {}, {"3": 17}]
    assert third.status is RequestStatus.FINISHED_LENGTH_CAPPED


def test_a_request_without_its_second_image_frees_a_first_one_that_the_prefix_cache_covers() -> None:
    engine = Engine(max_num_batched_tokens=64, encoder_cache_size=8, max_num_seqs=1)
    world = World(engine, tpot_ms=1e6, cost=vars(TRUE))
    world.add("1", 4, max_tokens=6)
    world.step()
    waiting = world.add("2", "8a", 4, "8b", 1, max_tokens=1)
    while not world.scheduler.encoder_cache_manager.is_ready(waiting, 0):
        world.step()
    world.add("3", "8a", 4, 1, max_tokens=1, slo={"ttft_ms": 1e3})  # is first, and computes the same beginning
    outputs = [output for output in world.steps(8) if "1" not in scheduled(output)]
    assert [scheduled(output) for output in outputs[:2]] == [{"3": 13}, {"2": 9}]
    assert encodes(outputs[0]) == ["8b"]


def test_an_admitted_request_has_its_images_after_a_loss_in_the_prefix_cache() -> None:
    """Otherwise it would be cut before its first token, and delay the requests behind it."""
    world = World(Engine(num_blocks=10, max_num_batched_tokens=64, encoder_cache_size=8, max_num_seqs=1))
    world.add("1", "8a", 4, max_tokens=1)
    world.steps(2)
    world.add("2", "8b", 1, max_tokens=25)  # takes the room of the first image, and its blocks in the end
    world.steps(2)
    request = world.add("3", "8a", 4, max_tokens=1)
    world.add("4", 5, max_tokens=1)
    world.step()
    assert world.scheduler.needs.num_computed(request) >= 8
    while "2" in world.scheduler.requests:
        world.step()
    assert scheduled(world.step()) == {"4": 5}
    assert [scheduled(output) for output in world.steps(2)] == [{}, {"3": 12}]
    assert world.runner.num_encodes == 3


def test_the_last_admitted_request_is_preempted_first_whatever_the_order_of_decodes() -> None:
    world = World(Engine(num_blocks=13, max_num_batched_tokens=64, prefix_caching=False, encoder_cache_size=8))
    world.add("1", 2, "8a", 3, "8b", 1)
    world.step()
    world.add("2", 5)
    outputs = world.steps(3)
    assert [scheduled(output) for output in outputs] == [{"1": 13, "2": 5}, {"2": 1}, {"1": 9, "2": 1}]
    preempted: set[str] = set()
    while not preempted:
        preempted = world.step().preempted_req_ids or set()
    assert preempted == {"2"}


def test_a_paused_engine_starts_no_encode() -> None:
    world = World()
    world.add("1", "8a", 1)
    world.scheduler.set_pause_state(PauseState.PAUSED_NEW)
    assert encodes(world.step()) == []
    world.scheduler.set_pause_state(PauseState.UNPAUSED)
    assert encodes(world.step()) == ["8a"]


# -- aborts -----------------------------------------------------------------------------------------------------------


def test_the_image_of_an_aborted_request_keeps_its_room_until_its_encode_has_ended() -> None:
    world = World(Engine(max_num_batched_tokens=64, encoder_cache_size=8), num_encode_layers=2)
    world.add("1", 4)
    world.step()
    world.add("2", "8a", 1)
    world.step()
    world.scheduler.finish_requests("2", RequestStatus.FINISHED_ABORTED)
    manager = world.scheduler.encoder_cache_manager
    assert manager.cached == {"8a": {ENCODER}}
    world.add("3", "8b", 1)
    assert [encodes(output) for output in world.steps(3)] == [[], [], ["8b"]]
    assert set(manager.cached) == {"8b"}


def test_an_image_that_was_encoded_for_an_aborted_request_serves_the_next() -> None:
    world = World(num_encode_layers=2)
    world.add("1", 4)
    world.step()
    world.add("2", "8a", 1)
    world.step()
    world.scheduler.finish_requests("2", RequestStatus.FINISHED_ABORTED)
    world.add("3", "8a", 1)
    world.steps(4)
    assert world.runner.num_encodes == 1
    assert {request.request_id for request in world.scheduler.running} == {"1", "3"}


def test_a_name_that_comes_again_with_another_size_fails_its_request() -> None:
    world = World()
    world.add("1", "8a", 1)
    world.steps(2)
    request = world.add("2", "8a", 1)
    position = request.mm_features[0].mm_position
    object.__setattr__(position, "length", 7)
    world.steps(2)
    assert request.status is RequestStatus.FINISHED_ERROR


# -- deadlines --------------------------------------------------------------------------------------------------------


def test_the_request_that_is_due_first_is_admitted_first() -> None:
    world = World(token_budget=8, min_prefill_tokens=1)
    world.add("1", 8, slo={"ttft_ms": 3000})
    world.add("2", 8, slo={"ttft_ms": 1000})
    world.add("3", 8)
    assert [scheduled(world.step()) for _ in range(3)] == [{"2": 8}, {"1": 7, "2": 1}, {"1": 1, "2": 1, "3": 6}]


def test_a_request_that_is_too_late_is_deferred_and_not_forever() -> None:
    world = World(Engine(max_num_batched_tokens=64, prefix_caching=False, max_num_seqs=1), patience=2)
    world.add("1", 8, max_tokens=1, slo={"ttft_ms": 1000})
    world.now = 2.0
    order = []
    for number in range(2, 6):
        world.add(str(number), 8, max_tokens=1, slo={"ttft_ms": 1000})
        order += list(scheduled(world.step()))
    assert order == ["2", "3", "1", "4"]


def test_a_session_of_requests_without_deadlines_keeps_its_order() -> None:
    world = World(token_budget=8, min_prefill_tokens=1)
    for number in range(1, 4):
        world.add(str(number), 8)
    assert scheduled(world.step()) == {"1": 8}
    assert not len(world.scheduler.deadlines)


# -- budgets from costs -----------------------------------------------------------------------------------------------


def make_costed(**epd: object) -> World:
    engine = Engine(max_num_batched_tokens=128, prefix_caching=False, encoder_cache_size=400, num_blocks=1000)
    return World(engine, tpot_ms=10.0, margin=1.0, cost=vars(TRUE), **epd)


def seconds(world: World, output: SchedulerOutput) -> float:
    """What the step costs by the model that the budgets were made from."""
    return TRUE.language_s(world.scheduler.iterations.latest.load)


def test_an_image_that_a_step_reads_last_frees_its_room_for_the_next_batch() -> None:
    engine = Engine(max_num_batched_tokens=128, prefix_caching=False, encoder_cache_size=100)
    world = World(engine, tpot_ms=10.0, margin=1.0, cost=vars(TRUE))
    for number, image in enumerate(["100a", "100b", "100c"]):
        world.add(str(number), image, 2, max_tokens=1)
    outputs = world.steps(4)
    assert [encodes(output) for output in outputs] == [["100a"], ["100b"], ["100c"], []]
    assert [scheduled(output) for output in outputs] == [{}, {"0": 102}, {"1": 102}, {"2": 102}]
    behind = [output.free_behind_forward for output in outputs if isinstance(output, EPDSchedulerOutput)]
    assert behind == [[], ["100a"], ["100b"]]


def test_an_encode_starts_beside_a_prompt_only_if_its_first_token_stays_in_time() -> None:
    def started(ttft_s: float) -> list[str]:
        world = make_costed()
        world.add("1", 100, slo={"ttft_ms": 1e3 * ttft_s})
        world.add("2", "100a", 1)
        return encodes(world.step())

    prompt_s, image_s = TRUE.language_s(LanguageLoad().with_prefill(100, 0)), TRUE.images_s(400)
    assert started(1.1 * (prompt_s + image_s)) == ["100a"]
    assert started(1.1 * prompt_s) == []
    assert started(0.9 * prompt_s) == ["100a"], "it is too late in any case"


def test_a_prefill_beside_decodes_is_cut_to_the_tpot_and_alone_it_is_not() -> None:
    world = make_costed()
    world.add("1", 100)
    assert scheduled(world.step()) == {"1": 100}
    world.add("2", 127)
    output = world.scheduler.schedule()
    assert seconds(world, output) <= 0.010
    assert scheduled(output) == {"1": 1, "2": 95}


def test_the_layers_beside_a_decode_fill_its_tpot() -> None:
    world = make_costed()
    budgets = world.scheduler.budgets
    assert isinstance(budgets, SloBudgets)
    budgets.num_layers_of_batch = 20
    world.add("1", 8)
    world.step()
    world.add("2", "100a", 1)
    output = world.scheduler.schedule()
    assert isinstance(output, EPDSchedulerOutput) and output.num_encode_layers is not None
    layer_s = TRUE.images_s(100) / 20
    taken_s = seconds(world, output) + output.num_encode_layers * layer_s
    assert 0.010 - layer_s < taken_s <= 0.010


def num_layers_for_late(tpot_share: float, expected_gaps: float = 100.0) -> int:
    """Of 20, beside a decode in 10 ms, for a prompt that takes 24 ms, 15 of them for its image, and is due in 30."""
    world = make_costed(tpot_share=tpot_share)
    budgets = world.scheduler.budgets
    assert isinstance(budgets, SloBudgets)
    budgets.num_layers_of_batch = 20
    world.scheduler.deadlines.expected_gaps = expected_gaps
    world.add("1", 8, max_tokens=100)
    world.step()
    image_s = TRUE.images_s(100)
    world.add("2", "100a", 1, slo={"ttft_ms": 2e3 * image_s})
    output = world.scheduler.schedule()
    assert isinstance(output, EPDSchedulerOutput) and output.encodes and output.num_encode_layers is not None
    return output.num_encode_layers


def test_a_late_first_token_takes_a_gap_of_a_decode_that_can_spare_it() -> None:
    assert num_layers_for_late(tpot_share=0.9) >= 20
    assert num_layers_for_late(tpot_share=0.995) < 20
    assert num_layers_for_late(tpot_share=0.9, expected_gaps=5.0) < 20


def test_the_runner_receives_the_time_left_of_the_iteration() -> None:
    world = make_costed()
    now = 0.0
    world.scheduler.clock = lambda: now  # type: ignore[method-assign]
    world.add("1", 8)
    world.step()  # 0 has ended, 1 continues
    world.add("2", "100a", 1)
    now = 0.004
    output = world.scheduler.schedule()
    assert isinstance(output, EPDSchedulerOutput) and output.encodes
    assert output.max_seconds == pytest.approx(0.006)


def test_measured_iterations_correct_the_budgets() -> None:
    world = make_costed()
    world.add("1", 8, max_tokens=100)
    for _ in range(60):
        output = world.scheduler.schedule()
        modelled_s = seconds(world, output)
        runner_output = world.runner.execute(output)
        world.now += 1.5 * modelled_s
        world.scheduler.update_from_output(output, runner_output)
    budgets = world.scheduler.budgets
    assert isinstance(budgets, SloBudgets)
    assert budgets.language_factor == pytest.approx(1.5, rel=0.05)


def test_a_decode_that_missed_its_slo_counts_with_a_multiple_of_its_tpot() -> None:
    world = make_costed()
    world.add("1", 8, max_tokens=4)
    world.step()
    world.add("2", 127)
    output = world.scheduler.schedule()
    assert 0.009 < seconds(world, output) <= 0.010

    world = make_costed()
    world.add("1", 8, max_tokens=4)
    world.step()
    world.step(seconds=0.5)  # the budgets' correction takes this for a machine that has become a little slower
    world.add("2", 127)
    output = world.scheduler.schedule()
    assert 0.010 < seconds(world, output) <= 0.010 * TPOT_FACTOR_OF_LOST


def test_decodes_that_missed_their_slo_set_no_limit_under_overload() -> None:
    def limit_s(number: int, ttft_ms: float) -> float | None:
        world = make_costed()
        world.add("1", 8, max_tokens=4)
        world.step()
        world.step(seconds=0.5)
        for name in range(2, number + 2):
            world.add(str(name), 127, slo={"ttft_ms": ttft_ms})
        world.now += 0.02
        scheduler = world.scheduler
        assert scheduler.budgets is not None
        load = LanguageLoad(num_decodes=1)
        return scheduler.deadlines.limit_s(scheduler.budgets, scheduler.running, load, [], scheduler.waiting, world.now)

    assert limit_s(20, ttft_ms=10.0) is None
    assert limit_s(2, ttft_ms=10.0) == pytest.approx(0.010 * TPOT_FACTOR_OF_LOST)
    assert limit_s(20, ttft_ms=1000.0) == pytest.approx(0.010 * TPOT_FACTOR_OF_LOST)


def test_unknown_costs_are_learned_and_then_keep_the_tpot() -> None:
    """A machine that takes exactly what TRUE says; the requests come as they come."""
    engine = Engine(max_num_batched_tokens=128, prefix_caching=False, encoder_cache_size=400, num_blocks=1000)
    world = World(engine, tpot_ms=10.0, margin=1.0, profile_s=0)
    world.runner.layer_s = lambda num_embeds: TRUE.images_s(num_embeds) / LayeredRunner.NUM_LAYERS
    rng = random.Random(0)
    over = []
    for number in range(600):
        if number % 20 == 0:
            image = [f"{rng.choice([40, 80])}{rng.choice('abcdefgh')}"] if rng.random() < 0.5 else []
            world.add(str(number), rng.randint(1, 40), *image, 1, max_tokens=rng.randint(5, 40))
        output = world.scheduler.schedule()
        load = world.scheduler.iterations.latest.load
        runner_output = world.runner.execute(output)
        report = runner_output.encode_report  # type: ignore[attr-defined]
        taken_s = TRUE.language_s(load) + (report.seconds if report else 0.0)
        world.now += taken_s
        world.scheduler.update_from_output(output, runner_output)
        # What an iteration must do at least may be more than the TPOT leaves: one layer, one shortest prefill.
        if load.num_decodes and load.num_prefill_tokens > 16 and taken_s > 0.010 * 1.01:
            over.append(number)
    budgets = world.scheduler.budgets
    assert isinstance(budgets, SloBudgets)
    load = LanguageLoad().with_decode(4, 60).with_prefill(30, 10)
    assert budgets.language_s(load) == pytest.approx(TRUE.language_s(load), rel=0.05)
    assert budgets.layer_s(80) == pytest.approx(TRUE.images_s(80) / LayeredRunner.NUM_LAYERS, rel=0.05)
    assert not [number for number in over if number > 100]


# -- beside streams ---------------------------------------------------------------------------------------------------


def test_a_request_that_waits_for_a_row_holds_up_no_encode() -> None:
    world = World(num_encode_layers=2)
    relay = ShmRelay(1 << 20)
    writer = relay.open_stream("1", (8,), torch.float32, credits=4)
    rows = InlineRelay().put_nowait("1", torch.zeros(3, 8))
    payload = Payload({"rows": rows}, {"rows": None}, {"rows": writer.ref})
    args = {"payloads": [encode(payload)], "num_own_tokens": 0}
    world.scheduler.add_request(
        Request("1", [10] * 4, SamplingParams(max_tokens=9, extra_args={STAGE_ARGS: args}), None, arrival_time=0.0)
    )
    wait(world.scheduler.gates.connections(), timeout=10)
    world.add("2", 4)
    assert scheduled(world.step()) == {"2": 4}
    world.add("3", "8a", 1)
    outputs = world.steps(3)
    assert [scheduled(output) for output in outputs] == [{"2": 1}] * 3
    assert [encodes(output) for output in outputs] == [["8a"], [], []]
    writer.write_nowait(torch.zeros(1, 8))
    output = world.step()
    assert scheduled(output) == {"2": 1, "1": 4, "3": 9}
    assert isinstance(output, StreamSchedulerOutput) and set(output.streams) == {"1"}
    world.scheduler.finish_requests(None, RequestStatus.FINISHED_ABORTED)
    relay.check_integrity()
    relay.close()
