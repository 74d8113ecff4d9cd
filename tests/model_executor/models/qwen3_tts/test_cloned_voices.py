"""Requests of a checkpoint that clones voices: for the features of a recording, and for speech with them."""

import asyncio
from pathlib import Path

import numpy as np
import pytest

from tests.engine.functions import CODEC
from tests.model_executor.models.qwen3_tts.test_pipeline import make_pipeline
from tests.reference.test_qwen3_tts import CASES, recording
from vllm_omni.engine.function_node import FunctionNode
from vllm_omni.engine.startup import start_engines
from vllm_omni.entrypoints.voice_cloning import ClonedVoice, VoiceFeatures
from vllm_omni.errors import InvalidRequest
from vllm_omni.flow import GraphParser, GraphRuntime
from vllm_omni.messages.stage_output import StageOutput
from vllm_omni.model_executor.models.qwen3_tts.pipeline import Qwen3TTSPipeline
from vllm_omni.model_executor.models.qwen3_tts.voice_encoder import encode, load_voice_encoder
from vllm_omni.model_executor.pipeline import ENCODES_VOICE, RequestContext
from vllm_omni.relay.hub import RelayHub, RelayOptions

FEATURES = VoiceFeatures(np.zeros(96, np.float32).tobytes(), np.ones((5, 16), np.int16).tobytes(), 5)


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory: pytest.TempPathFactory) -> Qwen3TTSPipeline:
    return make_pipeline(tmp_path_factory.mktemp("checkpoints"), "clone")


async def test_a_call_for_features_runs_the_encoders_alone_in_a_process_of_their_own(
    pipeline: Qwen3TTSPipeline,
) -> None:
    samples = recording(**CASES["clone"][1]["reference"]).tobytes()
    (spec,) = pipeline.functions
    node = FunctionNode(spec, CODEC)
    hub = RelayHub(RelayOptions(), prefault=False)
    running = await asyncio.to_thread(start_engines, {}, {}, hub, {}, node.processes)
    try:
        nodes = {"voice_encoder": node, "talker": node, "codec": node}  # the others are not reached
        options = pipeline.validate({ENCODES_VOICE: True})
        inputs = pipeline.inputs({"samples": samples, "with_codes": True}, options)
        runtime = GraphRuntime(GraphParser(pipeline.graph).parse(), nodes)
        call = runtime.open("voice", inputs, ["voice"], context=RequestContext("voice", {}, options), deadline_s=200)
        payloads = [frame.payload async for frame in call if frame.payload is not None]
        await node.processes[0].aclose()
    finally:
        await asyncio.to_thread(running.shutdown)
        hub.close()
    ((features,),) = (pipeline.extra_output("voice", StageOutput("voice", multimodal_output=one)) for one in payloads)
    assert node.num_runs == 1
    assert features == encode(load_voice_encoder(pipeline.model), samples, with_codes=True)
    assert VoiceFeatures(**features).num_frames == 18


@pytest.mark.parametrize("is_whole", [None, True])
def test_a_recording_with_its_transcript_is_a_part_of_the_talkers_prompt(
    pipeline: Qwen3TTSPipeline, is_whole: bool | None
) -> None:
    voice = ClonedVoice(FEATURES, "One two.")
    options = pipeline.validate({"cloned_voice": voice, "non_streaming_mode": is_whole})
    request = pipeline.inputs("Hello.", options)["prompt"]
    args = request.args
    assert len(request.prompt["prompt_token_ids"]) == len(args["text_ids"]) == len(args["codec_ids"])
    assert (args["x_vector"], args["voice_codes"]) == (FEATURES.x_vector, FEATURES.codes)
    assert args["codec_ids"][args["frames_at"] :] == [-1] * FEATURES.num_frames
    assert bool(args["tail_ids"]) is (is_whole is None)  # by default, the text follows with the frames


def test_without_a_transcript_the_timbre_alone_is_cloned(pipeline: Qwen3TTSPipeline) -> None:
    request = pipeline.inputs("Hello.", pipeline.validate({"cloned_voice": ClonedVoice(FEATURES)}))["prompt"]
    assert (request.args["x_vector"], request.args["voice_codes"]) == (FEATURES.x_vector, b"")
    assert request.args["frames_at"] is None


def test_a_transcript_is_read_as_text(pipeline: Qwen3TTSPipeline) -> None:
    options = pipeline.validate({"cloned_voice": ClonedVoice(FEATURES, "x" * 1_000_000)})
    with pytest.raises(InvalidRequest, match="ref_text has 1000000 characters"):
        pipeline.inputs("Hello.", options)


def test_only_a_checkpoint_that_clones_has_encoders(pipeline: Qwen3TTSPipeline, tmp_path: Path) -> None:
    other = make_pipeline(tmp_path, "base")
    assert (pipeline.voice_output, pipeline.x_vector_size) == ("voice", 96)
    assert (other.voice_output, list(other.functions)) == (None, [])
    assert "voice" not in GraphParser(other.graph).parse().outputs
