"""Other models as an instance that encodes and one that does the rest: they answer as one engine does."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from PIL import Image

from tests.e2e.engines import MARKS, PATIENT, UPSTREAM, Prompt, greedy, tokens_of, upstream_answers
from tests.e2e.test_qwen2_5_omni_parity import FEW_CODES, MAX_TOKENS, WAVEFORM_TOLERANCE, answer, num_equal_until_tie
from tests.reference import llava_next, qwen2_vl
from tests.reference.media import CASES
from tests.reference.qwen2_5_omni import Reference
from vllm_omni import OmniLLM
from vllm_omni.entrypoints.async_omni import AsyncOmni

pytestmark = [*MARKS, pytest.mark.long]


class Model(NamedTuple):
    build: Callable[[Path], Path]
    image: str  # what stands for one in a prompt
    transport: str
    engine: dict[str, Any] = {}


MODELS = {
    "LLaVA-NeXT": Model(llava_next.build, "<image>", "tcp"),
    "Qwen2-VL": Model(qwen2_vl.build, qwen2_vl.IMAGE, "shm", {"enable_prefix_caching": False}),
}


def make_prompts(model: Model) -> list[Prompt]:
    """Images of several shapes, of which one comes twice."""
    rng = np.random.default_rng(0)
    shapes = [(56, 56, 3), (56, 112, 3), (112, 70, 3)]
    images = [Image.fromarray(rng.integers(0, 255, shape, dtype=np.uint8)) for shape in shapes]

    def make(text: str, *numbers: int) -> Prompt:
        return {"prompt": text, "multi_modal_data": {"image": [images[number] for number in numbers]}}

    return [
        make(f"w1 {model.image} w4", 0),
        make(f"w3 {model.image} w4 {model.image} w5", 1, 2),
        make(f"w6 {model.image}", 1),
        {"prompt": "w1 w2 w3"},
    ]


@pytest.mark.parametrize("name", MODELS)
def test_ids_are_those_of_an_upstream_engine(name: str, tmp_path: Path) -> None:
    model = MODELS[name]
    checkpoint, prompts = model.build(tmp_path), make_prompts(model)
    engine = {**UPSTREAM, "max_model_len": 512, **model.engine}
    expected = tokens_of(upstream_answers(checkpoint, prompts, **engine))
    # A long timeout for slow machines: an encode that does not start in time moves to another instance.
    epd = {"instances": "E:1,PD:1", "transport": model.transport, **PATIENT}
    with OmniLLM(checkpoint, **engine, epd=epd) as omni:
        rounds = [tokens_of(omni.generate(prompts, greedy(), use_tqdm=False)) for _ in range(2)]
        statistics = omni.engine.instance_statistics()["language"]
    assert rounds == [expected, expected]
    assert len({tuple(one) for one in expected}) == len(prompts)  # or the images would not matter
    assert statistics.num_encoded == 3
    # What has been encoded is asked for once; an image in flight for one request may be requested by another.
    assert statistics.num_tasks["language/PD0"] == 8 and statistics.num_tasks["language/E0"] in (2, 3)
    assert not statistics.num_redone


async def test_speech_of_qwen2_5_omni_is_that_of_one_engine(tiny_checkpoint: Path) -> None:
    """Its thinker is two instances; text, codes and waveform are those of transformers, as those of one engine are."""
    reference, cases = Reference(tiny_checkpoint), [case for case in CASES if case.name in ("images", "audio_short")]
    omni = await asyncio.to_thread(
        AsyncOmni,
        tiny_checkpoint,
        dtype="float32",
        enforce_eager=True,
        max_model_len=2048,
        skip_mm_profiling=True,
        epd="E:1,PD:1",
    )
    try:
        outputs = await asyncio.gather(*(answer(omni, case, max_codes=FEW_CODES) for case in cases))
        statistics = omni.instance_statistics()["thinker"]
    finally:
        await omni.aclose()
    speaker = omni.orchestrator.pipeline.validate({})["speaker"]
    for case, output in zip(cases, outputs, strict=True):
        expected = reference.answer(case, max_tokens=MAX_TOKENS, max_codes=FEW_CODES, seed=0, speaker=speaker)
        assert expected.speech is not None
        ids, codes = list(output.outputs[0].token_ids), output.multimodal_output["codec_ids"]
        if num_equal_until_tie(ids, expected.reply.token_ids, expected.reply.margins, f"{case.name}, reply"):
            continue
        if num_equal_until_tie(codes, expected.speech.codes, expected.speech.margins, f"{case.name}, codes"):
            continue
        waveform = reference.vocode_windows(codes, speaker)
        assert (output.multimodal_output["audio"] - waveform).abs().max() < WAVEFORM_TOLERANCE, case.name
    assert statistics.num_encoded == 4  # three images and a sound
    assert statistics.num_tasks == {"thinker/E0": 2, "thinker/PD0": 2}
