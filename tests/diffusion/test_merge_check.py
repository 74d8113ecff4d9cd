import dataclasses
import logging
from types import SimpleNamespace

import pytest
import torch
from diffusers import DDPMPipeline, FluxControlPipeline, FluxFillPipeline, FluxInpaintPipeline

from tests.diffusion.other_pipelines import make_ddpm, make_from
from tests.diffusion.requests import OTHERS, REPRESENTATIVE
from vllm_omni.diffusion import merge_check
from vllm_omni.diffusion.merge_check import find_merging_rules, relative_difference
from vllm_omni.diffusion.merge_rules import RULES
from vllm_omni.errors import ConfigError

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


@pytest.mark.parametrize(
    ("name", "argument"),
    [
        ("qwen-image", "timestep"),
        ("flux", "timestep"),
        ("flux", "guidance"),
        ("wan2.2-t2v", "timestep"),
        ("z-image", "t"),
        ("sd3", "timestep"),
        ("sana", "timestep"),
        ("stable-audio", "timestep"),
        pytest.param("hunyuan-video", "guidance", marks=pytest.mark.long),
        pytest.param("ltx", "timestep", marks=pytest.mark.long),
    ],
)
def test_a_rule_that_takes_one_requests_timestep_or_guidance_for_all_is_detected(name, argument, load_tiny, caplog):
    pipeline = load_tiny(name)
    kind = type(pipeline.transformer).__name__
    rule = RULES[kind]
    rows = tuple(row for row in rule.rows if row != argument)
    rules = find(pipeline, caplog, **{kind: dataclasses.replace(rule, rows=rows, unused=(argument,))})
    assert "transformer" not in rules
    assert f"{kind} (transformer) does not merge requests" in caplog.text


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


def test_the_check_s_own_requests_leave_no_warning_of_diffusers_in_the_log(pipeline, caplog, capfd):
    find(pipeline, caplog)
    assert "guidance_scale is passed" not in capfd.readouterr().err + caplog.text


def test_a_network_outside_the_table_is_logged(caplog):
    assert find(make_ddpm(), caplog) == {}
    assert "UNet2DModel (unet) is not in the table" in caplog.text


@pytest.fixture
def tried(monkeypatch):
    """The heights of all requests of a check, in order; ``fail``, if set, is called with each."""
    sizes = SimpleNamespace(heights=[], fail=None)
    make = merge_check.pipeline_arguments

    def note(pipeline, request):
        sizes.heights.append(request.params.height)
        if sizes.fail is not None:
            sizes.fail(request)
        return make(pipeline, request)

    monkeypatch.setattr(merge_check, "pipeline_arguments", note)
    return sizes


def fail_with(error):
    def fail(request):
        raise error

    return fail


def test_an_error_that_does_not_depend_on_the_size_ends_the_check(pipeline, caplog, tried):
    tried.fail = fail_with(ValueError("never"))
    with pytest.raises(ConfigError, match="QwenImagePipeline answers no request: ValueError: never"):
        find(pipeline, caplog)
    assert tried.heights == [32, 64, 32, 64, None]  # repeated with fewer arguments, and with the default size


def test_an_error_that_is_not_about_size_ends_the_check_at_once(pipeline, caplog, tried):
    tried.fail = fail_with(NotImplementedError("decoding without tiling"))
    with pytest.raises(ConfigError, match="answers no request: NotImplementedError: decoding without tiling"):
        find(pipeline, caplog)
    assert tried.heights == [32] * 2


def test_a_request_with_fewer_arguments_is_tried_before_the_pipeline_is_rejected(pipeline, caplog, tried):
    def fail(request):
        if request.params.true_cfg_scale is not None:
            raise TypeError("no guidance")

    tried.fail = fail
    assert find(pipeline, caplog).keys() == {"text_encoder", "transformer", "vae"}


@pytest.mark.parametrize(
    ("kind", "missing"),
    [
        (FluxFillPipeline, "mask_image, masked_image_latents"),
        (FluxControlPipeline, "control_image"),
        (FluxInpaintPipeline, "mask_image, masked_image_latents"),
    ],
)
def test_a_pipeline_that_needs_what_no_request_can_bring_is_rejected(kind, missing, load_tiny, caplog, tried):
    pipeline = make_from(load_tiny("flux"), kind)
    with pytest.raises(ConfigError, match=f"{kind.__name__} answers no request: .*it also takes {missing} "):
        find(pipeline, caplog)
    assert len(set(tried.heights)) <= 3


def test_a_pipeline_whose_results_are_of_an_unknown_kind_is_rejected(caplog):
    class Predicting(DDPMPipeline):
        def __call__(self, generator=None, num_inference_steps=4, output_type="pt"):
            return {"prediction": super().__call__(1, generator, num_inference_steps, output_type).images}

    ddpm = make_ddpm()
    with pytest.raises(ConfigError, match="TypeError: Predicting returned prediction; known: images"):
        find(Predicting(ddpm.unet, ddpm.scheduler), caplog)


def test_a_pipeline_whose_image_is_needed_but_not_declared_so_is_checked_with_one(load_tiny, caplog, monkeypatch):
    pipeline = load_tiny("qwen-image-edit")
    monkeypatch.setattr(merge_check, "needs_image", lambda pipeline: False)
    assert find(pipeline, caplog).keys() == {"transformer", "vae"}


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
