"""BAGEL served through the graph, against outputs of the original code (``tests/reference/test_bagel.py``).

Pictures are equal to the last bit but for bytes that truncation sets one lower; all ids of answers are equal. Flows in
which the latents of given images have noise are not here: the server reads the mean of their distribution.
"""

import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from PIL import Image
from vllm.tokenizers import cached_get_tokenizer

from tests.e2e.engines import MARKS
from tests.e2e.test_bagel import GUIDANCE
from tests.engine_threads import engine_threads
from tests.reference.test_bagel import FLOWS, GOLDEN, NUM_TRUNCATED, golden
from vllm_omni.entrypoints.async_omni import AsyncOmni
from vllm_omni.messages.outputs import collect

pytestmark = [*MARKS, pytest.mark.skipif(not FLOWS, reason=f"no outputs of the original at {GOLDEN}"), pytest.mark.long]

SERVED = [
    name
    for name, flow in FLOWS.items()
    if not any(key.endswith("vae_noise") and one.any() for key, one in golden(name).items())
    and name != "think_retokenised"  # ids of a thought stay as they are
]

TRANSFORMS = {"latents": "vae_transform", "view": "vit_transform"}


@pytest.fixture(scope="module")
def omni(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AsyncOmni]:
    path = tmp_path_factory.mktemp("golden")
    for file in (GOLDEN / "checkpoint").iterdir():
        (path / file.name).symlink_to(file)
    transforms = json.loads((path / "transforms.json").read_text())
    names = ("max_image_size", "min_image_size", "image_stride")
    sizes = {to: [transforms[name][one] for one in names] for to, name in TRANSFORMS.items()}
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").unlink()
    (path / "config.json").write_text(json.dumps(config | {"image_sizes": sizes}))
    with engine_threads():
        settings = [
            "dtype=float32",
            "max_model_len=512",
            "max_num_batched_tokens=256",
            "kv_cache_memory_bytes=16777216",
        ]
        omni = AsyncOmni(path, stage_overrides=[f"language_model.{one}" for one in settings])
        yield omni
        omni.shutdown()


def prompt_of(name: str) -> dict[str, Any]:
    flow, tensors = FLOWS[name], golden(name)
    is_answered = bool(flow.get("understanding_output") or flow.get("think"))
    texts, images = [], []
    if flow.get("think"):  # the instruction to think, which is in the original's code
        ids = tensors["gen.0.text.packed_text_ids"][1:-1].tolist()
        texts.append(f"<|im_start|>{cached_get_tokenizer(str(GOLDEN / 'checkpoint')).decode(ids)}<|im_end|>")
    for given in flow["inputs"]:
        if isinstance(given, str):
            texts.append(f"<|im_start|>{given}<|im_end|>")
        else:
            texts.append("<|vision_start|><|vision_end|>")
            images.append(Image.fromarray(tensors[f"input.image.{given['image']}"].numpy()))
    prompt: dict[str, Any] = {"prompt": "".join(texts) + "<|im_start|>" * is_answered}
    if images:
        drawn = {} if flow.get("understanding_output") else {"is_drawn": True}
        prompt |= {"multi_modal_data": {"image": images}, "mm_processor_kwargs": drawn}
    return prompt


def params_of(name: str) -> dict[str, Any]:
    flow = FLOWS[name]
    params: dict[str, Any] = {"temperature": 0.0, "max_tokens": flow.get("max_think_token_n", 1)}
    if "denoise" in flow:
        given = flow["denoise"]
        names = ["cfg_text_scale", "cfg_img_scale", "cfg_interval", "cfg_renorm_min", "cfg_renorm_type"]
        image = {to: given[one] for to, one in zip(GUIDANCE, names, strict=True)}
        image["height"], image["width"] = flow["image_shape"]
        image |= {"num_inference_steps": given["num_timesteps"] - 1, "shift": given["timestep_shift"]}
        params["extra_args"] = {"image": {**image, "seed": flow["seed"]}}
    return {"language_model": params}


@pytest.mark.parametrize("name", SERVED)
async def test_the_answer_is_that_of_the_original(omni: AsyncOmni, name: str) -> None:
    expected = golden(name)
    modalities = ["image"] if "denoise" in FLOWS[name] else ["text"]
    output = await collect(omni.generate(prompt_of(name), params_of(name), modalities=modalities))
    if "answer.sampled_ids" in expected:
        ids = expected["answer.sampled_ids"].tolist()
        assert list(output.outputs[0].token_ids)[: len(ids)] == ids
    if "denoise" in FLOWS[name]:
        (image,) = output.images
        wrong = np.asarray(image).astype(int) - expected["output.image"].numpy()
        assert abs(wrong).max() <= 1
        assert np.count_nonzero(wrong) <= NUM_TRUNCATED * wrong.size
