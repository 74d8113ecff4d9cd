"""Images that are encoded for other engines, and images that other engines have encoded."""

from typing import Any

import pytest
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import Request, RequestStatus

from tests.core.sched.drive import (
    PAYLOAD,
    RelayedRunner,
    answer,
    assert_is_idle,
    drive,
    let_time_pass,
    make_request,
    make_scheduler,
    tokens_of,
)
from tests.core.sched.random_requests import (
    IMAGE_TOKEN,
    Engine,
    Image,
    PlannedRequest,
    Stream,
    make_budgets,
    make_slo_budgets,
    make_stream,
    with_migration,
    with_slos,
)
from tests.fuzz import seeds
from vllm_omni.config.budgets import EPD_CONFIG
from vllm_omni.core.sched.epd import EPDScheduler
from vllm_omni.messages.epd_step import EPDSchedulerOutput

ENGINE = Engine(max_num_batched_tokens=64, prefix_caching=False, ec_role="ec_both")


class World:
    """A scheduler with a connector, its runner, a clock, and what has ended."""

    def __init__(self, engine: Engine = ENGINE, *, epd: dict[str, Any] | None = None, **relay: Any) -> None:
        self.engine = engine
        self.scheduler = make_scheduler(EPDScheduler, engine, {EPD_CONFIG: epd} if epd else None)
        self.now = 0.0
        self.scheduler.clock = lambda: self.now  # type: ignore[method-assign]
        self.runner = RelayedRunner(self.scheduler, **relay)
        self.ended: dict[str, dict[str, Any]] = {}
        self.reasons: dict[str, str] = {}

    def add(self, name: str, *parts: int | str, elsewhere: tuple[str, ...] = (), **planned: Any) -> Request:
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
        values = {"max_tokens": 20, "arrival_time": self.now, **planned}
        one = PlannedRequest(name, tuple(prompt), tuple(images), elsewhere=elsewhere, **values)
        request = make_request(one, self.engine)
        self.scheduler.add_request(request)
        return request

    def add_task(self, name: str, *parts: int | str, **planned: Any) -> Request:
        return self.add(name, *parts, encode_only=True, **planned)

    def step(self) -> SchedulerOutput:
        output = self.scheduler.schedule()
        for outputs in self.scheduler.update_from_output(output, self.runner.execute(output)).values():
            for one in outputs.outputs:
                if one.finish_reason is not None:
                    assert one.request_id not in self.ended
                    self.ended[one.request_id] = one.ec_transfer_params or {}
                    self.reasons[one.request_id] = str(one.finish_reason)
        return output

    def steps(self, number: int) -> list[SchedulerOutput]:
        return [self.step() for _ in range(number)]


def encodes(output: SchedulerOutput) -> list[str]:
    return [item.feature.identifier for item in output.encodes] if isinstance(output, EPDSchedulerOutput) else []


def pulls(output: SchedulerOutput) -> list[str]:
    return [pull.identifier for pull in output.ec_connector_metadata.pulls]  # type: ignore[union-attr]


# -- encode tasks -----------------------------------------------------------------------------------------------------


def test_a_task_ends_with_its_images_and_never_reaches_the_language_model() -> None:
    world = World()
    world.add_task("1", 2, "8a", 3, "4b")
    output = world.step()
    assert encodes(output) == ["8a", "4b"] and not output.num_scheduled_tokens
    assert world.ended == {"1": {"num_encoded": 2, "images": {"8a": PAYLOAD, "4b": PAYLOAD}}}
    assert world.reasons == {"1": "stop"}
    assert_is_idle(world.scheduler)


def test_without_budgets_tasks_are_encoded_in_whole_batches() -> None:
    world = World(Engine(max_num_batched_tokens=64, encoder_cache_size=32, encoder_budget=24, ec_role="ec_producer"))
    for number, image in enumerate(["8a", "8b", "8c", "8d"]):
        world.add_task(str(number), image)
    assert [encodes(world.step()) for _ in range(2)] == [["8a", "8b", "8c"], ["8d"]]
    assert len(world.ended) == 4


