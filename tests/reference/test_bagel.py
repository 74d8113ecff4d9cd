"""The reference of BAGEL against outputs of the original code, on a tiny checkpoint of the real layout.

The outputs are no part of the repository: ``GOLDEN`` is their directory, or ``../shared/golden``. Without them nothing
is tested. Latents and logits are equal to 1e-5 of their maximum, all ids are equal, and pictures to the last bit but
for bytes that truncation sets one lower.
"""

import json
import os
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor

from tests.reference.bagel import Context, Guidance, Reference, combine, tokens_of

ROOT = Path(__file__).resolve().parents[2]
GOLDEN = Path(os.environ.get("GOLDEN", ROOT.parent / "shared" / "golden")) / "bagel"
FLOWS: dict[str, Any] = json.loads((GOLDEN / "flows.json").read_text()) if GOLDEN.is_dir() else {}
PICTURES = [name for name, flow in FLOWS.items() if "denoise" in flow]
ANSWERS = [name for name, flow in FLOWS.items() if "answer" in flow]

RELATIVE = 1e-5
NUM_TRUNCATED = 0.001  # of the bytes

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


@dataclass
class Branches:
    """The contexts of a picture: the whole; before the last input text; without images."""

    gen: Context
    text: Context
    img: Context


def read(name: str) -> Branches:
    """Read a flow's inputs as the original does; a thought is appended later."""
    model, flow, expected = reference(), FLOWS[name], golden(name)
    gen, img = model.new_context(), model.new_context()
    if flow.get("think"):  # the instruction to think, which is in the original's code
        gen = img = model.read_text(gen, expected["gen.0.text.packed_text_ids"][1:-1].tolist())
    text = gen
    for given in flow["inputs"]:
        if isinstance(given, str):
            text, gen, img = gen, model.read_text(gen, given), model.read_text(img, given)
            continue
        number, segment = given["image"], len(gen.hidden)
        image = model.resize(Image.fromarray(expected[f"input.image.{number}"].numpy()), "vae_transform")
        assert np.array_equal(np.array(image), expected[f"input.image_resized.{number}"].numpy())
        if not flow.get("understanding_output"):
            noise = expected.get(f"gen.{segment}.vae.vae_noise")
            latent = model.encode_pixels(image, None if noise is None else noise[0])
            assert_close(latent, expected[f"gen.{segment}.vae.vae_latent"].reshape(latent.shape))
            gen = model.read_latents(gen, latent)
        gen = model.read_view(gen, image)
        text = gen
    return Branches(gen, text, img)


def think(name: str, branches: Branches) -> None:
    """Append the model's own thought to the context of the picture."""
    model, flow = reference(), FLOWS[name]
    ids, _ = model.answer(branches.gen, flow["max_think_token_n"])
    thought = model.thought(ids, flow["max_think_token_n"])
    assert thought == flow["text_out"][0]
    branches.gen = model.read_text(branches.gen, thought)


@pytest.mark.parametrize("name", FLOWS)
def test_contexts_are_equal(name: str) -> None:
    flow, expected, branches = FLOWS[name], golden(name), read(name)
    if flow.get("think") and "denoise" in flow:
        think(name, branches)
    for branch, kinds in flow["segments"].items():
        context: Context = getattr(branches, branch)
        assert len(context.hidden) == len(kinds)
        for number, (kind, hidden) in enumerate(zip(kinds, context.hidden, strict=True)):
            assert_close(hidden, expected[f"{branch}.{number}.{kind}.hidden"])
    for branch, sizes in flow.get("branches", {}).items():
        context = getattr(branches, branch)
        assert (context.num_tokens, context.position) == (sizes["kv_len"], sizes["rope"])


@pytest.mark.parametrize("name", ANSWERS)
def test_answers_are_equal(name: str) -> None:
    flow, expected = FLOWS[name], golden(name)
    ids, logits = reference().answer(read(name).gen, flow["max_think_token_n"])
    assert ids == expected["answer.sampled_ids"].tolist()
    assert_close(logits, expected["answer.logits"])
    assert reference().thought(ids, flow["max_think_token_n"]) == flow["text_out"][0]


@pytest.mark.parametrize("name", PICTURES)
def test_pictures_are_equal(name: str) -> None:
    model, flow, expected, branches = reference(), FLOWS[name], golden(name), read(name)
    if flow.get("think"):
        think(name, branches)
    given = flow["denoise"]
    guidance = Guidance(
        given["cfg_text_scale"],
        given["cfg_img_scale"],
        tuple(given["cfg_interval"]),
        given["cfg_renorm_min"],
        given["cfg_renorm_type"],
    )
    height, width = flow["image_shape"]
    grid = height // 16, width // 16
    canvas = model.denoise(
        expected["denoise.noise"],
        grid,
        (branches.gen, branches.text, branches.img),
        num_timesteps=given["num_timesteps"],
        shift=given["timestep_shift"],
        guidance=guidance,
    )
    assert torch.equal(canvas.timesteps, expected["denoise.timesteps"])
    assert_close(canvas.velocities, expected["denoise.v"])
    assert_close(canvas.latents, expected["denoise.latents"])
    wrong = model.decode_latents(canvas.latents[-1], *grid).astype(int) - expected["output.image"].numpy()
    assert abs(wrong).max() <= 1
    assert np.count_nonzero(wrong) <= NUM_TRUNCATED * wrong.size


@pytest.mark.parametrize("name", PICTURES)
def test_guided_velocities_follow_from_the_branches_alone(name: str) -> None:
    """The arithmetic by itself, on recorded tensors."""
    given, expected = FLOWS[name]["denoise"], golden(name)
    if "text" not in given["branches_when_guided"]:
        assert not expected["denoise.guided"].any()
        return
    guidance = Guidance(
        given["cfg_text_scale"],
        given["cfg_img_scale"],
        tuple(given["cfg_interval"]),
        given["cfg_renorm_min"],
        given["cfg_renorm_type"],
    )
    guided = expected["denoise.guided"].nonzero().flatten().tolist()
    assert guided
    for row, step in enumerate(guided):
        without_images = expected["denoise.v_img"][row] if "img" in given["branches_when_guided"] else None
        made = combine(expected["denoise.v_gen"][step], expected["denoise.v_text"][row], without_images, guidance)
        assert_close(made, expected["denoise.v"][step])


def test_latents_are_tokens_row_by_row() -> None:
    latent = torch.arange(16.0).reshape(1, 4, 4)
    assert tokens_of(latent).tolist() == [[0, 1, 4, 5], [2, 3, 6, 7], [8, 9, 12, 13], [10, 11, 14, 15]]
