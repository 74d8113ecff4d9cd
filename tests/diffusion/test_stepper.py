import gc
import logging
import weakref

import msgspec
import pytest
import torch
from diffusers import FluxImg2ImgPipeline, LTXImageToVideoPipeline, StableDiffusion3Img2ImgPipeline

from tests.diffusion.other_pipelines import make_ddpm, make_from, make_stable_diffusion
from tests.diffusion.requests import difference, make_request, results, run, run_diffusers
from vllm_omni.diffusion import call_batcher, outputs
from vllm_omni.diffusion import stepper as stepper_module
from vllm_omni.diffusion.first_block_cache import FirstBlockCache
from vllm_omni.diffusion.pipeline_arguments import pipeline_arguments
from vllm_omni.diffusion.request import DiffusionRequest
from vllm_omni.diffusion.stepper import PipelineStepper
from vllm_omni.errors import InvalidRequest

TOLERANCE = 1e-5
LOGGER = "vllm_omni.diffusion"
PREVIEWED = ("qwen-image-edit", "wan2.2-i2v", "flux", "sd3", "hunyuan-video")


@pytest.fixture
def pipeline(load_tiny):
    return load_tiny("qwen-image")


def test_cond_and_uncond_calls_of_different_requests_share_a_forward(pipeline, make_stepper):
    stepper = make_stepper("qwen-image")
    stepper.add("a", make_request(pipeline, 0))
    stepper.step(["a"])  # its next call is of the other branch than that of a new request
    stepper.add("b", make_request(pipeline, 1))
    stepper.step(["a", "b"])
    assert stepper.statistics().widths == {1: 1, 2: 1}


def test_texts_of_different_lengths_share_a_forward(pipeline, make_stepper):
    stepper = make_stepper("qwen-image")
    requests = {"a": make_request(pipeline, 0), "b": make_request(pipeline, 1)}
    assert len(requests["a"].prompt) != len(requests["b"].prompt)
    for name, request in requests.items():
        stepper.add(name, request)
    stepper.step(list(requests))
    assert stepper.statistics().widths == {2: 1}


def test_texts_whose_padding_costs_more_than_a_forward_do_not_share_one(pipeline, make_stepper, monkeypatch):
    monkeypatch.setattr(call_batcher, "MAX_PADDING_TOKENS", 5)
    stepper = make_stepper("qwen-image")
    requests = {
        name: make_request(pipeline, 0, seed=seed)
        for seed, name in enumerate(["short", "long", "short too", "long too"])
    }
    for name, request in requests.items():
        prompt = "a fox" if "short" in name else "a fox " * 12
        stepper.add(name, msgspec.structs.replace(request, prompt=prompt))
    stepper.step(list(requests))
    assert stepper.statistics().widths == {2: 2}


def test_requests_at_different_experts_do_not_share_a_forward(load_tiny, make_stepper):
    pipeline = load_tiny("wan2.2-t2v")
    stepper = make_stepper("wan2.2-t2v")
    requests = {
        "a": make_request(pipeline, 0, num_inference_steps=2),
        "b": make_request(pipeline, 0, num_inference_steps=2, seed=7),
    }
    stepper.add("a", requests["a"])
    stepper.step(["a"])
    stepper.step(["a"])  # at the second expert now, b at the first
    stepper.add("b", requests["b"])
    stepper.step(["a", "b"])
    assert stepper.statistics().widths == {1: 4}


def test_images_of_different_sizes_share_a_forward_where_the_model_takes_lists(load_tiny, make_stepper):
    pipeline = load_tiny("z-image")
    stepper = make_stepper("z-image")
    requests = {"a": make_request(pipeline, 0), "b": make_request(pipeline, 0, height=48, width=64)}
    ours = results(run(stepper, requests))
    assert stepper.statistics().widths == {2: 4}
    for name, request in requests.items():
        assert difference(ours[name], run_diffusers(pipeline, request)) < TOLERANCE


def test_max_rows_splits_a_group(pipeline, make_stepper):
    stepper = make_stepper("qwen-image", max_rows=3)
    for index in range(4):
        stepper.add(str(index), make_request(pipeline, 0, seed=index))
    stepper.step(["0", "1", "2", "3"])
    assert stepper.statistics().widths == {3: 1, 1: 1}


def test_without_merging_each_request_has_its_own_forwards(pipeline, make_stepper):
    stepper = make_stepper("qwen-image", merge=False)
    requests = {str(index): make_request(pipeline, index) for index in range(2)}
    ours = results(run(stepper, requests))
    assert stepper.statistics().widths.keys() == {1}
    assert [difference(ours[name], run_diffusers(pipeline, request)) for name, request in requests.items()] == [0, 0]


