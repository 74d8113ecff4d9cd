"""The pipeline's options and requests, and the sound of its vocoder."""

import json
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import Qwen3OmniMoeConfig, Qwen3OmniMoeForConditionalGeneration

from vllm_omni.config import load_config, read_model_type
from vllm_omni.engine.graph_checks import check_graph
from vllm_omni.engine.pipeline_checks import check_pipeline
from vllm_omni.errors import InvalidRequest
from vllm_omni.flow import Chunk, parse_graphs
from vllm_omni.messages.payload import Payload, TensorRef
from vllm_omni.messages.token_names import TokenNames, decode_names
from vllm_omni.model_executor.models.qwen3_omni_moe.code2wav import Qwen3OmniCode2Wav, code2wav_hf_config
from vllm_omni.model_executor.models.qwen3_omni_moe.pipeline import RESIDUAL_SAMPLING, Qwen3OmniPipeline
from vllm_omni.model_executor.models.qwen3_omni_moe_thinker.pipeline import ThinkerPipeline
from vllm_omni.model_executor.pipeline import Pipeline
from vllm_omni.testing.qwen3_omni import VARIANTS
from vllm_omni.testing.qwen3_omni_config import make_config

SHAPE = VARIANTS["base"]
START, USER, ASSISTANT = (SHAPE.token_id(one) for one in ("<|im_start|>", "user", "assistant"))
PROMPT = [START, USER, 10, 65, 66, START, ASSISTANT, 10]


@pytest.fixture(scope="module")
def config() -> Qwen3OmniMoeConfig:
    return make_config(SHAPE)


@pytest.fixture(scope="module")
def pipeline(config: Qwen3OmniMoeConfig) -> Qwen3OmniPipeline:
    return Qwen3OmniPipeline("model", config)


def write_config(path: Path, config: Qwen3OmniMoeConfig, **more: object) -> Path:
    (path / "config.json").write_text(json.dumps({**config.to_dict(), **more}))
    return path


@pytest.mark.parametrize("pipeline_cls", [Qwen3OmniPipeline, ThinkerPipeline])
def test_the_bundled_deployment_fits_the_graph(
    pipeline_cls: type[Pipeline], config: Qwen3OmniMoeConfig, tmp_path: Path
) -> None:
    speaks = pipeline_cls is Qwen3OmniPipeline
    deployment = load_config(write_config(tmp_path, config, enable_audio_output=speaks))
    made = pipeline_cls(str(tmp_path), config)
    check_pipeline(made)
    check_graph(deployment, made, list(parse_graphs([made.graph]).values()))


def test_a_checkpoint_without_a_talker_is_a_model_type_of_its_own(config: Qwen3OmniMoeConfig, tmp_path: Path) -> None:
    assert read_model_type(write_config(tmp_path, config)) == "qwen3_omni_moe"
    assert read_model_type(write_config(tmp_path, config, enable_audio_output=False)) == "qwen3_omni_moe_thinker"


def test_speakers_are_known_by_any_spelling_and_the_first_is_the_references(pipeline: Qwen3OmniPipeline) -> None:
    assert pipeline.validate({}) == {"speaker": "ethan", "num_reply_tokens": 0}
    assert pipeline.validate({"speaker": "Chelsie"})["speaker"] == "chelsie"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"speaker": "chelsea"}, "unknown speaker 'chelsea': did you mean 'chelsie'"),
        ({"speeker": "ethan"}, "unknown option 'speeker': did you mean 'speaker'"),
        ({"num_reply_tokens": -1}, "must be a number of tokens"),
    ],
)
def test_unknown_options_are_rejected(pipeline: Qwen3OmniPipeline, options: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidRequest, match=said):
        pipeline.validate(options)


async def outputs(*payloads: Payload) -> AsyncIterator[Chunk]:
    """The thinker's: one payload each."""
    for seq, payload in enumerate(payloads):
        names = TokenNames(PROMPT, salt="s") if payload is FIRST else None
        output: Any = SimpleNamespace(prompt_token_ids=PROMPT, payloads=[payload], row_names=names)
        yield Chunk(output, seq, last=False)


async def requests_of(pipeline: Qwen3OmniPipeline, *payloads: Payload) -> list[Chunk]:
    context = SimpleNamespace(options={"speaker": "aiden"})
    call: Any = SimpleNamespace(context=context)
    return [chunk async for chunk in pipeline.thinker_to_talker(outputs(*payloads), call)]


REF = TensorRef("inline", (len(PROMPT), 4), "float32", b"")
FIRST = Payload({"rows": REF}, {"first_row": 0, "num_rows": len(PROMPT)}, {"rows": REF})
NEXT = Payload(values={"num_rows": 1})


async def test_the_talker_starts_with_the_first_row_of_the_reply(pipeline: Qwen3OmniPipeline) -> None:
    (chunk,) = await requests_of(pipeline, FIRST, NEXT, NEXT)
    args, ids = chunk.payload.args, chunk.payload.prompt["prompt_token_ids"]
    assert ids == [SHAPE.codec_id("pad")] * (5 + 9)
    assert len(args["payloads"]) == 1
    # Its whole prompt needs the rows of the thinker's prompt, and one of the reply.
    assert len(ids) - args["num_own_tokens"] == len(PROMPT) + 1
    assert args["speaker_id"] == SHAPE.codec_id("aiden")
    assert decode_names(args["row_names"]) == TokenNames(PROMPT, salt="s")
    assert args["sampling"] == RESIDUAL_SAMPLING


async def test_a_reply_of_one_token_is_not_spoken(pipeline: Qwen3OmniPipeline) -> None:
    assert await requests_of(pipeline, FIRST) == []


@torch.inference_mode()
def test_streams_of_the_vocoder_equal_the_whole_decode(config: Qwen3OmniMoeConfig) -> None:
    """Three streams that stand at different frames, in pieces of several sizes."""
    from vllm_omni.testing.qwen3_omni import randomize

    torch.manual_seed(0)
    reference = Qwen3OmniMoeForConditionalGeneration(config).eval()
    randomize(reference, SHAPE, list(range(33, 127)), torch.Generator().manual_seed(0))
    stage: Any = SimpleNamespace(
        model_config=SimpleNamespace(hf_config=code2wav_hf_config(config)),
        scheduler_config=SimpleNamespace(max_num_seqs=3),
    )
    ours = Qwen3OmniCode2Wav(vllm_config=stage)
    loaded = ours.load_weights(reference.state_dict().items())
    assert loaded == {name for name in reference.state_dict() if name.startswith("code2wav.")}
    ours.prepare()
    codes = torch.randint(SHAPE.num_codes, (3, 40, SHAPE.num_groups))
    streams = [ours.read({}) for _ in codes]
    sound: list[list[torch.Tensor]] = [[], [], []]
    for number, pieces in enumerate(([1, 2, 4, 33], [7, 33], [40])):
        for frames in codes[number].split(pieces):
            ours.extend(streams[number], frames)
            (answer,) = ours.generate([streams[number]])
            sound[number].append(answer["audio"])
    for frames, pieces in zip(codes, sound, strict=True):
        whole = reference.code2wav(frames.T[None]).flatten()
        streamed = torch.cat(pieces)
        assert streamed.shape == whole.shape == (40 * 1920 - 555,)
        assert (streamed - whole).abs().max() < 1e-5
