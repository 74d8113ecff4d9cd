"""Qwen3-Omni served through the graph, held against transformers on the same weights and inputs.

Tolerances, all in float32: ids of text and codes of all groups equal; waveforms 1e-4 of their maximum, against the
reference's decode of the whole speech. Hidden states are compared in ``tests/model_executor/models/qwen3_omni_moe``.
"""

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from tests.reference.media import CASES, Case
from tests.reference.qwen3_omni import Reference, Reply, Speech, as_qwen3
from tests.shared_engines import BLOCK_SIZE, Kind, SharedEngines, is_idle, on_the_loop_of
from vllm_omni import OmniLLM
from vllm_omni.entrypoints.async_omni import AsyncOmni
from vllm_omni.messages.outputs import OmniRequestOutput
from vllm_omni.testing import qwen3_omni as tiny

# The talker has no ids for its prompt, so its penalty counts only what it generates, as the library says.
pytestmark = pytest.mark.filterwarnings("ignore:Passing `repetition_penalty` with `inputs_embeds`:UserWarning")

WAVEFORM_TOLERANCE = 1e-4  # of the maximum
MAX_TOKENS, NUM_FRAMES = 12, 30
GREEDY = {"temperature": 0.0}
PENALTY = 1.05
NAMES = ("text", "images", "audio_short", "video_audio")
FEW = [case for case in CASES if case.name in NAMES]
ENGINES = {"dtype": "float32", "enforce_eager": True, "max_model_len": 2048, "block_size": BLOCK_SIZE}


def start_engines(directory: Path) -> OmniLLM:
    return OmniLLM(tiny.build(directory / "checkpoint"), skip_mm_profiling=True, **ENGINES)


KIND = Kind("qwen3-omni", start_engines, is_idle)


class Pair(NamedTuple):
    """The same checkpoint on both sides."""

    llm: OmniLLM
    omni: AsyncOmni
    reference: Reference


@pytest.fixture(scope="module")
def reference(shared_engines: SharedEngines) -> Iterator[Reference]:
    yield Reference(shared_engines.directory(KIND) / "checkpoint")
    shared_engines.stop(KIND)


@pytest.fixture
def pair(reference: Reference, engines: SharedEngines) -> Pair:
    llm = engines.get(KIND)
    return Pair(llm, llm.engine, reference)


def prompt_of(case: Case) -> dict[str, object]:
    """The time between a video's frames follows from ``fps``."""
    prompt = as_qwen3(case).vllm_prompt
    kwargs = {name: value for name, value in case.mm_processor_kwargs.items() if name != "second_per_grid_ts"}
    return {**prompt, "mm_processor_kwargs": kwargs} if kwargs else prompt


def merged(outputs: list[OmniRequestOutput]) -> OmniRequestOutput:
    for output in outputs[1:]:
        outputs[0].add(output, aggregate=True)
    return outputs[0]


async def answer(
    omni: AsyncOmni, case: Case, max_frames: int, min_frames: int = 0, **kwargs: object
) -> OmniRequestOutput:
    """The whole answer of the graph."""
    params = [
        {**GREEDY, "max_tokens": MAX_TOKENS},
        {**GREEDY, "max_tokens": max_frames, "min_tokens": min_frames, "repetition_penalty": PENALTY},
        {},
    ]
    kwargs = {"modalities": ["text", "audio", "codec_ids"], **kwargs}
    return merged([output async for output in omni.generate(prompt_of(case), params, **kwargs)])


def check_speech(reference: Reference, output: OmniRequestOutput, speech: Speech, what: str) -> float:
    """Assert that codes and sound are the reference's; returns the largest difference of samples."""
    codes = output.multimodal_output.get("codec_ids", [])
    # At the limit, the last sampled code begins a frame that the reference does not complete.
    compared = codes if speech.finished else codes[:-1]
    assert compared == speech.codes.tolist(), f"{what}: margin {float(speech.margins.min()):.1e}"
    audio = output.multimodal_output["audio"]
    expected = reference.vocode(torch.tensor(codes, dtype=torch.long))
    assert audio.shape == expected.shape, what
    if not len(codes):
        return 0.0
    difference = float((audio - expected).abs().max() / expected.abs().max())
    assert difference < WAVEFORM_TOLERANCE, f"{what}: {difference:.1e}"
    return difference