def test_an_unknown_pipeline_runs_one_request_at_a_time(caplog):
    pipeline = make_ddpm()
    with caplog.at_level(logging.WARNING):
        stepper = PipelineStepper(pipeline)
    assert "UNet2DModel (unet) is not in the table" in caplog.text
    requests = {
        name: DiffusionRequest("", params=make_request(pipeline, 0, num_inference_steps=steps, seed=steps).params)
        for name, steps in (("a", 3), ("b", 5))
    }
    outcomes = run(stepper, requests)
    for name, request in requests.items():  # its scheduler adds noise in every step
        assert difference(results(outcomes)[name], run_diffusers(pipeline, request)) == 0.0
    assert [outcome.num_steps for outcome in outcomes["b"]] == [5] * 5
    assert [outcome.step_index for outcome in outcomes["b"]] == [1, 2, 3, 4, 5]


def test_a_pipeline_with_a_u_net_and_noise_in_every_step_is_merged(load_tiny):
    flux = load_tiny("flux")
    pipeline = make_stable_diffusion(flux.text_encoder, flux.tokenizer)
    stepper = PipelineStepper(pipeline)
    assert stepper.rules.keys() == {"text_encoder", "unet", "vae"}
    requests = {f"r{index}": make_request(pipeline, index) for index in range(4)}
    ours = results(run(stepper, requests, together=2))
    assert max(stepper.statistics().widths) == 3
    for name, request in requests.items():
        assert difference(ours[name], run_diffusers(pipeline, request)) < TOLERANCE


# The last three draw noise for the latents of their input image, too, in one call from one generator for all outputs.
@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("qwen-image", None),
        ("wan2.2-t2v", None),
        ("z-image", None),
        ("stable-audio", None),
        ("flux", FluxImg2ImgPipeline),
        ("sd3", StableDiffusion3Img2ImgPipeline),
        ("ltx", LTXImageToVideoPipeline),
    ],
)
def test_output_i_of_several_equals_a_request_with_seed_plus_i(name, kind, load_tiny, make_stepper):
    pipeline = load_tiny(name)
    stepper = make_stepper(name)
    if kind is not None:
        pipeline = make_from(pipeline, kind)
        stepper = PipelineStepper(pipeline, rules=stepper.rules)
    requests = {"both": make_request(pipeline, 0, seed=5, num_outputs_per_prompt=2)}
    requests |= {f"lone{index}": make_request(pipeline, 0, seed=5 + index) for index in range(2)}
    ours = results(run(stepper, requests))
    for index in range(2):
        lone = ours[f"lone{index}"]
        of_both = {
            kind: value[index : index + 1] if isinstance(value, torch.Tensor) else value
            for kind, value in ours["both"].items()
        }
        assert difference(of_both, lone) < TOLERANCE
    assert max(stepper.statistics().widths) == 4


def test_a_pipeline_that_makes_one_output_is_called_once_for_each():
    pipeline = make_ddpm()
    params = make_request(pipeline, 0, seed=5, num_inference_steps=2).params
    both = DiffusionRequest("", params=msgspec.structs.replace(params, num_outputs_per_prompt=2))
    ours = results(run(PipelineStepper(pipeline), {"both": both}))["both"]["images"]
    for index in range(2):
        lone = DiffusionRequest("", params=msgspec.structs.replace(params, seed=5 + index))
        assert torch.equal(ours[index : index + 1], run_diffusers(pipeline, lone)["images"])


def test_outputs_beyond_max_rows_run_in_parts_and_end_with_their_request(pipeline, make_stepper):
    stepper = make_stepper("qwen-image", max_rows=2)
    stepper.add("a", make_request(pipeline, 0, num_outputs_per_prompt=3))
    assert stepper.step(["a"])["a"].num_rows == 3
    assert stepper.statistics().widths == {2: 1, 1: 1}
    stepper.abort("a")
    assert not stepper.running


def test_a_request_fails_when_one_of_its_outputs_does(pipeline, make_stepper):
    stepper = make_stepper("qwen-image", merge=False)
    stepper.add("a", make_request(pipeline, 0, num_outputs_per_prompt=2))
    stepper.step(["a"])
    first, second = stepper.running["a"].calls
    second.pending.kwargs["hidden_states"] = None
    assert isinstance(stepper.step(["a"])["a"].error, AttributeError | TypeError)
    assert first.has_ended and not stepper.running


