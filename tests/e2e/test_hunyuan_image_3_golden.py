"""HunyuanImage-3 served through the graph, against outputs of the original code
(``tests/reference/test_hunyuan_image_3.py``).

Pictures are equal to the last bit but for bytes that rounding sets one off, and latents to 1e-5 of their maximum; all ids
of texts are equal. Flows whose given images have noise are not here: the server reads the mean of their distribution.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from tests.e2e.engines import MARKS
from tests.engine_threads import engine_threads
from tests.reference.test_hunyuan_image_3 import FLOWS, GIVEN, GOLDEN, NUM_ROUNDED, PICTURES, RELATIVE, golden
from vllm_omni.entrypoints.async_omni import AsyncOmni
from vllm_omni.messages.outputs import OmniRequestOutput, collect

pytestmark = [*MARKS, pytest.mark.skipif(not FLOWS, reason=f"no outputs of the original at {GOLDEN}"), pytest.mark.long]

SERVED = [name for name in FLOWS if name not in GIVEN]


@pytest.fixture(scope="module")
def omni() -> Iterator[AsyncOmni]:
    with engine_threads():
        settings = ["dtype=float32", "max_model_len=512", "max_num_batched_tokens=256", "kv_cache_memory_bytes=16777216"]
        omni = AsyncOmni(GOLDEN / "checkpoint", stage_overrides=[f"language_model.{one}" for one in settings])
        yield omni
        omni.shutdown()


def prompt_of(name: str) -> str:
    """A flow's prompt; what stands in front of its picture is the pipeline's part."""
    flow = FLOWS[name]
    first = flow["phases"][0]
    text: str = first["text"][0]
    if first["mode"] == "gen_text":
        return text
    return text.partition("<answer>")[0].partition("<boi>")[0]


def params_of(name: str, output_type: str) -> dict[str, Any]:
    flow = FLOWS[name]
    params: dict[str, Any] = {"temperature": 0.0, "max_tokens": flow.get("max_new_tokens", 1)}
    if name in PICTURES:
        image = {"num_inference_steps": flow["diff_infer_steps"], "seed": flow["seed"], "output_type": output_type}
        if (size := flow.get("image_size")) != "auto":
            image["height"], image["width"] = size
        if "diff_guidance_scale" in flow:
            image["guidance_scale"] = flow["diff_guidance_scale"]
        params["extra_args"] = {"image": image}
    return {"language_model": params}


async def ask(omni: AsyncOmni, name: str, output_type: str = "media") -> OmniRequestOutput:
    modalities = ["image"] if name in PICTURES else ["text"]
    return await collect(omni.generate(prompt_of(name), params_of(name, output_type), modalities=modalities))


@pytest.mark.parametrize("name", SERVED)
async def test_the_answer_is_that_of_the_original(omni: AsyncOmni, name: str) -> None:
    expected, output = golden(name), await ask(omni, name)
    if "phase0.ar.ids" in expected and name not in PICTURES:
        assert list(output.outputs[0].token_ids) == expected["phase0.ar.ids"].tolist()
    if name in PICTURES:
        (image,) = output.images
        wrong = np.asarray(image).astype(int) - expected["output.image"].numpy()
        assert abs(wrong).max() <= 1
        assert np.count_nonzero(wrong) <= NUM_ROUNDED * wrong.size


@pytest.mark.parametrize("name", [name for name in SERVED if name in PICTURES])
async def test_the_latents_are_those_of_the_original(omni: AsyncOmni, name: str) -> None:
    output = await ask(omni, name, "latents")
    (made,), (expected,) = output.multimodal_output["latents"], golden(name)["denoise.latents"][-1]
    difference = (made - expected).abs().max() / expected.abs().max()
    assert difference <= RELATIVE, f"{name}: {difference:.1e}"
    assert torch.isfinite(made).all()
