import json

import pytest
import torch
from diffusers import DiffusionPipeline

from tests.diffusion.other_pipelines import make_ddpm
from vllm_omni.diffusion.loading import load_diffusers_pipeline, set_attention_backend
from vllm_omni.errors import ConfigError


@pytest.fixture(scope="module")
def checkpoint(tiny_pipeline):
    return str(tiny_pipeline("wan2.2-t2v"))


def test_a_loaded_pipeline_is_in_evaluation_mode_and_float32_on_a_cpu(checkpoint):
    pipeline = load_diffusers_pipeline(checkpoint)
    assert type(pipeline).__name__ == "WanPipeline"
    for component in ("transformer", "transformer_2", "vae", "text_encoder"):
        module = getattr(pipeline, component)
        assert not module.training
        assert {parameter.dtype for parameter in module.parameters()} == {torch.float32}  # "auto" on a CPU
        assert not any(parameter.requires_grad for parameter in module.parameters())


def test_the_dtype_applies_to_all_weights(checkpoint):
    pipeline = load_diffusers_pipeline(checkpoint, "bfloat16")
    assert pipeline.transformer.dtype == pipeline.vae.dtype == pipeline.text_encoder.dtype == torch.bfloat16


def test_the_attention_backend_is_set_in_all_denoisers(checkpoint):
    for backend in ("native", "_native_math"):
        pipeline = load_diffusers_pipeline(checkpoint, attention_backend=backend)
        for expert in (pipeline.transformer, pipeline.transformer_2):
            assert {block.attn1.processor._attention_backend.value for block in expert.blocks} == {backend}


def test_an_unknown_attention_backend_is_rejected_with_the_nearest_name(checkpoint):
    with pytest.raises(ConfigError, match="unknown attention backend 'flsh': did you mean 'flash'"):
        load_diffusers_pipeline(checkpoint, attention_backend="flsh")


def test_an_attention_backend_that_cannot_run_on_the_device_is_rejected_with_the_reason(checkpoint):
    for backend in ("flash", "sage", "xformers"):
        with pytest.raises(ConfigError, match=f"attention backend '{backend}' cannot run on cpu"):
            load_diffusers_pipeline(checkpoint, attention_backend=backend)


def test_an_attention_backend_that_fails_only_when_it_runs_is_found_at_the_start(checkpoint):
    pipeline = load_diffusers_pipeline(checkpoint)
    with pytest.raises(ConfigError, match="'_native_efficient' cannot run on cpu"):
        set_attention_backend(pipeline, "_native_efficient", torch.float32, torch.device("cpu"))


def test_the_deployment_switches_tiling_and_slicing_of_the_vae_on(checkpoint):
    vae = load_diffusers_pipeline(checkpoint, vae_tiling=True).vae
    assert (vae.use_tiling, vae.use_slicing) == (True, False)
    assert load_diffusers_pipeline(checkpoint, vae_slicing=True).vae.use_slicing


def test_tiling_is_rejected_where_no_vae_has_it(tmp_path):
    make_ddpm().save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"vae_tiling: DDPMPipeline has no VAE with tiling \(its VAE: none\)"):
        load_diffusers_pipeline(str(tmp_path), vae_tiling=True)


def test_a_model_is_fetched_with_the_deployments_revision_directory_and_token(monkeypatch):
    hub = {"revision": "r1", "cache_dir": "/somewhere", "token": "t", "trust_remote_code": True}
    given = []

    def fetch(model, dtype=None, **kwargs):
        given.append(kwargs)
        if dtype is not None:
            raise OSError("offline")
        return {}

    monkeypatch.setattr(DiffusionPipeline, "load_config", fetch)
    monkeypatch.setattr(DiffusionPipeline, "from_pretrained", fetch)
    with pytest.raises(ConfigError, match="offline"):
        load_diffusers_pipeline("owner/model", hub=hub)
    assert given == [hub, hub]


def test_an_unknown_dtype_is_rejected(checkpoint):
    with pytest.raises(ConfigError, match="unknown dtype 'bfloat61'"):
        load_diffusers_pipeline(checkpoint, "bfloat61")


def test_a_directory_without_a_pipeline_is_rejected(tmp_path):
    with pytest.raises(ConfigError, match=r"no model_index\.json"):
        load_diffusers_pipeline(str(tmp_path))


def test_a_pipeline_with_missing_components_is_rejected(tmp_path):
    index = {"_class_name": "WanPipeline", "vae": ["diffusers", "AutoencoderKLWan"]}
    (tmp_path / "model_index.json").write_text(json.dumps(index))
    with pytest.raises(ConfigError, match="cannot be loaded as a diffusers pipeline"):
        load_diffusers_pipeline(str(tmp_path))