def test_without_a_seed_two_requests_differ(pipeline, make_stepper):
    requests = {name: make_request(pipeline, 0, seed=None) for name in "ab"}
    ours = results(run(make_stepper("qwen-image"), requests))
    assert difference(ours["a"], ours["b"]) > 0.01


# --- what ends a request early


@pytest.mark.parametrize("steps", [0, 1, 3])
def test_other_requests_continue_when_one_is_aborted(pipeline, make_stepper, steps):
    stepper = make_stepper("qwen-image")
    requests = {name: make_request(pipeline, index) for index, name in enumerate("ab")}
    for name, request in requests.items():
        stepper.add(name, request)
    for _ in range(steps):
        stepper.step(["a", "b"])
    stepper.abort("a")
    with pytest.raises(KeyError):
        stepper.step(["a"])
    while (outcome := stepper.step(["b"])["b"]).output is None:
        assert outcome.error is None
    assert difference(outcome.output, run_diffusers(pipeline, requests["b"])) < TOLERANCE


def test_aborting_an_unknown_request_does_nothing(make_stepper):
    make_stepper("qwen-image").abort("unknown")


def test_a_request_that_the_pipeline_rejects_fails_alone(pipeline, make_stepper):
    stepper = make_stepper("qwen-image")
    requests = {
        "bad": make_request(pipeline, 0, extra_args={"max_sequence_length": 5000}),
        "good": make_request(pipeline, 1),
    }
    outcomes = run(stepper, requests)
    error = outcomes["bad"][-1].error
    assert isinstance(error, InvalidRequest)
    assert "max_sequence_length" in str(error)
    assert difference(results({"good": outcomes["good"]})["good"], run_diffusers(pipeline, requests["good"])) < 1e-5


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"num_frames": 9}, "takes no num_frames"),
        ({"extra_args": {"max_sequence_lenght": 5}}, "did you mean 'max_sequence_length'"),
        ({"extra_args": {"self": 1}}, "no extra argument 'self'"),
    ],
)
def test_invalid_arguments_are_rejected_when_a_request_is_added(pipeline, make_stepper, values, message):
    with pytest.raises(InvalidRequest, match=message):
        make_stepper("qwen-image").add("a", make_request(pipeline, 0, **values))


def test_when_a_merged_forward_fails_only_the_request_at_fault_fails(pipeline, make_stepper, monkeypatch, caplog):
    stepper = make_stepper("qwen-image")
    requests = {str(index): make_request(pipeline, 0, seed=index) for index in range(3)}
    for name, request in requests.items():
        stepper.add(name, request)
    stepper.step(["0", "1", "2"])
    poisoned = stepper.running["1"].calls[0].pending.kwargs["hidden_states"][0, 0, 0].item()
    forward = pipeline.transformer.forward

    def fail_on_poison(hidden_states, **kwargs):
        if (hidden_states[:, 0, 0] == poisoned).any():
            raise RuntimeError("out of memory")
        return forward(hidden_states, **kwargs)

    monkeypatch.setattr(pipeline.transformer, "forward", fail_on_poison)
    with caplog.at_level(logging.WARNING, LOGGER):
        outcomes = stepper.step(["0", "1", "2"])
    assert {name: str(outcome.error) for name, outcome in outcomes.items() if outcome.error} == {"1": "out of memory"}
    assert not isinstance(outcomes["1"].error, InvalidRequest)
    assert "3 merged calls of transformer failed" in caplog.text
    monkeypatch.undo()
    while (outcome := stepper.step(["2"])["2"]).output is None:
        assert outcome.error is None
    assert difference(outcome.output, run_diffusers(pipeline, requests["2"])) < TOLERANCE


def test_after_the_last_request_no_tensor_is_held(pipeline, make_stepper):
    cache = FirstBlockCache(0.1)
    stepper = make_stepper("qwen-image", cache=cache)
    bad = make_request(pipeline, 2, extra_args={"max_sequence_length": 5000})
    for name, request in {"a": make_request(pipeline, 0), "b": make_request(pipeline, 1), "bad": bad}.items():
        stepper.add(name, request)
    held = []
    running = ["a", "b", "bad"]
    for _ in range(20):
        for name, outcome in stepper.step(running).items():
            stepper.grant_cache(name, outcome.num_cache_bytes)
            if outcome.has_ended:
                running.remove(name)
            else:
                call = stepper.running[name].calls[0]
                held += [weakref.ref(call), weakref.ref(call.pending.kwargs["hidden_states"])]
                del call
            del outcome
        if running == ["b"]:
            stepper.abort("b")
            break
    assert len(held) > 8
    assert not stepper.running
    assert cache.statistics().num_requests == 0
    gc.collect()
    assert [reference for reference in held if reference() is not None] == []