def test_with_budgets_tasks_are_batched_and_sliced_beside_decodes() -> None:
    world = World(epd={"token_budget": 16, "image_budget": 16, "num_encode_layers": 2})
    world.add("1", 4)
    world.step()
    for number, image in [("2", "8a"), ("3", "8b"), ("4", "8c")]:
        world.add_task(number, image)
    outputs = world.steps(6)
    assert [encodes(output) for output in outputs] == [["8a", "8b"], [], [], ["8c"], [], []]
    assert all(output.num_scheduled_tokens == {"1": 1} for output in outputs)
    assert list(world.ended) == ["2", "3", "4"]


def test_an_image_larger_than_the_budget_is_a_batch_of_its_own() -> None:
    world = World(epd={"token_budget": 16, "image_budget": 4})
    world.add_task("1", "8a")
    world.add_task("2", "2b")
    assert [encodes(world.step()) for _ in range(2)] == [["8a"], ["2b"]]


def test_an_image_of_several_tasks_is_encoded_once_and_put_for_each() -> None:
    world = World(epd={"token_budget": 16, "image_budget": 16, "num_encode_layers": 1})
    world.add_task("1", "8a")
    world.add_task("2", 3, "8a", "8a")
    world.step()
    assert [one["num_encoded"] for one in world.ended.values()] == [1, 0]
    assert all(set(one["images"]) == {"8a"} for one in world.ended.values())
    assert world.runner.num_encodes == 1


def test_an_image_in_the_cache_is_put_and_not_encoded() -> None:
    world = World()
    world.add("1", "8a", 2, max_tokens=1)
    world.steps(2)
    world.add_task("2", "8a")
    world.step()
    assert world.ended["2"] == {"num_encoded": 0, "images": {"8a": PAYLOAD}}
    assert world.runner.num_encodes == 1


def test_an_image_being_encoded_for_a_request_is_put_for_a_task_when_its_encode_has_ended() -> None:
    world = World(epd={"token_budget": 16, "image_budget": 16, "num_encode_layers": 1})
    world.add("1", 4)
    world.step()
    world.add("2", "8a", 2)
    world.step()
    world.add_task("3", "8a")
    world.steps(5)
    assert world.ended == {"3": {"num_encoded": 0, "images": {"8a": PAYLOAD}}}
    assert world.runner.num_encodes == 1


def test_tasks_stand_among_the_waiting_by_their_arrival() -> None:
    world = World(epd={"token_budget": 16, "image_budget": 8})
    for number, name in enumerate(["8a", "8b", "8c"]):
        world.now = number
        (world.add_task if number != 1 else world.add)(str(number), name, 1)
    assert [encodes(world.step())[:1] for _ in range(3)] == [["8a"], ["8b"], []]


def test_priority_goes_before_arrival() -> None:
    world = World(
        Engine(prefix_caching=False, policy="priority", ec_role="ec_both"), epd={"token_budget": 16, "image_budget": 8}
    )
    world.add_task("1", "8a", priority=2)
    world.add_task("2", "8b", priority=0)
    world.add("3", "8c", 1, priority=1)
    assert [encodes(world.step()) for _ in range(3)] == [["8b"], ["8c"], []]


def test_a_cache_of_one_image_serves_task_after_task() -> None:
    world = World(Engine(encoder_cache_size=8, prefix_caching=False, ec_role="ec_both"))
    world.add_task("1", "8a", 1, "8b")
    world.add_task("2", "8c")
    world.add("3", "8d", 1, max_tokens=1)
    world.steps(6)
    assert set(world.ended) == {"1", "2", "3"}
    assert world.runner.num_encodes == 4


