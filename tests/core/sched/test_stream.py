"""The real scheduler with streams of the real shared-memory relay, driven as the engine core drives it."""

import asyncio
import time
from collections.abc import Iterator
from concurrent.futures import wait
from functools import partial
from typing import Any

import pytest
import torch
from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from vllm_omni.core.sched.read_window import report_of
from vllm_omni.core.sched.stream import StreamScheduler
from vllm_omni.messages.payload import Payload, encode, pack
from vllm_omni.messages.stage_step import STAGE_ARGS, WINDOW, StreamSchedulerOutput, StreamUpdate
from vllm_omni.model_executor.models.qwen2_5_omni.talker import talker_hf_config
from vllm_omni.plugin import register
from vllm_omni.relay import InlineRelay, StreamReader, StreamWriter
from vllm_omni.relay.shm import ShmRelay
from vllm_omni.testing import qwen2_5_omni as tiny

BLOCK_SIZE = 4
NUM_PROMPT = 6  # four of the thinker, the speaker's token, and the reply's first
WIDTH = 8
CREDITS = 4


@pytest.fixture(scope="module")
def vllm_config(tmp_path_factory: pytest.TempPathFactory) -> VllmConfig:
    """Two requests at a time."""
    register()
    return EngineArgs(
        model=str(tiny.build(tmp_path_factory.mktemp("checkpoint"))),
        dtype="float32",
        hf_overrides=partial(talker_hf_config, speaker_bos_ids=(1,)),
        skip_tokenizer_init=True,
        enable_prefix_caching=False,
        max_num_seqs=2,
        max_model_len=64,
        block_size=BLOCK_SIZE,
    ).create_engine_config()


@pytest.fixture
def relay() -> Iterator[ShmRelay]:
    relay = ShmRelay(1 << 20)
    yield relay
    relay.check_integrity()
    relay.close()


def make_scheduler(vllm_config: VllmConfig, num_blocks: int = 100) -> StreamScheduler:
    vllm_config.cache_config.num_gpu_blocks = num_blocks
    spec = FullAttentionSpec(block_size=BLOCK_SIZE, num_kv_heads=1, head_size=32, dtype=torch.float32)
    return StreamScheduler(
        vllm_config=vllm_config,
        kv_cache_config=KVCacheConfig(num_blocks, [], [KVCacheGroupSpec(["layer"], spec)]),
        structured_output_manager=StructuredOutputManager(vllm_config),
        block_size=BLOCK_SIZE,
    )


def make_request(request_id: str, args: dict[str, Any] | None = None, num_prompt: int = NUM_PROMPT) -> Request:
    params = SamplingParams(max_tokens=40, ignore_eos=True, extra_args={STAGE_ARGS: args} if args else None)
    return Request(request_id, [0] * num_prompt, params, None)


def add_consumer(
    scheduler: StreamScheduler, relay: ShmRelay, request_id: str, *, is_connected: bool = True
) -> StreamWriter:
    """A request whose prompt's first four rows came with it; the others come by the stream."""
    writer = relay.open_stream(request_id, (WIDTH,), torch.float32, credits=CREDITS)
    rows = InlineRelay().put_nowait(request_id, torch.zeros(NUM_PROMPT - 2, WIDTH))
    payload = Payload({"rows": rows}, {"rows": None}, {"rows": writer.ref})
    scheduler.add_request(make_request(request_id, {"payloads": [encode(payload)], "num_own_tokens": 1}))
    if is_connected:
        wait(scheduler.gates.connections(), timeout=60)
    return writer


def write(writer: StreamWriter, *values: float) -> None:
    writer.write_nowait(torch.tensor(values, dtype=torch.float32)[:, None].expand(-1, WIDTH))


