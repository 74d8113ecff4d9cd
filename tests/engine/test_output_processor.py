"""vLLM's real output processor and collector, fed with engine outputs that carry tokens, tensors or both."""

import time
from typing import Any

import msgspec
import pytest
import torch
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest, FinishReason
from vllm.v1.engine.output_processor import OutputProcessor, RequestOutputCollector

from vllm_omni.engine.output_processor import MultimodalOutputProcessor
from vllm_omni.engine.rejection import raise_reported
from vllm_omni.errors import RelayBroken, SourceLost, StageFailed, Unavailable
from vllm_omni.messages.failure import make_failure
from vllm_omni.messages.outputs import OmniRequestOutput
from vllm_omni.messages.payload import Payload, pack
from vllm_omni.messages.stage_step import STAGE_ARGS
from vllm_omni.messages.timeline import TIMELINE, Mark, Task, Timeline
from vllm_omni.relay.hub import RelayHub, RelayOptions

hub = RelayHub(RelayOptions())


def make_processor(output_type: str) -> MultimodalOutputProcessor:
    return MultimodalOutputProcessor(OutputProcessor(None, log_stats=False), output_type, hub)


def add_request(
    processor: MultimodalOutputProcessor,
    kind: RequestOutputKind = RequestOutputKind.DELTA,
    request_id: str = "a",
    **args: Any,
) -> RequestOutputCollector:
    collector = RequestOutputCollector(kind, request_id)
    request = EngineCoreRequest(
        request_id=request_id,
        external_req_id=request_id,
        prompt_token_ids=[1, 2, 3],
        mm_features=None,
        sampling_params=SamplingParams(
            output_kind=kind, detokenize=False, max_tokens=100, extra_args={STAGE_ARGS: args} if args else None
        ),
        pooling_params=None,
        arrival_time=time.time(),
        lora_request=None,
        cache_salt=None,
        data_parallel_rank=None,
    )
    processor.add_request(request, None, queue=collector)
    return collector


def make_output(
    token_ids: list[int],
    rows: torch.Tensor | None = None,
    *,
    finished: bool = False,
    request_id: str = "a",
    name: str = "rows",
) -> EngineCoreOutput:
    payload = None if rows is None else pack(hub.publish(request_id, {name: rows, "n": len(rows)}))
    return EngineCoreOutput(
        request_id=request_id,
        new_token_ids=token_ids,
        pooling_output=payload,
        finish_reason=FinishReason.LENGTH if finished else None,
    )


def read(collector: RequestOutputCollector) -> OmniRequestOutput:
    output = collector.get_nowait()
    assert isinstance(output, OmniRequestOutput)
    return output


def test_a_step_with_tokens_and_tensors_gives_both() -> None:
    processor = make_processor("latents")
    collector = add_request(processor)
    processor.process_outputs([make_output([7], torch.ones(2, 3))])
    output = read(collector)
    assert list(output.outputs[0].token_ids) == [7]
    assert [payload.tensors["rows"].num_rows for payload in output.payloads] == [2]


def test_a_slow_reader_loses_neither_tokens_nor_tensors() -> None:
    processor = make_processor("latents")
    collector = add_request(processor)
    for step in range(50):
        rows = torch.full((1, 2), float(step)) if step % 3 == 0 else None
        processor.process_outputs([make_output([step], rows, finished=step == 49)])
    output = read(collector)
    assert list(output.outputs[0].token_ids) == list(range(50))
    assert [hub.get_blocking(payload.tensors["rows"])[0, 0].item() for payload in output.payloads] == list(
        range(0, 50, 3)
    )
    assert output.finished


def test_no_chunk_is_delivered_twice() -> None:
    processor = make_processor("latents")
    collector = add_request(processor)
    counts = []
    for step in range(5):
        processor.process_outputs([make_output([step], torch.ones(1, 2))])
        counts.append(len(read(collector).payloads))
    assert counts == [1] * 5


def test_audio_of_several_steps_is_joined() -> None:
    processor = make_processor("audio")
    collector = add_request(processor)
    processor.process_outputs([make_output([0], torch.arange(3.0), name="audio")])
    processor.process_outputs([make_output([0], torch.arange(3.0, 5.0), finished=True, name="audio")])
    assert torch.equal(read(collector).multimodal_output["audio"], torch.arange(5.0))