def test_a_paused_engine_starts_no_encode_and_no_pull() -> None:
    world = World(epd={"token_budget": 16, "image_budget": 8, "num_encode_layers": 1})
    world.add("1", 4)
    world.step()
    world.add("2", "8a", 1)
    world.step()  # an encode is in flight
    world.scheduler.set_pause_state(PauseState.PAUSED_NEW)
    world.add_task("3", "8b")
    world.add("4", "8c", 1, elsewhere=("8c",))
    outputs = world.steps(8)
    assert not any(encodes(output) or pulls(output) for output in outputs)
    world.scheduler.set_pause_state(PauseState.UNPAUSED)
    outputs = world.steps(3)  # the first prefills what had been encoded
    assert pulls(outputs[0]) == ["8c"]
    assert [image for output in outputs for image in encodes(output)] == ["8b"]


# -- what ends otherwise ----------------------------------------------------------------------------------------------


def test_an_aborted_task_leaves_nothing() -> None:
    world = World(epd={"token_budget": 16, "image_budget": 8, "num_encode_layers": 1})
    world.add("1", 4, max_tokens=12)
    world.add_task("2", "8a", "4b")
    world.steps(2)
    world.scheduler.finish_requests("2", RequestStatus.FINISHED_ABORTED)
    world.steps(12)
    assert set(world.ended) == {"1"}
    assert_is_idle(world.scheduler)
    assert not world.scheduler.relay_ec._images and not world.scheduler.relay_ec._num_encoded  # type: ignore[union-attr]


def test_a_task_without_images_is_rejected() -> None:
    world = World()
    world.add_task("1", 4)
    world.step()
    assert world.reasons == {"1": "error"} and world.ended["1"]["invalid"]
    assert "nothing to encode" in world.ended["1"]["error"]
    assert_is_idle(world.scheduler)


@pytest.mark.parametrize("encode_only", [True, False])
def test_a_counter_is_rejected(encode_only: bool) -> None:
    world = World()
    name = "renderer0-mm-7-image-0"
    planned = PlannedRequest(
        "1", (9, 9, 1), (Image(name, 0, 2),), 4, encode_only=encode_only, elsewhere=() if encode_only else (name,)
    )
    world.scheduler.add_request(make_request(planned, ENGINE))
    world.step()
    assert "multi_modal_uuids" in world.ended["1"]["error"]


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"encode": True}, "unknown field `encode`; known are encode_only, images"),
        ({"images": {"8b": PAYLOAD}}, "has no '8b'"),
        ({"images": {"8a": "text"}}, "Expected `bytes`, got `str` - at `$.images[...]`"),
        ("encode_only", "Expected `object`, got `str`"),
    ],
)
def test_contradictory_params_are_rejected(params: Any, message: str) -> None:
    world = World()
    request = make_request(PlannedRequest("1", (9,) * 8, (Image("8a", 0, 8),), 4), ENGINE)
    request.ec_transfer_params = params
    world.scheduler.add_request(request)
    world.step()
    assert message in world.ended["1"]["error"]


def test_without_a_connector_a_task_is_rejected() -> None:
    world = World(Engine())
    world.runner = super(RelayedRunner, world.runner)  # type: ignore[assignment]
    request = make_request(PlannedRequest("1", (9,) * 8, (Image("8a", 0, 8),), 4, encode_only=True), ENGINE)
    world.scheduler.add_request(request)
    world.step()
    assert "RelayECConnector" in world.ended["1"]["error"]


def test_an_instance_that_only_encodes_rejects_other_requests() -> None:
    world = World(Engine(ec_role="ec_producer"))
    world.scheduler.is_mm_encoder_only = True
    world.add("1", "8a", 1)
    world.step()
    assert "only encodes" in world.ended["1"]["error"]


# -- no room in the relay ---------------------------------------------------------------------------------------------


