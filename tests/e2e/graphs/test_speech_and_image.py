"""Text, speech and a picture of one chat answer: Qwen2.5-Omni, and a diffusers pipeline that paints what it replies."""

import base64
from collections.abc import AsyncIterator, Iterator, Mapping
from typing import Any, NamedTuple

import httpx
import numpy as np
import openai
import pytest
import torch
from transformers import PreTrainedConfig

from tests.e2e.engines import MARKS
from tests.e2e.graphs.pipelines import to_picture
from tests.e2e.graphs.test_graphs import ByHand, pixels_of
from tests.engine_threads import engine_threads
from tests.media.test_audio import decode
from vllm_omni.entrypoints.async_omni import AsyncOmni
from vllm_omni.entrypoints.cli.serve import parse_serve_args
from vllm_omni.entrypoints.openai.app import build_omni_app
from vllm_omni.flow import Field, Role, interface
from vllm_omni.messages.outputs import collect
from vllm_omni.model_executor.models.diffusers.pipeline import diffusers_stage
from vllm_omni.model_executor.models.qwen2_5_omni.pipeline import Qwen2_5OmniPipeline
from vllm_omni.testing import diffusion, qwen2_5_omni

pytestmark = [
    *MARKS,
    pytest.mark.timeout(300),
    pytest.mark.long,  # quick: with images, test_graphs.py; with speech, tests/entrypoints/openai/test_server.py
    pytest.mark.filterwarnings("ignore:max_tokens is deprecated:DeprecationWarning"),  # vLLM's handler reads it
]

PARAMS: dict[str, Any] = {
    "thinker": {"temperature": 0.0, "max_tokens": 8, "ignore_eos": True},
    "talker": {"temperature": 0.0, "max_tokens": 40},
    "token2wav": {"seed": 5},
    "painter": {"num_inference_steps": 2, "height": 64, "width": 64, "seed": 3, "guidance_scale": 0.0},
}
MODALITIES = ["text", "audio", "image"]
QUESTION = "Tell me a story."


class Painter(Role):
    paint = interface([["prompt"]], {"image": Field("image", streamed=True)})


class PaintingPipeline(Qwen2_5OmniPipeline):
    """The thinker's text is spoken and painted."""

    modalities = {"text": "text", "audio": "audio", "image": "image"}
    deployment = {
        "stages": {
            "thinker": {"engine_type": "ar"},
            "talker": {"engine_type": "ar"},
            "token2wav": {"engine_type": "generation"},
            "painter": {"engine_type": "diffusion"},
        },
        "edges": {"thinker->talker": {"transport": "auto", "stream": True}},
    }

    def __init__(self, model: str, hf_config: PreTrainedConfig, revision: str | None = None) -> None:
        super().__init__(model, hf_config, revision)
        text = self.graph.declarations.outputs["text"]
        self.graph.output(image=self.graph.role(Painter, "painter").paint(prompt=text.via(to_picture)).image)
        self.stages = (*self.stages, diffusers_stage("painter", "image"))


@pytest.fixture(scope="module")
def omni(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AsyncOmni]:
    directory = tmp_path_factory.mktemp("painting")
    engine = {"dtype": "float32", "max_model_len": 512, "enforce_eager": True, "kv_cache_memory_bytes": 16 << 20}
    with engine_threads():
        omni = AsyncOmni(
            qwen2_5_omni.build(directory / "omni"),
            pipeline=PaintingPipeline,
            stage_overrides=[
                f"painter.model={diffusion.build(directory / 'painter', 'z-image')}",
                *(f"{stage}.{name}={value}" for stage in ("thinker", "talker") for name, value in engine.items()),
                "thinker.skip_mm_profiling=true",
            ],
        )
        yield omni
        omni.shutdown()


@pytest.fixture(scope="module")
async def client(omni: AsyncOmni) -> AsyncIterator[openai.AsyncOpenAI]:
    parsed = parse_serve_args([omni.config.model, "--served-model-name", "tiny", "--dtype", "float32"])
    transport = httpx.ASGITransport(await build_omni_app(omni, parsed.args), raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, timeout=120) as http:
        yield openai.AsyncOpenAI(base_url="http://server/v1", api_key="none", http_client=http, max_retries=0)


class Expected(NamedTuple):
    text: str
    sound: torch.Tensor
    pixels: torch.Tensor


@pytest.fixture(scope="module")
async def expected(omni: AsyncOmni) -> Expected:
    """Text and speech without a painter, and the picture of the painter by hand."""
    messages = [{"role": "user", "content": QUESTION}]
    prompt = omni.renderer.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    answer = await collect(omni.generate(prompt, PARAMS, modalities=["text", "audio"], speaker="Ethan"))
    painted = await ByHand(omni, PARAMS).run("painter", answer.outputs[0].text)
    pixels = torch.from_numpy(np.array(painted.images[0]))
    return Expected(answer.outputs[0].text, answer.multimodal_output["audio"], pixels)


def chat(**more: Any) -> dict[str, Any]:
    return {
        "model": "tiny",
        "messages": [{"role": "user", "content": QUESTION}],
        "modalities": MODALITIES,
        "extra_body": {"sampling_params_list": PARAMS},
        **more,
    }


def check_sound(samples: np.ndarray[Any, Any], expected: Expected) -> None:
    """Sixteen bits of each sample."""
    assert len(samples) == len(expected.sound) > 0
    assert np.abs(samples - expected.sound.numpy().clip(-1, 1)).max() <= 1.01 / 32768


async def test_an_answer_has_text_sound_and_picture_in_one_response(
    client: openai.AsyncOpenAI, expected: Expected
) -> None:
    whole = await client.chat.completions.create(**chat(audio={"voice": "Ethan", "format": "wav"}))
    (choice,) = whole.choices
    message: Any = choice.message
    assert message.content == expected.text == message.audio.transcript
    check_sound(decode("wav", base64.b64decode(message.audio.data)), expected)
    (image,) = message.images
    assert torch.equal(pixels_of(image["image_url"]["url"]), expected.pixels)
    assert choice.finish_reason == "length"


async def test_text_sound_and_picture_are_streamed_in_one_response(
    client: openai.AsyncOpenAI, expected: Expected
) -> None:
    stream = await client.chat.completions.create(
        **chat(audio={"voice": "Ethan", "format": "pcm16"}), stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    choices: list[Any] = [choice for chunk in chunks for choice in chunk.choices]
    deltas: list[Mapping[str, Any]] = [choice.delta.model_dump() for choice in choices]
    assert "".join(delta["content"] or "" for delta in deltas) == expected.text
    sound = b"".join(base64.b64decode(one["audio"]["data"]) for one in deltas if (one.get("audio") or {}).get("data"))
    check_sound(decode("pcm16", sound), expected)
    (images,) = [delta["images"] for delta in deltas if delta.get("images")]
    assert torch.equal(pixels_of(images[0]["image_url"]["url"]), expected.pixels)
    assert [choice.finish_reason for choice in choices if choice.finish_reason] == ["length"]
    assert [chunk.usage.completion_tokens for chunk in chunks if chunk.usage] == [PARAMS["thinker"]["max_tokens"]]


async def test_an_answer_in_text_and_picture_leaves_the_talker_out(omni: AsyncOmni, expected: Expected) -> None:
    answer = await collect(omni.generate("Tell me a story.", PARAMS, modalities=["text", "image"]))
    assert "audio" not in answer.multimodal_output and len(answer.images) == 1
    assert answer.stage_durations.keys() == {"thinker", "painter", "total"}