def step(scheduler: StreamScheduler, payloads: dict[str, Payload] | None = None) -> tuple[SchedulerOutput, list[str]]:
    """One engine step in which every request scheduled to its end gets a token; and the ids that were scheduled."""
    output = scheduler.schedule()
    ids = list(output.num_scheduled_tokens)
    packed = [pack((payloads or {})[one]) if one in (payloads or {}) else None for one in ids]
    runner_output = ModelRunnerOutput(
        req_ids=ids,
        req_id_to_index={one: index for index, one in enumerate(ids)},
        sampled_token_ids=[[5] for _ in ids],
        pooler_output=packed if payloads else None,
    )
    scheduler.update_from_output(output, runner_output)
    return output, ids


def update(output: SchedulerOutput, request_id: str) -> StreamUpdate:
    assert isinstance(output, StreamSchedulerOutput)
    return output.streams[request_id]


def values(output: SchedulerOutput, request_id: str) -> list[float]:
    rows = update(output, request_id).rows
    assert rows is not None
    return rows[:, 0].tolist()


# -- a consumer -------------------------------------------------------------------------------------------------------


def test_a_prompt_waits_for_its_last_row(vllm_config: VllmConfig, relay: ShmRelay) -> None:
    scheduler = make_scheduler(vllm_config)
    writer = add_consumer(scheduler, relay, "a")
    assert step(scheduler)[1] == []
    write(writer, 1.0)
    output, ids = step(scheduler)
    assert ids == ["a"]
    assert values(output, "a") == [1.0]


def test_a_step_waits_for_its_row(vllm_config: VllmConfig, relay: ShmRelay) -> None:
    scheduler = make_scheduler(vllm_config)
    writer = add_consumer(scheduler, relay, "a")
    write(writer, 1.0)
    step(scheduler)
    for value in (2.0, 3.0, 4.0):
        assert step(scheduler)[1] == []
        write(writer, value)
        output, ids = step(scheduler)
        assert ids == ["a"]
        assert values(output, "a") == [value]


def test_rows_that_came_together_leave_together(vllm_config: VllmConfig, relay: ShmRelay) -> None:
    scheduler = make_scheduler(vllm_config)
    writer = add_consumer(scheduler, relay, "a")
    write(writer, 1.0, 2.0, 3.0)
    assert values(step(scheduler)[0], "a") == [1.0, 2.0, 3.0]
    for _ in range(2):
        output, ids = step(scheduler)
        assert ids == ["a"]
        assert not isinstance(output, StreamSchedulerOutput)
    assert step(scheduler)[1] == []


def test_behind_the_end_nothing_waits(vllm_config: VllmConfig, relay: ShmRelay) -> None:
    scheduler = make_scheduler(vllm_config)
    writer = add_consumer(scheduler, relay, "a")
    write(writer, 1.0)
    writer.end()
    output, _ = step(scheduler)
    assert update(output, "a").last
    for _ in range(5):
        output, ids = step(scheduler)
        assert ids == ["a"]
        assert not isinstance(output, StreamSchedulerOutput)


def test_an_end_that_arrives_without_rows_is_sent_without_rows(vllm_config: VllmConfig, relay: ShmRelay) -> None:
    scheduler = make_scheduler(vllm_config)
    writer = add_consumer(scheduler, relay, "a")
    write(writer, 1.0)
    step(scheduler)
    assert step(scheduler)[1] == []
    writer.end()
    assert update(step(scheduler)[0], "a") == StreamUpdate(None, True)


@pytest.mark.parametrize("how", ["error", "abort", "close"])
def test_the_runner_is_notified_of_a_broken_stream(vllm_config: VllmConfig, relay: ShmRelay, how: str) -> None:
    scheduler = make_scheduler(vllm_config)
    writer = add_consumer(scheduler, relay, "a")
    write(writer, 1.0)
    step(scheduler)
    {"error": lambda: writer.end("no more"), "abort": lambda: relay.abort("a"), "close": relay.close}[how]()
    for _ in range(1000):
        output, ids = step(scheduler)
        if ids:
            break
        time.sleep(0.01)  # a connection's end is noticed by another thread
    sent = update(output, "a")
    assert not sent.last
    assert {"error": "no more"}.get(how, "gone") in sent.error
    scheduler.finish_requests("a", RequestStatus.FINISHED_ABORTED)


