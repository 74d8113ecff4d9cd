"""A prompt's pages travel from one engine to another under all failures, and nothing is left behind."""

import random
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import RequestStatus

from tests import machine
from tests.contract.relays import BACKENDS
from tests.kv.paged_engine import BLOCK_SIZE, PagedEngine, answer, release
from vllm_omni.config.budgets import EPD_CONFIG
from vllm_omni.core.sched.epd import EPDScheduler
from vllm_omni.errors import ConfigError
from vllm_omni.kv import page_relay
from vllm_omni.messages.payload import TensorRef
from vllm_omni.relay.hub import RelayHub, RelayOptions

RELAY_BYTES = 1 << 20
PAGE_BYTES = 4096  # what a prompt's buffer takes at least
NUM_TOKENS = 4


def make_prompt(length: int, seed: int = 0) -> list[int]:
    return [random.Random(seed * 1000 + length).randrange(8, 64) for _ in range(length)]


class Engines:
    """Engines whose relays are in this process, and checks of what is left in them."""

    def __init__(self) -> None:
        self.hubs: list[RelayHub] = []
        self.engines: list[PagedEngine] = []

    def hub(self, num_bytes: int = RELAY_BYTES, transport: str = "shm") -> RelayHub:
        self.hubs.append(RelayHub(RelayOptions(transport, num_bytes), prefault=False))
        return self.hubs[-1]

    def __call__(self, hub: RelayHub | None = None, **engine: Any) -> PagedEngine:
        self.engines.append(PagedEngine(hub or self.hub(), **engine))
        return self.engines[-1]

    def assert_nothing_is_left(self) -> None:
        for engine in self.engines:
            engine.run()
            engine.assert_is_idle()
        for hub in self.hubs:
            leases = {name: one.num_leases for name, one in hub.statistics().items() if one.num_leases}
            assert not leases


@pytest.fixture
def engines() -> Iterator[Engines]:
    made = Engines()
    yield made
    for engine in made.engines:
        engine.close()
    for hub in made.hubs:
        hub.close()


def migrate(source: PagedEngine, target: PagedEngine, prompt: list[int], name: str = "1", **request: Any) -> list[int]:
    """Prefill at the source, decode at the target, release."""
    params = source.run_prefill(name, prompt)
    target.add(name, prompt, **params, **request)
    target.run(lambda: name in target.reasons)
    release(target.ranks[0].worker.source._hub, params)  # type: ignore[union-attr]
    return target.tokens[name]


# -- the way of a prompt ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [1, 3, 4, 5, 8, 30, 100])
@pytest.mark.parametrize("scheduler_cls", [EPDScheduler, Scheduler])
def test_a_target_answers_as_if_it_had_computed_the_prompt(
    engines: Engines, length: int, scheduler_cls: type[Scheduler]
) -> None:
    source, target = (engines(scheduler_cls=scheduler_cls) for _ in range(2))
    prompt = make_prompt(length)
    assert migrate(source, target, prompt) == answer(prompt, NUM_TOKENS)
    # The first token is sampled here, from the last one of the prompt, computed again; a single one is not worth it.
    assert target.num_computed["1"] == NUM_TOKENS
    engines.assert_nothing_is_left()


@pytest.mark.parametrize("transport", ["local", "shm", "tcp", "nixl"])
def test_pages_go_over_any_relay_with_buffers(engines: Engines, transport: str) -> None:
    if needs := BACKENDS[transport].needs:
        machine.require(needs)
    source, target = engines(engines.hub(transport=transport)), engines(engines.hub(transport=transport))
    for number, length in enumerate([5, 17, 64]):
        prompt = make_prompt(length)
        assert migrate(source, target, prompt, str(number)) == answer(prompt, NUM_TOKENS)
        assert target.num_computed[str(number)] == NUM_TOKENS
    wait_until(lambda: not any(one.num_leases for hub in engines.hubs for one in hub.statistics().values()))
    engines.assert_nothing_is_left()


def wait_until(is_true: Callable[[], bool]) -> None:
    """Wait for another thread: a release is a message in flight."""
    event = threading.Event()
    for _ in range(1000):
        if is_true():
            return
        event.wait(0.01)
    raise AssertionError("it did not become true")


def test_an_engine_may_be_source_and_target_of_one_prompt(engines: Engines) -> None:
    engine = engines()
    prompt = make_prompt(30)
    params = engine.run_prefill("1", prompt)
    engine.add("2", prompt, **params)
    engine.run()
    assert engine.tokens["2"] == answer(prompt, NUM_TOKENS)
    release(engines.hubs[0], params)
    engines.assert_nothing_is_left()


