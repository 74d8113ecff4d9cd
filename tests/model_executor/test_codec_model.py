"""A codec decoder as a stage: real scheduler, executor and relay give the sound of the whole decode."""

import random
import time
from collections.abc import Iterator
from concurrent.futures import wait
from functools import partial
from pathlib import Path

import pytest
import torch
from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.engine import EngineCoreOutput, FinishReason
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from tests.reference.qwen3_tts import Reference
from tests.relay.test_hub import leases_end
from vllm_omni.core.sched.generation import GenerationScheduler
from vllm_omni.core.sched.read_window import report_of
from vllm_omni.messages.payload import Payload, encode, unpack
from vllm_omni.messages.stage_step import FRAME_CHUNKS, STAGE_ARGS, WINDOW
from vllm_omni.model_executor.codec_model import CodecModel
from vllm_omni.model_executor.frame_publisher import FramePublisher
from vllm_omni.model_executor.generation_executor import GenerationExecutor
from vllm_omni.model_executor.models.qwen3_tts.codec import codec_hf_config, load_codec_config
from vllm_omni.plugin import register
from vllm_omni.relay import hub as relay_hub
from vllm_omni.relay.hub import EdgeOptions, RelayHub, RelayOptions
from vllm_omni.testing.qwen3_tts import build

NUM_STREAMS = 3  # at a time
CHUNKS = {"first": 1, "size": 4}
STREAMED = 1e-5  # of samples within [-1, 1], float32
TALKER = RelayOptions("shm", num_bytes=1 << 20, edges={"codec": EdgeOptions("shm", stream=True, credits=64)})


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture(scope="module")
def reference(checkpoint: Path) -> Reference:
    return Reference(checkpoint)


@pytest.fixture(scope="module")
def vllm_config(checkpoint: Path) -> VllmConfig:
    register()
    section = load_codec_config(str(checkpoint), None)["decoder_config"]
    config = EngineArgs(
        model=str(checkpoint),
        dtype="float32",
        hf_overrides=partial(codec_hf_config, section=section),
        load_format="safetensors",
        skip_tokenizer_init=True,
        enable_prefix_caching=False,
        max_num_seqs=NUM_STREAMS,
        max_model_len=16,
        use_tqdm_on_load=False,
    ).create_engine_config()
    config.cache_config.num_gpu_blocks = 1
    return config


class Stage:
    """The codec's engine, stepped by hand, and the talker's end of its streams."""

    def __init__(self, config: VllmConfig, talker: RelayHub) -> None:
        self.executor = GenerationExecutor(config)
        self.scheduler = GenerationScheduler(
            vllm_config=config,
            kv_cache_config=KVCacheConfig(num_blocks=1, kv_cache_tensors=[], kv_cache_groups=[]),
            structured_output_manager=StructuredOutputManager(config),
            block_size=16,
        )
        self.talker = talker
        self.publishers: dict[str, FramePublisher] = {}
        self.published: list[Payload] = []
        self.audio: dict[str, list[torch.Tensor]] = {}
        self.ended: dict[str, EngineCoreOutput] = {}
        self.batches: list[dict[str, int]] = []  # of each step: frames by request

    @property
    def num_open(self) -> int:
        assert isinstance(self.executor.model, CodecModel)
        return self.executor.model.streams.num_open

    def speak(self, name: str, *frames: torch.Tensor) -> None:
        """The talker generates frames; with the first one, the request of the codec starts."""
        for frame in frames:
            if name in self.publishers:
                self.publishers[name].publish(frame.tolist())
                continue
            self.publishers[name] = FramePublisher(self.talker, name, ["codec.decode"])
            payload = self.publishers[name].publish(frame.tolist())
            self.published.append(payload)
            self.start(name, payload.of("codec.decode"))

    def start(self, name: str, *payloads: Payload, window: int | None = None, **args: object) -> None:
        args = {"payloads": [encode(one) for one in payloads], FRAME_CHUNKS: CHUNKS, **args}
        params = SamplingParams(max_tokens=1, extra_args={STAGE_ARGS: args, WINDOW: window})
        self.scheduler.add_request(Request(name, [0], params, None))
        self.audio[name] = []
        if (gate := self.scheduler.streams[name]._gate) is not None:
            wait([gate.connecting], timeout=60)

    def note_read(self, name: str, num_pieces: int) -> None:
        self.scheduler.add_request(Request.from_engine_core_request(report_of(name, num_pieces), None))

    def finish(self, *names: str) -> None:
        for name in names:
            self.publishers[name].finish()

    def step(self) -> list[str]:
        """One step; returns the ids of its requests."""
        output = self.scheduler.schedule()
        streams = output.streams
        self.batches.append({one: 0 if update.rows is None else len(update.rows) for one, update in streams.items()})
        made = self.executor.execute_model(output)
        for outputs in self.scheduler.update_from_output(output, made).values():
            for one in outputs.outputs:
                payload = unpack(one.pooling_output)
                if "error" not in payload.values:
                    self.audio[one.request_id].append(self.executor.hub.pull_blocking(payload)["audio"].clone())
                    self.executor.hub.release_payload(payload)
                if one.finished:
                    self.ended[one.request_id] = one
        return list(output.num_scheduled_tokens)

    def run(self) -> None:
        deadline = time.monotonic() + 60
        while self.scheduler.has_requests():
            assert self.step() or time.monotonic() < deadline
        self.step()  # the executor is notified of the last ones

    def abort(self, name: str) -> None:
        self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)
        self.publishers[name].finish()

    def sound(self, name: str) -> torch.Tensor:
        return torch.cat(self.audio[name])