def test_one_that_waits_does_not_hold_up_another(vllm_config: VllmConfig, relay: ShmRelay) -> None:
    scheduler = make_scheduler(vllm_config)
    for name in ("a", "b"):
        write(add_consumer(scheduler, relay, name), 1.0)
    step(scheduler)
    scheduler.add_request(make_request("c"))
    writer = add_consumer(scheduler, relay, "d")
    scheduler.finish_requests("a", RequestStatus.FINISHED_ABORTED)
    assert step(scheduler)[1] == ["c"]
    scheduler.finish_requests("b", RequestStatus.FINISHED_ABORTED)
    assert step(scheduler)[1] == ["c"]
    write(writer, 1.0)
    assert step(scheduler)[1] == ["c", "d"]


def test_a_waiting_request_keeps_its_slot_and_its_place(vllm_config: VllmConfig, relay: ShmRelay) -> None:
    scheduler = make_scheduler(vllm_config)
    writers = [add_consumer(scheduler, relay, name) for name in ("a", "b")]
    for writer in writers:
        write(writer, 1.0)
    step(scheduler)
    scheduler.add_request(make_request("c"))
    for _ in range(3):
        assert step(scheduler)[1] == []
    write(writers[1], 2.0)
    assert step(scheduler)[1] == ["b"]
    write(writers[0], 2.0)
    assert step(scheduler)[1] == ["a"]
    assert [request.request_id for request in scheduler.running] == ["a", "b"]
    assert scheduler.num_waiting_for_streaming_input == 0


def test_a_request_that_ends_closes_its_stream(vllm_config: VllmConfig, relay: ShmRelay) -> None:
    scheduler = make_scheduler(vllm_config)
    writer = add_consumer(scheduler, relay, "a")
    write(writer, 1.0, 2.0, 3.0, 4.0)
    step(scheduler)
    scheduler.finish_requests("a", RequestStatus.FINISHED_ABORTED)
    assert not scheduler.gates
    write(writer, *range(10))
    assert relay.statistics().num_leases == 0


def test_a_request_aborted_before_its_first_step_releases_its_stream(vllm_config: VllmConfig, relay: ShmRelay) -> None:
    scheduler = make_scheduler(vllm_config)
    add_consumer(scheduler, relay, "a")
    scheduler.finish_requests("a", RequestStatus.FINISHED_ABORTED)
    assert relay.statistics().num_leases == 0


def test_a_request_aborted_while_it_connects_releases_its_stream(vllm_config: VllmConfig, relay: ShmRelay) -> None:
    scheduler = make_scheduler(vllm_config)
    for number in range(100):
        add_consumer(scheduler, relay, str(number), is_connected=False)
        connections = scheduler.gates.connections()
        scheduler.finish_requests(str(number), RequestStatus.FINISHED_ABORTED)
        wait(connections, timeout=60)
    assert relay.statistics().num_leases == 0


def test_a_preempted_request_computes_again_without_new_rows(vllm_config: VllmConfig, relay: ShmRelay) -> None:
    scheduler = make_scheduler(vllm_config)
    writer = add_consumer(scheduler, relay, "a")
    write(writer, 1.0, 2.0)
    step(scheduler)
    step(scheduler)
    (request,) = scheduler.running
    scheduler.running.remove(request)
    scheduler._preempt_request(request, 0.0)
    assert step(scheduler)[1] == []
    write(writer, 3.0)
    output, ids = step(scheduler)
    assert ids == ["a"]
    assert output.num_scheduled_tokens["a"] == NUM_PROMPT + 2
    assert values(output, "a") == [3.0]


def test_without_streams_the_step_is_upstreams(vllm_config: VllmConfig) -> None:
    scheduler = make_scheduler(vllm_config)
    scheduler.add_request(make_request("a"))
    output, ids = step(scheduler)
    assert ids == ["a"]
    assert type(output) is SchedulerOutput


# -- a producer -------------------------------------------------------------------------------------------------------