def test_pulled_pages_can_travel_to_a_third_engine(engines: Engines) -> None:
    first, second, third = engines(), engines(), engines()
    prompt = make_prompt(30)
    params = first.run_prefill("1", prompt)
    second.add("2", prompt, max_tokens=1, do_remote_decode=True, **params)
    second.run()
    assert second.num_computed["2"] == 1
    third.add("3", prompt, **second.params["2"])  # type: ignore[arg-type]
    third.run()
    assert third.tokens["3"] == answer(prompt, NUM_TOKENS)
    for params_of in (params, second.params["2"]):
        release(engines.hubs[0], params_of)
    engines.assert_nothing_is_left()


def test_two_targets_pull_the_same_pages(engines: Engines) -> None:
    source, *targets = engines(), engines(), engines()
    prompt = make_prompt(30)
    params = source.run_prefill("1", prompt)
    for target in targets:
        target.add("1", prompt, **params)
        target.run()
        assert target.tokens["1"] == answer(prompt, NUM_TOKENS) and target.num_computed["1"] == NUM_TOKENS
    release(engines.hubs[0], params)
    engines.assert_nothing_is_left()


def test_many_prompts_at_once(engines: Engines) -> None:
    source, target = engines(max_num_batched_tokens=24), engines(max_num_batched_tokens=24, num_blocks=40)
    prompts = {str(number): make_prompt(3 + 7 * number) for number in range(12)}
    for name, prompt in prompts.items():
        source.prefill(name, prompt)
    source.run()
    for name, prompt in prompts.items():
        target.add(name, prompt, **source.params[name])  # type: ignore[arg-type]
    target.run()
    assert target.tokens == {name: answer(prompt, NUM_TOKENS) for name, prompt in prompts.items()}
    for params in source.params.values():
        release(engines.hubs[0], params)
    engines.assert_nothing_is_left()


def test_chunks_go_out_with_the_steps_that_compute_them(engines: Engines) -> None:
    source, target = engines(max_num_batched_tokens=10), engines()
    prompt = make_prompt(35)
    assert migrate(source, target, prompt) == answer(prompt, NUM_TOKENS)
    saves = [save for step in source.steps for save in step.kv_connector_metadata.actions.saves]  # type: ignore[union-attr]
    assert [(save.first_page, len(save.blocks), save.is_last) for save in saves] == [
        (0, 2, False),
        (2, 3, False),
        (5, 2, False),
        (7, 2, True),
    ]


def test_pages_of_the_sources_prefix_cache_go_out_as_well(engines: Engines) -> None:
    source, target = engines(prefix_caching=True), engines()
    prompt = make_prompt(30)
    for name in ("1", "2"):
        assert migrate(source, target, prompt, name) == answer(prompt, NUM_TOKENS)
    assert source.num_computed["2"] == 2  # of 30 tokens 28 were in 7 blocks
    engines.assert_nothing_is_left()


def test_pages_of_the_targets_prefix_cache_are_not_pulled(engines: Engines) -> None:
    source, target = engines(), engines(prefix_caching=True)
    prompt = make_prompt(30)
    migrate(source, target, prompt[:18], "1")
    assert migrate(source, target, prompt, "2") == answer(prompt, NUM_TOKENS)
    loads = [load for step in target.steps for load in step.kv_connector_metadata.actions.loads]  # type: ignore[union-attr]
    assert [(load.first_page, len(load.blocks)) for load in loads] == [(0, 5), (4, 4)]  # the fifth page was not full
    # All but the last token are here: nothing is worth being pulled.
    assert migrate(source, target, prompt[:29], "3") == answer(prompt[:29], NUM_TOKENS)
    assert len([1 for step in target.steps for _ in step.kv_connector_metadata.actions.loads]) == 2  # type: ignore[union-attr]
    engines.assert_nothing_is_left()