def test_a_task_waits_for_room_in_the_relay_and_no_other_is_encoded_meanwhile() -> None:
    world = World(num_slots=1, keep_steps=4)
    for name in ("1", "2", "3"):
        world.add_task(name, f"8{'xabc'[int(name)]}", arrival_time=float(name))
    outputs = world.steps(5)
    assert [encodes(output) for output in outputs] == [["8a", "8b", "8c"], [], [], [], []]
    assert list(world.ended) == ["1"]
    world.add_task("4", "8d", arrival_time=4.0)
    assert not encodes(world.step())
    world.steps(14)
    assert list(world.ended) == ["1", "2", "3", "4"]
    assert world.runner.num_encodes == 4


def test_a_task_that_waits_for_the_relay_holds_up_no_request() -> None:
    world = World(Engine(encoder_cache_size=8, prefix_caching=False, ec_role="ec_both"), num_slots=1, keep_steps=1000)
    world.add_task("1", "8a")
    world.add_task("2", "8b", arrival_time=1.0)
    world.steps(3)
    world.add("3", "8c", 1, max_tokens=1, arrival_time=2.0)
    world.steps(3)
    assert set(world.ended) == {"1", "3"}


def test_a_task_that_waits_too_long_for_the_relay_fails_alone() -> None:
    world = World(num_slots=1, keep_steps=1000)
    world.add_task("1", "8a")
    world.add_task("2", "8b", arrival_time=1.0)
    world.steps(3)
    world.now = 31.0
    world.steps(2)
    assert world.reasons == {"1": "stop", "2": "error"}
    assert "no room in the relay within 30 s" in world.ended["2"]["error"] and not world.ended["2"]["invalid"]
    assert_is_idle(world.scheduler)


def test_an_image_that_the_relay_can_never_take_fails_its_task_at_once() -> None:
    world = World(num_slots=0)
    world.add_task("1", "8a")
    world.step()
    assert "cannot be put" in world.ended["1"]["error"]


# -- images that are elsewhere ----------------------------------------------------------------------------------------


def test_an_image_that_is_elsewhere_is_pulled_and_its_request_encodes_nothing() -> None:
    world = World(max_steps=0)
    world.add("1", 2, "8a", 2, elsewhere=("8a",), max_tokens=1)
    outputs = world.steps(2)
    assert pulls(outputs[0]) == ["8a"] and not encodes(outputs[0])
    assert outputs[1].num_scheduled_tokens == {"1": 12}
    assert world.ended == {"1": {"num_encoded": 0}}


def test_an_image_that_is_lost_is_encoded() -> None:
    world = World(loss=1.0)
    world.add("1", 2, "8a", 2, elsewhere=("8a",), max_tokens=1)
    outputs = world.steps(3)
    assert [pulls(output) for output in outputs] == [["8a"], [], []]
    assert [encodes(output) for output in outputs] == [[], ["8a"], []]
    assert world.ended == {"1": {"num_encoded": 1}}
    assert_is_idle(world.scheduler)


def test_a_lost_image_that_came_without_its_data_fails_its_request_alone() -> None:
    world = World(loss=1.0)
    request = world.add("1", 2, "8a", 2, elsewhere=("8a",))
    request.mm_features[0].data = None
    world.add("2", 4, max_tokens=1)
    world.steps(3)
    assert world.reasons == {"1": "error", "2": "length"}
    assert "no data to encode it from" in world.ended["1"]["error"]
    assert_is_idle(world.scheduler)


def test_a_pull_continues_while_another_image_is_encoded() -> None:
    world = World(epd={"token_budget": 16, "image_budget": 8, "num_encode_layers": 1})
    world.add("1", 4)
    world.step()
    world.add("2", "8a", 1)
    world.step()
    world.add("3", "8b", 1, elsewhere=("8b",))
    assert pulls(world.step()) == ["8b"]
    assert world.step().num_scheduled_tokens == {"1": 1, "3": 9}


def test_a_full_cache_pulls_nothing() -> None:
    world = World(Engine(encoder_cache_size=8, prefix_caching=False, ec_role="ec_both"), max_steps=3)
    world.add("1", "8a", 1, elsewhere=("8a",))
    world.add("2", "8b", 1, elsewhere=("8b",))
    outputs = world.steps(12)
    assert sum(map(len, map(pulls, outputs))) == 2
    assert all(len(pulls(output)) <= 1 for output in outputs)


