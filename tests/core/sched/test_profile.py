"""An engine is measured before its first request: on a machine that takes exactly what a cost model says."""

import json
from collections.abc import Iterator

import pytest
from vllm.multimodal.inputs import MultiModalKwargsItem, PlaceholderRange
from vllm.v1.request import RequestStatus

from tests.core.sched.costs import TRUE
from tests.core.sched.random_requests import IMAGE_TOKEN, Engine
from tests.core.sched.test_epd_rules import World
from vllm_omni.core.sched.profile import PREFIX, DummyImage
from vllm_omni.epd.budget import SloBudgets
from vllm_omni.epd.cost import LanguageLoad
from vllm_omni.messages.epd_step import EPDSchedulerOutput

ENGINE = Engine(max_num_batched_tokens=64, encoder_cache_size=100, num_blocks=1000)
NUM_EMBEDS = 40


@pytest.fixture
def dummy_image(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    image = DummyImage(
        [IMAGE_TOKEN] * NUM_EMBEDS + [1], "image", MultiModalKwargsItem({}), PlaceholderRange(0, NUM_EMBEDS)
    )
    monkeypatch.setattr(DummyImage, "of", lambda config: image)


def make_world(engine: Engine = ENGINE, **epd: object) -> World:
    world = World(engine, tpot_ms=20.0, **epd)
    world.runner.layer_s = lambda num_embeds: TRUE.images_s(num_embeds) / world.runner.NUM_LAYERS
    return world


def step(world: World) -> list[str]:
    """One iteration; the requests that it ran."""
    output = world.scheduler.schedule()
    load = world.scheduler.iterations.latest.load
    runner_output = world.runner.execute(output)
    report = runner_output.encode_report  # type: ignore[attr-defined]
    world.now += TRUE.language_s(load) + (report.seconds if report else 0.0)
    outputs = world.scheduler.update_from_output(output, runner_output)
    reported = [one.request_id for of_client in outputs.values() for one in of_client.outputs]
    assert not any(name.startswith(PREFIX) for name in reported)
    if world.scheduler.profile is not None:
        assert all(of_client.scheduler_stats is None for of_client in outputs.values())
    return list(output.num_scheduled_tokens)


def run_profile(world: World) -> int:
    steps = 0
    while world.scheduler.profile is not None:
        assert world.scheduler.has_requests()
        step(world)
        steps += 1
        assert steps < 2000
    return steps


def test_the_costs_of_the_machine_are_found(dummy_image: None) -> None:
    world = make_world()
    run_profile(world)
    budgets = world.scheduler.budgets
    assert isinstance(budgets, SloBudgets)
    for load in (
        LanguageLoad().with_decode(1, 40),
        LanguageLoad().with_decode(8, 60),
        LanguageLoad().with_prefill(64, 0),
        LanguageLoad().with_decode(6, 60).with_prefill(40, 20),
    ):
        assert budgets.language_s(load) == pytest.approx(TRUE.language_s(load), rel=0.05)
    assert budgets.layer_s(NUM_EMBEDS) == pytest.approx(TRUE.images_s(NUM_EMBEDS) / world.runner.NUM_LAYERS, rel=0.02)
    assert world.now < 5.0


def test_encodes_are_measured_alone_and_beside_decodes(dummy_image: None) -> None:
    world = make_world()
    alone, beside = 0, 0
    while world.scheduler.profile is not None:
        output = world.scheduler.schedule()
        if isinstance(output, EPDSchedulerOutput):
            alone += output.num_encode_layers is None
            beside += output.num_encode_layers is not None
        world.scheduler.update_from_output(output, world.runner.execute(output))
    assert alone and beside


def test_nothing_of_it_stays(dummy_image: None) -> None:
    world = make_world()
    run_profile(world)
    step(world)  # tells the runner what to forget
    scheduler = world.scheduler
    assert not scheduler.requests and not scheduler.has_requests()
    assert not scheduler.encoder_cache_manager.cached and not world.runner.encoder_cache
    assert scheduler.encoder_cache_manager.num_free_slots == ENGINE.encoder_cache_size
    assert scheduler.kv_cache_manager.usage == 0
    stats = scheduler.make_stats()
    assert stats is None or stats.prefix_cache_stats is None or stats.prefix_cache_stats.queries == 0
    assert not len(scheduler.deadlines) and not len(scheduler.needs)


def test_a_request_that_arrives_meanwhile_waits_until_the_profile_is_over(dummy_image: None) -> None:
    world = make_world()
    step(world)
    world.add("1", 8, max_tokens=2)
    world.add("2", 8, "20a", max_tokens=2)
    while world.scheduler.profile is not None:
        ran = step(world)
        assert world.scheduler.profile is None or not {"1", "2"} & set(ran)
    for _ in range(20):
        step(world)
    assert not world.scheduler.requests


def test_a_request_aborted_while_it_waits_is_gone(dummy_image: None) -> None:
    world = make_world()
    world.add("1", 8)
    step(world)
    world.scheduler.finish_requests("1", RequestStatus.FINISHED_ABORTED)
    run_profile(world)
    assert not world.scheduler.requests


def test_it_ends_when_its_time_is_up(dummy_image: None) -> None:
    world = make_world(profile_s=0.05)
    run_profile(world)
    slowest = TRUE.language_s(LanguageLoad().with_prefill(64, 64)) + TRUE.images_s(2 * NUM_EMBEDS)
    assert world.now < 0.05 + 2 * slowest
    budgets = world.scheduler.budgets
    assert isinstance(budgets, SloBudgets) and budgets.is_fitted  # from what there was time for


def test_without_an_image_the_language_model_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(config: object) -> None:
        raise RuntimeError("this model's processor needs a file")

    monkeypatch.setattr(DummyImage, "of", fail)
    world = make_world()
    run_profile(world)
    budgets = world.scheduler.budgets
    assert isinstance(budgets, SloBudgets)
    assert budgets.is_fitted and budgets.layer_s(NUM_EMBEDS) == 0
    for number in range(4):  # which the first images change
        world.add(str(number), 8, f"{NUM_EMBEDS}{'abcd'[number]}", max_tokens=4)
    while world.scheduler.requests:
        step(world)
    assert budgets.layer_s(NUM_EMBEDS) == pytest.approx(TRUE.images_s(NUM_EMBEDS) / world.runner.NUM_LAYERS, rel=0.1)


def test_an_engine_with_little_room_is_measured_with_what_fits(dummy_image: None) -> None:
    world = make_world(Engine(max_num_batched_tokens=64, encoder_cache_size=100, num_blocks=8, max_num_seqs=2))
    run_profile(world)
    assert isinstance(world.scheduler.budgets, SloBudgets)
    assert world.scheduler.budgets.is_fitted


def test_with_costs_or_without_a_tpot_nothing_is_measured() -> None:
    assert World(ENGINE, tpot_ms=20.0, cost=vars(TRUE)).scheduler.profile is None
    assert World(ENGINE, tpot_ms=20.0, profile_s=0).scheduler.profile is None
    assert World(ENGINE).scheduler.profile is None


def test_what_was_found_can_be_given_back(dummy_image: None, caplog: pytest.LogCaptureFixture) -> None:
    world = make_world()
    with caplog.at_level("INFO", logger="vllm_omni.epd.profile_plan"):
        run_profile(world)
    (line,) = [record.getMessage() for record in caplog.records if "cost: " in record.getMessage()]
    given = World(ENGINE, tpot_ms=20.0, cost=json.loads(line.split("cost: ")[1])).scheduler.budgets
    assert isinstance(given, SloBudgets)
    load = LanguageLoad().with_decode(4, 60).with_prefill(40, 20)
    assert given.language_s(load) == pytest.approx(TRUE.language_s(load), rel=0.05)