def add_producer(scheduler: StreamScheduler, relay: ShmRelay, request_id: str) -> StreamWriter:
    """A request whose runner has opened a stream in its first step."""
    return add_producers(scheduler, relay, request_id, 1)[0]


def add_producers(scheduler: StreamScheduler, relay: ShmRelay, request_id: str, num_readers: int) -> list[StreamWriter]:
    scheduler.add_request(make_request(request_id, {"publish": True}))
    writers = [
        relay.open_stream(request_id, (WIDTH,), torch.float32, credits=CREDITS * (1 + number))
        for number in range(num_readers)
    ]
    step(scheduler, {request_id: Payload(streams={str(key): one.ref for key, one in enumerate(writers)})})
    return writers


def read(relay: ShmRelay, writer: StreamWriter) -> StreamReader:
    return asyncio.run(relay.read_stream(writer.ref))


def test_a_producer_without_credits_is_not_scheduled(vllm_config: VllmConfig, relay: ShmRelay) -> None:
    scheduler = make_scheduler(vllm_config)
    writer = add_producer(scheduler, relay, "a")
    reader = read(relay, writer)
    for index in range(CREDITS):
        assert step(scheduler)[1] == ["a"]
        write(writer, index)
    assert step(scheduler)[1] == []
    reader.read_nowait()
    assert step(scheduler)[1] == ["a"]
    reader.close()


def test_the_slowest_of_several_readers_holds_a_producer_back(vllm_config: VllmConfig, relay: ShmRelay) -> None:
    scheduler = make_scheduler(vllm_config)
    writers = add_producers(scheduler, relay, "a", 2)
    readers = [read(relay, writer) for writer in writers]
    for writer in writers:
        write(writer, *range(CREDITS))
    assert step(scheduler)[1] == []
    readers[1].read_nowait()
    assert step(scheduler)[1] == []
    readers[0].read_nowait()
    assert step(scheduler)[1] == ["a"]
    for reader in readers:
        reader.close()


def test_a_reader_that_has_not_come_holds_no_producer_back(vllm_config: VllmConfig, relay: ShmRelay) -> None:
    scheduler = make_scheduler(vllm_config)
    early, late = add_producers(scheduler, relay, "a", 2)
    reader = read(relay, early)
    write(late, *range(2 * CREDITS))
    for _ in range(3):
        assert step(scheduler)[1] == ["a"]
    late_reader = read(relay, late)  # it has come: from now on, it may be too slow
    assert step(scheduler)[1] == []
    late_reader.close()
    assert step(scheduler)[1] == ["a"]
    reader.close()


def test_a_consumer_that_has_gone_holds_no_producer_back(vllm_config: VllmConfig, relay: ShmRelay) -> None:
    scheduler = make_scheduler(vllm_config)
    writer = add_producer(scheduler, relay, "a")
    reader = read(relay, writer)
    write(writer, *range(CREDITS))
    assert step(scheduler)[1] == []
    reader.close()
    assert step(scheduler)[1] == ["a"]


def test_a_producer_without_credits_is_preempted_for_a_request_that_cannot_be_admitted(
    vllm_config: VllmConfig, relay: ShmRelay
) -> None:
    scheduler = make_scheduler(vllm_config)
    writers = [add_producer(scheduler, relay, name) for name in ("a", "b")]
    for writer in writers:
        read(relay, writer)
        write(writer, *range(CREDITS))
    scheduler.add_request(make_request("c"))
    step(scheduler)
    assert step(scheduler)[1] == ["c"]
    assert [request.request_id for request in scheduler.running] == ["a", "c"]
    writers[1].end()
    relay.abort("b")
    scheduler.finish_requests("a", RequestStatus.FINISHED_ABORTED)
    assert step(scheduler)[1] == ["c", "b"]


def test_a_producer_without_requests_behind_it_keeps_its_blocks(vllm_config: VllmConfig, relay: ShmRelay) -> None:
    scheduler = make_scheduler(vllm_config)
    writer = add_producer(scheduler, relay, "a")
    read(relay, writer)
    write(writer, *range(CREDITS))
    for _ in range(3):
        assert step(scheduler)[1] == []
    assert [request.num_preemptions for request in scheduler.running] == [0]
    relay.abort("a")


