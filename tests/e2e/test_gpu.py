"""Served models on a GPU, with default deployments (compiled, CUDA graphs), held against the references of their own
tests on the host of the same machine: ``pytest -m gpu``.

All in float32, with TF32 off. Tolerances: ids and codes equal; latents and waveforms 1e-4 of their maximum (those of
Qwen2.5-Omni 1e-4), as a GPU adds in another order.
"""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.e2e import test_bagel as bagel
from tests.e2e import test_glm_image as glm_image
from tests.e2e import test_hunyuan_image_3 as hunyuan_image_3
from tests.e2e import test_janus as janus
from tests.e2e import test_mimo_audio as mimo_audio
from tests.e2e import test_qwen2_5_omni_parity as qwen2_5_omni
from tests.e2e import test_qwen3_omni_parity as qwen3_omni
from tests.e2e import test_qwen3_tts as qwen3_tts
from tests.e2e.engines import MARKS
from tests.server import MAX_MODEL_LEN, STAGES, ask, read_audio, serve
from vllm_omni import OmniLLM
from vllm_omni.entrypoints.async_omni import AsyncOmni
from vllm_omni.messages.outputs import collect
from vllm_omni.testing import bagel as tiny_bagel
from vllm_omni.testing import glm_image as tiny_glm_image
from vllm_omni.testing import hunyuan_image_3 as tiny_hunyuan_image_3
from vllm_omni.testing import janus as tiny_janus
from vllm_omni.testing import mimo_audio as tiny_mimo_audio
from vllm_omni.testing import qwen2_5_omni as tiny_qwen2_5_omni
from vllm_omni.testing import qwen3_omni as tiny_qwen3_omni
from vllm_omni.testing import qwen3_tts as tiny_qwen3_tts

pytestmark = [
    *MARKS,
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device"),
    pytest.mark.timeout(600),
    qwen3_omni.pytestmark,
]

TOLERANCE = 1e-4  # of the maximum
# Each test's engines have the card beside those of others.
ROOM = {"dtype": "float32", "kv_cache_memory_bytes": 64 << 20, "max_num_seqs": 16}
TALKING = {"dtype": "float32", "max_num_seqs": 16, "max_model_len": 2048, "skip_mm_profiling": True}
TALKING_ROOM = [f"{stage}.kv_cache_memory_bytes={64 << 20}" for stage in ("thinker", "talker")]


