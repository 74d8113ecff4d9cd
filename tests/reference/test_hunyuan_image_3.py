"""The reference of HunyuanImage-3 against outputs of the original code, on a tiny checkpoint of the real layout.

The outputs are no part of the repository: ``GOLDEN`` is their directory, or ``../shared/golden``. Without them nothing
is tested. Latents and logits are equal to 1e-5 of their maximum, and all ids are equal.
"""

import json
import os
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.reference.hunyuan_image_3 import Drawn, Piece, Reference, Seen

ROOT = Path(__file__).resolve().parents[2]
GOLDEN = Path(os.environ.get("GOLDEN", ROOT.parent / "shared" / "golden")) / "hunyuan_image_3"
FLOWS: dict[str, Any] = json.loads((GOLDEN / "flows.json").read_text()) if GOLDEN.is_dir() else {}
PHASES = [(name, number) for name, flow in FLOWS.items() for number in range(len(flow["phases"]))]
ANSWERS = [(name, number) for name, number in PHASES if FLOWS[name]["phases"][number]["mode"] == "gen_text"]
PICTURES = [(name, number) for name, number in PHASES if FLOWS[name]["phases"][number]["mode"] == "gen_image"]

RELATIVE = 1e-5

pytestmark = [
    pytest.mark.skipif(not FLOWS, reason=f"no outputs of the original at {GOLDEN}"),
    pytest.mark.usefixtures("no_gradients"),
]


@pytest.fixture
def no_gradients() -> Iterator[None]:
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


def pieces_of(name: str, number: int, row: int) -> list[Piece]:
    """The sequence of a phase, section by section; row 1 is the one without the prompt."""
    model, expected = reference(), golden(name)
    pieces: list[Piece] = []
    for section in FLOWS[name]["phases"][number]["sections"][row]:
        if section["type"] == "text":
            ids = model.encode(section["text"])
            pieces.append([model.token("<cfg>")] * len(ids) if section.get("uncond_enabled") else ids)
        elif section["type"] == "gen_image":
            pieces.append(Drawn(section["token_height"], section["token_width"], section["ratio_idx"]))
        else:
            patches, (grid,) = (
                expected[f"phase{number}.vit_pixel_values"],
                expected[f"phase{number}.vit_spatial_shapes"],
            )
            latent = expected[f"phase{number}.cond_vae_images"][row]
            pieces.append(Seen(latent, patches[0], (int(grid[0]), int(grid[1])), section["ratio_idx"]))
    return pieces


@pytest.mark.parametrize(("name", "number"), PHASES)
def test_sequences_are_laid_out_equally(name: str, number: int) -> None:
    expected, phase = golden(name), f"phase{number}."
    num_rows = len(expected[f"{phase}input_ids"])
    for row in range(num_rows):
        made = reference().sequence(pieces_of(name, number, row))
        ids = expected[f"{phase}input_ids"][row]
        assert torch.equal(made.sees, expected[f"{phase}attention_mask"][row])
        assert torch.equal(made.places, expected[f"{phase}rope_pos_yx"][row, : len(ids)])
        # Latents and the timestep token of a picture are filled in by each step.
        is_filled = torch.ones(len(ids), dtype=torch.bool)
        if made.canvas is not None:
            is_filled[made.canvas.start - 1 : made.canvas.stop] = False
        assert_close(made.embeds[is_filled], expected[f"{phase}embeds"][row][is_filled])


@pytest.mark.parametrize(("name", "number"), ANSWERS)
def test_answers_are_equal(name: str, number: int) -> None:
    phase, expected = FLOWS[name]["phases"][number], golden(name)
    ids, logits = reference().answer(pieces_of(name, number, 0), phase["ar_steps"], phase["stop_ids"])
    assert ids == expected[f"phase{number}.ar.ids"].tolist()
    assert_close(logits, expected[f"phase{number}.ar.logits"])


@pytest.mark.parametrize(("name", "number"), PICTURES)
def test_latents_are_equal(name: str, number: int) -> None:
    flow, expected = FLOWS[name], golden(name)
    canvas = reference().denoise(
        expected["denoise.noise"][0],
        (pieces_of(name, number, 0), pieces_of(name, number, 1)),
        num_steps=flow["diff_infer_steps"],
        guidance=flow.get("diff_guidance_scale", 2.5),
    )
    assert_close(canvas.timesteps, expected["denoise.timesteps"])
    assert_close(canvas.predictions, expected[f"phase{number}.pred"])
    assert_close(canvas.velocities, expected["denoise.v"][:, 0])
    assert_close(canvas.latents, expected["denoise.latents"][:, 0])
