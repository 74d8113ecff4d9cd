"""The decoder of pictures, held against transformers' on the same weights."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file
from transformers import JanusConfig, JanusForConditionalGeneration

from vllm_omni.model_executor.models.janus.image_decoder import JanusImageDecoder, Picture, decoder_hf_config, images_of
from vllm_omni.testing.janus import VARIANTS, build

PIXELS = 1e-5  # of values that are about 1


class Loaded(NamedTuple):
    decoder: JanusImageDecoder
    reference: Any
    num_codes: int
    num_tokens: int


@pytest.fixture(scope="module", params=sorted(VARIANTS))
def loaded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    path = build(tmp_path_factory.mktemp("janus"), variant=request.param)
    shape = VARIANTS[request.param]
    decoder = make_decoder(path)
    decoder.load_weights(load_file(path / "model.safetensors").items())
    return Loaded(decoder, JanusForConditionalGeneration.from_pretrained(path), shape.num_codes, shape.num_image_tokens)


def make_decoder(path: Path) -> JanusImageDecoder:
    config: Any = SimpleNamespace(model_config=SimpleNamespace(hf_config=hf_config(path)))
    return JanusImageDecoder(vllm_config=config)


def hf_config(path: Path) -> Any:
    return decoder_hf_config(JanusConfig.from_pretrained(path))


def make_codes(loaded: Loaded, seed: int) -> torch.Tensor:
    return torch.randint(loaded.num_codes, (loaded.num_tokens,), generator=torch.Generator().manual_seed(seed))


@torch.inference_mode()
def test_pixels_are_transformers(loaded: Loaded) -> None:
    codes = torch.stack([make_codes(loaded, seed) for seed in range(3)])
    expected = loaded.reference.model.vqmodel.decode(codes)
    vq = loaded.decoder.vq
    made = vq.decoder(vq.post_quant_conv(vq.quantize.get_codebook_entry(codes)))
    assert (made - expected).abs().max() < PIXELS
    outputs = loaded.decoder.generate([Picture(one, is_decoded=True) for one in codes])
    images = torch.cat([one["images"] for one in outputs])
    assert (images.int() - images_of(expected).int()).abs().max() <= 1


@torch.inference_mode()
def test_latents_are_given_where_they_are_wanted(loaded: Loaded) -> None:
    codes = [make_codes(loaded, seed) for seed in range(2)]
    drawn, raw = loaded.decoder.generate([Picture(codes[0], is_decoded=True), Picture(codes[1], is_decoded=False)])
    assert drawn.keys() == {"images"} and drawn["images"].dtype is torch.uint8
    expected = loaded.reference.model.vqmodel.quantize.get_codebook_entry(codes[1][None])
    torch.testing.assert_close(raw["latents"], expected)


def test_tokens_that_are_no_picture_are_rejected(loaded: Loaded) -> None:
    codes = make_codes(loaded, 0).tolist()
    assert loaded.decoder.read({"codes": codes, "output_type": "media"}).is_decoded
    for wrong, said in (
        (codes[:-1], f"{len(codes) - 1} tokens are no picture, which has {len(codes)}"),
        ([*codes[:-1], loaded.num_codes], "tokens are from 0 to"),
        ([*codes[:-1], -1], "tokens are from 0 to"),
    ):
        with pytest.raises(ValueError, match=said):
            loaded.decoder.read({"codes": wrong, "output_type": "media"})


def test_missing_weights_are_named(tmp_path: Path) -> None:
    path = build(tmp_path)
    tensors = load_file(path / "model.safetensors")
    del tensors["model.vqmodel.post_quant_conv.bias"]
    with pytest.raises(ValueError, match=r"the checkpoint has no vq\.post_quant_conv\.bias"):
        make_decoder(path).load_weights(tensors.items())