def test_a_final_only_request_keeps_everything_until_its_end() -> None:
    processor = make_processor("latents")
    collector = add_request(processor, RequestOutputKind.FINAL_ONLY)
    processor.process_outputs([make_output([1], torch.ones(1, 2))])
    assert collector.get_nowait() is None
    processor.process_outputs([make_output([2], torch.ones(3, 2), finished=True)])
    output = read(collector)
    assert list(output.outputs[0].token_ids) == [1, 2]
    assert [payload.tensors["rows"].num_rows for payload in output.payloads] == [1, 3]


def test_requests_do_not_mix() -> None:
    processor = make_processor("latents")
    collectors = {name: add_request(processor, request_id=name) for name in "ab"}
    processor.process_outputs(
        [make_output([1], torch.ones(1, 2), request_id="a"), make_output([2], None, request_id="b")]
    )
    assert len(read(collectors["a"]).payloads) == 1
    assert read(collectors["b"]).payloads == []


def test_outputs_of_an_aborted_request_are_dropped() -> None:
    processor = make_processor("latents")
    add_request(processor)
    processor.abort_requests(["a"], internal=True)
    processor.process_outputs([make_output([1], torch.ones(1, 2))])
    assert processor.get_num_unfinished_requests() == 0


def test_an_error_of_the_engine_reaches_the_reader() -> None:
    processor = make_processor("latents")
    collector = add_request(processor)
    output = make_output([0], finished=True)
    output.pooling_output = pack(Payload(values={"error": "ValueError: no", "invalid": True}))
    processor.process_outputs([output])
    assert read(collector).multimodal_output == {"error": "ValueError: no", "invalid": True}


def test_media_that_cannot_be_fetched_fail_their_request_alone() -> None:
    processor = make_processor("audio")
    collectors = {name: add_request(processor, request_id=name) for name in "ab"}
    outputs = [make_output([0], finished=True, request_id=name) for name in "ab"]
    published = [hub.publish(name, {"audio": torch.ones(4)}) for name in "ab"]
    location = msgspec.msgpack.encode(["gone", 1])
    gone = msgspec.structs.replace(published[0].tensors["audio"], backend="shm", location=location, lease=1)
    for output, payload in zip(outputs, [Payload({"audio": gone}, published[0].values), published[1]], strict=True):
        output.pooling_output = pack(payload)
    processor.process_outputs(outputs)
    assert "the producer gone cannot be reached" in read(collectors["a"]).multimodal_output["error"]
    assert torch.equal(read(collectors["b"]).multimodal_output["audio"], torch.ones(4))


def test_the_images_of_a_request_come_with_its_last_step() -> None:
    processor = make_processor("image")
    collector = add_request(processor)
    progress = make_output([])
    progress.pooling_output = pack(Payload(values={"step": 1, "num_steps": 2}))
    processor.process_outputs([progress])
    output = read(collector)
    assert (output.multimodal_output, output.finished) == ({"step": 1, "num_steps": 2}, False)
    last = make_output([0], finished=True)
    images = torch.arange(2 * 3 * 3, dtype=torch.uint8).reshape(1, 2, 3, 3)
    last.pooling_output = pack(hub.publish("a", {"images": images, "step": 2, "num_steps": 2}))
    processor.process_outputs([last])
    output = read(collector)
    assert torch.equal(output.multimodal_output.pop("images"), images)
    assert (output.multimodal_output, output.finished) == ({"step": 2, "num_steps": 2}, True)


def test_media_that_only_another_stage_reads_are_not_fetched() -> None:
    images = torch.arange(2 * 3 * 3, dtype=torch.uint8).reshape(1, 2, 3, 3)
    for args, is_opened in (({"publish": True}, True), ({"publish": True, "unopened": True}, False)):
        processor = make_processor("image")
        collector = add_request(processor, **args)
        processor.process_outputs([make_output([0], images, finished=True, name="images")])
        output = read(collector)
        assert ("images" in output.multimodal_output) == is_opened
        (payload,) = output.payloads
        assert torch.equal(hub.pull_blocking(payload)["images"], images)