def test_what_a_request_published_that_was_aborted_during_the_step_is_released(
    vllm_config: VllmConfig, relay: ShmRelay
) -> None:
    scheduler = make_scheduler(vllm_config)
    scheduler.add_request(make_request("a", {"publish": True}))
    output = scheduler.schedule()
    writer = relay.open_stream("a", (WIDTH,), torch.float32, credits=CREDITS)
    rows = relay.put_nowait("a", torch.zeros(2, WIDTH), num_readers=2)
    scheduler.finish_requests("a", RequestStatus.FINISHED_ABORTED)
    packed = pack(Payload({"rows": rows}, {"rows": None}, {"rows": writer.ref}))
    scheduler.update_from_output(output, ModelRunnerOutput(["a"], {"a": 0}, [[5]], pooler_output=[packed]))
    assert relay.statistics().num_leases == 0
    assert not scheduler.gates


# -- a reader of the tokens -------------------------------------------------------------------------------------------


def add_read(scheduler: StreamScheduler, request_id: str, window: int) -> Request:
    """A request that may be so many tokens ahead."""
    request = make_request(request_id)
    assert request.sampling_params is not None
    request.sampling_params.extra_args = {WINDOW: window}
    scheduler.add_request(request)
    return request


def note_read(scheduler: StreamScheduler, request_id: str, num_tokens: int) -> None:
    scheduler.add_request(Request.from_engine_core_request(report_of(request_id, num_tokens), None))


def test_a_request_is_at_most_its_window_ahead_of_who_reads_its_tokens(vllm_config: VllmConfig) -> None:
    scheduler = make_scheduler(vllm_config)
    request = add_read(scheduler, "a", 4)
    scheduler.add_request(make_request("b"))
    for num_read, num_made in ((0, 4), (1, 5), (4, 8), (4, 8), (20, 24)):
        note_read(scheduler, "a", num_read)
        ids = [step(scheduler)[1] for _ in range(30 if num_read == 20 else 6)]
        assert ids[-1] == (["b"] if scheduler.requests.get("b") else [])
        assert request.num_output_tokens == num_made
    scheduler.finish_requests("a", RequestStatus.FINISHED_ABORTED)
    assert not scheduler.gates and not scheduler.has_unfinished_requests()


def test_a_report_about_a_request_that_has_ended_is_no_request(vllm_config: VllmConfig) -> None:
    scheduler = make_scheduler(vllm_config)
    note_read(scheduler, "gone", 4)
    assert not scheduler.has_requests()
    assert not scheduler.gates


def test_slow_readers_do_not_keep_others_out(vllm_config: VllmConfig) -> None:
    """Two requests run at a time: "a" is held, and makes room for "c" beside "b", which goes on."""
    scheduler = make_scheduler(vllm_config)
    slow = add_read(scheduler, "a", 3)
    scheduler.add_request(make_request("b"))
    for _ in range(4):
        step(scheduler)
    scheduler.add_request(make_request("c"))
    step(scheduler)
    assert step(scheduler)[1] == ["b", "c"]
    assert slow.num_preemptions == 1
    scheduler.finish_requests("b", RequestStatus.FINISHED_ABORTED)
    assert step(scheduler)[1] == ["c"]
    note_read(scheduler, "a", 3)
    output, ids = step(scheduler)
    assert ids == ["c", "a"]
    assert output.num_scheduled_tokens["a"] == NUM_PROMPT + 3


def test_a_slow_reader_with_nobody_behind_it_keeps_its_blocks(vllm_config: VllmConfig) -> None:
    scheduler = make_scheduler(vllm_config)
    requests = [add_read(scheduler, name, 3) for name in ("a", "b")]
    scheduler_ids = [step(scheduler)[1] for _ in range(6)]
    assert scheduler_ids == [["a", "b"]] * 3 + [[]] * 3
    assert [request.num_preemptions for request in requests] == [0, 0]
