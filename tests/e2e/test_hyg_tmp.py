"""HunyuanImage-3 served through the graph, against outputs of the original code
(``tests/reference/test_hunyuan_image_3.py``).

Pictures are equal to the last bit but for bytes that rounding sets one off, and latents to 1e-5 of their maximum; all
ids of texts are equal. Given images have the recorded latents, which have noise: the server reads the mean of their
distribution.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from tests.e2e.engines import MARKS
from tests.engine_threads import engine_threads
from tests.reference.test_hunyuan_image_3 import FLOWS, GIVEN, GOLDEN, NUM_ROUNDED, PICTURES, RELATIVE, golden
from vllm_omni.entrypoints.async_omni import AsyncOmni
from vllm_omni.messages.outputs import OmniRequestOutput, collect
from vllm_omni.model_executor.models.hunyuan_image_3.language_model import HunyuanImage3LanguageModel
from vllm_omni.model_executor.models.hunyuan_image_3.latents import tokens_of

pytestmark = [*MARKS, pytest.mark.skipif(not FLOWS, reason=f"no outputs of the original at {GOLDEN}"), pytest.mark.long]


@pytest.fixture(scope="module")
def omni() -> Iterator[AsyncOmni]:
    with engine_threads():
        settings = [
            "dtype=float32",
            "max_model_len=512",
            "max_num_batched_tokens=256",
            f"kv_cache_memory_bytes={16 << 20}",
        ]
        omni = AsyncOmni(GOLDEN / "checkpoint", stage_overrides=[f"language_model.{one}" for one in settings])
        yield omni
        omni.shutdown()


@pytest.fixture(autouse=True)
def recorded_latents(monkeypatch: pytest.MonkeyPatch) -> None:
    recorded = {len(golden(name)["input.image"]): golden(name)["phase0.cond_vae_images"][0] for name in GIVEN}

    def embed(model: HunyuanImage3LanguageModel, pixels: Tensor) -> Tensor:
        latent = recorded[pixels.shape[1]]  # the heights differ
        return model.latents.embed(tokens_of(latent), (latent.shape[1], latent.shape[2]), torch.zeros(()))

    monkeypatch.setattr(HunyuanImage3LanguageModel, "_embed_latents", embed)


def prompt_of(name: str) -> Any:
    """A flow's prompt; what stands in front of its picture is the pipeline's part."""
    flow = FLOWS[name]
    if name in GIVEN:
        (asked,) = [one for one in flow["messages"] if isinstance(one, str)]
        text = f"<|startoftext|>User: <img>{asked}\n\nAssistant: "
        return {"prompt": text, "multi_modal_data": {"image": Image.fromarray(golden(name)["input.image"].numpy())}}
    first = flow["phases"][0]
    text = first["text"][0]
    if first["mode"] == "gen_text":
        return text
    return text.partition("<answer>")[0].partition("<boi>")[0]


def params_of(name: str, output_type: str) -> dict[str, Any]:
    flow = FLOWS[name]
    params: dict[str, Any] = {"temperature": 0.0, "max_tokens": flow.get("max_new_tokens", 1)}
    if name in PICTURES:
        image = {"num_inference_steps": flow["diff_infer_steps"], "seed": flow["seed"], "output_type": output_type}
        if (size := flow.get("image_size", [64, 64])) != "auto":
            image["height"], image["width"] = size
        if "diff_guidance_scale" in flow:
            image["guidance_scale"] = flow["diff_guidance_scale"]
        params["extra_args"] = {"image": image}
    return {"language_model": params}


async def ask(omni: AsyncOmni, name: str, output_type: str = "media") -> OmniRequestOutput:
    modalities = ["image"] if name in PICTURES else ["text"]
    return await collect(omni.generate(prompt_of(name), params_of(name, output_type), modalities=modalities))


@pytest.mark.parametrize("name", FLOWS)
async def test_the_answer_is_that_of_the_original(omni: AsyncOmni, name: str) -> None:
    expected, output = golden(name), await ask(omni, name)
    if "phase0.ar.ids" in expected and name not in PICTURES:
        assert list(output.outputs[0].token_ids) == expected["phase0.ar.ids"].tolist()
    if name in PICTURES:
        (image,) = output.images
        wrong = np.asarray(image).astype(int) - expected["output.image"].numpy()
        print("WRONG", name, np.count_nonzero(wrong), wrong.size)
        assert abs(wrong).max() <= 1
        assert np.count_nonzero(wrong) <= NUM_ROUNDED * wrong.size


@pytest.mark.parametrize("name", PICTURES)
async def test_the_latents_are_those_of_the_original(omni: AsyncOmni, name: str) -> None:
    output = await ask(omni, name, "latents")
    (made,), (expected,) = output.multimodal_output["latents"], golden(name)["denoise.latents"][-1]
    difference = (made - expected).abs().max() / expected.abs().max()
    assert difference <= RELATIVE, f"{name}: {difference:.1e}"