def test_a_slow_reader_gets_the_latest_preview() -> None:
    processor = make_processor("image")
    collector = add_request(processor)
    for step in (1, 2):
        output = make_output([])
        preview = torch.full((2, 2, 3), step, dtype=torch.uint8)
        output.pooling_output = pack(hub.publish("a", {"preview": preview, "step": step, "num_steps": 4}))
        processor.process_outputs([output])
    media = read(collector).multimodal_output
    assert (media["step"], tuple(media["preview"].shape), int(media["preview"].max())) == (2, (2, 2, 3), 2)


def test_a_failed_request_has_its_reason() -> None:
    processor = make_processor("image")
    collector = add_request(processor)
    output = make_output([])
    output.finish_reason = FinishReason.ERROR
    output.pooling_output = pack(Payload(values={"error": "no memory", "invalid": False}))
    processor.process_outputs([output])
    got = read(collector)
    assert got.outputs[0].finish_reason == "error"
    assert got.multimodal_output == {"error": "no memory", "invalid": False}


def test_what_a_stage_could_not_read_is_an_error_of_its_own_class() -> None:
    for error, cls in ((RelayBroken("the producer is gone"), SourceLost), (KeyError("x"), StageFailed)):
        processor = make_processor("image")
        collector = add_request(processor)
        output = make_output([])
        output.finish_reason = FinishReason.ERROR
        output.pooling_output = pack(Payload(values=make_failure("a", error).report))
        processor.process_outputs([output])
        with pytest.raises(StageFailed, match=rf"stage 'painter': {type(error).__name__}: ") as raised:
            raise_reported(read(collector), "painter")
        assert type(raised.value) is cls


def test_a_request_whose_media_the_engine_does_not_have_can_be_sent_again() -> None:
    processor = make_processor("text")
    collector = add_request(processor)
    output = make_output([])
    output.finish_reason, output.mm_cache_miss_hashes = FinishReason.ERROR, ["cat"]
    processor.process_outputs([output])
    with pytest.raises(Unavailable, match=r"stage 'thinker': .*send the request again"):
        raise_reported(read(collector), "thinker", is_constrained=True)


def test_an_unknown_output_type_is_rejected() -> None:
    with pytest.raises(KeyError):
        make_processor("smell")


def test_a_timeline_is_noted_and_hidden_from_the_user() -> None:
    processor = make_processor("text")
    collector = add_request(processor)
    first, last = make_output([1]), make_output([2], finished=True)
    first.kv_transfer_params = {TIMELINE: Timeline(Task.WHOLE, [(Mark.QUEUED, 1.0), (Mark.TOKEN, 2.0)]).pack()}
    last.kv_transfer_params = {TIMELINE: Timeline(Task.WHOLE, [(Mark.ENDED, 3.0)]).pack(), "do_remote_prefill": True}
    processor.process_outputs([first])
    assert read(collector).kv_transfer_params is None
    processor.process_outputs([last])
    assert read(collector).kv_transfer_params == {"do_remote_prefill": True}
    assert processor.notes["a"].timelines == {
        "a": Timeline(Task.WHOLE, [(Mark.QUEUED, 1.0), (Mark.TOKEN, 2.0), (Mark.ENDED, 3.0)])
    }
    late = make_output([3], request_id="gone")
    late.kv_transfer_params = {TIMELINE: Timeline(Task.WHOLE).pack()}
    processor.process_outputs([late])  # aborted meanwhile
    assert processor.notes.keys() == {"a"}


def test_tokens_are_timed_where_there_is_an_slo() -> None:
    times = iter([5.0, 6.0])
    upstream = OutputProcessor(None, log_stats=False)
    processor = MultimodalOutputProcessor(upstream, "text", hub, has_slo=True, clock=lambda: next(times))
    add_request(processor)
    processor.process_outputs([make_output([1])])
    processor.process_outputs([make_output([2, 3], finished=True)])
    assert processor.notes["a"].token_times == [(0, 1, 5.0), (0, 2, 6.0)]
    processor = make_processor("text")
    add_request(processor)
    processor.process_outputs([make_output([1], finished=True)])
    assert not processor.notes
