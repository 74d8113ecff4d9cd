"""The reference of HunyuanImage-3 against outputs of the original code, on a tiny checkpoint of the real layout.

The outputs are no part of the repository: ``GOLDEN`` is their directory, or ``../shared/golden``. Without them nothing
is tested. Latents and logits are equal to 1e-5 of their maximum, all ids are equal, and pictures to the last bit but
for bytes that rounding sets one off.
"""

import json
import os
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor

from tests.reference.hunyuan_image_3 import Reference, Row, packed, unpacked

ROOT = Path(__file__).resolve().parents[2]
GOLDEN = Path(os.environ.get("GOLDEN", ROOT.parent / "shared" / "golden")) / "hunyuan_image_3"
FLOWS: dict[str, Any] = json.loads((GOLDEN / "flows.json").read_text()) if GOLDEN.is_dir() else {}
PICTURES = [name for name, flow in FLOWS.items() if flow["phases"][-1]["mode"] == "gen_image"]
GIVEN = [name for name, flow in FLOWS.items() if any("image_hw" in one for one in flow.get("messages", ()))]

RELATIVE = 1e-5
NUM_ROUNDED = 0.001  # of the bytes
GUIDANCE = 2.5  # of the checkpoint's generation_config.json, as is the shift
SHIFT = 3.0

pytestmark = [
    pytest.mark.skipif(not FLOWS, reason=f"no outputs of the original at {GOLDEN}"),
    pytest.mark.usefixtures("no_gradients"),
]


@pytest.fixture
def no_gradients() -> Any:
    with torch.no_grad():
        yield


@cache
def reference() -> Reference:
    return Reference(GOLDEN / "checkpoint")


@cache
def golden(name: str) -> dict[str, Tensor]:
    return load_file(GOLDEN / f"{name}.safetensors")


def assert_close(made: Tensor, expected: Tensor) -> None:
    assert made.shape == expected.shape
    assert (made - expected).abs().max() <= RELATIVE * expected.abs().max()


class Read(NamedTuple):
    """What a flow's text phases lead to."""

    ids: list[list[int]]  # of each text phase
    logits: list[Tensor]
    row: Row  # of the last phase


def read(name: str) -> Read:
    """A flow as the original runs it, up to its picture."""
    model, flow = reference(), FLOWS[name]
    is_instruct = flow["sequence_template"] == "instruct"
    row, ids, logits = model.start(), [], []

    def ask(stop_ids: list[int], max_tokens: int) -> list[int]:
        made, scores = model.answer(row, stop_ids, max_tokens)
        ids.append(made)
        logits.append(scores)
        return made

    if system := flow.get("system_prompt"):
        model.add_text(row, system)
        model.add_text(row, "\n\n")
    if is_instruct:
        model.add_text(row, "User: ")
    for message in flow.get("messages", [flow.get("prompt")]):
        if isinstance(message, str):
            model.add_text(row, message, is_masked=True)
        elif "image_hw" in message:
            image = Image.fromarray(golden(name)["input.image"].numpy())
            model.add_given(row, model.read_image(image, golden(name)["cond.0.vae_noise"][0, :, 0]))
    if is_instruct:
        model.add_text(row, "\n\n")
        model.add_text(row, "Assistant: ")
    stops, limit = flow["phases"][0].get("stop_ids", []), flow.get("max_new_tokens", 0)
    if flow.get("mode") == "gen_text":
        ask(stops, limit)
        return Read(ids, logits, row)
    if (task := flow.get("bot_task")) is not None:
        model.add_text(row, f"<{task}>", is_masked=task == "think")
        thought = ask(stops, limit)
        row.add(thought[:-1], is_masked=True)
        if thought[-1] == model.id_of("</recaption>"):
            row.add(thought[-1:])
    if is_instruct:
        model.add_text(row, "<answer>")
    if flow.get("image_size") == "auto":
        opened = Row(list(row.ids))
        opened.add([model.id_of("<boi>"), model.id_of(f"<img_size_{model.base_size}>")])
        made, scores = model.answer(opened, (), 1)
        ids.append(made)
        logits.append(scores)
        ratio = model.choose_ratio(opened)
    else:
        ratio = model.ratio_of(*flow.get("image_size", (64, 64)))
    model.add_canvas(row, ratio)
    if is_instruct:
        model.add_text(row, "</answer>")
        model.add_text(row, "\n\n")
    return Read(ids, logits, row)


