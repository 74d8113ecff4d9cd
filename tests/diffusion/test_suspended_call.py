import copy
import gc
import weakref

import pytest
import torch
from torch import nn

from tests.diffusion.other_pipelines import make_ddpm
from tests.diffusion.requests import make_request
from vllm_omni.diffusion.pipeline_arguments import pipeline_arguments
from vllm_omni.diffusion.pipeline_copy import PipelineCopies, find_denoisers
from vllm_omni.diffusion.suspended_call import ModuleProxy, SuspendedCall


@pytest.fixture
def pipeline(load_tiny):
    return load_tiny("qwen-image")


def start(pipeline, **values):
    arguments = pipeline_arguments(pipeline, make_request(pipeline, **values))
    return SuspendedCall(PipelineCopies(pipeline), arguments)


def run_until(call, wanted):
    """Answer calls until one for which ``wanted`` holds is pending."""
    pending = call.resume()
    while pending is not None and not wanted(pending):
        pending = call.resume(pending.run())
    return pending


@torch.no_grad()
def test_the_calls_of_a_pipeline_in_order(pipeline):
    call = start(pipeline, num_inference_steps=2)
    calls = []
    pending = call.resume()
    while pending is not None:
        calls.append((pending.component, pending.method, pending.branch, pending.is_denoiser))
        pending = call.resume(pending.run())
    denoise = [("transformer", "forward", branch, True) for branch in ("cond", "uncond")]
    encode = [("text_encoder", "forward", f"#{number}", False) for number in range(2)]
    assert calls == [*encode, *denoise, *denoise, ("vae", "decode", "#0", False)]
    assert call.has_ended and call.result.images.shape == (1, 3, 32, 32)


@torch.no_grad()
def test_calls_without_a_name_are_numbered_within_their_step(load_tiny):
    pipeline = load_tiny("stable-audio")
    call = start(pipeline, num_inference_steps=2)
    branches = []
    pending = call.resume()
    while pending is not None:
        if pending.is_denoiser:
            branches.append(pending.branch)
        pending = call.resume(pending.run())
    assert branches == ["#0", "#0"]


@torch.no_grad()
def test_positional_arguments_are_bound_to_their_names(load_tiny):
    pipeline = load_tiny("z-image")
    pending = run_until(start(pipeline), lambda pending: pending.is_denoiser)
    assert pending.positional == ()
    assert {"x", "t", "cap_feats"} <= pending.kwargs.keys()


@torch.no_grad()
def test_the_step_counter_counts_steps_and_their_total(pipeline):
    call = start(pipeline, num_inference_steps=3)
    seen = []
    pending = call.resume()
    while pending is not None:
        if pending.branch == "cond":
            seen.append((call.progress.step_index, call.progress.num_steps))
        pending = call.resume(pending.run())
    assert seen == [(0, 3), (1, 3), (2, 3)]
    assert call.progress.step_index == 3


def test_a_proxy_is_an_instance_of_its_network_s_class(pipeline):
    module = pipeline.transformer
    proxy = ModuleProxy(start(pipeline), "transformer", module, is_denoiser=True)
    assert isinstance(proxy, nn.Module) and isinstance(proxy, type(module))
    assert proxy.config is module.config
    assert proxy.dtype == torch.float32


@torch.no_grad()
def test_a_call_does_not_change_the_pipeline_or_its_scheduler(pipeline):
    before = copy.copy(vars(pipeline))
    timesteps = pipeline.scheduler.timesteps.clone()
    run_until(start(pipeline, num_inference_steps=7), lambda pending: False)
    assert vars(pipeline) == before
    assert torch.equal(pipeline.scheduler.timesteps, timesteps)
    assert "step" not in vars(pipeline.scheduler)


@torch.no_grad()
@pytest.mark.parametrize("phase", ["never", "text_encoder", "transformer", "vae"])
def test_a_call_cancelled_in_any_phase_holds_no_tensor(pipeline, phase):
    call = start(pipeline, num_inference_steps=2)
    held = []
    if phase != "never":
        pending = run_until(call, lambda pending: pending.component == phase)
        assert pending.component == phase
        held = [weakref.ref(value) for value in pending.kwargs.values() if isinstance(value, torch.Tensor)]
        assert held
        del pending
    call.cancel()
    call.cancel()  # once more does nothing
    assert call.has_ended and call.pending is None and call.result is None
    gc.collect()
    assert [reference() for reference in held] == [None] * len(held)


@torch.no_grad()
def test_an_error_of_a_network_ends_its_call_and_keeps_no_frames(pipeline):
    call = start(pipeline)
    run_until(call, lambda pending: pending.is_denoiser)
    assert call.throw(RuntimeError("no memory")) is None
    assert call.has_ended
    assert str(call.error) == "no memory" and call.error.__traceback__ is None


@torch.no_grad()
def test_an_ended_call_leaves_no_garbage_cycle(pipeline):
    call = start(pipeline, num_inference_steps=2)
    pending = run_until(call, lambda pending: pending.is_denoiser)
    latents = weakref.ref(pending.kwargs["hidden_states"])
    gc.disable()
    try:
        while pending is not None:
            pending = call.resume(pending.run())
        assert latents() is None
    finally:
        gc.enable()


def test_grad_mode_is_restored_for_any_order_of_ends(pipeline):
    with torch.no_grad():
        calls = [start(pipeline, num_inference_steps=2) for _ in range(3)]
        for call in calls:
            run_until(call, lambda pending: pending.is_denoiser)
        calls[1].cancel()
        for call in (calls[2], calls[0]):
            while call.pending is not None:
                call.resume(call.pending.run())
        assert not torch.is_grad_enabled()
    assert torch.is_grad_enabled()


def test_denoisers_are_found_by_name_or_class(load_tiny):
    assert find_denoisers(load_tiny("wan2.2-t2v")) == {"transformer", "transformer_2"}
    assert find_denoisers(load_tiny("stable-audio")) == {"transformer"}
    assert find_denoisers(make_ddpm()) == {"unet"}


@torch.no_grad()
def test_a_call_under_autocast_is_computed_at_once(pipeline):
    call = start(pipeline)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert call.resume() is None
    assert call.has_ended and call.error is None