@pytest.mark.parametrize("buffer_bytes", [1, 3000])
def test_a_prompt_of_several_buffers(engines: Engines, buffer_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vllm_omni.kv.pages.BUFFER_BYTES", buffer_bytes)
    source, target = engines(max_num_batched_tokens=13), engines(prefix_caching=True)
    prompt = make_prompt(50)
    assert migrate(source, target, prompt[:22], "1") == answer(prompt[:22], NUM_TOKENS)
    assert migrate(source, target, prompt, "2") == answer(prompt, NUM_TOKENS)
    engines.assert_nothing_is_left()


@pytest.mark.parametrize("tp_sizes", [(1, 2), (2, 1), (2, 2), (1, 4), (4, 1), (2, 4), (4, 2)])
def test_ranks_take_their_heads_from_the_ranks_that_have_them(engines: Engines, tp_sizes: tuple[int, int]) -> None:
    source, target = (engines(tp_size=tp_size) for tp_size in tp_sizes)
    for number, length in enumerate([3, 30]):
        prompt = make_prompt(length)
        assert migrate(source, target, prompt, str(number)) == answer(prompt, NUM_TOKENS)
        assert target.num_computed[str(number)] == NUM_TOKENS
    engines.assert_nothing_is_left()


@pytest.mark.parametrize("epd", [{"token_budget": 6, "image_budget": 8, "num_encode_layers": 1}])
def test_budgets_and_pages(engines: Engines, epd: dict[str, Any]) -> None:
    source, target = (engines(additional_config={EPD_CONFIG: epd}) for _ in range(2))
    prompt = make_prompt(33)
    assert migrate(source, target, prompt) == answer(prompt, NUM_TOKENS)
    assert target.num_computed["1"] == NUM_TOKENS
    engines.assert_nothing_is_left()


# -- room -------------------------------------------------------------------------------------------------------------


def test_a_full_relay_delays_prefills_until_a_release(engines: Engines) -> None:
    source, target = engines(engines.hub(2 * PAGE_BYTES)), engines()
    prompts = {str(number): make_prompt(10, number) for number in range(4)}
    for name, prompt in prompts.items():
        source.prefill(name, prompt)
    for _ in range(5):
        source.step()
    assert list(source.params) == ["1", "0"][::-1]
    assert source.num_computed.keys() == {"0", "1"}  # no other has started
    for name, prompt in prompts.items():
        source.run(lambda name=name: name in source.params)  # type: ignore[misc]
        target.add(name, prompt, **source.params[name])  # type: ignore[arg-type]
        target.run()
        release(engines.hubs[0], source.params[name])
    assert target.tokens == {name: answer(prompt, NUM_TOKENS) for name, prompt in prompts.items()}
    engines.assert_nothing_is_left()


def test_requests_that_need_no_buffers_are_not_delayed(engines: Engines) -> None:
    source = engines(engines.hub(PAGE_BYTES))
    params = source.run_prefill("1", make_prompt(10))
    source.prefill("2", make_prompt(10))
    source.add("3", make_prompt(10))
    source.run(lambda: "3" in source.reasons)
    assert source.tokens["3"] == answer(make_prompt(10), NUM_TOKENS) and "2" not in source.num_computed
    release(engines.hubs[0], params)
    source.run()
    release(engines.hubs[0], source.params["2"])
    engines.assert_nothing_is_left()


def test_a_prompt_larger_than_the_relay_is_announced_as_an_error_and_computed_by_the_target(
    engines: Engines, caplog: pytest.LogCaptureFixture
) -> None:
    source, target = engines(engines.hub(PAGE_BYTES)), engines()
    prompt = make_prompt(100)
    params = source.run_prefill("1", prompt)
    assert "take 16384 bytes of the relay, which has 4096 in all" in params["error"] and "pages" not in params
    target.add("1", prompt, **params)
    target.run()
    assert target.tokens["1"] == answer(prompt, NUM_TOKENS)
    assert "the source has announced no pages" in caplog.text
    engines.assert_nothing_is_left()


def test_other_buffers_of_the_relay_count(engines: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vllm_omni.kv.pages.BUFFER_BYTES", 1)  # a buffer, and so a chunk of the slab, for each page
    source = engines(engines.hub(3 * PAGE_BYTES))
    assert "pages" in source.run_prefill("1", make_prompt(12))
    release(engines.hubs[0], source.params["1"])
    assert "error" in source.run_prefill("2", make_prompt(13))
    engines.assert_nothing_is_left()


def test_a_full_target_admits_when_it_has_room(engines: Engines) -> None:
    source, target = engines(), engines(num_blocks=12)
    prompts = [make_prompt(30), make_prompt(28)]
    announced = [source.run_prefill(str(number), prompt) for number, prompt in enumerate(prompts)]
    target.add("0", prompts[0], max_tokens=10, **announced[0])
    target.run(lambda: target.tokens["0"])
    target.add("1", prompts[1], **announced[1])
    target.step()
    assert target.scheduler.requests["1"].status is RequestStatus.WAITING
    target.run()
    assert target.tokens == {"0": answer(prompts[0], 10), "1": answer(prompts[1], NUM_TOKENS)}
    assert target.num_computed["1"] == NUM_TOKENS
    for params in announced:
        release(engines.hubs[0], params)
    engines.assert_nothing_is_left()


def test_a_preempted_prefill_resumes_where_it_was(engines: Engines) -> None:
    source, target = engines(num_blocks=20, max_num_batched_tokens=16), engines()
    source.add("0", make_prompt(12), max_tokens=40)
    source.run(lambda: source.tokens["0"])
    prompt = make_prompt(60)
    source.prefill("1", prompt)
    source.run(lambda: source.num_computed.get("1", 0) >= 30)
    # As upstream does when another needs its blocks.
    request = source.scheduler.requests["1"]
    source.scheduler.running.remove(request)
    source.scheduler._preempt_request(request, 0.0)
    source.run(lambda: "1" in source.params)
    assert source.num_computed["1"] > 60
    pages = [
        save.first_page + number
        for step in source.steps
        for save in step.kv_connector_metadata.actions.saves  # type: ignore[union-attr]
        for number in range(len(save.blocks))
    ]
    assert pages == list(range(15)), "each page once"
    target.add("1", prompt, **source.params["1"])  # type: ignore[arg-type]
    target.run()
    assert target.tokens["1"] == answer(prompt, NUM_TOKENS)
    release(engines.hubs[0], source.params["1"])
    engines.assert_nothing_is_left()


def test_a_preempted_decode_computes_its_prompt_itself(engines: Engines) -> None:
    source, target = engines(), engines()
    prompt = make_prompt(30)
    params = source.run_prefill("1", prompt)
    target.add("1", prompt, max_tokens=8, **params)
    target.run(lambda: len(target.tokens["1"]) == 3)
    release(engines.hubs[0], params)
    request = target.scheduler.requests["1"]
    target.scheduler.running.remove(request)
    target.scheduler._preempt_request(request, 0.0)
    target.run()
    assert target.tokens["1"] == answer(prompt, 8)
    engines.assert_nothing_is_left()


# -- aborts -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_steps", range(7))
def test_a_prefill_task_that_is_aborted_at_any_step_leaves_nothing(engines: Engines, num_steps: int) -> None:
    source = engines(max_num_batched_tokens=8)
    source.prefill("1", make_prompt(20))
    for _ in range(num_steps):
        source.step()
    assert ("1" in source.params) == (num_steps >= 4)
    source.abort("1")  # in the last cases after its end: no engine has read its announcement
    engines.assert_nothing_is_left()


def test_a_prefill_task_that_is_aborted_while_the_relay_is_full_leaves_nothing(engines: Engines) -> None:
    source = engines(engines.hub(PAGE_BYTES))
    params = source.run_prefill("1", make_prompt(10))
    source.prefill("2", make_prompt(10))
    source.step()
    source.abort("2")
    release(engines.hubs[0], params)
    engines.assert_nothing_is_left()


class GatedHub(RelayHub):
    """Let pulls wait at a gate."""

    def __init__(self, options: RelayOptions) -> None:
        super().__init__(options, prefault=False)
        self.gate = threading.Event()
        self.num_gets = 0

    def get_blocking(self, ref: TensorRef, timeout_s: float = 30.0) -> torch.Tensor:
        self.num_gets += 1
        assert self.gate.wait(timeout_s)
        return super().get_blocking(ref, timeout_s)


@pytest.mark.parametrize("num_steps", range(4))
def test_a_decode_task_that_is_aborted_at_any_step_leaves_nothing(engines: Engines, num_steps: int) -> None:
    hub = GatedHub(RelayOptions("shm", RELAY_BYTES))
    engines.hubs.append(hub)
    source, target = engines(), engines(hub)
    prompt = make_prompt(20)
    params = source.run_prefill("1", prompt)
    target.add("1", prompt, **params)
    for _ in range(num_steps):
        target.step(wait=False)
    target.abort("1")
    target.step(wait=False)
    if num_steps:
        # A request that is being pulled keeps its blocks until the pull has ended.
        assert "1" in target.scheduler.requests
        num_free = target.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
        assert num_free < target.scheduler.kv_cache_manager.block_pool.num_gpu_blocks - 1
    hub.gate.set()
    target.run()
    release(engines.hubs[0], params)
    engines.assert_nothing_is_left()


def test_steps_continue_during_a_pull(engines: Engines) -> None:
    hub = GatedHub(RelayOptions("shm", RELAY_BYTES))
    engines.hubs.append(hub)
    source, target = engines(), engines(hub)
    prompts = [make_prompt(20), make_prompt(9)]
    params = source.run_prefill("1", prompts[0])
    target.add("1", prompts[0], **params)
    target.add("2", prompts[1])
    while "2" not in target.reasons:
        target.step(wait=False)
    assert target.tokens == {"1": [], "2": answer(prompts[1], NUM_TOKENS)}
    hub.gate.set()
    target.run()
    assert target.tokens["1"] == answer(prompts[0], NUM_TOKENS)
    release(engines.hubs[0], params)
    engines.assert_nothing_is_left()


def test_a_buffer_that_another_request_still_reads_is_not_released(engines: Engines) -> None:
    hub = GatedHub(RelayOptions("shm", RELAY_BYTES))
    engines.hubs.append(hub)
    source, target = engines(), engines(hub)
    prompt = make_prompt(20)
    params = source.run_prefill("1", prompt)
    target.add("1", prompt, **params)
    target.add("2", prompt, **params)
    target.step(wait=False)
    wait_until(lambda: hub.num_gets == 2)
    hub.gate.set()
    target.run()
    assert target.tokens["1"] == target.tokens["2"] == answer(prompt, NUM_TOKENS)
    release(engines.hubs[0], params)
    engines.assert_nothing_is_left()


# -- what is not there, or not what it should be ----------------------------------------------------------------------


def test_pages_that_are_gone_are_computed(engines: Engines, caplog: pytest.LogCaptureFixture) -> None:
    source, target = engines(), engines(prefix_caching=True)
    prompt = make_prompt(30)
    params = source.run_prefill("1", prompt)
    release(engines.hubs[0], params)
    target.add("1", prompt, **params)
    target.run()
    assert target.tokens["1"] == answer(prompt, NUM_TOKENS) and target.num_computed["1"] > 30
    assert "request 1: its pages could not be pulled: the tensor is not there any longer" in caplog.text
    engines.assert_nothing_is_left()


def test_one_rank_without_its_pages_is_enough_to_recompute(engines: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
    source, target = engines(), engines(tp_size=2)
    broken = target.ranks[1].worker
    assert broken is not None
    monkeypatch.setattr(broken.target, "_hub", RelayHub(RelayOptions()))
    monkeypatch.setattr(broken.target._hub, "get_blocking", lambda *args: (_ for _ in ()).throw(RuntimeError("broken")))
    prompt = make_prompt(30)
    assert migrate(source, target, prompt) == answer(prompt, NUM_TOKENS)
    assert target.num_computed["1"] > 30
    engines.assert_nothing_is_left()


def test_an_engine_with_that_policy_fails_the_request_instead(engines: Engines) -> None:
    source, target = engines(), engines(policy="fail")
    prompt = make_prompt(30)
    params = source.run_prefill("1", prompt)
    release(engines.hubs[0], params)
    target.add("1", prompt, **params)
    target.add("2", prompt)
    target.run()
    assert target.reasons == {"1": "error", "2": "length"}
    engines.assert_nothing_is_left()


def test_pages_whose_lease_has_expired_before_they_were_computed_are_not_written(
    engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = engines(max_num_batched_tokens=8), engines()
    prompt = make_prompt(20)
    source.prefill("1", prompt)
    source.run(lambda: source.num_computed.get("1"))
    engines.hubs[0].abort("kv/1")  # as when it expires
    other = engines.hubs[0].put_nowait("2", torch.arange(8192, dtype=torch.int64))  # in its place
    source.run(lambda: "1" in source.params)
    assert engines.hubs[0].get_blocking(other).tolist() == list(range(8192))
    engines.hubs[0].release(other)
    target.add("1", prompt, **source.params["1"])  # type: ignore[arg-type]
    target.run()
    assert target.tokens["1"] == answer(prompt, NUM_TOKENS)
    engines.assert_nothing_is_left()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"pages": None}, "no page table in 'pages'"),
        ({"pages": b"\x00"}, "malformed payload"),
        ({"pages": b""}, "malformed payload"),
        ({"num_tokens": 7}, "of another prompt"),
        ({"prompt": "0" * 32}, "of another prompt"),
        ({"error": "no room"}, "the source has announced no pages: no room"),
    ],
)
def test_a_wrong_announcement_is_logged_and_the_prompt_computed(
    engines: Engines, change: dict[str, Any], message: str, caplog: pytest.LogCaptureFixture
) -> None:
    source, target = engines(), engines()
    prompt = make_prompt(30)
    params = source.run_prefill("1", prompt)
    target.add("1", prompt, **{**params, **change})
    target.run()
    assert target.tokens["1"] == answer(prompt, NUM_TOKENS) and target.num_computed["1"] > 30
    assert "request 1: its prompt is computed here: " in caplog.text and message in caplog.text
    release(engines.hubs[0], params)
    engines.assert_nothing_is_left()