def test_grad_mode_is_as_before_after_a_step_and_an_abort(pipeline, make_stepper):
    stepper = make_stepper("qwen-image")
    for name in "ab":
        stepper.add(name, make_request(pipeline, 0))
    stepper.step(["a", "b"])
    stepper.abort("a")
    assert torch.is_grad_enabled()
    stepper.step(["b"])
    assert torch.is_grad_enabled()


# --- a step that takes long


def test_a_late_step_ends_with_its_forward_and_continues_with_the_requests_that_it_did_not_reach(
    pipeline, make_stepper, monkeypatch
):
    now = [0.0]
    stepper = make_stepper("qwen-image", merge=False, clock=lambda: now[0])
    forward = pipeline.transformer.forward

    def slow(**kwargs):
        now[0] += stepper_module.MAX_STEP_S
        return forward(**kwargs)

    monkeypatch.setattr(pipeline.transformer, "forward", slow)
    for name in "abc":
        stepper.add(name, make_request(pipeline, 0, true_cfg_scale=1.0, negative_prompt=None))
    reached = []
    for _ in range(5):
        outcomes = stepper.step(["a", "b", "c"])
        reached.append([outcomes[name].step_index for name in "abc"])
    assert reached == [[1, 0, 0], [1, 1, 0], [1, 1, 1], [2, 1, 1], [2, 2, 1]]


def test_late_steps_serve_texts_of_all_lengths_in_turn(pipeline, make_stepper, monkeypatch):
    monkeypatch.setattr(call_batcher, "MAX_PADDING_TOKENS", 5)
    now = [0.0]
    stepper = make_stepper("qwen-image", clock=lambda: now[0])
    forward = pipeline.transformer.forward

    def slow(**kwargs):
        now[0] += stepper_module.MAX_STEP_S
        return forward(**kwargs)

    monkeypatch.setattr(pipeline.transformer, "forward", slow)
    prompts = {"short": "a fox", "long": "a fox " * 12, "short too": "an owl", "long too": "an owl " * 12}
    for name, prompt in prompts.items():
        request = make_request(pipeline, 0, true_cfg_scale=1.0, negative_prompt=None)
        stepper.add(name, msgspec.structs.replace(request, prompt=prompt))
    reached = []
    for _ in range(4):
        outcomes = stepper.step(list(prompts))
        reached.append([outcomes[name].step_index for name in prompts])
    assert reached == [[1, 0, 1, 0], [1, 1, 1, 1], [2, 1, 2, 1], [2, 2, 2, 2]]
    assert stepper.statistics().widths == {2: 4}


def test_a_late_step_has_no_outcome_of_a_request_that_encodes_its_text(pipeline, make_stepper, monkeypatch):
    now = [0.0]
    stepper = make_stepper("qwen-image", merge=False, clock=lambda: now[0])
    forward = pipeline.text_encoder.forward

    def slow(*args, **kwargs):
        now[0] += stepper_module.MAX_STEP_S
        return forward(*args, **kwargs)

    monkeypatch.setattr(pipeline.text_encoder, "forward", slow)
    requests = {name: make_request(pipeline, index) for index, name in enumerate("ab")}
    for name, request in requests.items():
        stepper.add(name, request)
    seen = [set(stepper.step(["a", "b"])) for _ in range(4)]  # each encodes a positive and a negative prompt
    assert seen == [set(), set(), {"a"}, {"a", "b"}]
    monkeypatch.undo()
    for name in "ab":
        while (outcome := stepper.step([name])[name]).output is None:
            assert outcome.error is None
        assert difference(outcome.output, run_diffusers(pipeline, requests[name])) < TOLERANCE


# --- what an outcome says


def test_progress_and_bytes_of_a_request(pipeline, make_stepper):
    outcomes = run(make_stepper("qwen-image"), {"a": make_request(pipeline, 0)})["a"]
    assert [outcome.step_index for outcome in outcomes] == [0, 1, 1, 2, 2, 3, 3, 4]  # two calls a step
    assert {outcome.num_steps for outcome in outcomes} == {4}
    assert outcomes[-1].num_bytes == 0
    assert all(outcome.num_bytes > 4 * 4 * 64 for outcome in outcomes[:-1])  # latents: 4 tokens of 64 float32