@pytest.fixture(scope="module")
def engine(vllm_config: VllmConfig) -> Iterator[Stage]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(relay_hub, "_process_hub", None)
        talker = RelayHub(TALKER)
        stage = Stage(vllm_config, talker)
        yield stage
        stage.executor.shutdown()
        talker.close()


@pytest.fixture
def stage(engine: Stage) -> Iterator[Stage]:
    """Leaves nothing behind."""
    yield engine
    engine.run()
    assert engine.num_open == 0
    assert not engine.scheduler.streams
    for payload in engine.published:
        engine.talker.release_payload(payload, for_all=True)
    assert leases_end(engine.talker)
    engine.publishers.clear()
    engine.published.clear()
    engine.ended.clear()
    engine.batches.clear()


def codes_of(reference: Reference, num_frames: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(reference.decoder_config.codebook_size, (num_frames, 16), generator=generator)


def test_frames_that_come_one_by_one_sound_as_the_whole_decode_in_growing_chunks(
    stage: Stage, reference: Reference
) -> None:
    codes = codes_of(reference, 12)
    for frame in codes:
        stage.speak("a", frame)
        stage.step()
    stage.finish("a")
    stage.run()
    assert [len(one) // 1920 for one in stage.audio["a"]] == [1, 2, 4, 4, 1]
    torch.testing.assert_close(stage.sound("a"), reference.decode(codes), atol=STREAMED, rtol=0)
    assert stage.ended["a"].finish_reason is FinishReason.LENGTH


def test_a_slow_reader_of_sound_holds_its_decoder_and_so_the_talker(stage: Stage, reference: Reference) -> None:
    """Three pieces ahead at most: of 1, 2 and 4 frames, so that the next ones stay in the stream."""
    codes = codes_of(reference, 20)
    stage.speak("fast", codes[0])
    stage.publishers["a"] = publisher = FramePublisher(stage.talker, "a", ["codec.decode"])
    stage.published.append(publisher.publish(codes[0].tolist()))
    stage.start("a", stage.published[-1].of("codec.decode"), window=3)
    for frame in codes[1:]:
        stage.speak("a", frame)
        stage.speak("fast", frame)
        stage.step()
    stage.finish("a", "fast")
    num_rounds = 0
    while "a" not in stage.ended:
        assert len(stage.audio["a"]) == min(3 + 2 * num_rounds, 7)
        num_rounds += 1
        stage.note_read("a", 2 * num_rounds)
        for _ in range(4):
            stage.step()
    stage.note_read("a", 7)  # after its end: nothing
    assert num_rounds == 2
    assert [len(one) // 1920 for one in stage.audio["a"]] == [1, 2, 4, 4, 4, 4, 1]
    torch.testing.assert_close(stage.sound("a"), reference.decode(codes), atol=STREAMED, rtol=0)
    torch.testing.assert_close(stage.sound("fast"), reference.decode(codes), atol=STREAMED, rtol=0)


def test_streams_of_any_pace_share_steps_and_sound_as_alone(stage: Stage, reference: Reference) -> None:
    choose = random.Random(1)
    codes = {name: codes_of(reference, choose.randrange(1, 20), seed) for seed, name in enumerate("abcdefgh")}
    left = {name: list(frames) for name, frames in codes.items()}
    while left:
        for name in choose.sample(sorted(left), choose.randrange(1, len(left) + 1)):
            stage.speak(name, *left[name][: (count := choose.randrange(1, 6))])
            del left[name][:count]
            if not left[name]:
                stage.finish(name)
                del left[name]
        stage.step()
        assert stage.num_open <= NUM_STREAMS
    stage.run()
    for name, frames in codes.items():
        torch.testing.assert_close(stage.sound(name), reference.decode(frames), atol=STREAMED, rtol=0)
    assert any(len(batch) == NUM_STREAMS for batch in stage.batches)


def test_a_stream_beyond_the_slots_waits_and_then_sounds_whole(stage: Stage, reference: Reference) -> None:
    codes = codes_of(reference, 3)
    for name in "abcd":
        stage.speak(name, *codes)
    assert stage.step() == ["a", "b", "c"]
    stage.finish("a", "d")
    stage.step()
    stage.step()  # the end of "a" was not known with its last frame
    assert "d" in stage.step()
    stage.finish("b", "c")
    stage.run()
    torch.testing.assert_close(stage.sound("d"), reference.decode(codes), atol=STREAMED, rtol=0)


def test_aborted_streams_release_their_state_and_the_others_continue(stage: Stage, reference: Reference) -> None:
    codes = codes_of(reference, 5)
    for name in "abc":
        stage.speak(name, *codes[:3])
    stage.step()
    stage.abort("b")
    stage.step()
    assert stage.num_open == 2
    for name in "ac":
        stage.speak(name, *codes[3:])
        stage.finish(name)
    stage.run()
    for name in "ac":
        torch.testing.assert_close(stage.sound(name), reference.decode(codes), atol=STREAMED, rtol=0)


def test_an_id_that_is_aborted_and_comes_again_starts_anew(stage: Stage, reference: Reference) -> None:
    codes = codes_of(reference, 4)
    stage.speak("a", *codes)
    stage.step()
    stage.abort("a")
    del stage.publishers["a"]
    stage.speak("a", *codes.flip(0))
    stage.finish("a")
    stage.run()
    torch.testing.assert_close(stage.sound("a"), reference.decode(codes.flip(0)), atol=STREAMED, rtol=0)


def test_a_step_waits_for_a_whole_chunk_or_the_end(stage: Stage, reference: Reference) -> None:
    codes = codes_of(reference, 2)
    stage.speak("a", *codes)
    assert stage.step() == ["a"]
    assert stage.step() == []
    stage.finish("a")
    stage.run()
    assert [sum(batch.values()) for batch in stage.batches if batch] == [1, 1]


def test_a_code_outside_the_codebook_fails_its_request_alone(stage: Stage, reference: Reference) -> None:
    codes = codes_of(reference, 1)
    stage.speak("a", *codes)
    stage.speak("b", codes[0] * 0 + reference.decoder_config.codebook_size)
    stage.finish("a", "b")
    stage.run()
    assert stage.ended["b"].finish_reason is FinishReason.ERROR
    assert "codes must lie in [0, " in unpack(stage.ended["b"].pooling_output).values["error"]
    torch.testing.assert_close(stage.sound("a"), reference.decode(codes), atol=STREAMED, rtol=0)


def test_a_stream_whose_talker_is_gone_fails_its_request(stage: Stage, reference: Reference) -> None:
    stage.speak("a", *codes_of(reference, 2))
    stage.step()
    stage.talker.abort("a")
    stage.run()
    assert stage.ended["a"].finish_reason is FinishReason.ERROR


def test_frames_without_a_stream_are_decoded_in_the_same_chunks(stage: Stage, reference: Reference) -> None:
    codes = codes_of(reference, 9)
    stage.start("a", *(Payload(values={"frame": frame}) for frame in codes.tolist()))
    stage.run()
    assert [len(one) // 1920 for one in stage.audio["a"]] == [1, 2, 4, 2]
    torch.testing.assert_close(stage.sound("a"), reference.decode(codes), atol=STREAMED, rtol=0)


def test_frames_of_a_reference_come_first_and_are_not_heard(stage: Stage, reference: Reference) -> None:
    codes, context = codes_of(reference, 3), codes_of(reference, 7, seed=1)
    stage.start(
        "a", *(Payload(values={"frame": frame}) for frame in codes.tolist()), context=context.short().numpy().tobytes()
    )
    stage.run()
    torch.testing.assert_close(stage.sound("a"), reference.decode(codes, context), atol=STREAMED, rtol=0)


def test_a_paused_stage_ends_its_streams_and_starts_none(stage: Stage, reference: Reference) -> None:
    codes = codes_of(reference, 3)
    stage.speak("a", codes[0])
    stage.step()
    stage.scheduler.set_pause_state(PauseState.PAUSED_NEW)
    stage.speak("a", *codes[1:])
    stage.speak("b", *codes)
    stage.finish("a", "b")
    assert stage.step() == ["a"]
    stage.scheduler.set_pause_state(PauseState.PAUSED_ALL)
    assert stage.step() == []
    stage.scheduler.set_pause_state(PauseState.UNPAUSED)
    stage.run()
    torch.testing.assert_close(stage.sound("b"), reference.decode(codes), atol=STREAMED, rtol=0)
