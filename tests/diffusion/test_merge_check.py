import dataclasses
import logging

import pytest
import torch

from tests.diffusion.other_pipelines import make_ddpm
from tests.diffusion.requests import OTHERS, REPRESENTATIVE
from vllm_omni.diffusion.merge_check import find_merging_rules, relative_difference
from vllm_omni.diffusion.merge_rules import RULES

LOGGER = "vllm_omni.diffusion.merge_check"
DENOISER = "QwenImageTransformer2DModel"


@pytest.fixture
def pipeline(load_tiny):
    return load_tiny("qwen-image")


@torch.no_grad()
def find(pipeline, caplog, **replaced):
    with caplog.at_level(logging.WARNING, LOGGER):
        return find_merging_rules(pipeline, RULES | replaced)


@pytest.mark.parametrize("names", [REPRESENTATIVE, pytest.param(OTHERS, marks=pytest.mark.long)])
def test_the_table_holds_for_every_supported_pipeline(names, load_tiny, checked_rules):
    for name in names:
        pipeline = load_tiny(name)
        expected = {component for component, value in pipeline.components.items() if type(value).__name__ in RULES}
        if "edit" in name:
            expected.remove("text_encoder")  # it reads images, whose patches are not rows
        if name == "hunyuan-image":
            expected.remove("text_encoder_2")  # called only for words in quotation marks
        rules = checked_rules(name)
        assert rules.keys() == expected, name
        for component, rule in rules.items():
            assert rule is RULES[type(getattr(pipeline, component)).__name__], (name, component)


def test_a_rule_that_ignores_the_mask_is_detected(pipeline, caplog):
    broken = dataclasses.replace(RULES[DENOISER], padded={"encoder_hidden_states": "controlnet_block_samples"})
    rules = find(pipeline, caplog, **{DENOISER: broken})
    assert rules["transformer"].padded == {}
    assert f"{DENOISER} (transformer) merges only requests with texts of equal length" in caplog.text


def test_a_network_that_mixes_its_rows_is_not_merged(pipeline, caplog, monkeypatch):
    forward = pipeline.transformer.forward

    def mix(hidden_states, **kwargs):
        return (forward(hidden_states, **kwargs)[0] + hidden_states.mean(dim=0, keepdim=True),)

    monkeypatch.setattr(pipeline.transformer, "forward", mix)
    rules = find(pipeline, caplog)
    assert rules.keys() == {"text_encoder", "vae"}
    assert f"{DENOISER} (transformer) does not merge requests: merged and alone differ by" in caplog.text


def test_a_network_that_accepts_only_one_row_is_not_merged(pipeline, caplog, monkeypatch):
    decode = pipeline.vae.decode

    def decode_one(z, return_dict=True):
        if len(z) > 1:
            raise RuntimeError("one at a time")
        return decode(z, return_dict=return_dict)

    monkeypatch.setattr(pipeline.vae, "decode", decode_one)
    assert find(pipeline, caplog).keys() == {"text_encoder", "transformer"}
    assert "AutoencoderKLQwenImage (vae) does not merge requests: RuntimeError: one at a time" in caplog.text


def test_a_network_outside_the_table_is_logged(caplog):
    assert find(make_ddpm(), caplog) == {}
    assert "UNet2DModel (unet) is not in the table" in caplog.text


def test_where_no_size_is_accepted_nothing_is_merged(pipeline, caplog, monkeypatch):
    def reject(*args, **kwargs):
        raise ValueError("never that size")

    monkeypatch.setattr(type(pipeline), "check_inputs", reject)
    assert find(pipeline, caplog) == {}
    assert "the requests of the check fail: ValueError: never that size" in caplog.text


def test_a_larger_size_is_tried_where_a_small_one_is_rejected(pipeline, caplog, monkeypatch):
    tried = []
    prepare = type(pipeline).prepare_latents

    def reject_small(self, batch_size, num_channels_latents, height, *args, **kwargs):
        tried.append(height)
        if height < 64:
            raise ValueError("too small")
        return prepare(self, batch_size, num_channels_latents, height, *args, **kwargs)

    monkeypatch.setattr(type(pipeline), "prepare_latents", reject_small)
    assert find(pipeline, caplog).keys() == {"text_encoder", "transformer", "vae"}
    assert sorted(set(tried)) == [32, 64]


@pytest.mark.parametrize(
    ("ours", "theirs", "expected"),
    [
        ([1.0, 2.0], [1.0, 2.0], 0.0),
        ([1.0, 2.5], [1.0, 2.0], 0.25),
        ([1.0], [1.0, 2.0], float("inf")),
        ([float("nan")], [1.0], float("inf")),
        ([float("nan"), 1.0], [float("nan"), 1.0], 0.0),
        ([0.0], [0.0], 0.0),
        ([0.1], [0.0], float("inf")),
    ],
)
def test_differences_are_relative_to_the_largest_value(ours, theirs, expected):
    assert relative_difference(torch.tensor(ours), torch.tensor(theirs)) == pytest.approx(expected)