def test_blocks_of_another_size_are_rejected_by_their_sizes(engines: Engines, caplog: pytest.LogCaptureFixture) -> None:
    source, target = engines(), engines(block_size=2 * BLOCK_SIZE)
    prompt = make_prompt(30)
    assert migrate(source, target, prompt) == answer(prompt, NUM_TOKENS)
    assert target.num_computed["1"] > 30
    assert "blocks of 4 tokens there, of 8 here" in caplog.text


def test_caches_of_another_kind_are_rejected_by_their_content(
    engines: Engines, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = engines(), engines()
    prompt = make_prompt(30)
    params = source.run_prefill("1", prompt)
    table = page_relay.PageTable.decode(params["pages"])
    (rank,) = table.ranks
    for ranks, message in [
        ((), "no rank has announced its caches"),
        ((type(rank)("FLASH_ATTN", rank.block_size, rank.groups),), "caches of FLASH_ATTN there"),
        ((type(rank)(rank.content, rank.block_size, ()),), "layers and pages of a head"),
    ]:
        wrong = page_relay.PageTable(table.num_pages, ranks, table.refs)
        name = message.replace(" ", "-")
        target.add(name, prompt, **{**params, "pages": wrong.encode()})
        target.run()
        assert target.tokens[name] == answer(prompt, NUM_TOKENS) and message in caplog.text
    short = page_relay.PageTable(table.num_pages, table.ranks, {})
    target.add("short", prompt, **{**params, "pages": short.encode()})
    target.run()
    assert target.tokens["short"] == answer(prompt, NUM_TOKENS) and "a page table without '0/0/0'" in caplog.text
    release(engines.hubs[0], params)
    engines.assert_nothing_is_left()


def test_a_relay_without_buffers_is_rejected_at_start() -> None:
    with pytest.raises(ConfigError, match="needs a relay with buffers"):
        PagedEngine(RelayHub(RelayOptions("inline")))


# -- anything at any time ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(12))
def test_random_prompts_and_aborts(engines: Engines, seed: int) -> None:
    rng = random.Random(seed)
    caching, tp_size = rng.random() < 0.5, rng.choice([1, 2])
    hub = engines.hub(rng.choice([6, 20]) * PAGE_BYTES)
    source = engines(
        hub, prefix_caching=caching, num_blocks=40, max_num_batched_tokens=rng.choice([8, 30]), tp_size=tp_size
    )
    target = engines(prefix_caching=caching, num_blocks=40, max_num_batched_tokens=16)
    stem = make_prompt(12, seed)
    prompts = {
        str(number): stem[: rng.randrange(13)] + make_prompt(rng.randrange(1, 60), number) for number in range(16)
    }
    aborted: set[str] = set()
    announced: dict[str, dict[str, Any]] = {}
    todo = list(prompts)
    for _ in range(400):
        if todo and rng.random() < 0.4:
            name = todo.pop()
            source.prefill(name, prompts[name])
        source.step()
        target.step(wait=rng.random() < 0.5)
        for name, params in source.params.items():
            if name not in announced and name not in aborted:
                assert params is not None
                announced[name] = params
                target.add(name, prompts[name], **params)
        if rng.random() < 0.1:
            name = rng.choice(list(prompts))
            if name not in todo and name not in announced:
                source.abort(name)
                aborted.add(name)
            elif name in announced and name not in target.reasons:
                target.abort(name)
                aborted.add(name)
        for name in list(announced):
            is_over = name in aborted or bool(target.tokens[name])
            if is_over and (params := announced[name]) is not None and params:
                release(hub, params)
                announced[name] = {}
    source.run()
    target.run()
    for name in prompts.keys() - aborted:
        assert target.tokens[name] == answer(prompts[name], NUM_TOKENS)
    for params in announced.values():
        if params:
            release(hub, params)
    engines.assert_nothing_is_left()