@pytest.mark.parametrize("name", FLOWS)
def test_sequences_are_equal(name: str) -> None:
    expected, row, last = golden(name), read(name).row, f"phase{len(FLOWS[name]['phases']) - 1}"
    sequences = [row.ids, reference().unconditional(row)]
    ids = expected[f"{last}.input_ids"].tolist()
    assert sequences[: len(ids)] == ids
    num_tokens = len(row.ids)
    assert torch.equal(reference().positions(row), expected[f"{last}.rope_pos_yx"][0, :num_tokens])
    assert torch.equal(reference().mask(row), expected[f"{last}.attention_mask"][0])


@pytest.mark.parametrize("name", FLOWS)
def test_first_steps_are_equal(name: str) -> None:
    model, expected, row, last = reference(), golden(name), read(name).row, f"phase{len(FLOWS[name]['phases']) - 1}"
    noise, time = None, torch.zeros(())
    if name in PICTURES:
        noise, time = expected["denoise.noise"][0], expected["denoise.timesteps"][0]
    embeds = model.embed(row, row.ids, noise, time)
    assert_close(embeds, expected[f"{last}.embeds"][0])
    assert_close(model.forward(embeds, model.positions(row), model.mask(row)), expected[f"{last}.hidden"][0])


@pytest.mark.parametrize("name", FLOWS)
def test_texts_are_equal(name: str) -> None:
    expected, made = golden(name), read(name)
    phases = [index for index, phase in enumerate(FLOWS[name]["phases"]) if phase["mode"] == "gen_text"]
    assert len(phases) == len(made.ids)
    for phase, ids, logits in zip(phases, made.ids, made.logits, strict=True):
        assert ids == expected[f"phase{phase}.ar.ids"].tolist()
        assert_close(logits, expected[f"phase{phase}.ar.logits"])
        assert reference().tokenizer.decode(ids, skip_special_tokens=False) == FLOWS[name]["phases"][phase]["ar_text"]


@pytest.mark.parametrize("name", PICTURES)
def test_pictures_are_equal(name: str) -> None:
    model, flow, expected = reference(), FLOWS[name], golden(name)
    made = model.denoise(
        read(name).row,
        expected["denoise.noise"][0],
        num_steps=flow["diff_infer_steps"],
        shift=SHIFT,
        scale=flow.get("diff_guidance_scale", GUIDANCE),
    )
    last = len(flow["phases"]) - 1
    assert torch.equal(made.timesteps, expected["denoise.timesteps"])
    assert_close(made.predictions, expected[f"phase{last}.pred"])
    assert_close(made.velocities, expected["denoise.v"][:, 0])
    assert_close(made.latents, expected["denoise.latents"][:, 0])
    pixels = model.decode_latents(made.latents[-1])
    assert_close(pixels, expected["output.image_float"][0, :, 0])
    wrong = model.bytes_of(pixels).astype(int) - expected["output.image"].numpy()
    assert abs(wrong).max() <= 1
    assert np.count_nonzero(wrong) <= NUM_ROUNDED * wrong.size


@pytest.mark.parametrize("name", GIVEN)
def test_given_images_are_equal(name: str) -> None:
    model, expected = reference(), golden(name)
    noise = expected["cond.0.vae_noise"][0, :, 0]
    given = model.read_image(Image.fromarray(expected["input.image"].numpy()), noise)
    mean, std = model.encode_pixels(expected["cond.0.vae_pixels"][0])
    assert_close(mean, expected["cond.0.vae_mean"][0, :, 0])
    assert_close(std, expected["cond.0.vae_std"][0, :, 0])
    assert_close(given.latents, expected["phase0.cond_vae_images"][0])
    assert_close(given.patches, expected["phase0.vit_pixel_values"][0])
    assert given.mask.tolist() == expected["phase0.vit_attention_mask"][0].tolist()
    assert list(given.view) == expected["phase0.vit_spatial_shapes"][0].tolist()
    assert_close(model.encode_view(given), expected["phase0.vit_aligned"][0])


def test_packed_latents_are_unpacked_as_they_were() -> None:
    x = torch.arange(64.0).reshape(1, 2, 2, 4, 4)
    assert torch.equal(unpacked(packed(x, 2), 2), x)
    assert packed(x, 1)[0, :, 0, 0, 0].tolist() == [0, 32, 1, 33, 4, 36, 5, 37]