@on_the_loop_of("pair")
async def test_a_batch_equals_transformers(pair: Pair) -> None:
    outputs = await asyncio.gather(*(answer(pair.omni, case, NUM_FRAMES) for case in FEW))
    worst, num_frames = 0.0, 0
    for case, output in zip(FEW, outputs, strict=True):
        expected = pair.reference.answer(case, max_tokens=MAX_TOKENS, max_codes=NUM_FRAMES, repetition_penalty=PENALTY)
        assert output.outputs[0].token_ids == expected.reply.token_ids, case.name
        assert expected.speech is not None
        worst = max(worst, check_speech(pair.reference, output, expected.speech, case.name))
        num_frames += len(expected.speech.codes)
    print(f"{len(outputs)} answers, {num_frames} frames, sound within {worst:.1e} of its maximum")


@on_the_loop_of("pair")
async def test_every_speaker_equals_transformers(pair: Pair) -> None:
    case = CASES[0]
    speakers = pair.omni.orchestrator.pipeline.speakers
    outputs = await asyncio.gather(
        *(answer(pair.omni, case, NUM_FRAMES, speaker=speaker.title()) for speaker in speakers)
    )
    for speaker, output in zip(speakers, outputs, strict=True):
        expected = pair.reference.answer(
            case, max_tokens=MAX_TOKENS, max_codes=NUM_FRAMES, repetition_penalty=PENALTY, speaker=speaker
        )
        assert expected.speech is not None
        check_speech(pair.reference, output, expected.speech, speaker)


@on_the_loop_of("pair")
async def test_a_reply_of_one_token_has_text_and_no_sound(pair: Pair) -> None:
    params = {"thinker": {**GREEDY, "max_tokens": 1}}
    output = merged([one async for one in pair.omni.generate(prompt_of(CASES[0]), params)])
    assert len(output.outputs[0].token_ids) == 1
    assert len(output.multimodal_output["audio"]) == 0
    assert "talker" not in output.stage_durations


@on_the_loop_of("pair")
async def test_a_text_starts_no_talker(pair: Pair) -> None:
    params = {"thinker": {**GREEDY, "max_tokens": MAX_TOKENS}}
    outputs = [one async for one in pair.omni.generate(prompt_of(CASES[0]), params, modalities=["text"])]
    assert set(outputs[-1].stage_durations) == {"thinker", "total"}


def given_reply(reference: Reference, prompt_token_ids: list[int], text: str) -> Reply:
    """The reply that a thinker would have given, had it said the text (one token a byte) and ended."""
    num_prompt_tokens = len(prompt_token_ids) - len(text.encode())
    ids = torch.tensor(prompt_token_ids)[None]
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "use_audio_in_video": False}
    computed = reference.think(inputs, max_tokens=1)
    token_ids = [*prompt_token_ids[num_prompt_tokens:], reference.config.im_end_token_id]
    return replace(computed, prompt_ids=ids[0, :num_prompt_tokens], token_ids=token_ids)


@on_the_loop_of("pair")
async def test_a_given_text_is_spoken_as_if_the_thinker_had_said_it(pair: Pair) -> None:
    texts = ["!", "Hello, world.", "Grüße, 世界!"]
    params = [None, {**GREEDY, "max_tokens": NUM_FRAMES, "repetition_penalty": PENALTY}, {}]

    async def speak(text: str) -> OmniRequestOutput:
        return merged([one async for one in pair.omni.speak(text, params, modalities=["audio", "codec_ids"])])

    for text, output in zip(texts, await asyncio.gather(*map(speak, texts)), strict=True):
        reply = given_reply(pair.reference, output.prompt_token_ids, text)
        expected = pair.reference.speak({"use_audio_in_video": False}, reply, NUM_FRAMES, PENALTY)
        check_speech(pair.reference, output, expected, text)


@pytest.mark.long
def test_a_checkpoint_without_a_talker_answers_with_text_alone(tmp_path: Path) -> None:
    path = tiny.build(tmp_path / "checkpoint", variant="thinker")
    reference = Reference(path)
    with OmniLLM(path, skip_mm_profiling=True, **ENGINES) as llm:
        assert list(llm.engine.orchestrator.engines) == ["thinker"]
        outputs = llm.generate([prompt_of(case) for case in FEW], {**GREEDY, "max_tokens": MAX_TOKENS})
    for case, output in zip(FEW, outputs, strict=True):
        expected = reference.think(reference.process(case), MAX_TOKENS)
        assert output.outputs[0].token_ids == expected.token_ids, case.name
