"""Sizes of images as in the reference, and what a checkpoint has to have."""

import random
from pathlib import Path
from types import SimpleNamespace

import pytest
from PIL import Image
from transformers import PreTrainedConfig

from tests.cases import case
from tests.fuzz import seeds
from tests.reference.bagel import Reference
from tests.reference.test_bagel import FLOWS, GOLDEN, golden
from vllm_omni.errors import ConfigError
from vllm_omni.model_executor.models.bagel.config import (
    FLUX_VAE,
    LATENT_SIZES,
    PIXELS_PER_TOKEN,
    VAE_FILE,
    VIEW_SIZES,
    ImageSizes,
    Sizes,
    vae_file,
    vae_settings,
)

PUBLISHED = ImageSizes(LATENT_SIZES, VIEW_SIZES)
WITH_IMAGES = [name for name, flow in FLOWS.items() if not all(isinstance(one, str) for one in flow["inputs"])]
SMALL = ImageSizes(Sizes(112, 32, 16), Sizes(98, 28, 14))  # of the golden checkpoint


def reference_size(sizes: Sizes, size: tuple[int, int]) -> tuple[int, int]:
    names = ("max_image_size", "min_image_size", "image_stride")
    model = SimpleNamespace(transforms={"vae_transform": dict(zip(names, sizes, strict=True))})
    return Reference.resize(model, Image.new("RGB", size), "vae_transform").size  # type: ignore[arg-type]


# -- sizes of images --------------------------------------------------------------------------------------------------


def test_sides_are_the_references() -> None:
    for sizes in (*SMALL, *PUBLISHED):
        for size in ((1, 1), (61, 50), (48, 64), (512, 512), (640, 480), (300, 1100), (1025, 511), (40, 1400)):
            with case(sizes, size):
                assert sizes.of(size) == reference_size(sizes, size)


@pytest.mark.fuzz
def test_sides_keep_their_limits_and_about_the_shape() -> None:
    for seed in seeds(2000):
        rng = random.Random(seed)
        sizes = rng.choice((*SMALL, *PUBLISHED))
        size = rng.randint(1, 3000), rng.randint(1, 3000)
        made = sizes.of(size)
        with case(seed, sizes, size, made):
            assert all(side % sizes.stride == 0 and sizes.stride <= side <= sizes.longest for side in made)
            if max(size) / min(size) <= sizes.longest / sizes.shortest:
                assert min(made) >= sizes.shortest
                # Each side is at most half a stride from the size of that shape.
                assert made[0] * size[1] == pytest.approx(made[1] * size[0], abs=sizes.stride * sum(size) / 1.9)


def test_a_size_within_the_limits_stays() -> None:
    for size in ((512, 512), (1024, 512), (528, 1008)):
        assert LATENT_SIZES.of(size) == size


def test_an_image_is_seen_in_the_size_of_its_latents() -> None:
    """It is resized twice."""
    for size in ((61, 50), (4000, 300), (700, 900)):
        assert PUBLISHED.view_grid(size) == PUBLISHED.view_grid(PUBLISHED.latents.of(size))


def test_grids_have_rows_before_columns() -> None:
    assert PUBLISHED.latent_grid((1024, 512)) == (32, 64)
    assert PUBLISHED.view_grid((1024, 512)) == (35, 70)


def test_images_become_rgb() -> None:
    assert SMALL.latents.resize(Image.new("LA", (61, 50))).mode == "RGB"


@pytest.mark.skipif(not FLOWS, reason=f"no outputs of the original at {GOLDEN}")
@pytest.mark.parametrize(
    "name", [name for name, flow in FLOWS.items() if any("image" in one for one in flow["inputs"])]
)
def test_sizes_are_the_originals(name: str) -> None:
    recorded = golden(name)
    kinds = list(enumerate(FLOWS[name]["segments"]["gen"]))
    seen = [len(recorded[f"gen.{at}.vit.packed_vit_token_indexes"]) for at, kind in kinds if kind == "vit"]
    latents = [len(recorded[f"gen.{at}.vae.packed_vae_token_indexes"]) for at, kind in kinds if kind == "vae"]
    numbers = [one["image"] for one in FLOWS[name]["inputs"] if not isinstance(one, str)]
    for place, number in enumerate(numbers):
        height, width, _ = recorded[f"input.image.{number}"].shape
        resized = recorded[f"input.image_resized.{number}"].shape[:2]
        assert SMALL.latents.of((width, height)) == tuple(reversed(resized))
        rows, columns = SMALL.view_grid((width, height))
        assert rows * columns == seen[place]
        if latents:
            rows, columns = SMALL.latent_grid((width, height))
            assert rows * columns == latents[place]


# -- what a checkpoint says -------------------------------------------------------------------------------------------


def test_sizes_are_the_published_codes_where_a_checkpoint_has_none() -> None:
    assert ImageSizes.of(PreTrainedConfig()) == PUBLISHED
    assert ImageSizes.of(PreTrainedConfig(image_sizes={})) == PUBLISHED
    assert ImageSizes.of(PreTrainedConfig(image_sizes={"view": [98, 28, 14]})) == (LATENT_SIZES, SMALL.view)
    given = {"latents": [112, 32, 16], "view": [98, 28, 14]}
    assert ImageSizes.of(PreTrainedConfig(image_sizes=given)) == SMALL


def test_a_token_is_as_large_as_the_stride_of_latents() -> None:
    assert LATENT_SIZES.stride == PIXELS_PER_TOKEN


def test_the_auto_encoder_has_the_published_shape_where_a_checkpoint_has_none() -> None:
    assert vae_settings(PreTrainedConfig(vae_config=None)) == FLUX_VAE
    settings = vae_settings(PreTrainedConfig(vae_config={"ch": 32, "z_channels": 8}))
    assert settings == {**FLUX_VAE, "ch": 32, "z_channels": 8}


def test_the_auto_encoder_is_a_file_of_the_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / VAE_FILE).touch()
    assert vae_file(str(tmp_path), None) == tmp_path / VAE_FILE
    monkeypatch.setenv("HOME", str(tmp_path))
    assert vae_file("~", None) == tmp_path / VAE_FILE


def test_a_checkpoint_without_an_auto_encoder_is_rejected(tmp_path: Path) -> None:
    (tmp_path / VAE_FILE).mkdir()
    for path in (tmp_path, tmp_path / VAE_FILE):
        with pytest.raises(ConfigError, match=rf"model '{path}': it has no ae\.safetensors"):
            vae_file(str(path), None)