@pytest.fixture(scope="module", autouse=True)
def float32_is_float32() -> Iterator[None]:
    """In all processes of the stages: neither cuBLAS and cuDNN nor Triton round to TF32."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NVIDIA_TF32_OVERRIDE", "0")
        patch.setenv("TRITON_F32_DEFAULT", "ieee")
        yield


@pytest.fixture(autouse=True)
def tolerance_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (bagel, glm_image, hunyuan_image_3):
        monkeypatch.setattr(module, "LATENTS", TOLERANCE)
    monkeypatch.setattr(qwen2_5_omni, "WAVEFORM_TOLERANCE", TOLERANCE)


@contextmanager
def served(path: Path, stage: str, *stage_overrides: str, **engine: Any) -> Iterator[AsyncOmni]:
    """Engines in processes of their own.

    Args:
        stage: which generates tokens.
        engine: its arguments.
    """
    overrides = [f"{stage}.{name}={value}" for name, value in {**ROOM, **engine}.items()]
    omni = AsyncOmni(path, stage_overrides=[*overrides, *stage_overrides])
    try:
        yield omni
    finally:
        omni.shutdown()


@pytest.mark.parametrize(
    ("model", "tiny"), [(bagel, tiny_bagel), (hunyuan_image_3, tiny_hunyuan_image_3)], ids=["bagel", "hunyuan"]
)
async def test_a_batch_of_texts_and_denoised_pictures_is_as_the_reference(
    model: Any, tiny: Any, tmp_path: Path
) -> None:
    path = tiny.build(tmp_path)
    reference = model.Reference(path)
    with torch.no_grad():
        expected = {case.name: model.expected_of(reference, case) for case in model.CASES}
    with served(path, "language_model", max_model_len=512, max_num_batched_tokens=64) as omni:
        own = model.Served("base", omni=omni, reference=reference, expected=expected)
        outputs = await asyncio.gather(*(model.ask(own, case) for case in 2 * model.CASES))
        for case, output in zip(2 * model.CASES, outputs, strict=True):
            own.check(case, output)


async def test_a_batch_of_texts_and_pictures_of_tokens_is_as_the_reference(tmp_path: Path) -> None:
    path = tiny_janus.build(tmp_path)
    reference = janus.Reference(path)
    expected = [reference.answer(case) for case in janus.CASES]
    with served(path, "language_model", max_model_len=512, max_num_batched_tokens=96) as omni:
        own = janus.Served("base", omni, reference, expected)
        outputs = await asyncio.gather(*(janus.ask(own, case) for case in 2 * janus.CASES))
        for case, output in zip(2 * janus.CASES, outputs, strict=True):
            own.check(case, output)


async def test_a_batch_of_pictures_from_codes_is_as_diffusers(tmp_path: Path) -> None:
    path = tiny_glm_image.build(tmp_path)
    reference = glm_image.Reference(path)
    given = {case.name: {"num_inference_steps": glm_image.NUM_STEPS, **case.params} for case in glm_image.CASES}
    expected = {case.name: reference.latents(case.prompt, case.images, **given[case.name]) for case in glm_image.CASES}
    engine = {"max_model_len": 384, "max_num_batched_tokens": 64}
    with served(path, "language_model", "diffusion.dtype=float32", **engine) as omni:
        own = glm_image.Served("base", omni, expected)
        outputs = await asyncio.gather(*(glm_image.ask(own, case) for case in glm_image.CASES))
        for case, output in zip(glm_image.CASES, outputs, strict=True):
            own.check(case, output)


async def test_a_batch_of_spoken_texts_is_as_the_reference(tmp_path: Path) -> None:
    path = tiny_qwen3_tts.build(tmp_path)
    with served(path, "talker", max_model_len=512) as omni:
        own = qwen3_tts.Served("base", omni, qwen3_tts.Reference(path))
        requests = qwen3_tts.requests_of(own)
        outputs = await asyncio.gather(*(collect(qwen3_tts.speak(own, one)) for one in requests))
        for request, output in zip(requests, outputs, strict=True):
            qwen3_tts.check(own, request, output)


async def test_a_batch_of_replies_in_text_and_sound_is_as_the_reference(tmp_path: Path) -> None:
    path = tiny_mimo_audio.build(tmp_path)
    with served(path, "language_model", max_model_len=512) as omni:
        codec = mimo_audio.AudioTokenizer(path / "audio_tokenizer")
        own = mimo_audio.Served("base", omni, mimo_audio.LanguageModel(path), codec)
        cases = mimo_audio.make_cases(seed=5)
        outputs = await asyncio.gather(*(collect(mimo_audio.reply(own, case)) for case in cases))
        for case, output in zip(cases, outputs, strict=True):
            mimo_audio.check(own, case.groups(own.model, own.codec), output)


def test_qwen2_5_omni_answers_as_transformers(tmp_path: Path) -> None:
    path = tiny_qwen2_5_omni.build(tmp_path)
    with OmniLLM(path, stage_overrides=TALKING_ROOM, **TALKING) as llm:
        pair = qwen2_5_omni.Pair(llm, llm.engine, qwen2_5_omni.Reference(path), qwen2_5_omni.CASES, {}, [])
        qwen2_5_omni.test_codes_and_waveform_equal_transformers_in_one_batch(pair=pair)


def test_qwen3_omni_answers_as_transformers(tmp_path: Path) -> None:
    path = tiny_qwen3_omni.build(tmp_path)
    with OmniLLM(path, stage_overrides=TALKING_ROOM, **TALKING) as llm:
        pair = qwen3_omni.Pair(llm, llm.engine, qwen3_omni.Reference(path))
        qwen3_omni.test_a_batch_equals_transformers(pair=pair)


def test_a_server_answers_in_text_and_sound_and_leaves_no_process(tmp_path: Path) -> None:
    path = tiny_qwen2_5_omni.build(tmp_path / "checkpoint")
    flags = ["--dtype=float32", f"--max-model-len={MAX_MODEL_LEN}", "--skip-mm-profiling"]
    flags += [f"--stage={setting}" for setting in TALKING_ROOM]
    with serve(path, tmp_path / "log", *flags) as server:
        spoken = {"modalities": ["text", "audio"], "audio": {"voice": "Chelsie", "format": "wav"}}
        messages = [ask(server.client, **spoken).choices[0].message for _ in range(2)]
        assert [message.content for message in messages] == [server.text] * 2
        read_audio(messages[0].audio.data)
        assert messages[0].audio.data == messages[1].audio.data
        speech = {"model": "tiny", "input": "Good morning.", "voice": "Chelsie", "sampling_params_list": STAGES}
        assert server.post("/v1/audio/speech", {**speech, "response_format": "wav"}).content[:4] == b"RIFF"