def test_media_are_eight_bits_and_latents_are_raw(pipeline, make_stepper):
    stepper = make_stepper("qwen-image")
    types = ("media", "float", "latents")
    requests = {name: make_request(pipeline, 0, output_type=name) for name in types}
    ours = results(run(stepper, requests))
    assert ours["media"]["images"].dtype == torch.uint8 and ours["media"]["images"].shape == (1, 32, 32, 3)
    assert torch.equal(ours["media"]["images"], (ours["float"]["images"] * 255).round().to(torch.uint8))
    assert ours["latents"].keys() == {"latents"} and ours["latents"]["latents"].shape == (1, 4, 64)


# Latents as tokens, as a video, and as an image; the others have a layout of these three.
@pytest.mark.parametrize(
    "name",
    [
        "qwen-image",
        "wan2.2-t2v",
        "z-image",
        *(pytest.param(one, marks=pytest.mark.long) for one in PREVIEWED),
    ],
)
def test_a_preview_equals_the_output_of_a_run_that_stops_at_its_step(name, load_tiny, make_stepper):
    pipeline = load_tiny(name)
    # HunyuanVideo's decoder, unlike Wan's, normalizes over all frames, and a preview has one.
    frames = {"num_frames": 1} if name == "hunyuan-video" else {}
    request = make_request(pipeline, 0, preview_every=2, output_type="media", **frames)  # of four steps
    outcomes = run(make_stepper(name, rules={}), {"a": request})["a"]
    (preview,) = [outcome.preview for outcome in outcomes if outcome.preview is not None]  # none at the end

    def stop(pipeline, step, timestep, values):
        pipeline._interrupt = step == 1
        return {}

    theirs = pipeline(**pipeline_arguments(pipeline, request), callback_on_step_end=stop)
    stopped = outputs.collect(pipeline, theirs, "media")
    picture = stopped["frames"][0, 0] if "frames" in stopped else stopped["images"][0]
    assert (preview.int() - picture.int()).abs().max() <= 1
    output = results({"a": outcomes})["a"]
    end = output["frames"][0, 0] if "frames" in output else output["images"][0]
    assert (preview.int() - end.int()).abs().max() > 1


def test_a_pipeline_without_previews_logs_it_once(load_tiny, make_stepper, caplog):
    pipeline = load_tiny("stable-audio")
    stepper = make_stepper("stable-audio")
    with caplog.at_level(logging.WARNING, LOGGER):
        outcomes = run(stepper, {name: make_request(pipeline, 0, preview_every=1) for name in "ab"})
    assert caplog.text.count("no previews of StableAudioPipeline") == 1
    assert all(outcome.preview is None for steps in outcomes.values() for outcome in steps)
    assert results(outcomes).keys() == {"a", "b"}


# --- the row cache


def run_with_grants(stepper, requests):
    """Run requests that get as many bytes for the cache as they want; the outputs and these bytes, by name."""
    for name, request in requests.items():
        stepper.add(name, request)
    running, ended, wanted = list(requests), {}, {}
    while running:
        for name, outcome in stepper.step(running).items():
            if outcome.has_ended:
                ended[name] = outcome.output
                running.remove(name)
            else:
                wanted[name] = outcome.num_cache_bytes
                stepper.grant_cache(name, outcome.num_cache_bytes)
    return ended, wanted


def test_a_cached_request_shares_forwards_with_one_that_is_not(pipeline, make_stepper):
    cache = FirstBlockCache(1e3, num_warmup_steps=1, num_last_steps=0, max_reuses=None)
    stepper = make_stepper("qwen-image", cache=cache)
    requests = {"cached": make_request(pipeline, 0), "plain": make_request(pipeline, 0, cache_threshold=0.0)}
    ended, wanted = run_with_grants(stepper, requests)
    assert wanted["plain"] == 0 and wanted["cached"] > 0
    assert stepper.statistics().widths == {2: 8}
    theirs = run_diffusers(pipeline, requests["plain"])
    assert difference(ended["plain"], theirs) < TOLERANCE
    assert difference(ended["cached"], theirs) > 1e-3
    assert cache.statistics().num_rows_reused > 0


def test_each_output_of_a_request_has_its_own_cache_entries(pipeline, make_stepper):
    cache = FirstBlockCache(1e3, num_warmup_steps=1, num_last_steps=0, max_reuses=None)
    requests = {"both": make_request(pipeline, 0, seed=5, num_outputs_per_prompt=2)}
    requests |= {str(index): make_request(pipeline, 0, seed=5 + index) for index in range(2)}
    ended, wanted = run_with_grants(make_stepper("qwen-image", cache=cache), requests)
    assert wanted["both"] == wanted["0"] + wanted["1"] > 0
    for index in range(2):
        assert (ended["both"]["images"][index] - ended[str(index)]["images"][0]).abs().max() < TOLERANCE
    assert cache.statistics().num_rows_reused > 0