def test_without_a_kv_connector_a_request_waits_for_its_image_whatever_it_brings() -> None:
    world = World()
    request = world.add("1", "8a", 4)
    request.kv_transfer_params = {"do_remote_prefill": True}
    assert encodes(world.step())


def test_two_ranks_have_pulled_before_an_image_is_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World()
    monkeypatch.setattr(world.scheduler.vllm_config.parallel_config, "tensor_parallel_size", 2)
    world.scheduler.turn_on(world.scheduler.encoder_cache_manager.cache_size)
    world.add("1", "8a", 1, elsewhere=("8a",))
    world.steps(2)
    assert not world.scheduler.running
    world.runner.encoder_cache.remove("8a")
    world.runner.pulling["8a"] = 0  # the other one
    world.steps(2)
    assert len(world.scheduler.running) == 1


def test_after_a_reset_of_the_encoder_cache_tasks_and_pulls_start_anew() -> None:
    world = World(epd={"token_budget": 16, "image_budget": 8, "num_encode_layers": 1}, max_steps=0)
    world.add("1", 4)
    world.step()
    world.add_task("2", "8a")
    world.step()
    world.scheduler.reset_encoder_cache()
    world.runner.under_way, world.runner.wanted = [], {}  # as the runner's own reset
    world.steps(6)
    assert set(world.ended["2"]["images"]) == {"8a"}


# -- no request waits forever -----------------------------------------------------------------------------------------


def check_migration(seed: int, num_requests: int = 16) -> None:
    """Each request that was not aborted has all its tokens or images, and nothing is left."""
    stream = with_migration(make_stream(seed, num_requests=num_requests))
    check_stream(stream, make_budgets(seed) if seed % 3 else None)
    check_stream(with_slos(stream), make_slo_budgets(seed))


def check_stream(stream: Stream, budgets: dict[str, Any] | None) -> None:
    seed = stream.seed
    scheduler = make_scheduler(EPDScheduler, stream.engine, {EPD_CONFIG: budgets} if budgets else None)
    pass_time = let_time_pass(scheduler, seed)
    runner = RelayedRunner(
        scheduler, seed, num_slots=1 + seed % 3, keep_steps=seed % 7, max_steps=seed % 5, loss=(seed % 4) / 8
    )
    runner.layer_s = lambda num_embeds: 1e-4 * num_embeds
    steps = drive(scheduler, stream, runner=runner, on_step=pass_time)
    tokens = tokens_of(steps)
    ended = {name: params for step in steps for name, params in step.ec_params.items()}
    aborted = {request_id for ids in stream.aborts.values() for request_id in ids}
    for request in stream.requests:
        if request.request_id in aborted:
            continue
        if request.encode_only:
            assert set(ended[request.request_id]["images"]) == {image.name for image in request.images}
            assert not tokens.get(request.request_id)
        else:
            assert tokens[request.request_id] == answer(request)
            assert "num_encoded" in ended[request.request_id]
    for identifier in list(scheduler.encoder_cache_manager.in_flight):  # of requests aborted at the end
        scheduler.encoder_cache_manager.finish(identifier)
    assert_is_idle(scheduler)
    assert not len(scheduler.tasks) and not scheduler.pulls.has_sources and not scheduler.planner.failures
    assert not scheduler.relay_ec._images and not scheduler.relay_ec._num_encoded  # type: ignore[union-attr]


@pytest.mark.fuzz
@pytest.mark.timeout(0)
def test_random_streams_of_tasks_and_consumers_end() -> None:
    for seed in seeds(150):
        try:
            check_migration(seed)
        except Exception as exc:
            raise AssertionError(f"FUZZ_SEED={seed}: {exc!r}") from exc
